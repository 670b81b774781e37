/* Draft heads: what their first layer reads, and the tokens that their rows learn to score. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "part.h"

/* ---- states */

/* Hidden states of the target side by side, normed. */
static void gather_features(const Part *part, const float *features, float *gathered) {
    const DraftHead *draft_head = part->model->draft_head;
    const int64_t size = draft_head->target->architecture.hidden, count = draft_head->architecture.features;
    const float epsilon = part->a->norm_epsilon, *norm = draft_head->feature_norm;
    for (int64_t k = 0; k < count; k++) {
        float *own = gathered + k * size;
        memcpy(own, features + draft_head->architecture.places[k] * size, (size_t)size * sizeof *own);
        if (norm && draft_head->architecture.norms_features_apart)
            part->vector->rms_norm(own, norm + k * size, size, epsilon, own);
    }
    if (norm && !draft_head->architecture.norms_features_apart)
        part->vector->rms_norm(gathered, norm, count * size, epsilon, gathered);
}

/* EAGLE-3: compute the states of nodes that come with hidden states of the target, into `contracted` one by one. */
static void fuse_features(const Part *part) {
    const PackedMatrix *input = &part->model->draft_head->input;
    int count = 0;
    for (int i = 0; i < part->count; i++)
        if (part->work->nodes[i].features)
            gather_features(part, part->work->nodes[i].features, part->inputs + count++ * input->columns);
    if (!count)
        return;
    const Activations x = columns(part, part->inputs, input->columns, count, format_is_quantized(input->format));
    const Product product = {input, part->work->contracted};
    multiply_share(part, &x, &product, 1);
    pool_barrier(part->model->pool, part->thread);
}

/* [embedding; state] of every node. */
static void join_inputs(const Part *part) {
    const DraftHead *draft_head = part->model->draft_head;
    const int64_t hidden = part->a->hidden;
    const float *fused = part->work->contracted;
    for (int i = 0; i < part->count; i++) {
        const PassNode *node = &part->work->nodes[i];
        float *input = part->inputs + i * 2 * hidden;
        const float *state = node->state;
        if (node->features && draft_head->architecture.fuses_states) {
            state = fused;
            fused += hidden;
        } else if (node->features)
            state = node->features + draft_head->architecture.places[0] * hidden;
        embed_node(part, i, input);
        if (state)
            memcpy(input + hidden, state, (size_t)hidden * sizeof *state);
        else
            memset(input + hidden, 0, (size_t)hidden * sizeof *state);
        if (draft_head->input_bias && node->features && draft_head->architecture.fuses_states)
            part->vector->add(input + hidden, draft_head->input_bias, hidden);
    }
}

static void norm_in_place(const Part *part, const float *norm, float *x) {
    if (norm)
        part->vector->rms_norm(x, norm, part->a->hidden, part->a->norm_epsilon, x);
}

/* Both halves are normed apart. The residual stream of EAGLE-3 is the state. */
static void norm_inputs(const Part *part) {
    const DraftHead *draft_head = part->model->draft_head;
    const int64_t hidden = part->a->hidden;
    for (int i = 0; i < part->count; i++) {
        float *embedding = part->inputs + i * 2 * hidden, *state = embedding + hidden;
        float *residual = part->residual + i * hidden;
        memcpy(residual, state, (size_t)hidden * sizeof *state);
        norm_in_place(part, draft_head->embedding_norm, embedding);
        norm_in_place(part, draft_head->state_norm, state);
        if (draft_head->architecture.norms_residual)
            memcpy(residual, state, (size_t)hidden * sizeof *state);
    }
}

/* EAGLE-1: the residual stream is a product of both halves. */
static void project_inputs(const Part *part) {
    const DraftHead *draft_head = part->model->draft_head;
    const int64_t hidden = part->a->hidden;
    const Activations x =
        columns(part, part->inputs, 2 * hidden, part->count, format_is_quantized(draft_head->input.format));
    const Product product = {&draft_head->input, part->work->projected};
    multiply_share(part, &x, &product, 1);
    pool_barrier(part->model->pool, part->thread);
    memcpy(part->residual, part->work->projected, (size_t)(part->count * hidden) * sizeof *part->residual);
    for (int i = 0; draft_head->input_bias && i < part->count; i++)
        part->vector->add(part->residual + i * hidden, draft_head->input_bias, hidden);
}

void read_states(const Part *part) {
    const int fuses = part->model->draft_head->architecture.fuses_states;
    if (fuses)
        fuse_features(part);
    join_inputs(part);
    norm_inputs(part);
    if (!fuses)
        project_inputs(part);
}

/* ---- learned tokens */

void score_learned(const Part *part, int first_slot) {
    const Model *model = part->model;
    const PassNode *nodes = part->work->nodes;
    const int64_t hidden = part->a->hidden, stride = model->logit_stride, outputs = output_stride(model);
    float *logits = model->logits + first_slot * stride;
    for (int i = 0; i < part->count;) {
        const Row *row = nodes[i].row;
        int count = 0; /* of this row's wanted nodes */
        int64_t first = -1;
        for (; i < part->count && nodes[i].row == row; i++)
            if (nodes[i].slot >= 0 && count++ == 0)
                first = nodes[i].slot - first_slot;
        if (!count)
            continue;
        if (part->thread == part->threads - 1) /* it has computed the last tile */
            for (int64_t slot = first; slot < first + count; slot++)
                for (int64_t output = part->a->vocabulary; output < outputs; output++)
                    logits[slot * stride + output] = -INFINITY;
        if (!row->learned_count)
            continue;
        const PackedMatrix learned = {model->draft_head->target->output.format, row->learned_count, hidden,
                                      model->cache.learned_tile_bytes, row->learned_tiles};
        const Activations x =
            columns(part, part->normed + first * hidden, hidden, count, format_is_quantized(learned.format));
        const Share own = share(tiles_of(learned.rows), part->thread, part->threads);
        part->linear->multiply(&learned, own.first, own.last, &x, logits + first * stride + outputs, stride);
    }
}

