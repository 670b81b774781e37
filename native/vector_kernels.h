/* The kernels of vector.h, written once; vector_<tier>.c includes this file, compiled for its instruction set. */
#include "formats.h"
#include "lanes.h"
#include "noise.h"
#include "states.h"
#include "vector.h"

#define NOINLINE __attribute__((noinline))

#if WIDTH == 16
enum { SCORE_QUERIES = 12, VALUE_QUERIES = 12 }; /* registers: 32 of 16 lanes */
#elif WIDTH == 8
enum { SCORE_QUERIES = 4, VALUE_QUERIES = 2 }; /* registers: 16 of 8 lanes */
#else
enum { SCORE_QUERIES = 4, VALUE_QUERIES = 3 };
#endif

enum { MOST_HEAD_SIZE = 256, SUM_BLOCK = 256, VALUES_AHEAD = 32 };

/* The sum of 16 lanes: i and i + 8, i and i + 4, i and i + 2, then the last two. */
ALWAYS_INLINE float reduce_add(const Lanes *sums) {
    float lanes[16];
    for (int part = 0; part < PARTS; part++)
        store(lanes + part * WIDTH, sums[part]);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] += lanes[i + width];
    return lanes[0];
}

/* The sum of x^2: number i is in lane i % 16. */
ALWAYS_INLINE float sum_of_squares(const float *x, int64_t length) {
    Lanes sums[PARTS];
    for (int part = 0; part < PARTS; part++)
        sums[part] = splat(0);
    for (int64_t i = 0; i < length; i += 16)
        for (int part = 0; part < PARTS; part++) {
            Lanes v = load(x + i + part * WIDTH);
            sums[part] = fma_lanes(v, v, sums[part]);
        }
    return reduce_add(sums);
}

static void rms_norm(const float *x, const float *weight, int64_t length, float epsilon, float *y) {
    Lanes factor = splat(1.0f / sqrtf(sum_of_squares(x, length) / (float)length + epsilon));
    for (int64_t i = 0; i < length; i += WIDTH)
        store(y + i, load(x + i) * factor * load(weight + i));
}

static void add(float *x, const float *y, int64_t length) {
    for (int64_t i = 0; i < length; i += WIDTH)
        store(x + i, load(x + i) + load(y + i));
}

static void scale(float *x, float factor, int64_t length) {
    for (int64_t i = 0; i < length; i += WIDTH)
        store(x + i, load(x + i) * splat(factor));
}

/* x / (1 + exp(-t)): x times the logistic function of t. */
ALWAYS_INLINE Lanes gated(Lanes x, Lanes t) { return x / (splat(1) + exponential(splat(0) - t)); }

static void silu_gate(const float *gate, const float *up, int64_t length, float *y) {
    for (int64_t i = 0; i < length; i += WIDTH) {
        Lanes x = load(gate + i);
        store(y + i, gated(x, x) * load(up + i));
    }
}

/* x / 2 (1 + tanh(t)) = x / (1 + exp(-2 t)), t = sqrt(2 / pi) (x + 0.044715 x^3). */
static void gelu_gate(const float *gate, const float *up, int64_t length, float *y) {
    for (int64_t i = 0; i < length; i += WIDTH) {
        Lanes x = load(gate + i);
        Lanes cubic = fma_lanes(x * x * x, splat(0.044715f), x);
        store(y + i, gated(x, cubic * splat(1.5957691216f)) * load(up + i));
    }
}

static void logistic_gate(const float *gate, float *x, int64_t length) {
    for (int64_t i = 0; i < length; i += WIDTH)
        store(x + i, gated(load(x + i), load(gate + i)));
}

#include "delta_kernels.h"

/* A block of keys, and the value of a cell. */
ALWAYS_INLINE uint16_t *key_block(const KvHeadCache *cache, int block) {
    const size_t in_page = PAGE_CELLS / BLOCK_CELLS, number = (size_t)block % in_page;
    uint8_t *keys = cache->pages[(size_t)block / in_page] + cache->keys;
    return (uint16_t *)(void *)keys + number * (size_t)cache->head_size * BLOCK_CELLS;
}

ALWAYS_INLINE uint16_t *value_of(const KvHeadCache *cache, int cell) {
    uint8_t *values = cache->pages[cell / PAGE_CELLS] + cache->values;
    return (uint16_t *)(void *)values + (size_t)cell % PAGE_CELLS * (size_t)cache->head_size;
}

