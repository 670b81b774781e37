/* A layer of experts.
 *
 * A node takes the experts with the largest logits of the router, and adds what they give, by the softmax over these
 * logits, the largest first: so its bits depend on itself alone. The nodes of a chunk that have chosen an expert are
 * columns of one product, so that its weights are read once. Threads share the experts by what these cost.
 */
#include "experts.h"

#include <math.h>
#include <string.h>

/* Reading a tile of weights takes as long as so many columns' products with it: about 3 with AVX2, 13 with AVX-512, by
 * passes of dense models over 1 and over 16 tokens. */
enum { READING_COLUMNS = 8 };

/* ---- the router */

/* The largest logits first; of equal ones the first expert. */
static void choose_experts(const Architecture *a, const float *logits, int32_t *choices) {
    int32_t count = 0;
    for (int32_t expert = 0; expert < a->experts; expert++) {
        int32_t place = count;
        while (place > 0 && logits[expert] > logits[choices[place - 1]])
            place--;
        if (place == a->experts_used)
            continue;
        count += count < a->experts_used;
        memmove(choices + place + 1, choices + place, (size_t)(count - 1 - place) * sizeof *choices);
        choices[place] = expert;
    }
}

/* The softmax over the logits of the chosen experts. */
static void weigh_experts(const Architecture *a, const float *logits, const int32_t *choices, float *shares) {
    double sum = 0;
    for (int32_t k = 0; k < a->experts_used; k++)
        sum += exp((double)logits[choices[k]] - logits[choices[0]]);
    for (int32_t k = 0; k < a->experts_used; k++)
        shares[k] = (float)(exp((double)logits[choices[k]] - logits[choices[0]]) / sum);
}

static int64_t unit_cost(int32_t columns) { return READING_COLUMNS + columns; }

/* List the experts that are chosen; `next` has how often each is, and then where its choices begin. */
static void list_experts(const Architecture *a, Routing *routing) {
    int32_t first = 0;
    size_t groups = 0;
    routing->count = 0;
    routing->cost = 0;
    for (int32_t expert = 0; expert < a->experts; expert++) {
        const int32_t count = routing->next[expert];
        if (!count)
            continue;
        routing->experts[routing->count++] = (ChosenExpert){expert, first, count, routing->cost, groups};
        routing->next[expert] = first;
        first += count;
        routing->cost += unit_cost(count);
        groups += activation_bytes(count, a->feed_forward);
    }
}

/* The experts of all nodes, as every thread finds them. */
static void route(const Part *part) {
    const Architecture *a = part->a;
    Routing *routing = part->routing;
    const int32_t used = a->experts_used, choices = part->count * used;
    memset(routing->next, 0, (size_t)a->experts * sizeof *routing->next);
    for (int i = 0; i < part->count; i++) {
        const float *logits = part->work->router_logits + i * router_stride(a);
        choose_experts(a, logits, routing->choices + i * used);
        weigh_experts(a, logits, routing->choices + i * used, routing->shares + i * used);
    }
    for (int32_t i = 0; i < choices; i++)
        routing->next[routing->choices[i]]++;
    list_experts(a, routing);
    for (int32_t i = 0; i < choices; i++) {
        routing->places[i] = routing->next[routing->choices[i]]++;
        routing->nodes[routing->places[i]] = i / used;
    }
}

/* ---- the experts */

/* How many units begin before a place, of those that begin at 0, `cost`, 2 x `cost` and so on. */
static int64_t units_before(int64_t place, int64_t cost, int64_t units) {
    const int64_t count = place > 0 ? (place + cost - 1) / cost : 0;
    return count < units ? count : units;
}

/* This thread's part of the units of an expert; the shares of all experts together cost as much for each thread. */
static Share expert_share(const Part *part, const ChosenExpert *expert, int64_t units) {
    const Share own = share(part->routing->cost * units, part->thread, part->threads);
    const int64_t begin = expert->cost_before * units, cost = unit_cost(expert->count);
    return (Share){units_before(own.first - begin, cost, units), units_before(own.last - begin, cost, units)};
}

