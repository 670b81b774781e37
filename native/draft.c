/* Draft trees of all requests of a step, tree layer by layer: a part scores a layer in one go, the rule chooses. */
#include <stdlib.h>
#include <string.h>

#include "growth.h"

enum { MOST_NODES = 1 << 13, MOST_WIDTH = 1 << 13, MOST_PARTS = 1 << 10, MOST_REQUESTS = 1 << 20 };

/* ---- memory */

static void free_candidates(const CandidateBuffers *found) {
    free(found->counts.data);
    free(found->tokens.data);
    free(found->logprobs.data);
    free(found->entropies.data);
}

int draftree_draft_open(Draft **draft) {
    *draft = calloc(1, sizeof **draft);
    return *draft ? DRAFTREE_OK : DRAFTREE_NO_MEMORY;
}

void draftree_draft_close(Draft *draft) {
    if (!draft)
        return;
    GrowingTree *tree = draft->trees.data;
    for (int64_t i = 0; i < draft->trees.capacity / (int64_t)sizeof *tree; i++) {
        free(tree[i].nodes.data);
        free(tree[i].matches.data);
        free(tree[i].best.data);
    }
    Buffer *cells = draft->cells.data;
    for (int64_t i = 0; i < draft->cells.capacity / (int64_t)sizeof *cells; i++)
        free(cells[i].data);
    free_pass_memory(&draft->pass_memory);
    free_translations(draft);
    const Buffer *buffers[] = {&draft->trees,       &draft->fed,      &draft->cells, &draft->layer,
                               &draft->masks,       &draft->forced,   &draft->batch, &draft->batch_at,
                               &draft->batch_masks, &draft->children, &draft->best,  &draft->numbers,
                               &draft->ranked,      &draft->left,     &draft->gains, &draft->output};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        free(buffers[i]->data);
    free_candidates(&draft->candidates);
    free_candidates(&draft->batch_candidates);
    free(draft);
}

/* ---- a proposal begins */

static int check_step(const DraftStep *step) {
    const DraftRule *rule = step->rule;
    if (step->part_count < 1 || step->part_count > MOST_PARTS || step->request_count < 1 ||
        step->request_count > MOST_REQUESTS || rule->width < 1 || rule->width > MOST_WIDTH || rule->depth < 1 ||
        (rule->below && rule->sizes < 1))
        return DRAFTREE_BAD_ARGUMENT;
    for (int32_t part = 0; part < step->part_count; part++) {
        const DraftPart *own = step->parts + part;
        if (own->kind < BY_TEXT || own->kind > BY_CALLER || (own->kind == BY_CALLER && !step->score) ||
            (own->kind == BY_TRANSLATION && (!own->translation || !step->find_translations)) ||
            ((by_pass(own) || own->kind == BY_TRANSLATION) && !own->model))
            return DRAFTREE_BAD_ARGUMENT;
    }
    for (int32_t request = 0; request < step->request_count; request++) {
        const DraftRequest *own = step->requests + request;
        if (own->nodes < 0 || own->nodes > MOST_NODES || own->depth < 0 || (own->constrained && !step->find_states))
            return DRAFTREE_BAD_ARGUMENT;
        for (int32_t part = 0; part < step->part_count; part++)
            if (step->parts[part].kind == BY_TEXT && source_of(step, request, part)->limit &&
                !source_of(step, request, part)->index)
                return DRAFTREE_BAD_ARGUMENT;
    }
    return DRAFTREE_OK;
}

static int reserve_cells(Draft *draft, int32_t part, int32_t request, int32_t count) {
    Buffer *cells = (Buffer *)draft->cells.data + (int64_t)part * draft->requests + request;
    const int code = reserve(cells, count, sizeof(int32_t));
    fed_of(draft, part, request)->cells = cells->data;
    return code;
}