static void store_cell(const KvHeadCache *cache, int cell, const float *key, const float *value) {
    uint16_t halves[MOST_HEAD_SIZE], *values = value_of(cache, cell);
    for (int i = 0; i < cache->head_size; i += WIDTH) {
        store_fp16(halves + i, load(key + i));
        store_fp16(values + i, load(value + i));
    }
    uint16_t *keys = key_block(cache, cell / BLOCK_CELLS) + cell % BLOCK_CELLS;
    for (int i = 0; i < cache->head_size; i++)
        keys[(size_t)i * BLOCK_CELLS] = halves[i];
}

/* VECTORS vectors of keys, from block `block` on, for COUNT queries: COUNT x VECTORS sums stay in registers, and one
 * broadcast serves VECTORS products. The same place of the next page is fetched meanwhile. */
ALWAYS_INLINE void score_blocks(const int COUNT, const int VECTORS, const KvHeadCache *cache, const Query *queries,
                                int block, float *const *scores, int64_t at) {
    const int size = cache->head_size, in_page = PAGE_CELLS / BLOCK_CELLS;
    const size_t bytes = VECTORS * WIDTH * sizeof(uint16_t), block_size = (size_t)size * BLOCK_CELLS;
    const uint16_t *keys = key_block(cache, block);
    const int next = block / in_page + 1 < cache->page_count ? block + in_page : block;
    const uint8_t *ahead = (const uint8_t *)key_block(cache, next);
    Lanes sums[QUERIES_TOGETHER][16];
    UNROLL for (int r = 0; r < COUNT; r++) {
        UNROLL for (int j = 0; j < VECTORS; j++)
            sums[r][j] = splat(0);
    }
    for (int d = 0; d < size; d++) {
        UNROLL for (size_t byte = 0; byte < bytes; byte += 64)
            __builtin_prefetch(ahead + (size_t)d * bytes + byte);
        Lanes key[16];
        UNROLL for (int j = 0; j < VECTORS; j++)
            key[j] = load_fp16(keys + (size_t)(j * WIDTH / 16) * block_size + (size_t)d * 16 + j * WIDTH % 16);
        UNROLL for (int r = 0; r < COUNT; r++) {
            Lanes q = splat(queries[r].query[d]);
            UNROLL for (int j = 0; j < VECTORS; j++)
                sums[r][j] = fma_lanes(q, key[j], sums[r][j]);
        }
    }
    UNROLL for (int r = 0; r < COUNT; r++) {
        UNROLL for (int j = 0; j < VECTORS; j++)
            store(scores[r] + at + j * WIDTH, sums[r][j]);
    }
}

/* All blocks for COUNT queries: several at once inside a page, the rest one by one. */
ALWAYS_INLINE void score_queries(const int COUNT, const KvHeadCache *cache, const Query *queries, int first, int last,
                                 float *const *scores) {
    const int VECTORS = WIDTH == 16 ? (COUNT <= 6 ? 4 : 2) : WIDTH == 8 ? (COUNT <= 2 ? 4 : 2) : PARTS;
    const int step = VECTORS * WIDTH / BLOCK_CELLS;
    for (int block = first; block < last;) {
        const int64_t at = (int64_t)(block - first) * BLOCK_CELLS;
        if (step > 1 && block % step == 0 && block + step <= last) {
            score_blocks(COUNT, VECTORS, cache, queries, block, scores, at);
            block += step;
        } else {
            score_blocks(COUNT, PARTS, cache, queries, block, scores, at);
            block++;
        }
    }
}

#define TRY_COUNT(N, MOST, CALL)                                                                                       \
    if (N <= MOST && count - r >= N) {                                                                                 \
        CALL;                                                                                                          \
        r += N;                                                                                                        \
        continue;                                                                                                      \
    }

/* As many queries at once as registers hold, then the rest. */
static NOINLINE void score(const KvHeadCache *cache, int count, const Query *queries, int first_block, int last_block,
                           float *const *scores) {
    for (int r = 0; r < count;) {
#define SCORE(N) TRY_COUNT(N, SCORE_QUERIES, score_queries(N, cache, queries + r, first_block, last_block, scores + r))
#if WIDTH == 16
        SCORE(12)
        SCORE(9)
        SCORE(6)
#endif
        SCORE(4)
        SCORE(3)
        SCORE(2)
        SCORE(1)
#undef SCORE
    }
}

