/* The C interface of draftree's native engine: what Python calls (draftree_drafts.h is the rest of it).
 *
 * The caller allocates all output, and C keeps no pointer of the caller's. Every function returns 0 or an error code; a
 * call that fails changes nothing, but a pass that finds no memory ends the scores of the one before. One thread at a
 * time calls into a model; its pool shares the work of a call. Models that share a pool may be called from different
 * threads.
 */
#ifndef DRAFTREE_H
#define DRAFTREE_H

#include <stdint.h>

#pragma GCC visibility push(default) /* all else is hidden */

enum {
    DRAFTREE_OK = 0,
    DRAFTREE_BAD_ARGUMENT = -1, /* a number is out of its range */
    DRAFTREE_BAD_FILE = -2,     /* the file cannot be read, or is not what the description says */
    DRAFTREE_NO_MEMORY = -3,
    DRAFTREE_CONTEXT_FULL = -4, /* a node would lie beyond the context */
    DRAFTREE_BAD_ROW = -5,      /* no such row */
    DRAFTREE_BAD_TREE = -6,     /* a parent does not come before its child, or the nodes kept are no path */
    DRAFTREE_BAD_TOKEN = -7,
    DRAFTREE_NO_TIER = -8,    /* the CPU lacks the instruction set */
    DRAFTREE_NO_STATES = -9,  /* the row keeps no such hidden states */
    DRAFTREE_TOO_LARGE = -10, /* the weights take more memory than they may */
};

typedef struct Model Model;

/* A tensor in the file; format -1: the model has none. A vector has one row. */
typedef struct {
    int64_t offset; /* of its first byte, from the beginning of the first file on through all of them */
    int32_t format; /* formats.h */
    int32_t rows;
    int32_t columns;
} TensorPlace;

/* Tensors of a layer, in this order. Formats may differ between them. */
enum {
    ATTENTION_NORM, /* of what a block reads; an architecture may lack it, as the feed-forward block's */
    QUERY,
    KEY,
    VALUE,
    QUERY_BIAS,
    KEY_BIAS,
    VALUE_BIAS,
    QUERY_NORM, /* RMS norm, over what query_key_norm says */
    KEY_NORM,
    ATTENTION_OUTPUT,
    ATTENTION_POST_NORM, /* of what attention adds to the residual stream */
    FEED_FORWARD_NORM,
    GATE,
    UP,
    DOWN,
    FEED_FORWARD_POST_NORM,
    ATTENTION_OUTPUT_BIAS,
    DELTA_INPUT,       /* of a recurrent layer, which has no attention: queries, keys and values of a gated delta net */
    DELTA_GATE,        /* of what it gives */
    DELTA_DECAY,       /* decay = exp(speed x softplus(DELTA_DECAY x + time)) */
    DELTA_RATE,        /* rate = logistic(DELTA_RATE x) */
    DELTA_CONVOLUTION, /* [channels][4], the token's own input last */
    DELTA_TIME,
    DELTA_SPEED, /* below 0 */
    DELTA_NORM,
    DELTA_OUTPUT,
    ROUTER, /* of a mixture of experts: GATE, UP and DOWN are those of all experts, one below the other */
    LAYER_TENSORS,
};

enum {
    EMBEDDING,
    OUTPUT_NORM,
    OUTPUT, /* may be the place of EMBEDDING: tied */
    MODEL_TENSORS,
};

/* Tensors that draft heads alone have. One may be missing unless the head's kind needs it. */
enum {
    INPUT, /* EAGLE-1: [embedding; state] -> what the first layer reads; EAGLE-3: hidden states -> state */
    INPUT_BIAS,
    FEATURE_NORM,   /* EAGLE-3: of the target's hidden states before INPUT: one vector for all of them side by side */
    EMBEDDING_NORM, /* of [embedding; state] each half: EAGLE-3 has both norms, EAGLE-1 may have either */
    STATE_NORM,
    DRAFT_HEAD_TENSORS,
};

enum { ACTIVATION_SILU = 0, ACTIVATION_GELU_TANH = 1 };

/* What norms of queries and keys are over: each head before the rotation, each head after it, all heads together before
 * it. */
enum { NORM_OF_HEADS = 0, NORM_OF_ROTATED_HEADS = 1, NORM_OF_ALL_HEADS = 2 };

