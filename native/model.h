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
    MOST_TRACKED = 64,
    MOST_EXPERTS = 512,
};

/* The weights of a layer; a vector that the architecture lacks is NULL. */
typedef struct {
    PackedMatrix query, key, value, output;
    PackedMatrix gate, up, down;
    float *attention_norm, *attention_post_norm, *feed_forward_norm, *feed_forward_post_norm;
    float *query_bias, *key_bias, *value_bias;
    float *query_norm, *key_norm;
    float *output_bias;
    PackedMatrix delta_input, delta_gate, delta_decay, delta_rate, delta_output;
    float *delta_convolution;        /* [TAPS][channels] */
    float *delta_time, *delta_speed; /* [value heads] */
    float *delta_norm;
    PackedMatrix router;
    int place;  /* among the layers that attend, or among the recurrent ones */
    int rope;   /* row of the rope tables */
    int window; /* tokens that are attended to; 0: all */
} Layer;

static inline int is_recurrent(const Layer *layer) { return layer->delta_input.tiles != NULL; }
static inline int is_routed(const Layer *layer) { return layer->router.tiles != NULL; }

/* A node as the layers see it. */
typedef struct {
    Row *row;
    int32_t token;
    int32_t position;
    int32_t cell;
    float attention_scale; /* of its queries */
    int32_t visible;       /* cells 0 .. visible - 1 are all on its path */
    int32_t path_length;
    const int32_t *path;   /* and these */
    int32_t slot;          /* of its scores; -1: nobody wants them */
    const float *features; /* of draft heads: the target's hidden states at the token before; NULL: `state` counts */
    const float *state;    /* what the draft head predicted at its parent; NULL: zeros */
} PassNode;

/* Queries of one row and key head that share a reading of the cache: nodes x query heads, node by node. */
typedef struct {
    int32_t first_node;
    int32_t head;
    int32_t first_query; /* among the row's nodes x heads of the group */
    int32_t count;
    int64_t cost; /* of this item and all before it */
} AttentionItem;

/* Where a walk finds the inputs of a token: node i of the chunk: i; -1, -2, -3: so many tokens behind its first state;
 * from here down: those of a record. */
enum { RECORDED_INPUT = -1 - PAST };

/* A token of a walk: it makes the state on one level from that on another. */
typedef struct {
    int32_t node;     /* of the chunk; -1: it only leads to one */
    int32_t record;   /* of the row, which a node writes; -1: it has none */
    int32_t from, to; /* levels; to -1: no state is needed behind it */
    int32_t inputs[TAPS];
    State *kept; /* the state behind it is copied there; else NULL */
} Move;

/* A state of a row, and what of its nodes is computed from there (walks.c). */
typedef struct {
    const Row *row;
    const State *from;    /* NULL: zeros */
    int32_t first, count; /* of the moves */
} Walk;

typedef struct {
    Walk walks[2 * CHUNK];
    int32_t count;
    Move *moves;
    int32_t move_count;
    int64_t move_capacity;
    int32_t most_moves, levels; /* of a walk */
    int32_t *lists;             /* while walks are planned */
    int64_t list_capacity;
    float *scratch; /* [threads][scratch_stride] */
    int64_t scratch_stride, scratch_capacity;
} Walks;

/* An expert that nodes of a chunk have chosen. */
typedef struct {
    int32_t number;
    int32_t first, count; /* of its choices, in the order of experts, then of nodes */
    int64_t cost_before;  /* of a unit of work of each expert before it */
    size_t groups_before; /* bytes of their quantized activations */
} ChosenExpert;

/* Which experts the nodes of a chunk have chosen. */
typedef struct {
    int32_t *choices;      /* [CHUNK][experts_used], the largest weight first */
    float *shares;         /* [CHUNK][experts_used]: weights of what they give, whose sum is 1 */
    int32_t *places;       /* [CHUNK][experts_used] of the choices, in the order of experts */
    int32_t *nodes;        /* [CHUNK x experts_used] in this order */
    int32_t *next;         /* [experts] while they are put into it */
    ChosenExpert *experts; /* [experts], those that are chosen */
    int32_t count;
    int64_t cost; /* of a unit of work of each of them */
} Routing;

/* What a thread alone writes. */
typedef struct {
    float *residual; /* [CHUNK][hidden] */
    float *normed;   /* [CHUNK][hidden] */
    uint8_t *groups; /* quantized activations */
    float *inputs;   /* [CHUNK][2 hidden, or all features of a token]: of draft heads; [CHUNK][hidden]: of an expert */
    float *edited;   /* [most_logits]: edited logits */
    void *scratch;   /* [2][most_logits] numbers: candidates of a draw, then warped logits */
    Routing routing;
} ThreadSpace;

