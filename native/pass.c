/* One pass: embedding, decoder layers, output layer, for up to CHUNK nodes of any rows.
 *
 * All threads run it together. Each holds the whole residual stream and computes its part of every product; six
 * barriers a layer part the moves. What a thread computes twice (norms, quantized activations) costs less than handing
 * it over.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "part.h"

static int64_t query_size(const Architecture *a) { return (int64_t)a->query_heads * a->head_size; }

static int64_t key_size(const Architecture *a) { return (int64_t)a->key_heads * a->head_size; }

Activations columns(const Part *part, const float *values, int64_t stride, int count, int quantized) {
    if (quantized)
        part->linear->quantize(values, stride, stride, count, 0, stride / GROUP_SIZE, part->groups);
    return (Activations){count, values, stride, part->groups};
}

void multiply_share(const Part *part, const Activations *x, const Product *products, int count) {
    int64_t tiles = 0, before = 0;
    for (int i = 0; i < count; i++)
        tiles += tiles_of(products[i].matrix->rows);
    const Share own = share(tiles, part->thread, part->threads);
    for (int i = 0; i < count; i++) {
        const PackedMatrix *matrix = products[i].matrix;
        const int64_t size = tiles_of(matrix->rows);
        const int64_t first = own.first > before ? own.first - before : 0;
        const int64_t last = own.last - before < size ? own.last - before : size;
        if (first < last)
            part->linear->multiply(matrix, first, last, x, products[i].y, matrix->rows);
        before += size;
    }
}

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

/* ---- positions */

/* Cosines and sines of the nodes' positions, a share of the nodes by each thread. */
static void compute_rotations(const Part *part) {
    const Architecture *a = part->a;
    const int half = a->rope_size / 2;
    for (int table = 0; table < a->rope_tables; table++) {
        const double *frequencies = part->model->rope_frequencies + (int64_t)table * half;
        const float magnitude = table ? a->second_magnitude : a->rope_magnitude;
        for (int i = part->thread; i < part->count; i += part->threads) {
            float *rotation = part->work->rotation + ((int64_t)table * CHUNK + i) * a->rope_size;
            for (int j = 0; j < half; j++) {
                const double angle = part->work->nodes[i].position * frequencies[j];
                rotation[j] = (float)cos(angle) * magnitude;
                rotation[half + j] = (float)sin(angle) * magnitude;
            }
        }
    }
}

/* Rotate pairs of a head: (i, i + half), or neighbours. */
static void rotate(const Architecture *a, float *restrict head, const float *restrict rotation) {
    const int half = a->rope_size / 2;
    const float *cosine = rotation, *sine = rotation + half;
    if (a->rope_halves)
        for (int i = 0; i < half; i++) {
            const float x = head[i], y = head[i + half];
            head[i] = x * cosine[i] - y * sine[i];
            head[i + half] = x * sine[i] + y * cosine[i];
        }
    else
        for (int i = 0; i < half; i++) {
            const float x = head[2 * i], y = head[2 * i + 1];
            head[2 * i] = x * cosine[i] - y * sine[i];
            head[2 * i + 1] = x * sine[i] + y * cosine[i];
        }
}

static void prepare_attention_head(const Part *part, float *head, const float *bias, const float *norm,
                                   const float *rotation) {
    const Architecture *a = part->a;
    if (bias)
        part->vector->add(head, bias, a->head_size);
    if (norm && a->query_key_norm == NORM_OF_HEADS)
        part->vector->rms_norm(head, norm, a->head_size, a->norm_epsilon, head);
    if (rotation)
        rotate(a, head, rotation);
    if (norm && a->query_key_norm == NORM_OF_ROTATED_HEADS)
        part->vector->rms_norm(head, norm, a->head_size, a->norm_epsilon, head);
}

/* Norms of queries and keys over all heads, a share of the nodes by each thread. */
static void norm_attention_heads(const Part *part, const Layer *layer) {
    const Architecture *a = part->a;
    for (int i = part->thread; i < part->count; i += part->threads) {
        float *query = part->work->query + i * query_size(a), *key = part->work->key + i * key_size(a);
        if (layer->query_norm)
            part->vector->rms_norm(query, layer->query_norm, query_size(a), a->norm_epsilon, query);
        if (layer->key_norm)
            part->vector->rms_norm(key, layer->key_norm, key_size(a), a->norm_epsilon, key);
    }
}