static NOINLINE void softmax(const Query *query) {
    float *weights = query->weights;
    const int seen = query->visible - query->first, count = seen + query->path_length;
    for (int i = 0; i < query->path_length; i++)
        weights[seen + i] = weights[query->path[i] - query->first];
    const int padded = (count + 15) / 16 * 16;
    for (int i = count; i < padded; i++)
        weights[i] = -1e30f;
    Lanes most[PARTS];
    for (int part = 0; part < PARTS; part++)
        most[part] = load(weights + part * WIDTH);
    for (int i = 16; i < padded; i += 16)
        for (int part = 0; part < PARTS; part++)
            most[part] = max_lanes(most[part], load(weights + i + part * WIDTH));
    float lanes[16], largest;
    for (int part = 0; part < PARTS; part++)
        store(lanes + part * WIDTH, most[part]);
    largest = lanes[0];
    for (int i = 1; i < 16; i++)
        largest = lanes[i] > largest ? lanes[i] : largest;
    Lanes sums[PARTS], shift = splat(largest), factor = splat(query->scale);
    for (int part = 0; part < PARTS; part++)
        sums[part] = splat(0);
    for (int i = 0; i < padded; i += 16)
        for (int part = 0; part < PARTS; part++) {
            float *place = weights + i + part * WIDTH;
            store(place, exponential((load(place) - shift) * factor));
            if (i + 16 > count)
                for (int lane = 0; lane < WIDTH; lane++)
                    if (i + part * WIDTH + lane >= count)
                        place[lane] = 0;
            sums[part] += load(place);
        }
    Lanes inverse = splat(1.0f / reduce_add(sums));
    for (int i = 0; i < padded; i += WIDTH)
        store(weights + i, load(weights + i) * inverse);
}

/* Cells [from, to) of one query: sums += weight * value, VECTORS vectors from dimension d on. */
ALWAYS_INLINE void add_values(const int VECTORS, const KvHeadCache *cache, const float *weights, int from, int to,
                              int d, Lanes *sums) {
    for (int cell = from; cell < to; cell++) {
        const uint16_t *value = value_of(cache, cell) + d;
        const Lanes weight = splat(weights[cell - from]);
        UNROLL for (int j = 0; j < VECTORS; j++)
            sums[j] = fma_lanes(weight, load_fp16(value + j * WIDTH), sums[j]);
    }
}

/* Cells [from, to), which COUNT queries see: one reading of the values for all of them. */
ALWAYS_INLINE void add_shared_values(const int COUNT, const int VECTORS, const KvHeadCache *cache, const Query *queries,
                                     int from, int to, int d, Lanes (*sums)[4]) {
    const size_t size = (size_t)cache->head_size;
    const float *weights[QUERIES_TOGETHER];
    UNROLL for (int r = 0; r < COUNT; r++)
        weights[r] = queries[r].weights - queries[r].first;
    for (int cell = from; cell < to;) {
        const int page = cell / PAGE_CELLS, end = (page + 1) * PAGE_CELLS < to ? (page + 1) * PAGE_CELLS : to;
        const int next = page + 1 < cache->page_count ? (page + 1) * PAGE_CELLS : page * PAGE_CELLS;
        const uint16_t *following = value_of(cache, next) + d, *value = value_of(cache, cell) + d;
        for (; cell < end; cell++, value += size) {
            const int in_page = cell % PAGE_CELLS + VALUES_AHEAD;
            const uint16_t *ahead = in_page < PAGE_CELLS ? value + (size_t)VALUES_AHEAD * size
                                                         : following + (size_t)(in_page - PAGE_CELLS) * size;
            UNROLL for (int i = 0; i < VECTORS * WIDTH; i += 32)
                __builtin_prefetch(ahead + i);
            Lanes part[4];
            UNROLL for (int j = 0; j < VECTORS; j++)
                part[j] = load_fp16(value + j * WIDTH);
            UNROLL for (int r = 0; r < COUNT; r++) {
                Lanes weight = splat(weights[r][cell]);
                UNROLL for (int j = 0; j < VECTORS; j++)
                    sums[r][j] = fma_lanes(weight, part[j], sums[r][j]);
            }
        }
    }
}