/* What a pass writes. */
typedef struct {
    ThreadSpace *own; /* [threads] */
    float *scores;    /* of QUERIES_TOGETHER queries of each thread, score_stride apart */
    float *rotation;  /* [ROPE_TABLES][CHUNK][rope_size]: cosines, then sines */
    float *query;     /* [CHUNK][query_heads x head_size]; with gates [CHUNK][query_heads][2 x head_size] */
    float *key;       /* [CHUNK][key_heads x head_size] */
    float *value;
    float *attended;                   /* [CHUNK][query_heads x head_size, or all values of a delta net] */
    float *delta_inputs;               /* [CHUNK][channels] */
    float *delta_gates;                /* [CHUNK][values] */
    float *delta_decays, *delta_rates; /* [CHUNK][value heads in whole tiles] */
    float *zeros;                      /* [channels] */
    Walks walks;
    float *projected; /* [CHUNK][hidden] */
    float *gate;      /* [CHUNK, of experts x experts_used][feed_forward] */
    float *up;
    float *activated;
    uint8_t *activated_groups;
    float *contracted;     /* [CHUNK][hidden] */
    float *router_logits;  /* [CHUNK][experts in whole tiles] */
    float *expert_outputs; /* [CHUNK x experts_used][hidden] */
    PassNode nodes[CHUNK];
    int32_t count; /* nodes of the chunk */
    int32_t *path_cells;
    int64_t path_capacity;
    AttentionItem *items;
    int32_t item_count;
    int split; /* few queries: threads share each of them */
    int64_t score_stride;
    int64_t score_capacity;
    size_t arena_bytes;
    uint8_t *arena;
} Workspace;

/* What a draft head has beside a model. */
typedef struct {
    DraftHeadArchitecture architecture;
    const Model *target;
    int32_t last_place; /* the last of the hidden states that it reads, among those that the target tracks */
    PackedMatrix input;
    float *input_bias, *feature_norm, *embedding_norm, *state_norm;
    int32_t *tokens; /* [vocabulary] of the output layer */
    uint8_t *known;  /* [tokens of the target] which are among them */
} DraftHead;

/* The outputs of a slot: [vocabulary], then those that its row has learned, from the next whole tile on. */
typedef struct {
    int32_t learned; /* how many these are */
    int32_t first;   /* where they begin in learned_tokens */
} Slot;

struct Model {
    Architecture architecture;
    DraftHead *draft_head;    /* NULL: it is none */
    double *rope_frequencies; /* [rope_tables][rope_size / 2] */
    const Tier *tier;
    Pool *pool;
    int64_t tokens;          /* rows of the embeddings */
    PackedMatrix embeddings; /* of a tied model its output layer's tiles, of heads that have none the target's */
    Layer *layers;
    float *output_norm;
    PackedMatrix output;
    uint8_t *weights; /* all tiles and vectors */
    size_t weight_bytes;
    Cache cache;
    Workspace work;

    int32_t tracked[MOST_TRACKED]; /* layers of the hidden states that cells keep, cache.tracked of them */

    int64_t logit_stride; /* the outputs in whole tiles, of heads those of the last extend */
    int64_t most_logits;  /* of a slot, in whole tiles */
    float *logits;        /* [slots][logit_stride] of the last extend */
    int64_t logit_capacity;
    int32_t slot_count;
    Slot *slots; /* of heads */
    int64_t slot_capacity;
    int32_t *learned_tokens;
    int64_t learned_capacity;
};

/* Prepare the memory that passes and scores need; 0 or an error code. */
int start_workspace(Model *model);
void free_workspace(Model *model);

/* The outputs in whole tiles, before those that rows have learned. */
static inline int64_t output_stride(const Model *model) { return tiles_of(model->architecture.vocabulary) * TILE_ROWS; }

/* Numbers of a token's queries, and of its keys, over all heads; of its queries with their gates, and of a head's. */
static inline int64_t query_size(const Architecture *a) { return (int64_t)a->query_heads * a->head_size; }
static inline int64_t key_size(const Architecture *a) { return (int64_t)a->key_heads * a->head_size; }
static inline int64_t gated_head_size(const Architecture *a) {
    return (int64_t)a->head_size * (1 + a->gated_attention);
}
static inline int64_t gated_query_size(const Architecture *a) { return a->query_heads * gated_head_size(a); }

/* Of a delta net: the values of a token, and the inputs of its convolution (queries and keys of key heads, values). */
static inline int64_t delta_values(const Architecture *a) {
    return (int64_t)a->delta_value_heads * a->delta_value_size;
}
static inline int64_t delta_channels(const Architecture *a) {
    return 2 * (int64_t)a->delta_key_heads * a->delta_key_size + delta_values(a);
}

/* Logits of a node's experts, in whole tiles. */
static inline int64_t router_stride(const Architecture *a) { return tiles_of(a->experts) * TILE_ROWS; }

/* What extend is called with (draftree.h). */
typedef struct {
    int32_t row_count;
    const int32_t *rows, *counts, *tokens, *parents;
    const uint8_t *wanted;
    const int32_t *target_rows, *sources; /* of draft heads */
} Pass;

/* draft_head.c: list what each slot of a pass scores; check that the states are there that a draft head's nodes read;
 * find that of node `at` of row b. */
int list_slots(Model *model, const Pass *pass, int64_t slots);
int check_sources(const Model *model, const Pass *pass);
void find_state(const Model *model, const Pass *pass, int32_t b, int32_t at, PassNode *node);

/* One chunk of a pass: work.nodes are filled in and their cells reserved. */
void run_chunk(Model *model);
/* Before that: where its nodes are, and which queries share a reading of the cache; how recurrent layers walk through
 * them. Both return 0 or an error code. */
int prepare_attention(Model *model);
int prepare_walks(Model *model);

#endif
