/* A layer of a gated delta net, along the walks of a chunk (walks.c).
 *
 * The state of a value head is a matrix S, a row for each dimension of keys. A token with key k, value v, decay g and
 * rate b makes g S + k (b (v - k g S)) of it, and its query q gives q S. Queries, keys and values are a convolution of
 * the token's inputs and those of the three before it. Sixteen columns at a time are carried along a whole walk: they
 * stay in the first cache.
 */
#include "delta.h"

#include <math.h>
#include <string.h>

/* One key head of a walk, and the value heads that share it: each of them is `key_heads` behind the one before. */
typedef struct {
    const Part *part;
    const Layer *layer;
    const Walk *walk;
    const Move *moves;
    int key_head;
    float *queries_keys; /* [moves][2][key size] */
    float *values;       /* [moves][value size] of one head */
    float *decays;       /* [moves], then rates */
    float *levels;       /* [levels][key size][16] */
} HeadWalk;

static float *record_at(const HeadWalk *head, int32_t record) {
    return record_layer(&head->part->model->cache.states, &head->walk->row->states, record, head->layer->place);
}

static float *layer_of(const HeadWalk *head, const State *state) {
    return state_layer(&head->part->model->cache.states, state, head->layer->place);
}

static float *past_inputs(const HeadWalk *head, const State *state) {
    return layer_of(head, state) + head->part->model->cache.states.matrices;
}

/* The inputs of a token (RECORDED_INPUT in model.h). */
static const float *inputs_at(const HeadWalk *head, int32_t input) {
    const int64_t channels = head->part->model->cache.states.channels;
    if (input >= 0)
        return head->part->work->delta_inputs + input * channels;
    if (input <= RECORDED_INPUT)
        return record_at(head, RECORDED_INPUT - input);
    return head->walk->from ? past_inputs(head, head->walk->from) + (PAST + input) * channels : head->part->work->zeros;
}

static void convolve_at(const HeadWalk *head, const Move *move, int64_t channel, int64_t count, float *y) {
    const float *inputs[TAPS];
    for (int tap = 0; tap < TAPS; tap++)
        inputs[tap] = inputs_at(head, move->inputs[tap]) + channel;
    head->part->vector->convolve(inputs, head->layer->delta_convolution + channel,
                                 head->part->model->cache.states.channels, count, y);
}

static void convolve_queries_and_keys(const HeadWalk *head) {
    const Architecture *a = head->part->a;
    const int64_t size = a->delta_key_size, queries = head->key_head * size, keys = queries + a->delta_key_heads * size;
    for (int32_t i = 0; i < head->walk->count; i++) {
        float *query = head->queries_keys + 2 * i * size, *key = query + size;
        convolve_at(head, &head->moves[i], keys, size, key);
        head->part->vector->unit(key, 1, size);
        if (head->moves[i].node < 0)
            continue;
        convolve_at(head, &head->moves[i], queries, size, query);
        head->part->vector->unit(query, 1 / sqrtf((float)size), size);
    }
}

/* ln(1 + exp(x)) */
static double softplus(double x) { return x > 20 ? x : log1p(exp(x)); }

/* Decays and rates of a value head: of nodes computed, of other tokens read from their records. */
static void find_gates(const HeadWalk *head, int value_head) {
    const Workspace *work = head->part->work;
    const int64_t heads = head->part->a->delta_value_heads, stride = tiles_of(heads) * TILE_ROWS;
    const int64_t channels = head->part->model->cache.states.channels;
    float *decays = head->decays, *rates = decays + head->walk->count;
    for (int32_t i = 0; i < head->walk->count; i++) {
        const Move *move = &head->moves[i];
        float *record = move->record < 0 ? NULL : record_at(head, move->record) + channels + value_head;
        if (move->node >= 0) {
            const int64_t at = move->node * stride + value_head;
            const double time = softplus((double)work->delta_decays[at] + head->layer->delta_time[value_head]);
            decays[i] = (float)exp(head->layer->delta_speed[value_head] * time);
            rates[i] = (float)(1 / (1 + exp(-(double)work->delta_rates[at])));
            if (record) {
                record[0] = decays[i];
                record[heads] = rates[i];
            }
        } else {
            decays[i] = record[0];
            rates[i] = record[heads];
        }
    }
}

