/* Mixtures of experts: a router chooses some of many feed-forward networks for each node. */
#ifndef DRAFTREE_EXPERTS_H
#define DRAFTREE_EXPERTS_H

#include "part.h"

/* What the chosen experts make of the normed columns, in work.contracted: this thread's share of it. */
void run_experts(const Part *part, const Layer *layer);

#endif