/* Dimensions d .. d + VECTORS * WIDTH - 1 of COUNT outputs. Every query adds its cells in ascending order: those that
 * others do not see before the shared ones, the shared ones, the rest of what it sees, its path. */
ALWAYS_INLINE void sum_values(const int COUNT, const int VECTORS, const KvHeadCache *cache, const Query *queries,
                              int d) {
    Lanes sums[QUERIES_TOGETHER][4];
    int from = queries[0].first, to = queries[0].visible;
    UNROLL for (int r = 0; r < COUNT; r++) {
        from = queries[r].first > from ? queries[r].first : from;
        to = queries[r].visible < to ? queries[r].visible : to;
        UNROLL for (int j = 0; j < VECTORS; j++)
            sums[r][j] = splat(0);
    }
    to = to < from ? from : to;
    UNROLL for (int r = 0; r < COUNT; r++) {
        const Query *query = queries + r;
        const int own = from < query->visible ? from : query->visible;
        add_values(VECTORS, cache, query->weights, query->first, own, d, sums[r]);
    }
    add_shared_values(COUNT, VECTORS, cache, queries, from, to, d, sums);
    UNROLL for (int r = 0; r < COUNT; r++) {
        const Query *query = queries + r;
        const float *path_weights = query->weights + (query->visible - query->first);
        if (to < query->visible)
            add_values(VECTORS, cache, query->weights + (to - query->first), to, query->visible, d, sums[r]);
        for (int i = 0; i < query->path_length; i++)
            add_values(VECTORS, cache, path_weights + i, query->path[i], query->path[i] + 1, d, sums[r]);
        UNROLL for (int j = 0; j < VECTORS; j++)
            store(query->output + d + j * WIDTH, sums[r][j]);
    }
}

ALWAYS_INLINE void sum_dimensions(const int COUNT, const KvHeadCache *cache, const Query *queries, int first,
                                  int last) {
    const int wide = WIDTH == 16 ? (COUNT <= 6 ? 4 : 2) : 4;
    int d = first;
    for (; d + wide * WIDTH <= last; d += wide * WIDTH)
        sum_values(COUNT, wide, cache, queries, d);
    for (; d < last; d += WIDTH)
        sum_values(COUNT, 1, cache, queries, d);
}

static NOINLINE void values(const KvHeadCache *cache, int count, const Query *queries, int first, int last) {
    for (int r = 0; r < count;) {
#define SUM(N) TRY_COUNT(N, VALUE_QUERIES, sum_dimensions(N, cache, queries + r, first, last))
#if WIDTH == 16
        SUM(12)
        SUM(9)
        SUM(6)
        SUM(4)
#endif
        SUM(3)
        SUM(2)
        SUM(1)
#undef SUM
    }
}

static int64_t argmax(const float *x, int64_t length) {
    int64_t best = 0, i = 0;
    float most = x[0];
    for (; i + 64 <= length; i += 64) { /* most blocks hold nothing larger */
        Lanes block = load(x + i);
        for (int j = WIDTH; j < 64; j += WIDTH)
            block = max_lanes(block, load(x + i + j));
        float lanes[WIDTH], largest;
        store(lanes, block);
        largest = lanes[0];
        for (int lane = 1; lane < WIDTH; lane++)
            largest = lanes[lane] > largest ? lanes[lane] : largest;
        if (largest > most)
            for (int64_t j = i; j < i + 64; j++)
                if (x[j] > most) {
                    most = x[j];
                    best = j;
                }
    }
    for (; i < length; i++)
        if (x[i] > most) {
            most = x[i];
            best = i;
        }
    return best;
}