static int is_scored(const DraftHead *draft_head, const Row *row, int32_t token) {
    if (draft_head->known[token])
        return 1;
    for (int32_t i = 0; i < row->learned_count; i++)
        if (row->learned[i].token == token)
            return 1;
    return 0;
}

static void learn_token(const Model *model, Row *row, int32_t token, int32_t length) {
    const int32_t number = row->learned_count++;
    row->learned[number] = (Learned){token, length};
    packed_copy_row(&model->draft_head->target->output, token, number % TILE_ROWS,
                    row->learned_tiles + (size_t)(number / TILE_ROWS) * model->cache.learned_tile_bytes);
}

int draftree_learn(Model *model, int32_t row, const int32_t *tokens, int32_t count) {
    Row *found = find_row(&model->cache, row);
    if (!found)
        return DRAFTREE_BAD_ROW;
    if (!model->draft_head || count < 0)
        return DRAFTREE_BAD_ARGUMENT;
    for (int32_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= model->tokens)
            return DRAFTREE_BAD_TOKEN;
    if (!model->cache.learned_tile_bytes)
        return DRAFTREE_OK;
    const int32_t first = found->learned_count;
    int error = DRAFTREE_OK;
    for (int32_t i = 0; i < count && !error; i++) {
        if (is_scored(model->draft_head, found, tokens[i]))
            continue;
        error = reserve_learned(&model->cache, found, found->learned_count + 1);
        if (!error)
            learn_token(model, found, tokens[i], found->length + i + 1);
    }
    if (error)
        found->learned_count = first;
    return error;
}

int32_t draftree_output_count(const Model *model, int32_t row) {
    const Row *found = find_row(&model->cache, row);
    return found ? model->architecture.vocabulary + found->learned_count : DRAFTREE_BAD_ROW;
}

int draftree_output_tokens(const Model *model, int32_t row, int32_t *tokens) {
    const Row *found = find_row(&model->cache, row);
    if (!found || !model->draft_head)
        return found ? DRAFTREE_BAD_ARGUMENT : DRAFTREE_BAD_ROW;
    const size_t outputs = (size_t)model->architecture.vocabulary;
    memcpy(tokens, model->draft_head->tokens, outputs * sizeof *tokens);
    for (int32_t i = 0; i < found->learned_count; i++)
        tokens[outputs + (size_t)i] = found->learned[i].token;
    return DRAFTREE_OK;
}

/* ---- nodes */

int list_slots(Model *model, const Pass *pass, int64_t slots) {
    int64_t learned = 0, most = 0;
    for (int32_t b = 0; b < pass->row_count; b++) {
        const int64_t own = find_row(&model->cache, pass->rows[b])->learned_count;
        learned += own;
        most = own > most ? own : most;
    }
    model->logit_stride = output_stride(model) + tiles_of(most) * TILE_ROWS;
    Slot *all = enlarged(model->slots, &model->slot_capacity, slots, sizeof *all);
    if (!all)
        return DRAFTREE_NO_MEMORY;
    model->slots = all;
    int32_t *tokens = enlarged(model->learned_tokens, &model->learned_capacity, learned, sizeof *tokens);
    if (!tokens)
        return DRAFTREE_NO_MEMORY;
    model->learned_tokens = tokens;
    int64_t at = 0, slot = 0;
    int32_t first = 0;
    for (int32_t b = 0; b < pass->row_count; b++) {
        const Row *row = find_row(&model->cache, pass->rows[b]);
        for (int32_t i = 0; i < pass->counts[b]; i++)
            if (pass->wanted[at++])
                all[slot++] = (Slot){row->learned_count, first};
        for (int32_t i = 0; i < row->learned_count; i++)
            tokens[first++] = row->learned[i].token;
    }
    return DRAFTREE_OK;
}

int check_sources(const Model *model, const Pass *pass) {
    int64_t at = 0;
    for (int32_t b = 0; b < pass->row_count; b++) {
        const Row *row = find_row(&model->cache, pass->rows[b]);
        const Row *target = find_row(&model->draft_head->target->cache, pass->target_rows[b]);
        for (int32_t i = 0; i < pass->counts[b]; i++, at++) {
            const int32_t source = pass->sources[at], parent = pass->parents[at];
            if (source < NO_STATE)
                return DRAFTREE_BAD_ARGUMENT;
            if (source == LAST_STATE && (parent >= row->count || (parent < 0 && !row->length)))
                return DRAFTREE_NO_STATES;
            if (source >= 0 && !target)
                return DRAFTREE_BAD_ROW;
            if (source >= 0 && source >= target->length + target->count)
                return DRAFTREE_BAD_ARGUMENT;
            if (source >= 0 && model->draft_head->last_place >= target->tracked)
                return DRAFTREE_NO_STATES;
        }
    }
    return DRAFTREE_OK;
}

void find_state(const Model *model, const Pass *pass, int32_t b, int32_t at, PassNode *node) {
    const Cache *target = &model->draft_head->target->cache;
    const int32_t source = pass->sources[at], parent = pass->parents[at];
    if (source >= 0)
        node->features = cell_states(target, find_row(target, pass->target_rows[b]), source);
    else if (source == LAST_STATE)
        node->state = cell_states(&model->cache, node->row, node->row->length + parent);
}