/* Room for the root and `count` nodes of a request. */
static int reserve_nodes_of(Draft *draft, const DraftStep *step, int32_t request, int32_t count) {
    GrowingTree *tree = growing_tree(draft, request);
    int code = reserve(&tree->nodes, (int64_t)count + 1, sizeof(DraftedNode));
    for (int32_t part = 0; part < step->part_count && !code; part++)
        if (step->parts[part].kind == BY_TEXT)
            code = reserve(&tree->matches, (int64_t)count + 1, sizeof(NgramMatches));
        else if (by_pass(step->parts + part))
            code = reserve_cells(draft, part, request, count);
    return code;
}

static int begin(Draft *draft, const DraftStep *step) {
    const int32_t requests = step->request_count, parts = step->part_count;
    if (reserve(&draft->trees, requests, sizeof(GrowingTree)) ||
        reserve(&draft->fed, (int64_t)requests * parts, sizeof(Fed)) ||
        reserve(&draft->cells, (int64_t)requests * parts, sizeof(Buffer)) ||
        reserve(&draft->read_trees, (int64_t)requests * parts, sizeof(ReadTree)) ||
        reserve(&draft->layer, requests, sizeof(DraftNode)) || reserve(&draft->left, requests, sizeof(int32_t)) ||
        reserve(&draft->gains, requests, sizeof(double)))
        return DRAFTREE_NO_MEMORY;
    draft->requests = requests;
    draft->parts = parts;
    draft->depth = draft->layer_count = draft->best_count = draft->paying = 0;
    DraftNode *layer = draft->layer.data;
    for (int32_t request = 0; request < requests; request++) {
        if (reserve_nodes_of(draft, step, request, 0))
            return DRAFTREE_NO_MEMORY;
        GrowingTree *tree = growing_tree(draft, request);
        const DraftRequest *own = step->requests + request;
        tree->part = -1;
        tree->count = tree->best_count = 0;
        tree->most = own->nodes ? most_drafted(step->rule, own->nodes) : 0;
        *node_at(tree, -1) = (DraftedNode){.token = -1, .parent = -1, .first = -1, .number = -1, .value = 1};
        NgramMatches followed; /* from now on */
        for (int32_t part = 0; part < parts; part++)
            if (step->parts[part].enabled && source_of(step, request, part)->index)
                draftree_ngram_latest(source_of(step, request, part)->index, &followed);
        if (own->nodes && own->depth)
            layer[draft->layer_count++] = (DraftNode){request, -1, -1, -1};
    }
    return DRAFTREE_OK;
}

/* ---- growth */

/* Leave out the least probable children of requests that would have more nodes than are drafted at most. */
static int fit_children(Draft *draft, const DraftStep *step) {
    const DraftNode *layer = draft->layer.data;
    Child *children = draft->children.data;
    int32_t *left = draft->left.data, over = 0;
    for (int32_t request = 0; request < step->request_count; request++)
        left[request] = growing_tree(draft, request)->most - growing_tree(draft, request)->count;
    for (int32_t i = 0; i < draft->child_count; i++)
        over |= --left[layer[children[i].at].request] < 0;
    if (!over)
        return DRAFTREE_OK;
    if (reserve(&draft->ranked, draft->child_count, sizeof(Ranked)))
        return DRAFTREE_NO_MEMORY;
    Ranked *ranked = draft->ranked.data;
    for (int32_t i = 0; i < draft->child_count; i++) {
        ranked[i] = (Ranked){children[i].path, 0, i};
        left[layer[children[i].at].request]++;
    }
    rank(ranked, draft->child_count);
    for (int32_t i = 0; i < draft->child_count; i++)
        children[ranked[i].at].taken = left[layer[children[ranked[i].at].at].request]-- > 0;
    int32_t count = 0;
    for (int32_t i = 0; i < draft->child_count; i++)
        if (children[i].taken)
            children[count++] = children[i];
    draft->child_count = count;
    return DRAFTREE_OK;
}