/* The matrix of one expert, of those that lie one below the other. */
static PackedMatrix expert_matrix(const PackedMatrix *all, int64_t rows, int32_t expert) {
    PackedMatrix matrix = *all;
    matrix.rows = rows;
    matrix.tiles += (size_t)(tiles_of(rows) * expert) * all->tile_bytes;
    return matrix;
}

/* The columns of the nodes that have chosen an expert. */
static Activations expert_inputs(const Part *part, const Layer *layer, const ChosenExpert *expert) {
    const int64_t hidden = part->a->hidden;
    for (int32_t i = 0; i < expert->count; i++)
        memcpy(part->inputs + i * hidden, part->normed + part->routing->nodes[expert->first + i] * hidden,
               (size_t)hidden * sizeof *part->inputs);
    const int quantized = format_is_quantized(layer->gate.format) || format_is_quantized(layer->up.format);
    return columns(part, part->inputs, hidden, expert->count, quantized);
}

static void activate_experts(const Part *part, const Layer *layer) {
    const int64_t wide = part->a->feed_forward;
    const int quantized = format_is_quantized(layer->down.format);
    for (int32_t i = 0; i < part->routing->count; i++) {
        const ChosenExpert *expert = &part->routing->experts[i];
        const Share own = expert_share(part, expert, wide / GROUP_SIZE);
        if (own.first == own.last)
            continue;
        const Activations x = expert_inputs(part, layer, expert);
        const PackedMatrix gate = expert_matrix(&layer->gate, wide, expert->number);
        const PackedMatrix up = expert_matrix(&layer->up, wide, expert->number);
        uint8_t *groups = quantized ? part->work->activated_groups + expert->groups_before : NULL;
        activate(part, &(Gated){&gate, &up, expert->first, groups}, &x, own);
    }
}

static void contract_experts(const Part *part, const Layer *layer) {
    const int64_t wide = part->a->feed_forward, hidden = part->a->hidden;
    const Workspace *work = part->work;
    for (int32_t i = 0; i < part->routing->count; i++) {
        const ChosenExpert *expert = &part->routing->experts[i];
        const Share own = expert_share(part, expert, hidden / TILE_ROWS);
        const PackedMatrix down = expert_matrix(&layer->down, hidden, expert->number);
        const Activations x = {expert->count, work->activated + expert->first * wide, wide,
                               work->activated_groups + expert->groups_before};
        part->linear->multiply(&down, own.first, own.last, &x, work->expert_outputs + expert->first * hidden, hidden);
    }
}

/* A share of the hidden dimensions of all nodes. */
static void add_experts(const Part *part) {
    const Architecture *a = part->a;
    const Share own = share(a->hidden / TILE_ROWS, part->thread, part->threads);
    const int64_t first = own.first * TILE_ROWS, length = own.last * TILE_ROWS - first;
    for (int i = 0; i < part->count; i++) {
        float *sum = part->work->contracted + (int64_t)i * a->hidden + first;
        memset(sum, 0, (size_t)length * sizeof *sum);
        for (int32_t k = i * a->experts_used; k < (i + 1) * a->experts_used; k++) {
            float *output = part->work->expert_outputs + (int64_t)part->routing->places[k] * a->hidden + first;
            part->vector->scale(output, part->routing->shares[k], length);
            part->vector->add(sum, output, length);
        }
    }
}

void run_experts(const Part *part, const Layer *layer) {
    Pool *pool = part->model->pool;
    const Activations x =
        columns(part, part->normed, part->a->hidden, part->count, format_is_quantized(layer->router.format));
    const Product logits = {&layer->router, part->work->router_logits};
    multiply_share(part, &x, &logits, 1);
    pool_barrier(pool, part->thread);
    route(part);
    activate_experts(part, layer);
    pool_barrier(pool, part->thread);
    contract_experts(part, layer);
    pool_barrier(pool, part->thread);
    add_experts(part);
}
