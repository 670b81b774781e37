/* What may follow the nodes of a layer: by the texts, by models, by the caller, and what constraints leave of it. */
#include <math.h>
#include <string.h>

#include "growth.h"
#include "platform.h"

/* Probability of a first candidate from which on a part is confident. */
static const double CONFIDENT = 0.5;
/* Of the token that begins what a constraint forces. */
static const double FORCED = 0.99;

static int reserve_candidates(CandidateBuffers *found, int32_t count, int32_t width) {
    const int64_t candidates = (int64_t)count * width;
    if (reserve(&found->counts, count, sizeof(int32_t)) || reserve(&found->entropies, count, sizeof(double)) ||
        reserve(&found->tokens, candidates, sizeof(int32_t)) || reserve(&found->logprobs, candidates, sizeof(double)))
        return DRAFTREE_NO_MEMORY;
    found->view =
        (Candidates){width, found->counts.data, found->tokens.data, found->logprobs.data, found->entropies.data};
    memset(found->view.counts, 0, (size_t)count * sizeof(int32_t));
    memset(found->view.entropies, 0, (size_t)count * sizeof(double));
    return DRAFTREE_OK;
}

/* Matches of a node's path among its text; those of nodes below are found among them. */
static NgramMatches find_matches(const GrowingTree *tree, NgramIndex *index, int32_t node) {
    NgramMatches found, *kept = tree->matches.data;
    if (node < 0) {
        draftree_ngram_latest(index, &found);
        return found;
    }
    const DraftedNode *own = node_at(tree, node);
    const NgramMatches above = own->parent < 0 ? find_matches(tree, index, -1) : kept[own->parent];
    draftree_ngram_followed(index, &above, own->token, &found);
    if (!found.count) {
        int32_t tail[2 * NGRAM_LONGEST], path[NGRAM_LONGEST], length = 0, count = ngram_tail(index, tail);
        for (int32_t at = node; at >= 0 && length < NGRAM_LONGEST; at = node_at(tree, at)->parent)
            path[length++] = node_at(tree, at)->token;
        while (length)
            tail[count++] = path[--length];
        draftree_ngram_matches(index, tail, count, &found);
    }
    return kept[node] = found;
}

static void score_by_text(const Draft *draft, const DraftStep *step, int32_t part) {
    const DraftNode *batch = draft->batch.data;
    const int32_t *at = draft->batch_at.data, *forced = draft->forced.data;
    const Candidates *found = &draft->batch_candidates.view;
    int32_t tokens[NGRAM_MATCHES];
    double probabilities[NGRAM_MATCHES];
    for (int32_t i = 0; i < draft->batch_count; i++) {
        const GrowingTree *tree = growing_tree(draft, batch[i].request);
        NgramIndex *index = source_of(step, batch[i].request, part)->index;
        const NgramMatches matches = find_matches(tree, index, batch[i].node);
        int32_t count = draftree_ngram_probabilities(index, &matches, tokens, probabilities);
        if (forced[at[i]] >= 0) {
            count = 1;
            tokens[0] = forced[at[i]];
            probabilities[0] = FORCED;
        }
        double sum = 0, entropy = 0;
        found->counts[i] = count < found->width ? count : found->width;
        for (int32_t k = 0; k < count; k++) {
            const double logprob = log(probabilities[k]);
            sum += probabilities[k];
            entropy -= probabilities[k] * logprob;
            if (k < found->width) {
                found->tokens[(int64_t)i * found->width + k] = tokens[k];
                found->logprobs[(int64_t)i * found->width + k] = logprob;
            }
        }
        found->entropies[i] = entropy - (sum < 1 ? (1 - sum) * log(1 - sum) : 0);
    }
}

static int score_by_caller(const Draft *draft, const DraftStep *step, int32_t part) {
    const Candidates *found = &draft->batch_candidates.view;
    const int code = step->score(part, draft->batch_count, draft->batch.data, found->width, found->counts,
                                 found->tokens, found->logprobs, found->entropies);
    for (int32_t i = 0; i < draft->batch_count && !code; i++)
        if (found->counts[i] < 0 || found->counts[i] > found->width)
            return DRAFTREE_BAD_ARGUMENT;
    return code;
}

