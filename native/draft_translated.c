/* Drafting by models of other token ids: what the target's tokens spell is read as the model's own tokens, and a token
 * that the model predicts stands for the target's token that begins what it spells. models/translated.py is the
 * reference. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "growth.h"
#include "model.h"
#include "noise.h"

/* How many of the model's tokens are translated after a node; after one whose distribution is warped or constrained. */
enum { CANDIDATES = 64, MORE_CANDIDATES = 256 };
/* ln(1e-4): less probable ones are not translated where no constraint rules the others out. */
static const double UNLIKELY = -9.210340371976182;

typedef struct {
    Draft *draft;
    const DraftStep *step;
    const DraftLayer *layer;
    const Translation *translation;
    Model *model;
    TranslationMemory *memory;
    int32_t width;            /* candidates of a node */
    int32_t count, row_count; /* tokens and rows of the pass */
    int32_t request;          /* whose row is the last one */
    int32_t slots, k, missing;
} Scoring;

static ReadTree *tree_of(const Draft *draft, int32_t part, int32_t request) {
    return (ReadTree *)draft->read_trees.data + (int64_t)part * draft->requests + request;
}

static ReadNode *node_of(const ReadTree *tree, int32_t node) { return (ReadNode *)tree->nodes.data + 1 + node; }

/* The node was scored: only then there are nodes below it. */
static int is_scored(const ReadTree *tree, int32_t node) {
    return node >= -1 && node < tree->count && node_of(tree, node)->depth >= 0;
}

void free_translations(Draft *draft) {
    ReadTree *trees = draft->read_trees.data;
    for (int64_t i = 0; i < draft->read_trees.capacity / (int64_t)sizeof *trees; i++) {
        free(trees[i].nodes.data);
        free(trees[i].continuations.data);
    }
    free(trees);
    TranslationMemory *memory = &draft->translation_memory;
    const Buffer *buffers[] = {&memory->rows,     &memory->counts,    &memory->tokens, &memory->parents,
                               &memory->wanted,   &memory->places,    &memory->slots,  &memory->found,
                               &memory->logprobs, &memory->entropies, &memory->missing};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        free(buffers[i]->data);
}

void find_end(const Draft *draft, int32_t part, int32_t request, int32_t node, int32_t *depth, int32_t *left) {
    const ReadTree *tree = tree_of(draft, part, request);
    if (!is_scored(tree, node))
        return;
    *depth = node_of(tree, node)->depth;
    *left = node_of(tree, node)->left;
}

/* ---- entries of the table */

/* Note a key that has no entry. */
static int want(Scoring *scoring, int32_t kind, int32_t text, int32_t token) {
    if (find_entry(scoring->translation, kind, text, token))
        return DRAFTREE_OK;
    Buffer *missing = &scoring->memory->missing;
    if (reserve(missing, (int64_t)scoring->missing + 1, sizeof(TranslationKey)))
        return DRAFTREE_NO_MEMORY;
    ((TranslationKey *)missing->data)[scoring->missing++] = (TranslationKey){kind, text, token};
    return DRAFTREE_OK;
}

/* Let the caller put the entries that are missing. */
static int find_missing(Scoring *scoring) {
    const TranslationKey *keys = scoring->memory->missing.data;
    const int32_t count = scoring->missing;
    scoring->missing = 0;
    const int code = count ? scoring->step->find_translations(scoring->layer->part, count, keys) : DRAFTREE_OK;
    for (int32_t i = 0; i < count && !code; i++)
        if (!find_entry(scoring->translation, keys[i].kind, keys[i].text, keys[i].token))
            return DRAFTREE_BAD_ARGUMENT;
    return code;
}

/* What is expected behind a token below a node; NULL: nothing is, and the model reads the token. */
static const Continuation *continuation_of(const ReadTree *tree, const ReadNode *above, int32_t token) {
    const Continuation *continuations = tree->continuations.data;
    for (int32_t i = above->first_continuation; i < above->first_continuation + above->continuation_count; i++)
        if (continuations[i].token == token)
            return continuations + i;
    return NULL;
}

