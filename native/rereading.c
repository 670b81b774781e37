#include "rereading.h"

#include <stdlib.h>

/* Its nodes lack records, or it has no state from which new nodes can be reached. */
static int reads_again(const Row *row, const int32_t *parents, int32_t count) {
    const RowStates *states = &row->states;
    const int behind = replayable_length(states) < row->length;
    if (count && (states->lost || (behind && !states->ahead)))
        return 1;
    for (int32_t i = 0; i < count; i++)
        if (parents[i] < states->ahead_nodes - 1 && (behind || parents[i] >= 0))
            return 1;
    return 0;
}

/* The tokens of a row from its state on, as nodes of the pass that begin there, and behind them the new ones. */
static void list_again(const Row *row, const Pass *pass, int64_t at, int32_t count, int32_t gap, Rereading *all,
                       int64_t to) {
    const int32_t old = gap < 0 ? 0 : gap + row->count, shift = gap < 0 ? 0 : gap;
    for (int32_t i = 0; i < old; i++) {
        all->tokens[to + i] = row->states.tokens[row->length - gap + i];
        all->parents[to + i] = i < gap ? i - 1 : row->nodes[i - gap].parent + gap;
        all->wanted[to + i] = 0;
    }
    for (int32_t i = 0; i < count; i++) {
        all->tokens[to + old + i] = pass->tokens[at + i];
        all->parents[to + old + i] = pass->parents[at + i] + shift;
        all->wanted[to + old + i] = pass->wanted[at + i];
    }
}

/* Find what each row reads again; how many nodes the pass has then. */
static int64_t find_gaps(const Model *model, const Pass *pass, Rereading *rereading) {
    int64_t nodes = 0;
    for (int32_t b = 0, at = 0; b < pass->row_count; at += pass->counts[b++]) {
        const Row *row = find_row(&model->cache, pass->rows[b]);
        rereading->before[b] = row->count;
        rereading->gaps[b] = -1;
        nodes += pass->counts[b];
        if (!model->cache.states.layers || !reads_again(row, pass->parents + at, pass->counts[b]))
            continue;
        rereading->gaps[b] = row->length - replayable_length(&row->states);
        nodes += rereading->gaps[b] + row->count;
    }
    return nodes;
}

static int is_unchanged(const Rereading *rereading) {
    for (int32_t b = 0; b < rereading->pass.row_count; b++)
        if (rereading->gaps[b] >= 0)
            return 0;
    return 1;
}

/* List the nodes of all rows, and take those that are read again from the rows. */
static void list_all_again(const Model *model, const Pass *pass, Rereading *rereading) {
    for (int32_t b = 0, at = 0, to = 0; b < pass->row_count; at += pass->counts[b], to += rereading->counts[b++]) {
        Row *row = find_row(&model->cache, pass->rows[b]);
        const int32_t gap = rereading->gaps[b];
        list_again(row, pass, at, pass->counts[b], gap, rereading, to);
        rereading->counts[b] = pass->counts[b] + (gap < 0 ? 0 : gap + row->count);
        if (gap < 0)
            continue;
        row->length -= gap;
        row->count = 0;
        drop_node_states(&model->cache.states, &row->states, 0);
    }
    rereading->pass.tokens = rereading->tokens;
    rereading->pass.parents = rereading->parents;
    rereading->pass.counts = rereading->counts;
    rereading->pass.wanted = rereading->wanted;
}

int begin_rereading(const Model *model, const Pass *pass, Rereading *rereading) {
    const size_t rows = (size_t)pass->row_count + 1, number = sizeof(int32_t);
    *rereading = (Rereading){.pass = *pass, .before = malloc(2 * rows * number)};
    if (!rereading->before)
        return DRAFTREE_NO_MEMORY;
    rereading->gaps = rereading->before + rows;
    const size_t nodes = (size_t)find_gaps(model, pass, rereading);
    if (is_unchanged(rereading))
        return DRAFTREE_OK;
    int32_t *memory = malloc((3 * nodes + rows) * number + nodes);
    if (!memory) {
        free(rereading->before);
        return DRAFTREE_NO_MEMORY;
    }
    rereading->tokens = memory;
    rereading->parents = memory + nodes;
    rereading->numbers = memory + 2 * nodes;
    rereading->counts = memory + 3 * nodes;
    rereading->wanted = (uint8_t *)(rereading->counts + rows);
    list_all_again(model, pass, rereading);
    return DRAFTREE_OK;
}

/* Give a row its tokens and nodes back: of the pass's all, or those that it had. */
static void restore_row(Model *model, const Rereading *rereading, int32_t b, int64_t at, int error) {
    Row *row = find_row(&model->cache, rereading->pass.rows[b]);
    const int32_t gap = rereading->gaps[b], count = error ? gap + rereading->before[b] : rereading->pass.counts[b];
    const StateSizes *sizes = &model->cache.states;
    if (error) {
        drop_node_states(sizes, &row->states, 0);
    } else {
        for (int32_t i = 0; i < count; i++)
            rereading->numbers[i] = i;
        keep_states(sizes, &row->states, row->length, rereading->numbers, count, gap);
    }
    row->length += gap;
    row->count = 0;
    for (int32_t i = gap; i < count; i++)
        append_node(row, rereading->parents[at + i] - gap);
    if (error) {
        row->states.lost = 1;
        drop_nodes(&model->cache, row, row->count);
    }
}

void end_rereading(Model *model, Rereading *rereading, int error) {
    const Pass *pass = &rereading->pass;
    for (int32_t b = 0, at = 0; b < pass->row_count; at += pass->counts[b++])
        if (rereading->gaps[b] >= 0)
            restore_row(model, rereading, b, at, error);
        else if (error)
            drop_nodes(&model->cache, find_row(&model->cache, pass->rows[b]), rereading->before[b]);
    free(rereading->tokens);
    free(rereading->before);
}

int32_t nodes_in_place(const Row *row, const int32_t *parents, int32_t count) {
    const int32_t first = row->count;
    if (first != row->states.unrecorded)
        return 0;
    int32_t chain = 0;
    while (chain < count && parents[chain] == first + chain - 1)
        chain++;
    int32_t in_place = chain - RECORDED_END;
    for (int32_t i = chain; i < count; i++)
        if (parents[i] >= first - 1 && parents[i] >= 0 && parents[i] < first + in_place - 1)
            in_place = parents[i] - first + 1;
    return in_place > 0 ? in_place : 0;
}