/* Add children; those that may get children in turn are the next layer. */
static int add_children(Draft *draft, const DraftStep *step) {
    const Child *children = draft->children.data;
    const Candidates *found = &draft->candidates.view;
    if (reserve(&draft->layer, (int64_t)draft->layer_count + draft->child_count, sizeof(DraftNode)))
        return DRAFTREE_NO_MEMORY;
    DraftNode *layer = draft->layer.data;
    int32_t next = draft->layer_count;
    for (int32_t i = 0; i < draft->child_count; i++) {
        const DraftNode parent = layer[children[i].at];
        GrowingTree *tree = growing_tree(draft, parent.request);
        if (reserve_nodes_of(draft, step, parent.request, tree->count + 1))
            return DRAFTREE_NO_MEMORY;
        const int32_t token = found->tokens[(int64_t)children[i].at * found->width + children[i].rank];
        *node_at(tree, tree->count) = (DraftedNode){.token = token,
                                                    .parent = parent.node,
                                                    .depth = draft->depth + 1,
                                                    .first = -1,
                                                    .path = children[i].path,
                                                    .value = children[i].value,
                                                    .entropy = found->entropies[children[i].at]};
        if (children[i].extends)
            layer[next++] = (DraftNode){parent.request, tree->count, parent.node, token};
        tree->count++;
    }
    int32_t count = 0;
    for (int32_t at = draft->layer_count; at < next; at++)
        if (step->requests[layer[at].request].depth > draft->depth + 1 &&
            growing_tree(draft, layer[at].request)->most > growing_tree(draft, layer[at].request)->count)
            layer[count++] = layer[at];
    draft->layer_count = count;
    draft->depth++;
    return DRAFTREE_OK;
}

static int grow(Draft *draft, const DraftStep *step, DraftWork *work) {
    int32_t width = NGRAM_MATCHES < step->rule->width ? NGRAM_MATCHES : step->rule->width;
    int code = DRAFTREE_OK;
    for (int32_t part = 0; part < step->part_count && !code; part++) {
        if (step->parts[part].kind != BY_TEXT)
            width = step->rule->width;
        if (step->parts[part].enabled && by_pass(step->parts + part))
            code = begin_models(step, part, fed_of(draft, part, 0));
        if (step->parts[part].enabled && step->parts[part].kind == BY_TRANSLATION)
            code = begin_translation(draft, step, part);
    }
    while (draft->layer_count && !code) {
        code = score_layer(draft, step, width, work);
        if (!code)
            code = choose_children(draft, step);
        if (!code)
            code = fit_children(draft, step);
        if (!code)
            code = add_children(draft, step);
    }
    return code ? code : choose_verified(draft, step);
}

/* ---- finished trees */

/* The nodes of a request that are verified, as columns from `columns` on; returns how many, or an error code. */
static int32_t finish(const Draft *draft, const DraftStep *step, int32_t request, int32_t *columns) {
    const GrowingTree *tree = growing_tree(draft, request);
    const int translated = tree->part >= 0 && step->parts[tree->part].kind == BY_TRANSLATION;
    int32_t count = 0, number = 0;
    for (int32_t node = 0; node < tree->count; node++)
        count += node_at(tree, node)->verified;
    for (int32_t node = 0; node < tree->count; node++) {
        DraftedNode *own = node_at(tree, node);
        if (!own->verified)
            continue;
        const DraftedNode *parent = node_at(tree, own->parent);
        if (own->parent >= 0 && !parent->verified)
            return DRAFTREE_BAD_TREE;
        const float path = (float)own->path, entropy = (float)own->entropy;
        columns[number] = own->token;
        columns[count + number] = parent->number;
        columns[2 * count + number] = own->depth;
        memcpy(columns + 3 * count + number, &path, sizeof path);
        memcpy(columns + 4 * count + number, &entropy, sizeof entropy);
        columns[5 * count + number] = node;
        columns[6 * count + number] = -1;
        columns[7 * count + number] = 0;
        if (translated)
            find_end(draft, tree->part, request, node, columns + 6 * count + number, columns + 7 * count + number);
        own->number = number++;
    }
    return count;
}