/* Look up all that reading the layer takes. */
static int find_readings(Scoring *scoring) {
    int code = DRAFTREE_OK;
    for (int32_t i = 0; i < scoring->layer->count && !code; i++) {
        const DraftNode *node = &scoring->layer->nodes[i];
        if (node->node < 0)
            continue;
        const ReadTree *tree = tree_of(scoring->draft, scoring->layer->part, node->request);
        if (!is_scored(tree, node->parent))
            return DRAFTREE_BAD_TREE;
        const ReadNode *above = node_of(tree, node->parent);
        const Continuation *continuation = continuation_of(tree, above, node->token);
        code = want(scoring, READING, above->left, node->token);
        if (!code && continuation)
            code = want(scoring, FIRST_OF_TEXT, continuation->text, 0);
    }
    return code ? code : find_missing(scoring);
}

/* ---- the pass */

/* Make room for the tokens of one more node. */
static int reserve_pass(Scoring *scoring, int64_t count) {
    TranslationMemory *memory = scoring->memory;
    const int64_t tokens = scoring->count + count, rows = (int64_t)scoring->row_count + 1;
    if (tokens > INT32_MAX)
        return DRAFTREE_BAD_ARGUMENT;
    return reserve(&memory->tokens, tokens, sizeof(int32_t)) || reserve(&memory->parents, tokens, sizeof(int32_t)) ||
                   reserve(&memory->wanted, tokens, 1) || reserve(&memory->rows, rows, sizeof(int32_t)) ||
                   reserve(&memory->counts, rows, sizeof(int32_t))
               ? DRAFTREE_NO_MEMORY
               : DRAFTREE_OK;
}

/* Feed a chain of tokens below a number of the row, -1: below the last committed one; the last of them is scored.
 * Returns its number, or an error code below -1. */
static int32_t feed(Scoring *scoring, int32_t request, int32_t above, const int32_t *tokens, int32_t count) {
    const DraftSource *source = source_of(scoring->step, request, scoring->layer->part);
    const Row *row = find_row(&scoring->model->cache, source->row);
    if (!row)
        return DRAFTREE_BAD_ROW;
    if (reserve_pass(scoring, count))
        return DRAFTREE_NO_MEMORY;
    TranslationMemory *memory = scoring->memory;
    int32_t *counts = memory->counts.data;
    if (scoring->request != request) {
        scoring->request = request;
        ((int32_t *)memory->rows.data)[scoring->row_count] = source->row;
        counts[scoring->row_count++] = 0;
    }
    int32_t *own = counts + scoring->row_count - 1;
    for (int32_t i = 0; i < count; i++) {
        const int32_t at = scoring->count++;
        ((int32_t *)memory->tokens.data)[at] = tokens[i];
        ((int32_t *)memory->parents.data)[at] = above;
        ((uint8_t *)memory->wanted.data)[at] = i == count - 1;
        above = row->count + (*own)++;
    }
    return above;
}

static int add_node(ReadTree *tree, int32_t node, ReadNode read) {
    if (reserve(&tree->nodes, (int64_t)node + 2, sizeof read))
        return DRAFTREE_NO_MEMORY;
    for (; tree->count < node; tree->count++)
        node_of(tree, tree->count)->depth = -1;
    *node_of(tree, node) = read;
    if (tree->count <= node)
        tree->count = node + 1;
    return DRAFTREE_OK;
}

/* Read a chain for a node of the layer: 0 or an error code. */
static int read_chain(Scoring *scoring, int32_t i, ReadNode read, const int32_t *tokens, int32_t count) {
    const DraftNode *node = &scoring->layer->nodes[i];
    int32_t *places = scoring->memory->places.data;
    places[i] = -1;
    if (count) {
        const int32_t number = feed(scoring, node->request, read.number, tokens, count);
        if (number < -1)
            return number;
        read.number = read.own ? number : read.number;
        places[i] = scoring->slots++;
    }
    return add_node(tree_of(scoring->draft, scoring->layer->part, node->request), node->node, read);
}