static const float *attention_head_bias(const float *bias, const Architecture *a, int head) {
    return bias ? bias + (int64_t)head * a->head_size : NULL;
}

/* Bias, norm and rotation of queries and keys; keys and values go to the cache. One thread writes a key head: its new
 * cells share cache lines. */
static void prepare_attention_heads(const Part *part, const Layer *layer, int number) {
    const Architecture *a = part->a;
    Workspace *work = part->work;
    const float *rotations = work->rotation + (int64_t)layer->rope * CHUNK * a->rope_size;
    for (int head = part->thread; head < a->query_heads; head += part->threads)
        for (int i = 0; i < part->count; i++)
            prepare_attention_head(part, work->query + i * query_size(a) + (int64_t)head * a->head_size,
                                   attention_head_bias(layer->query_bias, a, head), layer->query_norm,
                                   rotations + (int64_t)i * a->rope_size);
    /* From the last thread on: the first ones may have had a query head more. */
    for (int head = a->key_heads - 1 - part->thread; head >= 0; head -= part->threads)
        for (int i = 0; i < part->count; i++) {
            float *key = work->key + i * key_size(a) + (int64_t)head * a->head_size;
            float *value = work->value + i * key_size(a) + (int64_t)head * a->head_size;
            prepare_attention_head(part, key, attention_head_bias(layer->key_bias, a, head), layer->key_norm,
                                   rotations + (int64_t)i * a->rope_size);
            prepare_attention_head(part, value, attention_head_bias(layer->value_bias, a, head), NULL, NULL);
            const KvHeadCache cache = kv_head_cache(&part->model->cache, work->nodes[i].row, number, head);
            part->vector->store(&cache, work->nodes[i].cell, key, value);
        }
}

/* ---- attention */

/* The queries of an item, and the blocks of keys that they read. */
typedef struct {
    KvHeadCache cache;
    Query queries[QUERIES_TOGETHER];
    float *scores[QUERIES_TOGETHER];
    int count;
    int first_block, last_block;
} Attention;

static void start_query(const PassNode *node, int window, Query *query) {
    const int first = window && node->position >= window ? node->position - window + 1 : 0;
    const int hidden = first > node->visible ? first - node->visible : 0; /* cells of the path that lie before it */
    query->first = first - hidden;
    query->visible = node->visible;
    query->path = node->path + hidden;
    query->path_length = node->path_length - hidden;
    query->scale = node->attention_scale;
}

static void start_attention(const Part *part, const AttentionItem *item, const Layer *layer, int number, float *scores,
                            Attention *attention) {
    const Architecture *a = part->a;
    Workspace *work = part->work;
    const int group = a->query_heads / a->key_heads;
    int last_cell = 0, first = INT32_MAX;
    attention->count = item->count;
    for (int r = 0; r < item->count; r++) {
        const int index = item->first_query + r, i = item->first_node + index / group;
        const int64_t head = (int64_t)item->head * group + index % group;
        Query *query = &attention->queries[r];
        start_query(&work->nodes[i], layer->window, query);
        query->query = work->query + i * query_size(a) + head * a->head_size;
        query->output = work->attended + i * query_size(a) + head * a->head_size;
        last_cell = work->nodes[i].cell > last_cell ? work->nodes[i].cell : last_cell;
        first = query->first < first ? query->first : first;
    }
    attention->first_block = first / BLOCK_CELLS;
    attention->last_block = last_cell / BLOCK_CELLS + 1;
    for (int r = 0; r < item->count; r++) {
        Query *query = &attention->queries[r];
        attention->scores[r] = scores + r * work->score_stride;
        query->weights = attention->scores[r] + query->first - attention->first_block * BLOCK_CELLS;
    }
    attention->cache = kv_head_cache(&part->model->cache, work->nodes[item->first_node].row, number, item->head);
}

/* Item i, whose scores all threads write beside one another. */
static void start_shared(const Part *part, int i, const Layer *layer, int number, Attention *attention) {
    const AttentionItem *item = &part->work->items[i];
    float *scores = part->work->scores + (int64_t)i * item->count * part->work->score_stride;
    start_attention(part, item, layer, number, scores, attention);
}

