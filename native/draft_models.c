/* Draft models and heads: they score a layer of all requests in one pass. */
#include <math.h>
#include <string.h>

#include "draft.h"
#include "model.h"
#include "noise.h"

/* What goes into a pass and comes out of it, in PassMemory. */
typedef struct {
    Model *model;
    const DraftStep *step;
    const DraftLayer *layer;
    Fed *fed;
    int32_t row_count;
    int32_t count;  /* nodes of the pass so far */
    int32_t k;      /* candidates of a node */
    uint64_t *keys; /* [layer->count], as the next ones */
    Warping *warpings;
    int32_t *rows, *counts, *target_rows, *slots, *mask_of;
    float *entropies;
    int32_t *found; /* [layer->count][k] */
    float *logprobs;
    uint32_t *masks;                     /* [masks][words] */
    int32_t *tokens, *parents, *sources; /* [nodes of the pass] */
    uint8_t *wanted;
} LayerPass;

void free_pass_memory(PassMemory *memory) {
    release(memory->bytes, (size_t)memory->capacity);
    *memory = (PassMemory){0};
}

static int reserve_bytes(PassMemory *memory, int64_t count) {
    uint8_t *grown = enlarged(memory->bytes, &memory->capacity, count, 1);
    if (!grown)
        return DRAFTREE_NO_MEMORY;
    memory->bytes = grown;
    return DRAFTREE_OK;
}

/* The next `count` entries of memory. Larger entries come first, so that all are aligned. */
static void *take(uint8_t **at, int64_t count, size_t size) {
    void *taken = *at;
    *at += (size_t)count * size;
    return taken;
}

/* Make room for so many nodes and masks. */
static int start_pass(LayerPass *pass, PassMemory *memory, int64_t nodes, int64_t masks) {
    const int64_t count = pass->layer->count, found = count * pass->k, words = (pass->model->tokens + 31) / 32;
    const int64_t of_node = sizeof *pass->keys + sizeof *pass->warpings + 5 * sizeof(int32_t) + sizeof(float);
    const int64_t of_token = 3 * sizeof(int32_t) + sizeof(uint8_t);
    const int64_t of_found = sizeof(int32_t) + sizeof(float);
    int error = nodes > INT32_MAX ? DRAFTREE_BAD_ARGUMENT
                                  : reserve_bytes(memory, count * of_node + found * of_found + nodes * of_token +
                                                              masks * words * (int64_t)sizeof(uint32_t));
    if (error)
        return error;
    uint8_t *at = memory->bytes;
    pass->keys = take(&at, count, sizeof *pass->keys);
    pass->warpings = take(&at, count, sizeof *pass->warpings);
    pass->rows = take(&at, count, sizeof *pass->rows);
    pass->counts = take(&at, count, sizeof *pass->counts);
    pass->target_rows = take(&at, count, sizeof *pass->target_rows);
    pass->slots = take(&at, count, sizeof *pass->slots);
    pass->mask_of = take(&at, count, sizeof *pass->mask_of);
    pass->entropies = take(&at, count, sizeof *pass->entropies);
    pass->found = take(&at, found, sizeof *pass->found);
    pass->logprobs = take(&at, found, sizeof *pass->logprobs);
    pass->masks = take(&at, masks * words, sizeof *pass->masks);
    pass->tokens = take(&at, nodes, sizeof *pass->tokens);
    pass->parents = take(&at, nodes, sizeof *pass->parents);
    pass->sources = take(&at, nodes, sizeof *pass->sources);
    pass->wanted = take(&at, nodes, sizeof *pass->wanted);
    return DRAFTREE_OK;
}

/* ---- what is fed */

/* The number that a node has in the row; -1: it has not been read. */
static int32_t number_of(const Fed *fed, int32_t node) {
    if (node < 0)
        return fed->waiting - 1;
    return node < fed->count ? fed->cells[node] : -1;
}

static void set_number(Fed *fed, int32_t node, int32_t number) {
    while (fed->count <= node)
        fed->cells[fed->count++] = -1;
    fed->cells[node] = number;
}

/* How many tokens a root brings: those that the row has not committed, of a draft head the last one again if it has
 * read them all; below 0: an error code. The first token of a text is none of a draft head's: no hidden state comes
 * before it. */
static int32_t unread_tokens(const LayerPass *pass, int32_t request) {
    const DraftSource *source = source_of(pass->step, request, pass->layer->part);
    const Row *row = find_row(&pass->model->cache, source->row);
    if (!row)
        return DRAFTREE_BAD_ROW;
    int32_t count = pass->step->requests[request].position - row->length;
    if (pass->model->draft_head && --count == 0)
        count = 1;
    return count < 1 || count > source->unread_count ? DRAFTREE_BAD_ARGUMENT : count;
}

/* Nodes of the pass; below 0: an error code. */
static int64_t count_nodes(const LayerPass *pass) {
    int64_t count = 0;
    for (int32_t i = 0; i < pass->layer->count; i++) {
        const DraftNode *node = &pass->layer->nodes[i];
        const int32_t own = node->node < 0 ? unread_tokens(pass, node->request) : 1;
        if (own < 0)
            return own;
        count += own;
    }
    return count;
}