/* Read what the row lacks of the text. */
static int read_root(Scoring *scoring, int32_t i) {
    const DraftSource *source = source_of(scoring->step, scoring->layer->nodes[i].request, scoring->layer->part);
    if (source->unread_count < 0 || (source->read && source->read != source->unread_count) || source->left < 0)
        return DRAFTREE_BAD_ARGUMENT;
    const ReadNode root = {.number = -1, .depth = source->read, .own = source->read, .left = source->left};
    return read_chain(scoring, i, root, source->unread, source->unread_count);
}

static int read_node(Scoring *scoring, int32_t i) {
    const DraftNode *node = &scoring->layer->nodes[i];
    const ReadTree *tree = tree_of(scoring->draft, scoring->layer->part, node->request);
    const ReadNode *above = node_of(tree, node->parent);
    const Continuation *continuation = continuation_of(tree, above, node->token);
    const TranslationEntry *reading = find_entry(scoring->translation, READING, above->left, node->token);
    const Row *row =
        find_row(&scoring->model->cache, source_of(scoring->step, node->request, scoring->layer->part)->row);
    if (!row)
        return DRAFTREE_BAD_ROW;
    const int64_t length = (int64_t)row->length + above->depth + reading->count;
    const int reads = !continuation && length <= scoring->model->architecture.context;
    const int32_t count = reads ? reading->count : 0;
    const ReadNode read = {.number = above->number,
                           .depth = above->depth + count,
                           .own = count,
                           .left = reads ? reading->behind : reading->found,
                           .expected = continuation ? continuation->text : 0,
                           .share = continuation ? continuation->share : 0};
    return read_chain(scoring, i, read, ids_of(scoring->translation, reading), count);
}

static int read_layer(Scoring *scoring) {
    if (reserve(&scoring->memory->places, scoring->layer->count, sizeof(int32_t)))
        return DRAFTREE_NO_MEMORY;
    int code = DRAFTREE_OK;
    for (int32_t i = 0; i < scoring->layer->count && !code; i++)
        code = scoring->layer->nodes[i].node < 0 ? read_root(scoring, i) : read_node(scoring, i);
    return code;
}

/* ---- scores */

/* The mask of a node; NULL: there is none, or it allows no token, and then any may follow. */
static const uint32_t *mask_at(const Scoring *scoring, int32_t i) {
    const uint32_t *mask = scoring->layer->masks ? scoring->layer->masks[i] : NULL;
    const int32_t outputs = scoring->step->parts[scoring->layer->part].outputs;
    for (int32_t word = 0; mask && word < (outputs + 31) / 32; word++) {
        const int32_t left = outputs - word * 32;
        if (mask[word] & (left >= 32 ? UINT32_MAX : (1u << left) - 1))
            return mask;
    }
    return NULL;
}

static int is_constrained(const Scoring *scoring, int32_t i) {
    return scoring->layer->masks && scoring->layer->masks[i];
}

static const DraftRequest *request_at(const Scoring *scoring, int32_t i) {
    return scoring->step->requests + scoring->layer->nodes[i].request;
}

/* How many of the model's tokens are translated after a node. */
static int32_t wanted_at(const Scoring *scoring, int32_t i) {
    const int more = is_constrained(scoring, i) || request_at(scoring, i)->warping.temperature > 0;
    int32_t count = more ? MORE_CANDIDATES : CANDIDATES;
    if (count < 2 * scoring->width)
        count = 2 * scoring->width;
    if (count > scoring->model->architecture.vocabulary)
        count = scoring->model->architecture.vocabulary;
    return count < MOST_TOP ? count : MOST_TOP;
}

static double least_at(const Scoring *scoring, int32_t i) { return is_constrained(scoring, i) ? -INFINITY : UNLIKELY; }

