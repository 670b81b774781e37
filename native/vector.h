/* What a pass needs beside linear layers: norms, gates, attention, sums over logits.
 *
 * Every function has one written order of operations, the same for all instruction sets: sums run in 16 lanes (element
 * i in lane i % 16), and lanes are added in the order of `reduce_add` (vector_kernels.h). Lengths are multiples of 16
 * unless said otherwise.
 */
#ifndef DRAFTREE_VECTOR_H
#define DRAFTREE_VECTOR_H

#include <stddef.h>
#include <stdint.h>

enum {
    PAGE_CELLS = 64,      /* tokens of a page of the cache */
    BLOCK_CELLS = 16,     /* tokens whose keys lie side by side */
    QUERIES_TOGETHER = 12 /* most queries that share one reading of keys and values */
};

/* Keys and values of one head of one layer, as a row sees them. In a page:
 *
 *   page + keys:   [PAGE_CELLS / 16][head_size][16] float16, the keys of 16 cells side by side
 *   page + values: [PAGE_CELLS][head_size] float16
 */
typedef struct {
    uint8_t *const *pages; /* cell c is in pages[c / PAGE_CELLS] */
    size_t keys;           /* where the head's keys begin in every page, in bytes */
    size_t values;
    int page_count;
    int head_size;
} KvHeadCache;

/* A query of one node and head. It attends to cells [first, visible), and then to those of `path`, ascending. */
typedef struct {
    const float *query; /* [head_size] */
    float *output;      /* [head_size] */
    float *weights;     /* scores, then weights of the cells; entry 0 is cell `first` */
    const int32_t *path;
    int path_length;
    int first;
    int visible;
    float scale; /* of the scores */
} Query;

/* What a token does to the state of a value head of a gated delta net, a matrix of a row for each dimension of keys. */
typedef struct {
    const float *key, *query; /* [size] */
    const float *value;       /* of all columns */
    float decay, rate;
    int size; /* a multiple of 16 */
} DeltaToken;

struct VectorKernels {
    /* y = x / sqrt(mean(x^2) + epsilon) * weight; y may be x. */
    void (*rms_norm)(const float *x, const float *weight, int64_t length, float epsilon, float *y);
    void (*add)(float *x, const float *y, int64_t length);
    void (*scale)(float *x, float factor, int64_t length);
    /* y = activation(gate) * up */
    void (*silu_gate)(const float *gate, const float *up, int64_t length, float *y);
    void (*gelu_gate)(const float *gate, const float *up, int64_t length, float *y);
    /* x = x times the logistic function of the gate */
    void (*logistic_gate)(const float *gate, float *x, int64_t length);

    /* y = silu of a convolution: the sum of inputs[tap] x taps[tap x stride], the oldest of the four first. */
    void (*convolve)(const float *const *inputs, const float *taps, int64_t stride, int64_t count, float *y);
    /* x = x / sqrt(sum(x^2) + 1e-6) x length */
    void (*unit)(float *x, float length, int64_t count);
    /* Columns [column, column + 16) of a state, [size][16], behind a token: to = decay x from + key (rate (value -
     * decay x key from)); output = query to. NULL: to is not kept, the token has no output. Sums run in four chains of
     * fused multiply-adds over the keys. */
    void (*delta)(const float *from, float *to, const DeltaToken *token, int64_t column, float *output);

    /* Write one cell of a head; `key` and `value` are [head_size]. */
    void (*store)(const KvHeadCache *cache, int cell, const float *key, const float *value);
    /* Products of queries and keys of blocks [first_block, last_block): cell c of query r goes to
     * scores[r][c - 16 * first_block]. Each is one chain of fused multiply-adds over the dimensions in order. */
    void (*scores)(const KvHeadCache *cache, int count, const Query *queries, int first_block, int last_block,
                   float *const *scores);
    /* Softmax of the scaled scores over the cells that a query sees; those of its path move behind the others.
     * Weights are normalised before values are summed. */
    void (*softmax)(const Query *query);
    /* Dimensions [first, last) of the outputs (a multiple of 16 apart): one chain of fused multiply-adds over the cells
     * in order. */
    void (*values)(const KvHeadCache *cache, int count, const Query *queries, int first, int last);

    /* Index of the first largest of `length` numbers, any count. */
    int64_t (*argmax)(const float *x, int64_t length);
    /* sum of exp(x - shift), and of (x - shift) exp(x - shift), in float64 over blocks of 256; any count. */
    void (*exponential_sums)(const float *x, int64_t length, float shift, double *sum, double *weighted);
    /* Of tokens first..first + count - 1 those whose uniform number (noise.h) is below `limit`; any count. */
    int (*tokens_below)(uint64_t key, int64_t first, int count, uint64_t limit, int32_t *tokens);
    /* x = (x + noise) * scale for these tokens, the noise within 1e-6; any count. */
    void (*add_noise)(uint64_t key, const int32_t *tokens, int count, float scale, float *x);
};

typedef struct VectorKernels VectorKernels;

extern const VectorKernels vector_base, vector_avx2, vector_avx512, vector_neon;

#endif
