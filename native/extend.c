/* Rows and passes as Python calls them: every number is checked here, once. */
#include <stdlib.h>
#include <string.h>

#include "model.h"

enum { MOST_NODES = 1 << 28 }; /* of a pass */

const char *draftree_version(void) { return DRAFTREE_VERSION; }

const char *draftree_tiers(void) {
    static char names[256];
    names[0] = '\0';
    for (int i = 0; tier_at(i); i++) {
        if (i)
            strncat(names, " ", sizeof names - strlen(names) - 1);
        strncat(names, tier_at(i)->name, sizeof names - strlen(names) - 1);
    }
    return names;
}

const char *draftree_tier(const Model *model) { return model->tier->name; }

int64_t draftree_token_bytes(const Model *model) { return token_bytes(&model->cache); }

int64_t draftree_cache_bytes(const Model *model) { return model->cache.page_total * (int64_t)model->cache.page_bytes; }

int draftree_open(Model *model, int32_t *row) { return open_row(&model->cache, row); }

int draftree_fork(Model *model, int32_t row, int32_t length, int32_t *fork) {
    return fork_row(&model->cache, row, length, fork);
}

int draftree_close(Model *model, int32_t row) {
    Row *found = find_row(&model->cache, row);
    if (!found)
        return DRAFTREE_BAD_ROW;
    close_row(&model->cache, found);
    return DRAFTREE_OK;
}

int draftree_commit(Model *model, int32_t row, const int32_t *path, int32_t count) {
    Row *found = find_row(&model->cache, row);
    return found ? commit_path(&model->cache, found, path, count) : DRAFTREE_BAD_ROW;
}

int draftree_prune(Model *model, int32_t row, const int32_t *keep, int32_t count, int32_t trunk) {
    Row *found = find_row(&model->cache, row);
    return found ? prune_nodes(&model->cache, found, keep, count, trunk) : DRAFTREE_BAD_ROW;
}

int draftree_track(Model *model, const int32_t *layers, int32_t count) {
    if (count < 0 || count > (int32_t)(sizeof model->tracked / sizeof *model->tracked))
        return DRAFTREE_BAD_ARGUMENT;
    for (int32_t k = 0; k < count; k++)
        if (layers[k] < -1 || layers[k] > model->architecture.layers)
            return DRAFTREE_BAD_ARGUMENT;
    for (int32_t k = 0; k < count; k++)
        model->tracked[k] = layers[k];
    model->tracked_count = count;
    model->node_count = 0; /* what was kept is of other layers */
    return DRAFTREE_OK;
}

int draftree_hidden(Model *model, int32_t first, int32_t count, float *states) {
    if (first < 0 || count < 0 || first > model->node_count - count)
        return DRAFTREE_BAD_ARGUMENT;
    const size_t size = (size_t)model->tracked_count * (size_t)model->architecture.hidden;
    if (size && count)
        memcpy(states, model->hidden + (size_t)first * size, (size_t)count * size * sizeof *states);
    return DRAFTREE_OK;
}

/* Rows are open and there once; a node's token is in the vocabulary, its parent before it, its position in the context.
 * depths: [N] scratch. */