static int run_pass(Scoring *scoring) {
    TranslationMemory *memory = scoring->memory;
    const int32_t *places = memory->places.data;
    scoring->k = 0;
    for (int32_t i = 0; i < scoring->layer->count; i++)
        if (places[i] >= 0 && wanted_at(scoring, i) > scoring->k)
            scoring->k = wanted_at(scoring, i);
    const int64_t found = (int64_t)scoring->slots * scoring->k;
    if (reserve(&memory->slots, scoring->slots, sizeof(int32_t)) || reserve(&memory->found, found, sizeof(int32_t)) ||
        reserve(&memory->logprobs, found, sizeof(float)) || reserve(&memory->entropies, scoring->slots, sizeof(float)))
        return DRAFTREE_NO_MEMORY;
    int32_t *slots = memory->slots.data;
    for (int32_t slot = 0; slot < scoring->slots; slot++)
        slots[slot] = slot;
    const int code = draftree_extend(scoring->model, scoring->row_count, memory->rows.data, memory->counts.data,
                                     memory->tokens.data, memory->parents.data, memory->wanted.data, NULL, NULL);
    return code ? code
                : draftree_top(scoring->model, scoring->slots, slots, scoring->k, NULL, NULL, NULL, memory->found.data,
                               memory->logprobs.data, memory->entropies.data);
}

/* The model's tokens after a node, the most probable first; returns how many are translated. */
static int32_t tokens_at(const Scoring *scoring, int32_t i, const int32_t **tokens, const float **logprobs) {
    const int32_t place = ((int32_t *)scoring->memory->places.data)[i];
    if (place < 0)
        return 0;
    const double least = least_at(scoring, i);
    *tokens = (int32_t *)scoring->memory->found.data + (int64_t)place * scoring->k;
    *logprobs = (float *)scoring->memory->logprobs.data + (int64_t)place * scoring->k;
    int32_t count = 0, most = wanted_at(scoring, i);
    while (count < most && (double)(*logprobs)[count] > least)
        count++;
    return count;
}

/* Look up what the model's tokens after the layer's nodes stand for. */
static int find_firsts(Scoring *scoring) {
    int code = DRAFTREE_OK;
    for (int32_t i = 0; i < scoring->layer->count; i++) {
        const int32_t *tokens;
        const float *logprobs;
        const int32_t count = tokens_at(scoring, i, &tokens, &logprobs);
        for (int32_t rank = 0; rank < count && !code; rank++)
            code = want(scoring, FIRST_OF_TOKEN, 0, tokens[rank]);
    }
    return code ? code : find_missing(scoring);
}

/* A token fits a node's mask and the target's vocabulary; -1 stands for none. */
static int is_allowed(const Scoring *scoring, const uint32_t *mask, int32_t token) {
    return token >= 0 && token < scoring->step->parts[scoring->layer->part].outputs &&
           (!mask || mask[token / 32] >> token % 32 & 1);
}

/* Find what may follow a node that the model has read, the most probable first; returns how many. */
static int32_t follow(const Scoring *scoring, int32_t i, Translated *followers) {
    const int32_t *tokens;
    const float *logprobs;
    const uint32_t *mask = mask_at(scoring, i);
    const DraftRequest *request = request_at(scoring, i);
    int32_t count = 0, own = tokens_at(scoring, i, &tokens, &logprobs);
    for (int32_t rank = 0; rank < own; rank++) {
        const TranslationEntry *first = find_entry(scoring->translation, FIRST_OF_TOKEN, 0, tokens[rank]);
        if (is_allowed(scoring, mask, first->found))
            followers[count++] = (Translated){(double)logprobs[rank], 0, first->found, rank, first->behind};
    }
    count = add_up(followers, count);
    if (count && request->warping.temperature > 0) {
        const uint64_t key = stream_key(request->noise, (int64_t)request->position + scoring->layer->depth);
        count = warp(followers, count, &request->warping, scoring->step->coupled ? &key : NULL);
    } else if (count && is_constrained(scoring, i))
        normalise(followers, count);
    return count;
}

/* Find what follows a node for which no pass was made: the first token of the text that is expected there. */
static int32_t follow_expected(const Scoring *scoring, int32_t i, const ReadNode *read, Translated *follower) {
    const TranslationEntry *first =
        read->expected ? find_entry(scoring->translation, FIRST_OF_TEXT, read->expected, 0) : NULL;
    if (!first || !is_allowed(scoring, mask_at(scoring, i), first->found))
        return 0;
    *follower = (Translated){.value = read->share, .token = first->found, .behind = first->behind};
    return 1;
}

