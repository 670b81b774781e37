/* Attention of a pass: positions, queries and keys, the sums over the cache. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

/* ---- positions */

void compute_rotations(const Part *part) {
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

void norm_attention_heads(const Part *part, const Layer *layer) {
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

void prepare_attention_heads(const Part *part, const Layer *layer) {
    const Architecture *a = part->a;
    Workspace *work = part->work;
    const float *rotations = work->rotation + (int64_t)layer->rope * CHUNK * a->rope_size;
    for (int head = part->thread; head < a->query_heads; head += part->threads)
        for (int i = 0; i < part->count; i++)
            prepare_attention_head(part, work->query + i * gated_query_size(a) + head * gated_head_size(a),
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
            const KvHeadCache cache = kv_head_cache(&part->model->cache, work->nodes[i].row, layer->place, head);
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

static void start_attention(const Part *part, const AttentionItem *item, const Layer *layer, float *scores,
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
        query->query = work->query + i * gated_query_size(a) + head * gated_head_size(a);
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
    attention->cache = kv_head_cache(&part->model->cache, work->nodes[item->first_node].row, layer->place, item->head);
}

/* Item i, whose scores all threads write beside one another. */
static void start_shared(const Part *part, int i, const Layer *layer, Attention *attention) {
    const AttentionItem *item = &part->work->items[i];
    float *scores = part->work->scores + (int64_t)i * item->count * part->work->score_stride;
    start_attention(part, item, layer, scores, attention);
}

/* Dimensions [first, last) of what the queries attend to; the gate of a head lies behind its query. */
static void sum_values(const Part *part, const Attention *attention, int first, int last) {
    part->vector->values(&attention->cache, attention->count, attention->queries, first, last);
    for (int r = 0; part->a->gated_attention && r < attention->count; r++) {
        const Query *query = &attention->queries[r];
        part->vector->logistic_gate(query->query + part->a->head_size + first, query->output + first, last - first);
    }
}

/* Few queries: every key head's blocks, then its queries, then its dimensions are shared by the threads. */
static void attend_together(const Part *part, const Layer *layer) {
    const Workspace *work = part->work;
    const int threads = part->threads, size = part->a->head_size;
    Attention attention;
    for (int i = 0; i < work->item_count; i++) {
        start_shared(part, i, layer, &attention);
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
        start_shared(part, i, layer, &attention);
        for (int r = 0; r < attention.count; r++, turn++)
            if (turn % threads == part->thread)
                part->vector->softmax(&attention.queries[r]);
    }
    pool_barrier(part->model->pool, part->thread);
    int pieces = 1;
    while (pieces * work->item_count < 2 * threads && size % (32 * pieces) == 0)
        pieces *= 2;
    for (int i = 0, turn = 0; i < work->item_count; i++) {
        start_shared(part, i, layer, &attention);
        for (int piece = 0; piece < pieces; piece++, turn++)
            if (turn % threads == part->thread)
                sum_values(part, &attention, size * piece / pieces, size * (piece + 1) / pieces);
    }
}

/* Many queries: each thread takes items of about the same cost in all. */
static void attend_apart(const Part *part, const Layer *layer) {
    const Workspace *work = part->work;
    const int64_t total = work->items[work->item_count - 1].cost;
    float *scores = work->scores + (int64_t)QUERIES_TOGETHER * part->thread * work->score_stride;
    Attention attention;
    for (int i = 0; i < work->item_count; i++) {
        const int64_t before = i ? work->items[i - 1].cost : 0;
        const int64_t middle = (before + work->items[i].cost) / 2;
        if (middle * part->threads / total != part->thread)
            continue;
        start_attention(part, &work->items[i], layer, scores, &attention);
        part->vector->scores(&attention.cache, attention.count, attention.queries, attention.first_block,
                             attention.last_block, attention.scores);
        for (int r = 0; r < attention.count; r++)
            part->vector->softmax(&attention.queries[r]);
        sum_values(part, &attention, 0, part->a->head_size);
    }
}

void attend(const Part *part, const Layer *layer) {
    if (part->work->split)
        attend_together(part, layer);
    else
        attend_apart(part, layer);
}

/* ---- what queries share a reading of the cache */

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
