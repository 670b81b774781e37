/* The memory that passes and scores work in. */
#include <stdlib.h>

#include "model.h"

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Numbers of a token before the first layer of a draft head, or of what an expert reads. */
static int64_t input_size(const Model *model) {
    const Architecture *a = &model->architecture;
    return model->draft_head ? larger(2 * a->hidden, model->draft_head->input.columns) : a->experts ? a->hidden : 0;
}

/* Hand out `floats` of the arena; a round without memory adds them up. */
static float *take_floats(Workspace *work, int64_t floats) {
    float *place = work->arena ? (float *)(void *)(work->arena + work->arena_bytes) : NULL;
    work->arena_bytes += ((size_t)floats * sizeof(float) + 127) / 64 * 64;
    return place;
}

/* Numbers of four bytes that have room for some bytes. */
static int64_t floats_of(size_t bytes) { return (int64_t)(bytes / sizeof(float)) + 16; }

/* Of columns in any number of parts: one of 9, 11, 13 or 15 columns is filled up by one. */
static size_t most_activation_bytes(int64_t columns, int64_t inputs) {
    return activation_bytes((int)(columns + columns / 8), inputs);
}

static void lay_out_routing(Workspace *work, const Architecture *a, Routing *routing) {
    const int64_t choices = (int64_t)CHUNK * a->experts_used;
    routing->choices = (int32_t *)take_floats(work, choices);
    routing->shares = take_floats(work, choices);
    routing->places = (int32_t *)take_floats(work, choices);
    routing->nodes = (int32_t *)take_floats(work, choices);
    routing->next = (int32_t *)take_floats(work, a->experts);
    routing->experts = (ChosenExpert *)(void *)take_floats(work, floats_of((size_t)a->experts * sizeof(ChosenExpert)));
}

static void lay_out(Model *model) {
    Workspace *work = &model->work;
    const Architecture *a = &model->architecture;
    const int threads = pool_threads(model->pool);
    const int64_t attended = larger(query_size(a), delta_values(a)), heads = tiles_of(a->delta_value_heads) * TILE_ROWS;
    const int64_t widest = larger(larger(a->hidden, a->feed_forward), larger(attended, input_size(model)));
    const int64_t groups = floats_of(activation_bytes(CHUNK, widest));
    const int64_t columns = CHUNK * larger(1, a->experts_used);
    work->arena_bytes = 0;
    for (int thread = 0; thread < threads; thread++) {
        ThreadSpace *own = &work->own[thread];
        own->residual = take_floats(work, (int64_t)CHUNK * a->hidden);
        own->normed = take_floats(work, (int64_t)CHUNK * a->hidden);
        own->groups = (uint8_t *)take_floats(work, groups);
        own->inputs = take_floats(work, CHUNK * input_size(model));
        own->edited = take_floats(work, model->most_logits);
        own->scratch = take_floats(work, 2 * model->most_logits);
        lay_out_routing(work, a, &own->routing);
    }
    work->rotation = take_floats(work, (int64_t)ROPE_TABLES * CHUNK * (a->rope_size ? a->rope_size : 1));
    work->query = take_floats(work, CHUNK * gated_query_size(a));
    work->key = take_floats(work, CHUNK * key_size(a));
    work->value = take_floats(work, CHUNK * key_size(a));
    work->attended = take_floats(work, CHUNK * attended);
    work->delta_inputs = take_floats(work, CHUNK * delta_channels(a));
    work->delta_gates = take_floats(work, CHUNK * delta_values(a));
    work->delta_decays = take_floats(work, CHUNK * heads);
    work->delta_rates = take_floats(work, CHUNK * heads);
    work->zeros = take_floats(work, delta_channels(a));
    work->projected = take_floats(work, (int64_t)CHUNK * a->hidden);
    work->gate = take_floats(work, columns * a->feed_forward);
    work->up = take_floats(work, columns * a->feed_forward);
    work->activated = take_floats(work, columns * a->feed_forward);
    work->activated_groups = (uint8_t *)take_floats(work, floats_of(most_activation_bytes(columns, a->feed_forward)));
    work->contracted = take_floats(work, (int64_t)CHUNK * a->hidden);
    work->router_logits = take_floats(work, CHUNK * router_stride(a));
    work->expert_outputs = take_floats(work, (int64_t)CHUNK * a->experts_used * a->hidden);
}

int start_workspace(Model *model) {
    Workspace *work = &model->work;
    model->logit_stride = output_stride(model);
    model->most_logits = output_stride(model) + (model->draft_head ? model->tokens + TILE_ROWS : 0);
    work->own = calloc((size_t)pool_threads(model->pool), sizeof *work->own);
    work->items = calloc((size_t)CHUNK * (size_t)model->architecture.query_heads, sizeof *work->items);
    if (!work->own || !work->items)
        return DRAFTREE_NO_MEMORY;
    lay_out(model);
    work->arena = allocate(work->arena_bytes);
    if (!work->arena)
        return DRAFTREE_NO_MEMORY;
    lay_out(model);
    return DRAFTREE_OK;
}

void free_workspace(Model *model) {
    Workspace *work = &model->work;
    release(work->scores, (size_t)work->score_capacity * sizeof *work->scores);
    release(work->arena, work->arena_bytes);
    release(model->logits, (size_t)model->logit_capacity * sizeof *model->logits);
    free(work->own);
    free(work->items);
    release(work->walks.moves, (size_t)work->walks.move_capacity * sizeof *work->walks.moves);
    release(work->walks.lists, (size_t)work->walks.list_capacity * sizeof *work->walks.lists);
    release(work->walks.scratch, (size_t)work->walks.scratch_capacity * sizeof *work->walks.scratch);
    release(work->path_cells, (size_t)work->path_capacity * sizeof *work->path_cells);
    release(model->slots, (size_t)model->slot_capacity * sizeof *model->slots);
    release(model->learned_tokens, (size_t)model->learned_capacity * sizeof *model->learned_tokens);
}
