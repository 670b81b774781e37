/* Passes as Python calls them: every number is checked here, once. */
#include <stdlib.h>
#include <string.h>

#include "rereading.h"

enum { MOST_PASS_NODES = 1 << 28 }; /* of a pass */

const char *draftree_version(void) { return DRAFTREE_VERSION; }

const char *draftree_tier_name(int32_t number) {
    const Tier *tier = tier_at(number);
    return tier ? tier->name : NULL;
}

const char *draftree_tier(const Model *model) { return model->tier->name; }

int64_t draftree_token_bytes(const Model *model) { return token_bytes(&model->cache); }

int64_t draftree_cache_bytes(const Model *model) { return model->cache.bytes; }

int draftree_track(Model *model, const int32_t *layers, int32_t count) {
    if (count < model->cache.tracked || count > MOST_TRACKED)
        return DRAFTREE_BAD_ARGUMENT;
    for (int32_t k = 0; k < count; k++)
        if (layers[k] < -1 || layers[k] > model->architecture.layers ||
            (k < model->cache.tracked && layers[k] != model->tracked[k]))
            return DRAFTREE_BAD_ARGUMENT;
    for (int32_t k = 0; k < count; k++)
        model->tracked[k] = layers[k];
    track_states(&model->cache, count);
    return DRAFTREE_OK;
}

int draftree_states(const Model *model, int32_t row, int32_t first, int32_t count, float *states) {
    const Row *found = find_row(&model->cache, row);
    if (!found)
        return DRAFTREE_BAD_ROW;
    if (first < 0 || count < 0 || first > found->length + found->count - count)
        return DRAFTREE_BAD_ARGUMENT;
    const size_t size = (size_t)found->tracked * (size_t)model->architecture.hidden;
    for (int32_t i = 0; size && i < count; i++)
        memcpy(states + (size_t)i * size, cell_states(&model->cache, found, first + i), size * sizeof *states);
    return DRAFTREE_OK;
}

int draftree_rows(const Model *model, int32_t tensor, const int32_t *tokens, int32_t count, float *rows) {
    if ((tensor != EMBEDDING && tensor != OUTPUT) || count < 0)
        return DRAFTREE_BAD_ARGUMENT;
    const PackedMatrix *matrix = tensor == EMBEDDING ? &model->embeddings : &model->output;
    for (int32_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= matrix->rows)
            return DRAFTREE_BAD_TOKEN;
    for (int32_t i = 0; i < count; i++)
        packed_decode_row(matrix, tokens[i], rows + (int64_t)i * matrix->columns);
    return DRAFTREE_OK;
}

/* Rows are open and there once; a node's token is in the vocabulary, its parent before it, its position in the context.
 * depths: [N] scratch. */
static int check_nodes(const Model *model, const Pass *pass, int32_t *depths) {
    int64_t at = 0;
    for (int32_t b = 0; b < pass->row_count; b++) {
        const Row *row = find_row(&model->cache, pass->rows[b]);
        if (!row)
            return DRAFTREE_BAD_ROW;
        for (int32_t other = 0; other < b; other++)
            if (pass->rows[other] == pass->rows[b])
                return DRAFTREE_BAD_ROW;
        const int64_t first = at;
        for (int32_t i = 0; i < pass->counts[b]; i++, at++) {
            const int32_t parent = pass->parents[at];
            if (pass->tokens[at] < 0 || pass->tokens[at] >= model->tokens)
                return DRAFTREE_BAD_TOKEN;
            if (parent < -1 || parent >= row->count + i)
                return DRAFTREE_BAD_TREE;
            depths[at] =
                parent < 0 ? 0
                           : 1 + (parent < row->count ? row->nodes[parent].depth : depths[first + parent - row->count]);
            if (row->length + depths[at] >= model->architecture.context)
                return DRAFTREE_CONTEXT_FULL;
        }
    }
    return model->draft_head ? check_sources(model, pass) : DRAFTREE_OK;
}

