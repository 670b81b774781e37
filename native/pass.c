/* One pass: embedding, decoder layers, output layer, for up to CHUNK nodes of any rows.
 *
 * All threads run it together. Each holds the whole residual stream and computes its part of every product;
 * barriers in every layer part the moves. What a thread computes twice (norms, quantized activations) costs less than
 * handing it over.
 */
#include <string.h>

#include "attention.h"
#include "delta.h"
#include "experts.h"

/* The columns of the residual stream, normed; without a weight as they are. */
static void normalise(const Part *part, const float *weight) {
    const int64_t hidden = part->a->hidden;
    for (int i = 0; i < part->count; i++)
        if (weight)
            part->vector->rms_norm(part->residual + i * hidden, weight, hidden, part->a->norm_epsilon,
                                   part->normed + i * hidden);
        else
            memcpy(part->normed + i * hidden, part->residual + i * hidden, (size_t)hidden * sizeof *part->normed);
}

/* What a block of a layer adds to the residual stream, with its bias, or normalised or scaled first. */
static void add_to_residual(const Part *part, float *added, const float *bias, const float *post_norm) {
    const int64_t hidden = part->a->hidden;
    for (int i = 0; i < part->count; i++) {
        const float *column = added + i * hidden;
        if (post_norm) {
            part->vector->rms_norm(column, post_norm, hidden, part->a->norm_epsilon, part->normed);
            column = part->normed;
        } else if (part->a->residual_scale != 1.0f) {
            memcpy(part->normed, column, (size_t)hidden * sizeof *column);
            part->vector->scale(part->normed, part->a->residual_scale, hidden);
            column = part->normed;
        }
        part->vector->add(part->residual + i * hidden, column, hidden);
        if (bias)
            part->vector->add(part->residual + i * hidden, bias, hidden);
    }
}

/* ---- the layers */

/* Keep hidden state `layer` of a share of the nodes, in their cells. */
static void keep_hidden(const Part *part, int layer, const float *states) {
    const Model *model = part->model;
    const int64_t hidden = part->a->hidden;
    for (int k = 0; k < model->cache.tracked; k++)
        for (int i = part->thread; model->tracked[k] == layer && i < part->count; i += part->threads) {
            const PassNode *node = &part->work->nodes[i];
            if (k < node->row->tracked)
                memcpy(cell_states(&model->cache, node->row, node->cell) + k * hidden, states + i * hidden,
                       (size_t)hidden * sizeof *states);
        }
}

static void attention_block(const Part *part, const Layer *layer) {
    const Architecture *a = part->a;
    Workspace *work = part->work;
    Pool *pool = part->model->pool;
    const int joins = layer->query.columns != a->hidden; /* as the first layer of EAGLE-3 does */
    if (!joins)
        normalise(part, layer->attention_norm);
    const int quantized = format_is_quantized(layer->query.format) || format_is_quantized(layer->key.format) ||
                          format_is_quantized(layer->value.format);
    Activations x = columns(part, joins ? part->inputs : part->normed, layer->query.columns, part->count, quantized);
    const Product products[] = {{&layer->query, work->query}, {&layer->key, work->key}, {&layer->value, work->value}};
    multiply_share(part, &x, products, 3);
    pool_barrier(pool, part->thread);
    if (a->query_key_norm == NORM_OF_ALL_HEADS) {
        norm_attention_heads(part, layer);
        pool_barrier(pool, part->thread);
    }
    prepare_attention_heads(part, layer);
    pool_barrier(pool, part->thread);
    attend(part, layer);
    pool_barrier(pool, part->thread);
    x = columns(part, work->attended, query_size(a), part->count, format_is_quantized(layer->output.format));
    const Product output = {&layer->output, work->projected};
    multiply_share(part, &x, &output, 1);
    pool_barrier(pool, part->thread);
    add_to_residual(part, work->projected, layer->output_bias, layer->attention_post_norm);
}

