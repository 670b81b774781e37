/* Passes of recurrent models: what rows read in place, and what they must read again (states.h). */
#ifndef DRAFTREE_REREADING_H
#define DRAFTREE_REREADING_H

#include "model.h"

/* A pass, in front of whose nodes come those that its rows read again. */
typedef struct {
    Pass pass;
    int32_t *before; /* [rows] nodes of each row before the pass */
    int32_t *gaps; /* [rows] committed tokens that are read again, before all nodes; -1: the row reads nothing again */
    int32_t *tokens, *parents, *counts, *numbers; /* of such a pass, else NULL; numbers: scratch */
    uint8_t *wanted;
} Rereading;

/* Begin a pass, which is checked; 0, or DRAFTREE_NO_MEMORY: nothing has changed. Then rows that read again have lost
 * their nodes and the end of their tokens, until the pass has run: it ends with its error. */
int begin_rereading(const Model *model, const Pass *pass, Rereading *rereading);
void end_rereading(Model *model, Rereading *rereading, int error);

/* How many of the new nodes of a row, the first ones, are read in place: the beginning of a chain of which no state is
 * needed, neither for what hangs from it nor to go back a little. */
int32_t nodes_in_place(const Row *row, const int32_t *parents, int32_t count);

#endif
