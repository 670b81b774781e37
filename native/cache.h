/* Keys and values of token sequences, in pages that rows share.
 *
 * A row is a list of pages of PAGE_CELLS tokens each. Cell c of a row holds its c-th token: the committed ones first,
 * then the uncommitted nodes in the order of their arrival. A fork shares the pages of its prefix; a page that two rows
 * hold is copied before either writes to it.
 *
 * Inside a page: for each layer, for each key head: keys, then values (vector.h draws both). Behind them, for each
 * cell: the hidden states that its row keeps, [tracked][state_size] float32.
 */
#ifndef DRAFTREE_CACHE_H
#define DRAFTREE_CACHE_H

#include <stdint.h>

#include "states.h"
#include "vector.h"

/* An uncommitted node. Its path is cells 0 .. run - 1 after the committed ones, and the rest of its ancestors. */
typedef struct {
    int32_t parent; /* -1: the last committed token */
    int32_t depth;  /* 0 for children of the last committed token */
    int32_t run;    /* ancestors, itself included, that came first and in order */
} Node;

/* A token that a row of a draft head scores beside those of the output layer. */
typedef struct {
    int32_t token;
    int32_t length; /* of the row when it was learned: shorter forks do without it */
} Learned;

typedef struct {
    int open;
    int32_t length;  /* committed tokens */
    int32_t count;   /* uncommitted nodes */
    int32_t tracked; /* hidden states of each cell: those that were tracked when the row was opened */
    int32_t node_capacity;
    Node *nodes;
    int32_t page_count;
    int32_t page_capacity;
    uint8_t **pages;
    Learned *learned;
    int32_t learned_count;
    int32_t learned_capacity;
    uint8_t *learned_tiles; /* their rows of the target's output layer, packed */
    RowStates states;
} Row;

typedef struct {
    int layers; /* that attend */
    int heads;  /* of keys */
    int head_size;
    int state_size;
    size_t learned_tile_bytes; /* of a tile of learned rows; 0: nothing is learned */
    int32_t tracked;           /* hidden states that rows keep which are opened now */
    size_t page_bytes;         /* of a new page, its header included */
    Row *rows;
    int32_t row_count;
    uint8_t **spare; /* pages that nobody holds, kept for the next row */
    int32_t spare_count;
    int64_t bytes;     /* of what rows hold: pages, states, records */
    StateSizes states; /* of recurrent layers */
} Cache;

void start_cache(Cache *cache, int layers, int heads, int head_size, int state_size);
void free_cache(Cache *cache);

/* Keep so many hidden states of the tokens of rows that are opened from now on; never fewer than before. */
void track_states(Cache *cache, int32_t tracked);

/* Bytes of a token: its keys and values, all layers and heads, and its hidden states. */
int64_t token_bytes(const Cache *cache);

/* An open row by its number; NULL: there is none. */
Row *find_row(const Cache *cache, int32_t row);

/* Both return 0 or an error code of draftree.h. */
/* Make room for `count` more nodes, in pages that the row alone holds. */
int reserve_nodes(Cache *cache, Row *row, int32_t count);
/* Make room for so many learned tokens. */
int reserve_learned(const Cache *cache, Row *row, int32_t count);

/* Keep a row's first `count` nodes, and give back the pages that the others needed. */
void drop_nodes(Cache *cache, Row *row, int32_t count);

/* Add a node to the row's list; the row has room for it. */
void append_node(Row *row, int32_t parent);

/* The cells of a node's ancestors behind its run, ascending, itself included; how many there are. */
int32_t path_cells(const Row *row, int32_t node, int32_t *cells);

/* The hidden states of a cell, [row->tracked][state_size]. */
float *cell_states(const Cache *cache, const Row *row, int32_t cell);

/* How the head of a layer finds its keys and values. */
KvHeadCache kv_head_cache(const Cache *cache, const Row *row, int layer, int head);

#endif