/* Let a part score the batch. */
static int score_batch(Draft *draft, const DraftStep *step, int32_t part, int32_t width, DraftWork *work) {
    if (reserve_candidates(&draft->batch_candidates, draft->batch_count, width))
        return DRAFTREE_NO_MEMORY;
    const DraftPart *own = step->parts + part;
    const int64_t began = nanoseconds();
    int code = DRAFTREE_OK;
    const DraftLayer layer = {part, draft->depth, draft->batch_count, draft->batch.data, draft->batch_masks.data};
    work[part].passes += own->model != NULL;
    if (own->kind == BY_TRANSLATION)
        code = score_by_translation(draft, step, &layer, &draft->batch_candidates.view);
    else if (own->kind == BY_TEXT)
        score_by_text(draft, step, part);
    else if (own->kind == BY_CALLER)
        code = score_by_caller(draft, step, part);
    else
        code =
            score_by_models(step, &layer, fed_of(draft, part, 0), &draft->pass_memory, &draft->batch_candidates.view);
    work[part].nanoseconds += nanoseconds() - began;
    return code;
}

static void add_to_batch(Draft *draft, int32_t at) {
    ((DraftNode *)draft->batch.data)[draft->batch_count] = ((DraftNode *)draft->layer.data)[at];
    ((const uint32_t **)draft->batch_masks.data)[draft->batch_count] = ((const uint32_t **)draft->masks.data)[at];
    ((int32_t *)draft->batch_at.data)[draft->batch_count++] = at;
}

/* Copy the candidates of the i-th node of the batch to the layer's. */
static void copy_candidates(Draft *draft, int32_t i) {
    const Candidates *from = &draft->batch_candidates.view, *to = &draft->candidates.view;
    const int32_t at = ((int32_t *)draft->batch_at.data)[i], width = to->width, count = from->counts[i];
    to->counts[at] = count;
    to->entropies[at] = from->entropies[i];
    memcpy(to->tokens + (int64_t)at * width, from->tokens + (int64_t)i * width, (size_t)count * sizeof(int32_t));
    memcpy(to->logprobs + (int64_t)at * width, from->logprobs + (int64_t)i * width, (size_t)count * sizeof(double));
}

/* Score roots, and choose who drafts: a part that is confident, or the last one that has candidates. */
static int score_roots(Draft *draft, const DraftStep *step, int32_t width, DraftWork *work) {
    const DraftNode *layer = draft->layer.data;
    const Candidates *found = &draft->candidates.view;
    const double confident = log(CONFIDENT);
    for (int32_t part = 0; part < step->part_count; part++) {
        if (!step->parts[part].enabled)
            continue;
        draft->batch_count = 0;
        for (int32_t at = 0; at < draft->layer_count; at++) {
            const int32_t limit = source_of(step, layer[at].request, part)->limit;
            if (limit && !(found->counts[at] && found->logprobs[(int64_t)at * width] >= confident))
                add_to_batch(draft, at);
        }
        const int code = draft->batch_count ? score_batch(draft, step, part, width, work) : DRAFTREE_OK;
        if (code)
            return code;
        for (int32_t i = 0; i < draft->batch_count; i++)
            if (draft->batch_candidates.view.counts[i]) {
                copy_candidates(draft, i);
                growing_tree(draft, ((DraftNode *)draft->batch.data)[i].request)->part = part;
            }
    }
    return DRAFTREE_OK;
}

