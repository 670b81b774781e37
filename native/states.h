/* What recurrent layers keep of a row, beside its cells: states behind some of its tokens.
 *
 * No node has a state of its own. A row's state stands at or behind its last committed tokens; of these and of nodes it
 * keeps records, what a layer computes a state from: a pass replays the committed ones, and walks the tree from there.
 * A long chain is read in place instead: its first nodes keep no records, and the state behind them is `ahead`.
 *
 * Where a row is asked to go back to a place without a state, it goes back to the last one before it, and its next pass
 * reads the tokens from there on again. Such places are marked: the end of what was read in place, 64 tokens before
 * that of a prompt, of the last two prompts or pieces of them.
 */
#ifndef DRAFTREE_STATES_H
#define DRAFTREE_STATES_H

#include <stddef.h>
#include <stdint.h>

enum {
    TAPS = 4,          /* inputs of a convolution: of a token and of those before it */
    PAST = TAPS - 1,   /* of which a state keeps those of the last tokens */
    MOST_MARKS = 2,    /* states that a row keeps behind earlier tokens */
    RECORDED_END = 64, /* nodes at the end of a chain that keep records, however long it is */
};

/* Sizes of a model's recurrent layers. */
typedef struct {
    int layers;       /* 0: it has none */
    int64_t matrices; /* numbers of a layer's states: of all value heads [value size / 16][key size][16] */
    int64_t channels; /* inputs of a layer's convolution */
    int64_t heads;    /* of values */
    int64_t *bytes;   /* of states and records, for the cache's account */
} StateSizes;

/* A state of all recurrent layers, which rows share. In each layer: the matrices, then the inputs of the last PAST
 * tokens, the oldest first. */
typedef struct {
    int32_t references;
    int32_t length; /* tokens that it has read */
    float *numbers;
} State;

/* What a row has of all this. A record: in each layer the inputs of the convolution, then of each value head the decay
 * of its state, then of each the rate at which it learns. */
typedef struct {
    State *state;         /* NULL: behind no token */
    State *fresh;         /* where a pass writes that replays records on a state which others share; else NULL */
    State *ahead;         /* behind its first nodes, a chain without records; NULL: there is none */
    int32_t ahead_nodes;  /* which ahead has read */
    int32_t unrecorded;   /* which it has read when the pass ends */
    int32_t replayed;     /* committed tokens behind the state that have records: the first ones */
    int32_t first_record; /* of its nodes behind the unrecorded ones */
    int lost;             /* its nodes lack records: they are read again */
    State *marks[MOST_MARKS];
    int32_t mark_count;
    float *records;
    int64_t record_capacity;
    int32_t *tokens; /* of its cells */
    int32_t token_capacity;
} RowStates;

/* Numbers of a layer: of a state, and of a record. */
static inline int64_t state_numbers(const StateSizes *sizes) { return sizes->matrices + PAST * sizes->channels; }
static inline int64_t record_numbers(const StateSizes *sizes) { return sizes->channels + 2 * sizes->heads; }

/* Where a layer's numbers begin. */
static inline float *state_layer(const StateSizes *sizes, const State *state, int layer) {
    return state->numbers + layer * state_numbers(sizes);
}
static inline float *record_layer(const StateSizes *sizes, const RowStates *states, int32_t record, int layer) {
    return states->records + ((int64_t)record * sizes->layers + layer) * record_numbers(sizes);
}

/* Tokens that the row's state and the records behind it stand for. */
static inline int32_t replayable_length(const RowStates *states) {
    return (states->state ? states->state->length : 0) + states->replayed;
}

/* Make room for `count` nodes behind `nodes` others of a row, of which the first `in_place` are read in place; 0, or
 * DRAFTREE_NO_MEMORY. cells: that the row has then. */
int reserve_states(const StateSizes *sizes, RowStates *states, int32_t nodes, int32_t count, int32_t in_place,
                   int32_t cells);

/* What a pass has written: the records of committed tokens are replayed, `nodes` nodes are there. */
void settle_states(const StateSizes *sizes, RowStates *states, int32_t nodes);

/* Before a row of `length` committed tokens keeps nodes, ascending, and commits the first `trunk` of them. */
void keep_states(const StateSizes *sizes, RowStates *states, int32_t length, const int32_t *keep, int32_t count,
                 int32_t trunk);

/* A row has only its first `count` nodes left. */
void drop_node_states(const StateSizes *sizes, RowStates *states, int32_t count);

/* A row goes back to its first `length` tokens. */
void cut_states(const StateSizes *sizes, RowStates *states, int32_t length);

/* A new row begins as another; 0, or DRAFTREE_NO_MEMORY. */
int fork_states(const StateSizes *sizes, const RowStates *source, int32_t length, RowStates *copy);
void close_states(const StateSizes *sizes, RowStates *states);

#endif
