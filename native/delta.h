/* Gated delta nets: how a pass walks the trees of rows from their states, and what a layer computes on the way. */
#ifndef DRAFTREE_DELTA_H
#define DRAFTREE_DELTA_H

#include "part.h"

/* The layer's inputs of all nodes (work.delta_inputs, gates, decays, rates) become what it gives, in work.attended:
 * each thread takes some walks and key heads. */
void walk_states(const Part *part, const Layer *layer);

#endif