/* Few queries: every key head's blocks, then its queries, then its dimensions are shared by the threads. */
static void attend_together(const Part *part, const Layer *layer, int number) {
    const Workspace *work = part->work;
    const int threads = part->threads, size = part->a->head_size;
    Attention attention;
    for (int i = 0; i < work->item_count; i++) {
        start_shared(part, i, layer, number, &attention);
        const int blocks = attention.last_block - attention.first_block;
        const Share own = share(blocks, (part->thread + i) % threads, threads);
        float *scores[QUERIES_TOGETHER];
        for (int r = 0; r < attention.count; r++)
            scores[r] = attention.scores[r] + own.first * BLOCK_CELLS;
        part->vector->scores(&attention.cache, attention.count, attention.queries,
                             attention.first_block + (int)own.first, attention.first_block + (int)own.last, scores);
    }
    pool_barrier(part->model->pool, part->thread);
    for (int i = 0, turn = 0; i < work->item_count; i++) {
        start_shared(part, i, layer, number, &attention);
        for (int r = 0; r < attention.count; r++, turn++)
            if (turn % threads == part->thread)
                part->vector->softmax(&attention.queries[r]);
    }
    pool_barrier(part->model->pool, part->thread);
    int pieces = 1;
    while (pieces * work->item_count < 2 * threads && size % (32 * pieces) == 0)
        pieces *= 2;
    for (int i = 0, turn = 0; i < work->item_count; i++) {
        start_shared(part, i, layer, number, &attention);
        for (int piece = 0; piece < pieces; piece++, turn++)
            if (turn % threads == part->thread)
                part->vector->values(&attention.cache, attention.count, attention.queries, size * piece / pieces,
                                     size * (piece + 1) / pieces);
    }
}

/* Many queries: each thread takes items of about the same cost in all. */
static void attend_apart(const Part *part, const Layer *layer, int number) {
    const Workspace *work = part->work;
    const int64_t total = work->items[work->item_count - 1].cost;
    float *scores = work->scores + (int64_t)QUERIES_TOGETHER * part->thread * work->score_stride;
    Attention attention;
    for (int i = 0; i < work->item_count; i++) {
        const int64_t before = i ? work->items[i - 1].cost : 0;
        const int64_t middle = (before + work->items[i].cost) / 2;
        if (middle * part->threads / total != part->thread)
            continue;
        start_attention(part, &work->items[i], layer, number, scores, &attention);
        part->vector->scores(&attention.cache, attention.count, attention.queries, attention.first_block,
                             attention.last_block, attention.scores);
        for (int r = 0; r < attention.count; r++)
            part->vector->softmax(&attention.queries[r]);
        part->vector->values(&attention.cache, attention.count, attention.queries, 0, part->a->head_size);
    }
}

static int reserve_scores(Model *model, int64_t cells) {
    Workspace *work = &model->work;
    const int threads = pool_threads(model->pool);
    const int64_t own = (int64_t)QUERIES_TOGETHER * threads, together = 2 * (int64_t)model->architecture.query_heads;
    work->score_stride = (cells + 63) / 16 * 16 + 16;
    const int64_t floats = work->score_stride * (own > together ? own : together);
    float *scores = enlarged(work->scores, &work->score_capacity, floats, sizeof *scores);
    if (!scores)
        return DRAFTREE_NO_MEMORY;
    work->scores = scores;
    return DRAFTREE_OK;
}

/* Of the products of a position's queries and keys. */
static float scale_at(const Architecture *a, int32_t position) {
    if (!a->temperature_length)
        return a->attention_scale;
    const int32_t steps = position / a->temperature_length;
    return a->attention_scale * (float)(1 + (double)a->temperature_growth * log(1 + (double)steps));
}

/* Where the nodes are, and the cells of all their paths in one list. */
static int list_paths(const Architecture *a, Workspace *work, const int32_t *numbers) {
    int64_t total = 0;
    for (int32_t i = 0; i < work->count; i++) {
        const Node *node = &work->nodes[i].row->nodes[numbers[i]];
        work->nodes[i].path_length = node->depth + 1 - node->run;
        work->nodes[i].visible = work->nodes[i].row->length + node->run;
        work->nodes[i].position = work->nodes[i].row->length + node->depth;
        work->nodes[i].attention_scale = scale_at(a, work->nodes[i].position);
        total += work->nodes[i].path_length;
    }
    int32_t *cells = enlarged(work->path_cells, &work->path_capacity, total, sizeof *cells);
    if (!cells)
        return DRAFTREE_NO_MEMORY;
    work->path_cells = cells;
    for (int32_t i = 0; i < work->count; i++) {
        work->nodes[i].path = cells;
        cells += path_cells(work->nodes[i].row, numbers[i], cells);
    }
    return DRAFTREE_OK;
}