static int score_nodes(Draft *draft, const DraftStep *step, int32_t width, DraftWork *work) {
    const DraftNode *layer = draft->layer.data;
    for (int32_t part = 0; part < step->part_count; part++) {
        draft->batch_count = 0;
        for (int32_t at = 0; at < draft->layer_count; at++) {
            const int32_t limit = source_of(step, layer[at].request, part)->limit;
            if (growing_tree(draft, layer[at].request)->part == part && draft->depth < limit)
                add_to_batch(draft, at);
        }
        const int code = draft->batch_count ? score_batch(draft, step, part, width, work) : DRAFTREE_OK;
        if (code)
            return code;
        for (int32_t i = 0; i < draft->batch_count; i++)
            copy_candidates(draft, i);
    }
    return DRAFTREE_OK;
}

/* ---- constraints */

/* Find what may follow the layer's nodes. */
static int find_states(Draft *draft, const DraftStep *step) {
    const uint32_t **masks = draft->masks.data, **found = draft->batch_masks.data;
    int32_t *forced = draft->forced.data;
    const DraftNode *layer = draft->layer.data;
    draft->batch_count = 0;
    for (int32_t at = 0; at < draft->layer_count; at++) {
        masks[at] = NULL;
        forced[at] = -1;
        if (step->requests[layer[at].request].constrained)
            add_to_batch(draft, at);
    }
    if (!draft->batch_count)
        return DRAFTREE_OK;
    if (reserve(&draft->numbers, draft->batch_count, sizeof(int32_t)))
        return DRAFTREE_NO_MEMORY;
    int32_t *next = draft->numbers.data; /* of the batch */
    const int code = step->find_states(draft->batch_count, draft->batch.data, found, next);
    for (int32_t i = 0; i < draft->batch_count && !code; i++) {
        masks[((int32_t *)draft->batch_at.data)[i]] = found[i];
        forced[((int32_t *)draft->batch_at.data)[i]] = next[i];
    }
    return code;
}

/* Leave out candidates that a constraint rejects. */
static void filter(const Draft *draft, const DraftStep *step) {
    const uint32_t *const *masks = draft->masks.data;
    const DraftNode *layer = draft->layer.data;
    const Candidates *found = &draft->candidates.view;
    for (int32_t at = 0; at < draft->layer_count; at++) {
        if (!masks[at] || !found->counts[at])
            continue;
        int32_t *tokens = found->tokens + (int64_t)at * found->width, count = 0;
        double *logprobs = found->logprobs + (int64_t)at * found->width;
        const int32_t outputs = step->parts[growing_tree(draft, layer[at].request)->part].outputs;
        for (int32_t k = 0; k < found->counts[at]; k++)
            if (tokens[k] >= 0 && tokens[k] < outputs && masks[at][tokens[k] / 32] >> tokens[k] % 32 & 1) {
                tokens[count] = tokens[k];
                logprobs[count++] = logprobs[k];
            }
        found->counts[at] = count;
    }
}

/* ---- a layer */

int score_layer(Draft *draft, const DraftStep *step, int32_t width, DraftWork *work) {
    const int32_t count = draft->layer_count;
    if (reserve_candidates(&draft->candidates, count, width) || reserve(&draft->batch, count, sizeof(DraftNode)) ||
        reserve(&draft->batch_at, count, sizeof(int32_t)) || reserve(&draft->forced, count, sizeof(int32_t)) ||
        reserve(&draft->masks, count, sizeof(uint32_t *)) || reserve(&draft->batch_masks, count, sizeof(uint32_t *)))
        return DRAFTREE_NO_MEMORY;
    int code = find_states(draft, step);
    if (!code)
        code = draft->depth ? score_nodes(draft, step, width, work) : score_roots(draft, step, width, work);
    if (code)
        return code;
    filter(draft, step);
    const DraftNode *layer = draft->layer.data;
    const Candidates *found = &draft->candidates.view;
    for (int32_t at = 0; at < count; at++)
        if (found->counts[at]) {
            DraftedNode *node = node_at(growing_tree(draft, layer[at].request), layer[at].node);
            node->first = found->tokens[(int64_t)at * width];
            node->logprob = found->logprobs[(int64_t)at * width];
        }
    return DRAFTREE_OK;
}