static void exponential_sums(const float *x, int64_t length, float shift, double *sum, double *weighted) {
    double total = 0, total_weighted = 0;
    for (int64_t block = 0; block < length; block += SUM_BLOCK) {
        const int64_t end = block + SUM_BLOCK < length ? block + SUM_BLOCK : length;
        Lanes sums[PARTS], weighted_sums[PARTS];
        for (int part = 0; part < PARTS; part++)
            sums[part] = weighted_sums[part] = splat(0);
        for (int64_t i = block; i < end; i += 16) {
            float rest[16];
            const float *some = x + i;
            if (i + 16 > end) { /* what lies past the end counts exp(-87), nothing */
                for (int lane = 0; lane < 16; lane++)
                    rest[lane] = i + lane < end ? x[i + lane] : -1e30f;
                some = rest;
            }
            for (int part = 0; part < PARTS; part++) {
                Lanes difference = max_lanes(load(some + part * WIDTH) - splat(shift), splat(-87.0f));
                Lanes e = exponential(difference);
                sums[part] += e;
                weighted_sums[part] = fma_lanes(difference, e, weighted_sums[part]);
            }
        }
        total += reduce_add(sums);
        total_weighted += reduce_add(weighted_sums);
    }
    *sum = total;
    *weighted = total_weighted;
}

enum { TOGETHER = 64 }; /* tokens whose numbers are computed side by side */

static int tokens_below(uint64_t key, int64_t first, int count, uint64_t limit, int32_t *tokens) {
    int found = 0;
    for (int start = 0; start < count; start += TOGETHER) {
        uint64_t numbers[TOGETHER];
        const int some = count - start < TOGETHER ? count - start : TOGETHER;
        int any = 0;
        for (int i = 0; i < TOGETHER; i++) {
            numbers[i] = uniform_bits(key, first + start + i);
            any |= numbers[i] < limit;
        }
        if (any)
            for (int i = 0; i < some; i++)
                if (numbers[i] < limit)
                    tokens[found++] = (int32_t)(first + start + i);
    }
    return found;
}

/* ln(x) of a positive number, within 2 units in the last place: of its power of two, and a polynomial (Cephes, logf).
 */
ALWAYS_INLINE float logarithm(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits -= 0x3f3504f3; /* sqrt(1/2): the rest is from there to sqrt(2) */
    const float power = (float)(bits >> 23);
    bits = (bits & 0x7fffff) + 0x3f3504f3;
    memcpy(&x, &bits, sizeof x);
    x -= 1;
    float p = 7.0376836292e-2f;
    p = p * x - 1.1514610310e-1f;
    p = p * x + 1.1676998740e-1f;
    p = p * x - 1.2420140846e-1f;
    p = p * x + 1.4249322787e-1f;
    p = p * x - 1.6668057665e-1f;
    p = p * x + 2.0000714765e-1f;
    p = p * x - 2.4999993993e-1f;
    p = p * x + 3.3333331174e-1f;
    p = p * x * x * x - 2.12194440e-4f * power - 0.5f * x * x;
    return x + p + 0.693359375f * power;
}

static void add_noise(uint64_t key, const int32_t *tokens, int count, float scale, float *x) {
    enum { SMALL = 1 << 22 }; /* of 2^31: so small a number needs all its bits */
    for (int start = 0; start < count; start += TOGETHER) {
        int32_t numbers[TOGETHER];
        float noise[TOGETHER];
        const int some = count - start < TOGETHER ? count - start : TOGETHER;
        int any = 0;
        for (int i = 0; i < TOGETHER; i++) {
            numbers[i] = (int32_t)(uniform_bits(key, tokens[start + (i < some ? i : 0)]) >> 21);
            any |= numbers[i] < SMALL;
        }
        for (int i = 0; i < TOGETHER; i++) {
            const float u = ((float)numbers[i] + 0.5f) * 0x1p-31f;
            const float rest = ((float)(INT32_MAX - numbers[i]) + 0.5f) * 0x1p-31f;
            /* -log1p(-u), of which the rounded rest would leave few digits where u is small (Kahan) */
            noise[i] = -logarithm(-logarithm(rest) * (u / (1 - rest)));
        }
        if (any)
            for (int i = 0; i < some; i++)
                if (numbers[i] < SMALL)
                    noise[i] = (float)gumbel_noise(key, tokens[start + i]);
        for (int i = 0; i < some; i++)
            x[start + i] = (x[start + i] + noise[i]) * scale;
    }
}

#define VECTOR_KERNELS                                                                                                 \
    {rms_norm,   add,   scale,   silu_gate, gelu_gate, logistic_gate,    convolve,     unit,     delta,                \
     store_cell, score, softmax, values,    argmax,    exponential_sums, tokens_below, add_noise}