/* Items of one row's nodes, head by head. */
static void list_items(Model *model, int32_t first, int32_t last, int most) {
    Workspace *work = &model->work;
    const int group = model->architecture.query_heads / model->architecture.key_heads;
    const int queries = (last - first) * group;
    for (int head = 0; head < model->architecture.key_heads; head++)
        for (int query = 0; query < queries; query += most) {
            const int count = queries - query < most ? queries - query : most;
            const int64_t before = work->item_count ? work->items[work->item_count - 1].cost : 0;
            const int64_t cells = work->nodes[first + (query + count - 1) / group].position + 1;
            work->items[work->item_count++] = (AttentionItem){first, head, query, count, before + cells * count};
        }
}

int prepare_attention(Model *model) {
    Workspace *work = &model->work;
    const Architecture *a = &model->architecture;
    const int group = a->query_heads / a->key_heads, threads = pool_threads(model->pool);
    int32_t numbers[CHUNK];
    int64_t cells = 0;
    for (int32_t i = 0; i < work->count; i++) {
        numbers[i] = work->nodes[i].cell - work->nodes[i].row->length;
        cells = work->nodes[i].cell + 1 > cells ? work->nodes[i].cell + 1 : cells;
    }
    int error = list_paths(a, work, numbers);
    if (!error)
        error = reserve_scores(model, cells);
    if (error)
        return error;
    const int queries = work->count * group;
    const int one_row = work->nodes[0].row == work->nodes[work->count - 1].row;
    work->split = one_row && work->count <= 2 && queries <= QUERIES_TOGETHER;
    int most = QUERIES_TOGETHER;
    while (!work->split && most > 3 && (int64_t)((queries + most - 1) / most) * a->key_heads < 2 * threads)
        most /= 2;
    work->item_count = 0;
    for (int32_t first = 0, i = 1; i <= work->count; i++)
        if (i == work->count || work->nodes[i].row != work->nodes[first].row) {
            list_items(model, first, i, most);
            first = i;
        }
    return DRAFTREE_OK;
}

/* ---- the layers */

void embed_node(const Part *part, int i, float *embedding) {
    packed_decode_row(&part->model->embeddings, part->work->nodes[i].token, embedding);
    if (part->a->embedding_scale != 1.0f)
        part->vector->scale(embedding, part->a->embedding_scale, part->a->hidden);
}

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

static void attention_block(const Part *part, const Layer *layer, int number) {
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
    prepare_attention_heads(part, layer, number);
    pool_barrier(pool, part->thread);
    if (work->split)
        attend_together(part, layer, number);
    else
        attend_apart(part, layer, number);
    pool_barrier(pool, part->thread);
    x = columns(part, work->attended, query_size(a), part->count, format_is_quantized(layer->output.format));
    const Product output = {&layer->output, work->projected};
    multiply_share(part, &x, &output, 1);
    pool_barrier(pool, part->thread);
    add_to_residual(part, work->projected, layer->output_bias, layer->attention_post_norm);
}