static int reserve_all(Model *model, const Pass *pass, int64_t logits) {
    float *grown = enlarged(model->logits, &model->logit_capacity, logits, sizeof *grown);
    if (!grown)
        return DRAFTREE_NO_MEMORY;
    model->logits = grown;
    for (int32_t b = 0, at = 0; b < pass->row_count; at += pass->counts[b++]) {
        Row *row = find_row(&model->cache, pass->rows[b]);
        int error = reserve_nodes(&model->cache, row, pass->counts[b]);
        if (!error && model->cache.states.layers)
            error = reserve_states(&model->cache.states, &row->states, row->count, pass->counts[b],
                                   nodes_in_place(row, pass->parents + at, pass->counts[b]),
                                   row->length + row->count + pass->counts[b]);
        if (error)
            return error;
    }
    return DRAFTREE_OK;
}

static int run_chunk_of(Model *model) {
    Workspace *work = &model->work;
    int error = prepare_attention(model);
    if (!error)
        error = prepare_walks(model);
    if (!error) {
        run_chunk(model);
        for (int32_t i = 0; model->cache.states.layers && i < work->count; i++)
            if (!i || work->nodes[i].row != work->nodes[i - 1].row)
                settle_states(&model->cache.states, &work->nodes[i].row->states, work->nodes[i].row->count);
    }
    work->count = 0;
    return error;
}

/* Run the pass chunk by chunk; a row's nodes are appended as they come. */
static int run_all(Model *model, const Pass *pass) {
    Workspace *work = &model->work;
    int32_t at = 0, slot = 0;
    int error = DRAFTREE_OK;
    work->count = 0;
    for (int32_t b = 0; b < pass->row_count; b++) {
        Row *row = find_row(&model->cache, pass->rows[b]);
        for (int32_t i = 0; i < pass->counts[b] && !error; i++, at++) {
            append_node(row, pass->parents[at]);
            PassNode *node = &work->nodes[work->count++];
            *node = (PassNode){
                .row = row,
                .token = pass->tokens[at],
                .cell = row->length + row->count - 1,
                .slot = pass->wanted[at] ? slot++ : -1,
            };
            if (model->draft_head)
                find_state(model, pass, b, at, node);
            if (model->cache.states.layers)
                row->states.tokens[node->cell] = node->token;
            if (work->count == CHUNK)
                error = run_chunk_of(model);
        }
    }
    return error || !work->count ? error : run_chunk_of(model);
}

static int extend(Model *model, const Pass *pass) {
    int64_t nodes = 0, slots = 0;
    for (int32_t b = 0; b < pass->row_count; b++) {
        if (pass->counts[b] < 0)
            return DRAFTREE_BAD_ARGUMENT;
        nodes += pass->counts[b];
    }
    if (pass->row_count < 0 || nodes > MOST_PASS_NODES)
        return DRAFTREE_BAD_ARGUMENT;
    int32_t *depths = malloc((size_t)(nodes + 1) * sizeof *depths);
    if (!depths)
        return DRAFTREE_NO_MEMORY;
    Rereading rereading;
    int error = check_nodes(model, pass, depths);
    free(depths);
    if (!error)
        error = begin_rereading(model, pass, &rereading);
    if (error)
        return error;
    for (int64_t i = 0; i < nodes; i++)
        slots += pass->wanted[i] != 0;
    model->slot_count = 0; /* their logits are written over */
    if (model->draft_head)
        error = list_slots(model, pass, slots);
    if (!error)
        error = reserve_all(model, &rereading.pass, slots * model->logit_stride);
    if (!error)
        error = run_all(model, &rereading.pass);
    end_rereading(model, &rereading, error);
    model->slot_count = error ? 0 : (int32_t)slots;
    return error;
}

int draftree_extend(Model *model, int32_t row_count, const int32_t *rows, const int32_t *counts, const int32_t *tokens,
                    const int32_t *parents, const uint8_t *wanted, const int32_t *target_rows, const int32_t *sources) {
    const Pass pass = {row_count, rows, counts, tokens, parents, wanted, target_rows, sources};
    return !model->draft_head == !sources ? extend(model, &pass) : DRAFTREE_BAD_ARGUMENT;
}