/* A gated delta net in place of attention. */
static void delta_block(const Part *part, const Layer *layer) {
    Workspace *work = part->work;
    Pool *pool = part->model->pool;
    const Product products[] = {{&layer->delta_input, work->delta_inputs},
                                {&layer->delta_gate, work->delta_gates},
                                {&layer->delta_decay, work->delta_decays},
                                {&layer->delta_rate, work->delta_rates}};
    int quantized = 0;
    for (int i = 0; i < 4; i++)
        quantized |= format_is_quantized(products[i].matrix->format);
    normalise(part, layer->attention_norm);
    Activations x = columns(part, part->normed, part->a->hidden, part->count, quantized);
    multiply_share(part, &x, products, 4);
    pool_barrier(pool, part->thread);
    walk_states(part, layer);
    pool_barrier(pool, part->thread);
    const int64_t values = delta_values(part->a);
    x = columns(part, work->attended, values, part->count, format_is_quantized(layer->delta_output.format));
    const Product output = {&layer->delta_output, work->projected};
    multiply_share(part, &x, &output, 1);
    pool_barrier(pool, part->thread);
    add_to_residual(part, work->projected, NULL, layer->attention_post_norm);
}

/* What a gated feed-forward network makes of the normed columns, in work.contracted. */
static void run_feed_forward(const Part *part, const Layer *layer) {
    const Architecture *a = part->a;
    Workspace *work = part->work;
    const int64_t wide = a->feed_forward;
    const int quantized = format_is_quantized(layer->gate.format) || format_is_quantized(layer->up.format);
    uint8_t *groups = format_is_quantized(layer->down.format) ? work->activated_groups : NULL;
    const Gated gated = {&layer->gate, &layer->up, 0, groups};
    Activations x = columns(part, part->normed, a->hidden, part->count, quantized);
    activate(part, &gated, &x, share(wide / GROUP_SIZE, part->thread, part->threads));
    pool_barrier(part->model->pool, part->thread);
    x = (Activations){part->count, work->activated, wide, work->activated_groups};
    const Product down = {&layer->down, work->contracted};
    multiply_share(part, &x, &down, 1);
}

static void feed_forward_block(const Part *part, const Layer *layer) {
    normalise(part, layer->feed_forward_norm);
    if (is_routed(layer))
        run_experts(part, layer);
    else
        run_feed_forward(part, layer);
    pool_barrier(part->model->pool, part->thread);
    add_to_residual(part, part->work->contracted, NULL, layer->feed_forward_post_norm);
}

/* Logits of the wanted nodes. */
static void output_block(const Part *part) {
    const Model *model = part->model;
    const int64_t hidden = part->a->hidden;
    int wanted = 0, first_slot = 0;
    normalise(part, model->output_norm);
    keep_hidden(part, -1, part->normed);
    for (int i = 0; i < part->count; i++) {
        if (part->work->nodes[i].slot < 0)
            continue;
        if (!wanted)
            first_slot = part->work->nodes[i].slot;
        memmove(part->normed + wanted++ * hidden, part->normed + i * hidden, (size_t)hidden * sizeof *part->normed);
    }
    if (!wanted)
        return;
    if (part->a->logit_scale != 1.0f)
        for (int i = 0; i < wanted; i++)
            part->vector->scale(part->normed + i * hidden, part->a->logit_scale, hidden);
    const Activations x = columns(part, part->normed, hidden, wanted, format_is_quantized(model->output.format));
    const Share own = share(output_stride(model) / TILE_ROWS, part->thread, part->threads);
    part->linear->multiply(&model->output, own.first, own.last, &x,
                           model->logits + (int64_t)first_slot * model->logit_stride, model->logit_stride);
    if (model->draft_head)
        score_learned(part, first_slot);
}

static void run_part(void *argument, int thread, int threads) {
    Model *model = argument;
    Workspace *work = &model->work;
    const Part part = {
        .model = model,
        .work = work,
        .a = &model->architecture,
        .linear = model->tier->linear,
        .vector = model->tier->vector,
        .thread = thread,
        .threads = threads,
        .count = work->count,
        .residual = work->own[thread].residual,
        .normed = work->own[thread].normed,
        .inputs = work->own[thread].inputs,
        .groups = work->own[thread].groups,
        .routing = &work->own[thread].routing,
    };
    if (model->draft_head)
        read_states(&part);
    else
        for (int i = 0; i < part.count; i++)
            embed_node(&part, i, part.residual + (int64_t)i * part.a->hidden);
    compute_rotations(&part);
    for (int number = 0; number < model->architecture.layers; number++) {
        keep_hidden(&part, number, part.residual);
        if (is_recurrent(&model->layers[number]))
            delta_block(&part, &model->layers[number]);
        else
            attention_block(&part, &model->layers[number]);
        feed_forward_block(&part, &model->layers[number]);
    }
    keep_hidden(&part, model->architecture.layers, part.residual);
    output_block(&part);
}

void run_chunk(Model *model) { pool_run(model->pool, run_part, model); }