/* Tokens that the target alone has pad its output layer, and are read as the model's last one. */
static void feed(LayerPass *pass, int32_t token, int32_t parent, int32_t source, int wanted) {
    const int32_t at = pass->count++, last = (int32_t)pass->model->tokens - 1;
    pass->tokens[at] = token < last ? token : last;
    pass->parents[at] = parent;
    pass->sources[at] = source;
    pass->wanted[at] = wanted != 0;
    pass->counts[pass->row_count - 1]++;
}

static void add_row(LayerPass *pass, int32_t request) {
    const int32_t at = pass->row_count++;
    pass->rows[at] = source_of(pass->step, request, pass->layer->part)->row;
    pass->target_rows[at] = pass->step->requests[request].target_row;
    pass->counts[at] = 0;
}

/* A root behind the tokens that the model has not read. */
static int feed_text(LayerPass *pass, int32_t request) {
    const DraftSource *source = source_of(pass->step, request, pass->layer->part);
    const int32_t count = unread_tokens(pass, request), *text = source->unread + source->unread_count - count;
    pass->fed[request].waiting = count;
    for (int32_t i = 0; i < count; i++)
        feed(pass, text[i], i - 1, 0, i == count - 1);
    return DRAFTREE_OK;
}

/* The same for a draft head: each token with the target's hidden states before it. Behind a text of one token there are
 * none, and any node serves to draft from. */
static int feed_draft_head_text(LayerPass *pass, int32_t request) {
    const DraftSource *source = source_of(pass->step, request, pass->layer->part);
    const int32_t count = unread_tokens(pass, request), *text = source->unread + source->unread_count - count;
    const int32_t first = pass->step->requests[request].position - 1 - count;
    if (first < 0) {
        feed(pass, 0, -1, NO_STATE, 1);
        return DRAFTREE_OK;
    }
    int error = draftree_cut(pass->model, source->row, first);
    if (!error)
        error = draftree_learn(pass->model, source->row, text, count);
    for (int32_t i = 0; i < count && !error; i++)
        feed(pass, text[i], i - 1, first + i, i == count - 1);
    return error;
}

static int feed_node(LayerPass *pass, const DraftNode *node) {
    Fed *fed = &pass->fed[node->request];
    const Row *row = find_row(&pass->model->cache, pass->rows[pass->row_count - 1]);
    if (!row)
        return DRAFTREE_BAD_ROW;
    const int32_t parent = number_of(fed, node->parent);
    if (parent < 0 && node->parent >= 0)
        return DRAFTREE_BAD_TREE;
    set_number(fed, node->node, row->count + pass->counts[pass->row_count - 1]);
    feed(pass, node->token, parent, row->length ? LAST_STATE : NO_STATE, 1);
    return DRAFTREE_OK;
}

static int feed_layer(LayerPass *pass) {
    int error = DRAFTREE_OK;
    for (int32_t i = 0; i < pass->layer->count && !error; i++) {
        const DraftNode *node = &pass->layer->nodes[i];
        if (!i || node->request != node[-1].request)
            add_row(pass, node->request);
        if (node->node >= 0)
            error = feed_node(pass, node);
        else
            error =
                pass->model->draft_head ? feed_draft_head_text(pass, node->request) : feed_text(pass, node->request);
    }
    return error;
}

/* Let a draft head keep the texts that it has read. */
static int commit_texts(LayerPass *pass) {
    int error = DRAFTREE_OK;
    for (int32_t b = 0, at = 0; b < pass->row_count && !error; at += pass->counts[b++]) {
        for (int32_t i = 0; i < pass->counts[b]; i++)
            pass->parents[at + i] = i; /* the path now */
        const int32_t kept = pass->sources[at] == NO_STATE ? 0 : pass->counts[b];
        error = draftree_commit(pass->model, pass->rows[b], pass->parents + at, kept);
    }
    return error;
}

static int run_pass(LayerPass *pass) {
    const int is_draft_head = pass->model->draft_head != NULL;
    int error = feed_layer(pass);
    if (!error)
        error = draftree_extend(pass->model, pass->row_count, pass->rows, pass->counts, pass->tokens, pass->parents,
                                pass->wanted, is_draft_head ? pass->target_rows : NULL,
                                is_draft_head ? pass->sources : NULL);
    return error || !is_draft_head || pass->layer->depth ? error : commit_texts(pass);
}

/* ---- what is found */

static const uint32_t *mask_at(const DraftLayer *layer, int32_t i) { return layer->masks ? layer->masks[i] : NULL; }

/* Masks of a pass: one where the model has tokens that the target lacks, and one of each constrained node. */
static int64_t count_masks(const LayerPass *pass) {
    int64_t count = pass->model->tokens > pass->step->parts[pass->layer->part].outputs;
    for (int32_t i = 0; i < pass->layer->count; i++)
        count += mask_at(pass->layer, i) != NULL;
    return count;
}