/* Columns [column, column + 16) of a value head, from the walk's first state to its last. */
static void walk_columns(const HeadWalk *head, int value_head, int64_t column) {
    const Architecture *a = head->part->a;
    const int64_t size = a->delta_key_size, values = a->delta_value_size;
    const int64_t place = (value_head * values + column) * size, block = 16 * size;
    if (head->walk->from)
        memcpy(head->levels, layer_of(head, head->walk->from) + place, (size_t)block * sizeof(float));
    else
        memset(head->levels, 0, (size_t)block * sizeof(float));
    for (int32_t i = 0; i < head->walk->count; i++) {
        const Move *move = &head->moves[i];
        const float *query = head->queries_keys + 2 * i * size;
        const DeltaToken token = {.key = query + size,
                                  .query = query,
                                  .value = head->values + i * values,
                                  .decay = head->decays[i],
                                  .rate = head->decays[head->walk->count + i],
                                  .size = (int)size};
        float *to = move->to < 0 ? NULL : head->levels + move->to * block;
        float *output =
            move->node < 0 ? NULL : head->part->work->attended + move->node * delta_values(a) + value_head * values;
        head->part->vector->delta(head->levels + move->from * block, to, &token, column, output);
        if (move->kept)
            memcpy(layer_of(head, move->kept) + place, to, (size_t)block * sizeof(float));
    }
}

static void walk_value_head(const HeadWalk *head, int value_head) {
    const Part *part = head->part;
    const Architecture *a = part->a;
    const int64_t values = a->delta_value_size, first = delta_channels(a) - delta_values(a) + value_head * values;
    for (int32_t i = 0; i < head->walk->count; i++)
        convolve_at(head, &head->moves[i], first, values, head->values + i * values);
    find_gates(head, value_head);
    for (int64_t column = 0; column < values; column += 16)
        walk_columns(head, value_head, column);
    for (int32_t i = 0; i < head->walk->count; i++) {
        if (head->moves[i].node < 0)
            continue;
        const int64_t at = head->moves[i].node * delta_values(a) + value_head * values;
        float *output = part->work->attended + at;
        part->vector->rms_norm(output, head->layer->delta_norm, values, a->norm_epsilon, output);
        part->vector->silu_gate(part->work->delta_gates + at, output, values, output);
    }
}

/* What later passes read of some channels: the inputs of nodes, and of the last tokens of states that are kept. States
 * that come later in the walk first: the first one may be that which the walk began with. */
static void keep_inputs(const HeadWalk *head, int64_t channel, int64_t count) {
    const int64_t channels = head->part->model->cache.states.channels;
    const size_t bytes = (size_t)count * sizeof(float);
    for (int32_t i = head->walk->count - 1; i >= 0; i--) {
        const Move *move = &head->moves[i];
        for (int tap = 1; move->kept && tap < TAPS; tap++) {
            const float *inputs = inputs_at(head, move->inputs[tap]) + channel;
            memmove(past_inputs(head, move->kept) + (tap - 1) * channels + channel, inputs, bytes);
        }
        if (move->node >= 0 && move->record >= 0)
            memcpy(record_at(head, move->record) + channel, inputs_at(head, move->node) + channel, bytes);
    }
}

static void walk_key_head(const Part *part, const Layer *layer, const Walk *walk, int key_head) {
    const Architecture *a = part->a;
    const int64_t size = a->delta_key_size, values = a->delta_value_size;
    float *scratch = part->work->walks.scratch + part->thread * part->work->walks.scratch_stride;
    HeadWalk head = {.part = part, .layer = layer, .walk = walk, .key_head = key_head};
    head.moves = part->work->walks.moves + walk->first;
    head.levels = scratch;
    head.queries_keys = head.levels + part->work->walks.levels * 16 * size;
    head.values = head.queries_keys + 2 * size * walk->count;
    head.decays = head.values + values * walk->count;
    convolve_queries_and_keys(&head);
    for (int value_head = key_head; value_head < a->delta_value_heads; value_head += a->delta_key_heads)
        walk_value_head(&head, value_head);
    const int64_t all_keys = a->delta_key_heads * size;
    keep_inputs(&head, key_head * size, size);
    keep_inputs(&head, all_keys + key_head * size, size);
    for (int value_head = key_head; value_head < a->delta_value_heads; value_head += a->delta_key_heads)
        keep_inputs(&head, 2 * all_keys + value_head * values, values);
}

void walk_states(const Part *part, const Layer *layer) {
    const Walks *walks = &part->work->walks;
    const int heads = part->a->delta_key_heads;
    const Share own = share((int64_t)walks->count * heads, part->thread, part->threads);
    for (int64_t item = own.first; item < own.last; item++)
        walk_key_head(part, layer, &walks->walks[item / heads], (int)(item % heads));
}
