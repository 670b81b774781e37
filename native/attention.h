/* What attention.c does for a pass, each thread its share. */
#ifndef DRAFTREE_ATTENTION_H
#define DRAFTREE_ATTENTION_H

#include "part.h"

/* Cosines and sines of the nodes' positions, a share of the nodes by each thread. */
void compute_rotations(const Part *part);

/* Norms of queries and keys over all heads, a share of the nodes by each thread. */
void norm_attention_heads(const Part *part, const Layer *layer);

/* Bias, norm and rotation of queries and keys; keys and values go to the cache. One thread writes a key head: its new
 * cells share cache lines. */
void prepare_attention_heads(const Part *part, const Layer *layer);

/* The attended values of all queries; threads share each query, or each takes some. */
void attend(const Part *part, const Layer *layer);

#endif