/* Allow what a constraint does of the target's tokens; NULL: all. Returns whether there are any among the model's. */
static int write_mask(const LayerPass *pass, const uint32_t *constraint, uint32_t *mask) {
    const int64_t outputs = pass->step->parts[pass->layer->part].outputs, own = pass->model->tokens;
    const int64_t both = outputs < own ? outputs : own;
    uint32_t any = 0;
    for (int64_t word = 0; word < (own + 31) / 32; word++) {
        const int64_t left = both - word * 32;
        const uint32_t every = left >= 32 ? UINT32_MAX : left > 0 ? (1u << left) - 1 : 0;
        mask[word] = constraint && left > 0 ? every & constraint[word] : every;
        any |= mask[word];
    }
    return any != 0;
}

/* What constraints and the target's vocabulary rule out; a constraint that allows nothing is left out. */
static Edits edits_of(LayerPass *pass) {
    const int64_t words = (pass->model->tokens + 31) / 32;
    const int surplus = pass->model->tokens > pass->step->parts[pass->layer->part].outputs;
    if (surplus)
        write_mask(pass, NULL, pass->masks);
    int32_t count = surplus;
    for (int32_t i = 0; i < pass->layer->count; i++) {
        const uint32_t *constraint = mask_at(pass->layer, i);
        pass->mask_of[i] = surplus ? 0 : -1;
        if (constraint && write_mask(pass, constraint, pass->masks + count * words))
            pass->mask_of[i] = count++;
    }
    return (Edits){.mask_of = count ? pass->mask_of : NULL, .masks = pass->masks};
}

static void write_candidates(const LayerPass *pass, Candidates *found) {
    for (int32_t i = 0; i < pass->layer->count; i++) {
        const int64_t from = (int64_t)i * pass->k, to = (int64_t)i * found->width;
        int32_t count = 0;
        for (; count < pass->k && pass->logprobs[from + count] > -INFINITY; count++) {
            found->tokens[to + count] = pass->found[from + count];
            found->logprobs[to + count] = pass->logprobs[from + count];
        }
        found->counts[i] = count;
        found->entropies[i] = pass->entropies[i];
    }
}

static int find_candidates(LayerPass *pass, Candidates *found) {
    const DraftLayer *layer = pass->layer;
    for (int32_t i = 0; i < layer->count; i++) {
        const DraftRequest *request = &pass->step->requests[layer->nodes[i].request];
        pass->slots[i] = i;
        pass->warpings[i] = request->warping;
        pass->keys[i] = stream_key(request->noise, (int64_t)request->position + layer->depth);
    }
    const Edits edits = edits_of(pass);
    int error = draftree_top(pass->model, layer->count, pass->slots, pass->k, &edits, pass->warpings,
                             pass->step->coupled ? pass->keys : NULL, pass->found, pass->logprobs, pass->entropies);
    if (!error)
        write_candidates(pass, found);
    return error;
}

/* ---- steps */

static int32_t smallest(int32_t one, int32_t other) { return one < other ? one : other; }

int score_by_models(const DraftStep *step, const DraftLayer *layer, Fed *fed, PassMemory *memory, Candidates *found) {
    const DraftPart *part = &step->parts[layer->part];
    LayerPass pass = {.model = part->model, .step = step, .layer = layer, .fed = fed};
    pass.k = smallest(smallest(found->width, part->outputs), smallest(part->model->architecture.vocabulary, MOST_TOP));
    const int64_t nodes = count_nodes(&pass);
    int error = nodes < 0 ? (int)nodes : start_pass(&pass, memory, nodes, count_masks(&pass));
    if (!error)
        error = run_pass(&pass);
    return error ? error : find_candidates(&pass, found);
}

int begin_models(const DraftStep *step, int32_t part, Fed *fed) {
    int error = DRAFTREE_OK;
    for (int32_t request = 0; request < step->request_count; request++) {
        const DraftSource *source = source_of(step, request, part);
        fed[request].waiting = fed[request].count = 0;
        if (source->limit && !error)
            error = draftree_commit(step->parts[part].model, source->row, NULL, 0);
    }
    return error;
}

int commit_accepted(const DraftStep *step, int32_t part, int32_t request, const Fed *fed, const int32_t *path,
                    int32_t count, PassMemory *memory) {
    const DraftSource *source = source_of(step, request, part);
    Model *model = step->parts[part].model;
    if (!source->limit)
        return DRAFTREE_OK;
    int error = reserve_bytes(memory, ((int64_t)fed->waiting + count) * (int64_t)sizeof(int32_t));
    if (error)
        return error;
    int32_t *numbers = (int32_t *)(void *)memory->bytes, kept = fed->waiting;
    for (int32_t i = 0; i < kept; i++)
        numbers[i] = i;
    for (int32_t i = 0; i < count && !model->draft_head && number_of(fed, path[i]) >= 0; i++)
        numbers[kept++] = number_of(fed, path[i]);
    return draftree_commit(model, source->row, numbers, kept);
}