static int check_nodes(const Model *model, int32_t row_count, const int32_t *rows, const int32_t *counts,
                       const int32_t *tokens, const int32_t *parents, int32_t *depths) {
    int64_t at = 0;
    for (int32_t b = 0; b < row_count; b++) {
        const Row *row = find_row(&model->cache, rows[b]);
        if (!row)
            return DRAFTREE_BAD_ROW;
        for (int32_t other = 0; other < b; other++)
            if (rows[other] == rows[b])
                return DRAFTREE_BAD_ROW;
        const int64_t first = at;
        for (int32_t i = 0; i < counts[b]; i++, at++) {
            const int32_t parent = parents[at];
            if (tokens[at] < 0 || tokens[at] >= model->architecture.vocabulary)
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
    return DRAFTREE_OK;
}

/* At least `wanted` numbers at *memory, whose old contents are not kept. */
static int grow_floats(float **memory, int64_t *capacity, int64_t wanted) {
    if (wanted <= *capacity)
        return DRAFTREE_OK;
    const int64_t larger = wanted + wanted / 4;
    float *grown = allocate((size_t)larger * sizeof *grown);
    if (!grown)
        return DRAFTREE_NO_MEMORY;
    release(*memory, (size_t)*capacity * sizeof *grown);
    *memory = grown;
    *capacity = larger;
    return DRAFTREE_OK;
}

static int reserve_outputs(Model *model, int64_t nodes, int64_t slots) {
    const int64_t states = nodes * model->tracked_count * model->architecture.hidden;
    int error = grow_floats(&model->hidden, &model->hidden_capacity, states);
    return error ? error : grow_floats(&model->logits, &model->logit_capacity, slots * model->logit_stride);
}

static int reserve_all(Model *model, int32_t row_count, const int32_t *rows, const int32_t *counts) {
    for (int32_t b = 0; b < row_count; b++) {
        int error = reserve_nodes(&model->cache, find_row(&model->cache, rows[b]), counts[b]);
        if (error)
            return error;
    }
    return DRAFTREE_OK;
}

/* Run the pass chunk by chunk; a row's nodes are appended as they come. */
static int run_all(Model *model, int32_t row_count, const int32_t *rows, const int32_t *counts, const int32_t *tokens,
                   const int32_t *parents, const uint8_t *wanted) {
    Workspace *work = &model->work;
    int32_t at = 0, slot = 0;
    work->count = work->first = 0;
    for (int32_t b = 0; b < row_count; b++) {
        Row *row = find_row(&model->cache, rows[b]);
        for (int32_t i = 0; i < counts[b]; i++, at++) {
            append_node(row, parents[at]);
            work->nodes[work->count++] = (PassNode){
                .row = row,
                .token = tokens[at],
                .cell = row->length + row->count - 1,
                .slot = wanted[at] ? slot++ : -1,
            };
            const int last = b == row_count - 1 && i == counts[b] - 1;
            if (work->count < CHUNK && !last)
                continue;
            int error = prepare_attention(model);
            if (error)
                return error;
            run_chunk(model);
            work->first += work->count;
            work->count = 0;
        }
    }
    if (work->count) { /* the last rows have no nodes */
        int error = prepare_attention(model);
        if (error)
            return error;
        run_chunk(model);
    }
    return DRAFTREE_OK;
}

int draftree_extend(Model *model, int32_t row_count, const int32_t *rows, const int32_t *counts, const int32_t *tokens,
                    const int32_t *parents, const uint8_t *wanted) {
    int64_t nodes = 0, slots = 0;
    for (int32_t b = 0; b < row_count; b++) {
        if (counts[b] < 0)
            return DRAFTREE_BAD_ARGUMENT;
        nodes += counts[b];
    }
    if (row_count < 0 || nodes > MOST_NODES)
        return DRAFTREE_BAD_ARGUMENT;
    int32_t *scratch = malloc((size_t)(nodes + row_count + 1) * sizeof *scratch);
    if (!scratch)
        return DRAFTREE_NO_MEMORY;
    int32_t *before = scratch + nodes; /* nodes of each row */
    int error = check_nodes(model, row_count, rows, counts, tokens, parents, scratch);
    for (int64_t i = 0; i < nodes; i++)
        slots += wanted[i] != 0;
    if (!error)
        error = reserve_outputs(model, nodes, slots);
    if (!error)
        error = reserve_all(model, row_count, rows, counts);
    if (!error) {
        model->node_count = (int32_t)nodes;
        model->slot_count = (int32_t)slots;
        for (int32_t b = 0; b < row_count; b++)
            before[b] = find_row(&model->cache, rows[b])->count;
        error = run_all(model, row_count, rows, counts, tokens, parents, wanted);
        for (int32_t b = 0; error && b < row_count; b++)
            find_row(&model->cache, rows[b])->count = before[b];
    }
    free(scratch);
    return error;
}