/* A thread's gates and ups are the same columns, in whole groups: it multiplies and quantizes them by itself. */
static void feed_forward_block(const Part *part, const Layer *layer) {
    const Architecture *a = part->a;
    Workspace *work = part->work;
    const int64_t wide = a->feed_forward;
    normalise(part, layer->feed_forward_norm);
    const int quantized = format_is_quantized(layer->gate.format) || format_is_quantized(layer->up.format);
    Activations x = columns(part, part->normed, a->hidden, part->count, quantized);
    const Share own = share(wide / GROUP_SIZE, part->thread, part->threads);
    const int64_t first = own.first * GROUP_SIZE, last = own.last * GROUP_SIZE;
    part->linear->multiply(&layer->gate, first / TILE_ROWS, last / TILE_ROWS, &x, work->gate, wide);
    part->linear->multiply(&layer->up, first / TILE_ROWS, last / TILE_ROWS, &x, work->up, wide);
    for (int i = 0; i < part->count; i++) {
        const int64_t at = i * wide + first;
        if (a->activation == ACTIVATION_SILU)
            part->vector->silu_gate(work->gate + at, work->up + at, last - first, work->activated + at);
        else
            part->vector->gelu_gate(work->gate + at, work->up + at, last - first, work->activated + at);
    }
    if (format_is_quantized(layer->down.format))
        part->linear->quantize(work->activated, wide, wide, part->count, own.first, own.last, work->activated_groups);
    pool_barrier(part->model->pool, part->thread);
    x = (Activations){part->count, work->activated, wide, work->activated_groups};
    const Product down = {&layer->down, work->contracted};
    multiply_share(part, &x, &down, 1);
    pool_barrier(part->model->pool, part->thread);
    add_to_residual(part, work->contracted, NULL, layer->feed_forward_post_norm);
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
    };
    if (model->draft_head)
        read_states(&part);
    else
        for (int i = 0; i < part.count; i++)
            embed_node(&part, i, part.residual + (int64_t)i * part.a->hidden);
    compute_rotations(&part);
    for (int number = 0; number < model->architecture.layers; number++) {
        keep_hidden(&part, number, part.residual);
        attention_block(&part, &model->layers[number], number);
        feed_forward_block(&part, &model->layers[number]);
    }
    keep_hidden(&part, model->architecture.layers, part.residual);
    output_block(&part);
}

void run_chunk(Model *model) { pool_run(model->pool, run_part, model); }

/* ---- memory */

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Numbers of a token before the first layer of a draft head. */
static int64_t input_size(const Model *model) {
    return model->draft_head ? larger(2 * model->architecture.hidden, model->draft_head->input.columns) : 0;
}

/* Hand out `floats` of the arena; a round without memory adds them up. */
static float *take_floats(Workspace *work, int64_t floats) {
    float *place = work->arena ? (float *)(void *)(work->arena + work->arena_bytes) : NULL;
    work->arena_bytes += ((size_t)floats * sizeof(float) + 127) / 64 * 64;
    return place;
}

static void lay_out(Model *model) {
    Workspace *work = &model->work;
    const Architecture *a = &model->architecture;
    const int threads = pool_threads(model->pool);
    const int64_t widest = larger(larger(a->hidden, a->feed_forward), larger(query_size(a), input_size(model)));
    const int64_t groups = (int64_t)activation_bytes(CHUNK, widest) / (int64_t)sizeof(float) + 16;
    work->arena_bytes = 0;
    for (int thread = 0; thread < threads; thread++) {
        ThreadSpace *own = &work->own[thread];
        own->residual = take_floats(work, (int64_t)CHUNK * a->hidden);
        own->normed = take_floats(work, (int64_t)CHUNK * a->hidden);
        own->groups = (uint8_t *)take_floats(work, groups);
        own->inputs = take_floats(work, CHUNK * input_size(model));
        own->edited = take_floats(work, model->most_logits);
        own->scratch = take_floats(work, 2 * model->most_logits);
    }
    work->rotation = take_floats(work, (int64_t)ROPE_TABLES * CHUNK * (a->rope_size ? a->rope_size : 1));
    work->query = take_floats(work, CHUNK * query_size(a));
    work->key = take_floats(work, CHUNK * key_size(a));
    work->value = take_floats(work, CHUNK * key_size(a));
    work->attended = take_floats(work, CHUNK * query_size(a));
    work->projected = take_floats(work, (int64_t)CHUNK * a->hidden);
    work->gate = take_floats(work, (int64_t)CHUNK * a->feed_forward);
    work->up = take_floats(work, (int64_t)CHUNK * a->feed_forward);
    work->activated = take_floats(work, (int64_t)CHUNK * a->feed_forward);
    work->activated_groups = (uint8_t *)take_floats(work, groups);
    work->contracted = take_floats(work, (int64_t)CHUNK * a->hidden);
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
    release(work->path_cells, (size_t)work->path_capacity * sizeof *work->path_cells);
    release(model->slots, (size_t)model->slot_capacity * sizeof *model->slots);
    release(model->learned_tokens, (size_t)model->learned_capacity * sizeof *model->learned_tokens);
}