/* What a decoder layer is, in data. */
typedef struct {
    int32_t vocabulary;
    int32_t hidden;
    int32_t layers;
    int32_t query_heads;
    int32_t key_heads;    /* divides query_heads */
    int32_t head_size;    /* a multiple of 16, at most 256 */
    int32_t feed_forward; /* a multiple of 32; of an expert */
    int32_t context;      /* most tokens of a row */
    int32_t rope_size;    /* dimensions of a head that are rotated: even, at most head_size */
    int32_t rope_halves;  /* 1: pairs (i, i + rope_size / 2); 0: pairs (2 i, 2 i + 1) */
    int32_t rope_tables;  /* rows of rope_frequencies, 1 or 2 */
    int32_t activation;   /* of the gate: SiLU or GELU (tanh) */
    int32_t query_key_norm;
    int32_t temperature_length; /* positions after which the temperature of attention grows; 0: it never does */
    int32_t gated_attention;    /* 1: QUERY gives for each head its query, then the gate of what it attends to */
    int32_t delta_key_heads,
        delta_value_heads;                    /* value head v has key head v % delta_key_heads; 0: none is recurrent */
    int32_t delta_key_size, delta_value_size; /* of a head: multiples of 16, at most 256 */
    int32_t experts, experts_used;            /* of a layer; of those a token's; 0: no layer has any */
    float norm_epsilon;
    float embedding_scale;
    float attention_scale;    /* of the products of queries and keys */
    float rope_magnitude;     /* of the rotated dimensions (YaRN), else 1 */
    float second_magnitude;   /* of those by the second of the rope tables */
    float residual_scale;     /* of what a block adds to the residual stream */
    float logit_scale;        /* of what the output layer reads */
    float temperature_growth; /* g: attention_scale x (1 + g log(1 + floor(position / temperature_length))) */
} Architecture;

enum { MOST_FEATURES = 8 };

/* What a draft head is, beside an Architecture of its layers, whose vocabulary is that of its output layer.
 *
 * A node's state s is made of hidden states of the target at the token before it, or what the last layer gave at its
 * parent. EAGLE-3: s = INPUT of these hidden states; the first layer's queries, keys and values read [norm(e);
 * norm(s)] for the token embedding e, and its residual is s. EAGLE-1: s is the hidden state, and the first layer reads
 * INPUT [e; s], or of these normed (as a draft layer of Qwen3.5, MTP). */
typedef struct {
    int32_t fuses_states;          /* 1: EAGLE-3 */
    int32_t features;              /* hidden states of the target that it reads */
    int32_t places[MOST_FEATURES]; /* where each is among those that the target tracks */
    int32_t norms_features_apart;  /* FEATURE_NORM norms each of them by itself */
    int32_t norms_residual;        /* the first layer's residual is norm(s) */
    int32_t norms_state;           /* the next state is what the output layer reads, after the last norm */
    int32_t learns;                /* its output layer is rows of the target's and grows by them (draftree_learn) */
} DraftHeadArchitecture;

/* Version of this interface and of the bits that passes compute: part of a cost profile's identity. */
#define DRAFTREE_VERSION "14"
const char *draftree_version(void);

/* Name of an instruction set that this CPU runs, the portable one first; NULL behind the last. */
const char *draftree_tier_name(int32_t number);

/* Read and pack the weights of a model. files: descriptors of its files, on Windows their handles, which are read
 * before the call returns; sizes: their bytes.
 *
 * rope_frequencies: [rope_tables][rope_size / 2] radians a position, scaling included.
 * layer_rope, layer_window: [layers]; the row of rope_frequencies, and how many last tokens a layer attends to (0:
 * all). layer_tensors: [layers][LAYER_TENSORS]; model_tensors: [MODEL_TENSORS]. tier: the name of an instruction set;
 * NULL or "": the best that there is. most_bytes: that packed weights may take; what they take goes to weight_bytes
 * before anything is read. progress: from 0 to 1 while weights are read, by the calling thread; may be NULL. It returns
 * 0 to stop, and the load fails. message: what is wrong with a file, for people.
 */
int draftree_load(const int64_t *files, const int64_t *sizes, int32_t file_count, const Architecture *architecture,
                  const double *rope_frequencies, const int32_t *layer_rope, const int32_t *layer_window,
                  const TensorPlace *layer_tensors, const TensorPlace *model_tensors, int threads, const char *tier,
                  int64_t most_bytes, int (*progress)(double), int64_t *weight_bytes, char message[256], Model **model);
void draftree_free(Model *model);

/* Run a model's passes on the threads of another one, which has as many; its own end. Both may be freed in any order.
 */
int draftree_share_threads(Model *model, const Model *other);

/* Load a draft head for a target. It uses the target's threads and instruction set, and the target's embeddings if it
 * has none: no pass of a head may come after its target is freed. weights: the bytes that its tensors lie in, read
 * before the call returns. tokens: [vocabulary], the target's id of each output. Of model_tensors EAGLE-1 may lack
 * OUTPUT_NORM, a head as wide as its target EMBEDDING, and one that learns OUTPUT. The rest as draftree_load. */
int draftree_load_draft_head(const Model *target, const uint8_t *weights, int64_t size,
                             const Architecture *architecture, const DraftHeadArchitecture *draft_head,
                             const double *rope_frequencies, const TensorPlace *layer_tensors,
                             const TensorPlace *model_tensors, const TensorPlace *draft_head_tensors,
                             const int32_t *tokens, char message[256], Model **model);

/* [count][hidden] rows of the EMBEDDING or the OUTPUT of a model: the weights of the file, not scaled. */
int draftree_rows(const Model *model, int32_t tensor, const int32_t *tokens, int32_t count, float *rows);

/* The tier in use; bytes that the cells of the open rows take now; bytes of a new token's. */
const char *draftree_tier(const Model *model);
int64_t draftree_cache_bytes(const Model *model);
int64_t draftree_token_bytes(const Model *model);

