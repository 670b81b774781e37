/* A model in memory: what it is (Architecture), its packed weights, its cache, and the memory that passes work in. */
#ifndef DRAFTREE_MODEL_H
#define DRAFTREE_MODEL_H

#include "cache.h"
#include "cpu.h"
#include "draftree.h"
#include "formats.h"
#include "platform.h"
#include "pool.h"

enum {
    CHUNK = 128, /* nodes of a pass that are computed together: their activations fit the second cache */
    ROPE_TABLES = 2,
    LARGEST_PATH = 1 << 16,
};

/* A vector of floats, or NULL where the architecture has none. */
typedef struct {
    PackedMatrix query, key, value, output;
    PackedMatrix gate, up, down;
    float *attention_norm, *attention_post_norm, *feed_forward_norm, *feed_forward_post_norm;
    float *query_bias, *key_bias, *value_bias;
    float *query_norm, *key_norm;
    int rope;   /* row of the rope tables */
    int window; /* tokens that are attended to; 0: all */
} Layer;

/* A node as the layers see it. */
typedef struct {
    const Row *row;
    int32_t token;
    int32_t position;
    int32_t cell;
    int32_t visible; /* cells 0 .. visible - 1 are all on its path */
    int32_t path_length;
    const int32_t *path; /* and these */
    int32_t slot;        /* of its scores; -1: nobody wants them */
} PassNode;

/* Queries of one row and key head that share a reading of the cache: nodes x query heads, node by node. */
typedef struct {
    int32_t first_node;
    int32_t head;
    int32_t first_query; /* among the row's nodes x heads of the group */
    int32_t count;
    int64_t cost; /* of this item and all before it */
} AttentionItem;

/* What a pass writes. Those that end in [threads] are each thread's own. */
typedef struct {
    float **residual; /* [threads][CHUNK][hidden] */
    float **normed;   /* [threads][CHUNK][hidden] */
    uint8_t **groups; /* [threads] quantized activations */
    float **scores;   /* [threads] of QUERIES_TOGETHER queries */
    float *rotation;  /* [ROPE_TABLES][CHUNK][rope_size]: cosines, then sines */
    float *query;     /* [CHUNK][query_heads x head_size] */
    float *key;       /* [CHUNK][key_heads x head_size] */
    float *value;
    float *attended;  /* [CHUNK][query_heads x head_size] */
    float *projected; /* [CHUNK][hidden] */
    float *gate;      /* [CHUNK][feed_forward] */
    float *up;
    float *activated;
    uint8_t *activated_groups;
    float *contracted; /* [CHUNK][hidden] */
    PassNode nodes[CHUNK];
    int32_t count; /* nodes of the chunk */
    int32_t first; /* number of the chunk's first node in the pass */
    int32_t *path_cells;
    int64_t path_capacity;
    AttentionItem *items;
    int32_t item_count;
    int split; /* few queries: threads share each of them */
    int64_t score_stride;
    int64_t score_capacity; /* floats of each thread's scores */
    size_t arena_bytes;
    uint8_t *arena;
} Workspace;

struct Model {
    Architecture architecture;
    double *rope_frequencies; /* [rope_tables][rope_size / 2] */
    const Tier *tier;
    Pool *pool;
    MappedFile file;
    TensorPlace embedding;
    Layer *layers;
    float *output_norm;
    PackedMatrix output;
    uint8_t *weights; /* all tiles and vectors */
    size_t weight_bytes;
    Cache cache;
    Workspace work;

    int32_t tracked[64]; /* hidden states that are kept (draftree_track) */
    int32_t tracked_count;
    float *hidden; /* [nodes][tracked_count][hidden] of the last extend */
    int64_t hidden_capacity;
    int32_t node_count; /* of the last extend */

    int64_t logit_stride; /* the vocabulary in whole tiles */
    float *logits;        /* [slots][logit_stride] of the last extend */
    int64_t logit_capacity;
    int32_t slot_count;
    float **edited; /* [threads][2][logit_stride]: edited logits, and warped ones */
};

/* Prepare the memory that passes and scores need; 0 or an error code. */
int start_workspace(Model *model);
void free_workspace(Model *model);

/* One chunk of a pass: work.nodes are filled in and their cells reserved. */
void run_chunk(Model *model);
int prepare_attention(Model *model);

#endif