static int finish_trees(Draft *draft, const DraftStep *step, DraftTree *trees) {
    int64_t nodes = 0;
    for (int32_t request = 0; request < step->request_count; request++)
        nodes += growing_tree(draft, request)->count;
    if (reserve(&draft->output, 8 * nodes, sizeof(int32_t)))
        return DRAFTREE_NO_MEMORY;
    int32_t *columns = draft->output.data;
    for (int32_t request = 0; request < step->request_count; request++) {
        const GrowingTree *tree = growing_tree(draft, request);
        const int32_t count = finish(draft, step, request, columns);
        if (count < 0)
            return count;
        trees[request] = (DraftTree){count, count ? tree->part : 0, columns};
        columns += 8 * (int64_t)count;
    }
    return DRAFTREE_OK;
}

int draftree_draft(Draft *draft, const DraftStep *step, DraftTree *trees, DraftWork *work, int32_t *layers) {
    draft->requests = 0;
    int code = check_step(step);
    if (code)
        return code;
    memset(work, 0, (size_t)step->part_count * sizeof *work);
    code = begin(draft, step);
    if (!code)
        code = grow(draft, step, work);
    if (!code)
        code = finish_trees(draft, step, trees);
    *layers = draft->depth;
    if (code)
        draft->requests = 0;
    return code;
}

/* ---- outcomes */

/* Walk down what was proposed along the target's tokens; candidates count whether they became nodes or not. */
static int32_t find_trials(const GrowingTree *tree, const DraftOutcome *outcome, DraftTrial *trials) {
    int32_t count = 0, node = -1;
    for (int32_t i = 0; i < outcome->token_count; i++) {
        const DraftedNode *own = node_at(tree, node);
        if (own->first < 0)
            break;
        trials[count++] = (DraftTrial){tree->part, own->first == outcome->tokens[i], own->logprob};
        int32_t child = node + 1;
        while (child < tree->count &&
               (node_at(tree, child)->parent != node || node_at(tree, child)->token != outcome->tokens[i]))
            child++;
        if (child == tree->count)
            break;
        node = child;
    }
    return count;
}

/* Commit what the rows of a request have read of its accepted path. */
static int commit_path(Draft *draft, const DraftStep *step, int32_t request, const DraftOutcome *outcome) {
    const GrowingTree *tree = growing_tree(draft, request);
    int32_t *path = draft->numbers.data;
    for (int32_t i = 0; i < outcome->path_count; i++) {
        int32_t node = 0;
        while (node < tree->count &&
               !(node_at(tree, node)->verified && node_at(tree, node)->number == outcome->path[i]))
            node++;
        if (node == tree->count)
            return DRAFTREE_BAD_TREE;
        path[i] = node;
    }
    int code = DRAFTREE_OK;
    for (int32_t part = 0; part < step->part_count && !code; part++)
        if (step->parts[part].enabled && by_pass(step->parts + part))
            code = commit_accepted(step, part, request, fed_of(draft, part, request), path,
                                   tree->part == part ? outcome->path_count : 0, &draft->pass_memory);
        else if (step->parts[part].enabled && step->parts[part].kind == BY_TRANSLATION)
            code = commit_translated(draft, step, part, request, path, tree->part == part ? outcome->path_count : 0);
    return code;
}

int draftree_accept(Draft *draft, const DraftStep *step, const DraftOutcome *outcomes, DraftTrial *trials,
                    int32_t *trial_count) {
    *trial_count = 0;
    if (!draft->requests || draft->requests != step->request_count || draft->parts != step->part_count)
        return DRAFTREE_BAD_ARGUMENT;
    for (int32_t request = 0; request < step->request_count; request++)
        if (reserve(&draft->numbers, outcomes[request].path_count, sizeof(int32_t)))
            return DRAFTREE_NO_MEMORY;
    int code = DRAFTREE_OK;
    for (int32_t request = 0; request < step->request_count && !code; request++) {
        *trial_count += find_trials(growing_tree(draft, request), outcomes + request, trials + *trial_count);
        code = commit_path(draft, step, request, outcomes + request);
    }
    draft->requests = 0;
    return code;
}