/* Rows: token sequences in the cache. A fork shares the cells of the prefix until one of the two writes there. */
int draftree_open(Model *model, int32_t *row);
int draftree_fork(Model *model, int32_t row, int32_t length, int32_t *fork);
int draftree_close(Model *model, int32_t row);

/* Append uncommitted nodes to rows, in one pass.
 *
 * rows: [row_count], each once; counts: [row_count] nodes of each, N in all.
 * tokens, parents: [N], a row's nodes together. A parent is a number among the row's uncommitted nodes in the order of
 * their arrival, these ones included; -1 is the last committed token.
 * wanted: [N]; the k-th node with a nonzero entry has its scores in slot k until the next extend.
 * Of a draft head, else NULL: sources: [N] where the state before each node is: cell c of the target's row, or one of:
 * LAST_STATE what the draft head predicted at its parent, which came with an earlier call; NO_STATE zeros. target_rows:
 * [row_count]; looked at where a source is a cell.
 */
enum { LAST_STATE = -1, NO_STATE = -2 };
int draftree_extend(Model *model, int32_t row_count, const int32_t *rows, const int32_t *counts, const int32_t *tokens,
                    const int32_t *parents, const uint8_t *wanted, const int32_t *target_rows, const int32_t *sources);

/* Let a row of a head score the tokens that are committed to it next, beside the output layer's. Scores of its nodes
 * are over [the output layer's; those learned, in their order]; a fork keeps those that are among its tokens. */
int draftree_learn(Model *draft_head, int32_t row, const int32_t *tokens, int32_t count);

/* The tokens that a head's row scores: how many (below 0: an error code), and which. */
int32_t draftree_output_count(const Model *draft_head, int32_t row);
int draftree_output_tokens(const Model *draft_head, int32_t row, int32_t *tokens);

/* Keep the first `length` committed tokens of a row; drop those behind them, and its nodes. */
int draftree_cut(Model *model, int32_t row, int32_t length);

/* Keep uncommitted nodes, a path from the last committed token down; drop all others. */
int draftree_commit(Model *model, int32_t row, const int32_t *path, int32_t count);

/* Keep uncommitted nodes, ascending and closed under parents; commit the first `trunk` of them, a path that all the
 * others descend from. The i-th of the others is node i from now on. */
int draftree_prune(Model *model, int32_t row, const int32_t *keep, int32_t count, int32_t trunk);

/* Which hidden states the cells of rows keep that are opened from now on: layer k in 0..layers is what decoder layer k
 * reads (k = layers: what the last one gives), -1 the state after the final norm. A list begins with the one before it.
 * states: [count][layers x hidden] of cells first.. of a row: its committed tokens, then its nodes. */
int draftree_track(Model *model, const int32_t *layers, int32_t count);
int draftree_states(const Model *model, int32_t row, int32_t first, int32_t count, float *states);

/* Edits of logits, by entry of `slots` (not by slot): (1) changes: logit * positive if logit > 0, else logit *
 * negative, then + addend; (2) the mask: tokens whose bit is 0 are -inf; a mask that allows nothing is left out. */
typedef struct {
    const int32_t *mask_of;       /* [w] number of a mask, -1: none; NULL: nobody has one */
    const uint32_t *masks;        /* [masks][ceil(vocabulary / 32)], bit t % 32 of word t / 32 */
    const int32_t *change_starts; /* [w + 1] into the lists below; NULL: nobody has changes */
    const int32_t *tokens;
    const float *positive;
    const float *negative;
    const float *addend;
} Edits;

/* How a token is drawn: argmax of warped logits + Gumbel noise, which is a function of (key, token). Temperature 0: the
 * argmax. Warping in this order: temperature, top-k (0: all), top-p, min-p. */
typedef struct {
    float temperature;
    int32_t top_k;
    float top_p;
    float min_p;
} Warping;

/* What slots of the last extend hold; of equal logits the first wins. A draft head has logits of the tokens that the
 * slot's row scores, in the order of draftree_output_tokens: masks and results name tokens of the target, and changes
 * and draws are errors. */
int draftree_argmax(Model *model, int32_t count, const int32_t *slots, const Edits *edits, int32_t *tokens);
/* The k largest logits, at most MOST_TOP: with warpings the warped ones, with keys too temperature x (warped logit +
 * noise); at temperature 0 the logits. */
enum { MOST_TOP = 1024 };
int draftree_top(Model *model, int32_t count, const int32_t *slots, int32_t k, const Edits *edits,
                 const Warping *warpings, const uint64_t *keys, int32_t *tokens, float *log_probabilities,
                 float *entropies);
int draftree_log_probabilities(Model *model, int32_t count, const int32_t *slots, const int32_t *tokens,
                               float *log_probabilities);
int draftree_draw(Model *model, int32_t count, const int32_t *slots, const uint64_t *keys, const Warping *warpings,
                  const Edits *edits, int32_t *tokens);
int draftree_logits(const Model *model, int32_t slot, int32_t count, float *logits); /* [count], -inf past the last */

/* The committed tokens of a row; below 0: an error code. */
int32_t draftree_length(const Model *model, int32_t row);

#pragma GCC visibility pop

#endif