/* Write the candidates of a node, and keep what is expected behind them. */
static int write_candidates(const Scoring *scoring, int32_t i, const Candidates *found) {
    Translated followers[MOST_TOP];
    const DraftNode *node = &scoring->layer->nodes[i];
    const int32_t place = ((int32_t *)scoring->memory->places.data)[i];
    ReadTree *tree = tree_of(scoring->draft, scoring->layer->part, node->request);
    ReadNode *read = node_of(tree, node->node);
    const int32_t all = place < 0 ? follow_expected(scoring, i, read, followers) : follow(scoring, i, followers);
    const int32_t count = all < scoring->width ? all : scoring->width;
    if (reserve(&tree->continuations, (int64_t)tree->continuation_count + count, sizeof(Continuation)))
        return DRAFTREE_NO_MEMORY;
    Continuation *continuations = tree->continuations.data;
    read->first_continuation = tree->continuation_count;
    for (int32_t rank = 0; rank < count; rank++) {
        const Translated *own = followers + rank;
        found->tokens[(int64_t)i * found->width + rank] = own->token;
        found->logprobs[(int64_t)i * found->width + rank] = (float)own->value;
        if (own->behind)
            continuations[tree->continuation_count++] = (Continuation){own->token, own->behind, own->share};
    }
    read->continuation_count = tree->continuation_count - read->first_continuation;
    found->counts[i] = count;
    found->entropies[i] = place < 0 ? 0 : ((float *)scoring->memory->entropies.data)[place];
    return DRAFTREE_OK;
}

/* ---- steps */

int begin_translation(Draft *draft, const DraftStep *step, int32_t part) {
    int code = DRAFTREE_OK;
    for (int32_t request = 0; request < step->request_count; request++) {
        ReadTree *tree = tree_of(draft, part, request);
        tree->count = tree->continuation_count = 0;
        if (reserve(&tree->nodes, 1, sizeof(ReadNode)))
            return DRAFTREE_NO_MEMORY;
        node_of(tree, -1)->depth = -1;
        const DraftSource *source = source_of(step, request, part);
        if (source->limit && !code)
            code = draftree_commit(step->parts[part].model, source->row, NULL, 0);
    }
    return code;
}

int score_by_translation(Draft *draft, const DraftStep *step, const DraftLayer *layer, const Candidates *found) {
    const DraftPart *part = step->parts + layer->part;
    Scoring scoring = {.draft = draft,
                       .step = step,
                       .layer = layer,
                       .translation = part->translation,
                       .model = part->model,
                       .memory = &draft->translation_memory,
                       .width = found->width < part->outputs ? found->width : part->outputs,
                       .request = -1};
    int code = find_readings(&scoring);
    if (!code)
        code = read_layer(&scoring);
    if (!code && scoring.slots)
        code = run_pass(&scoring);
    if (!code)
        code = find_firsts(&scoring);
    for (int32_t i = 0; i < layer->count && !code; i++)
        code = write_candidates(&scoring, i, found);
    return code;
}

/* Add the numbers of what was read for a node. */
static void add_numbers(Buffer *numbers, int32_t *count, const ReadNode *read) {
    for (int32_t number = read->number - read->own + 1; number <= read->number && read->own; number++)
        ((int32_t *)numbers->data)[(*count)++] = number;
}

int commit_translated(Draft *draft, const DraftStep *step, int32_t part, int32_t request, const int32_t *path,
                      int32_t count) {
    const ReadTree *tree = tree_of(draft, part, request);
    const DraftSource *source = source_of(step, request, part);
    if (!source->limit)
        return DRAFTREE_OK;
    Buffer *numbers = &draft->translation_memory.tokens;
    int32_t last = -1, known = 0, kept = 0;
    while (known < count && is_scored(tree, path[known]))
        last = path[known++];
    const int32_t most = is_scored(tree, last) ? node_of(tree, last)->depth : 0;
    if (reserve(numbers, most, sizeof(int32_t)))
        return DRAFTREE_NO_MEMORY;
    if (is_scored(tree, -1))
        add_numbers(numbers, &kept, node_of(tree, -1));
    for (int32_t i = 0; i < known; i++)
        add_numbers(numbers, &kept, node_of(tree, path[i]));
    return draftree_commit(step->parts[part].model, source->row, numbers->data, kept);
}
