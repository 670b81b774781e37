/* What the files of a pass share: a thread's own view of it, and products whose tiles threads share. */
#ifndef DRAFTREE_PART_H
#define DRAFTREE_PART_H

#include "model.h"

/* Part `thread` of `total` pieces of work. */
typedef struct {
    int64_t first, last;
} Share;

static inline Share share(int64_t total, int thread, int threads) {
    return (Share){total * thread / threads, total * (thread + 1) / threads};
}

/* A thread's own view of the pass. */
typedef struct {
    Model *model;
    Workspace *work;
    const Architecture *a;
    const LinearKernels *linear;
    const VectorKernels *vector;
    int thread, threads;
    int count;
    float *residual, *normed, *inputs;
    uint8_t *groups;
    Routing *routing;
} Part;

/* A product and where its outputs go, a column's in whole tiles. */
typedef struct {
    const PackedMatrix *matrix;
    float *y;
} Product;

/* Columns as a product reads them; quantized whole by this thread, into memory of its own. */
Activations columns(const Part *part, const float *values, int64_t stride, int count, int quantized);

/* This thread's share of the tiles of several products of the same columns. */
void multiply_share(const Part *part, const Activations *x, const Product *products, int count);

/* The first matrices of a feed-forward network, and where what they give lies. */
typedef struct {
    const PackedMatrix *gate, *up;
    int64_t column;  /* the first, of work.gate, up and activated */
    uint8_t *groups; /* of these columns quantized; NULL: the next matrix reads floats */
} Gated;

/* Activations of some groups of outputs: gates and ups of the same outputs, multiplied and quantized by this thread. */
void activate(const Part *part, const Gated *gated, const Activations *x, Share groups);

/* The embedding of node i, scaled. */
void embed_node(const Part *part, int i, float *embedding);

/* draft_head.c: the residual stream of a draft head, and in `inputs` what its first layer reads where that is twice as
 * wide.
 */
void read_states(const Part *part);

/* draft_head.c: logits of the tokens that the rows of wanted nodes have learned; their columns are the first of
 * `normed`. */
void score_learned(const Part *part, int first_slot);

#endif
