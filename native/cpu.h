/* Which instruction sets this CPU and its operating system allow, and the kernels for each. */
#ifndef DRAFTREE_CPU_H
#define DRAFTREE_CPU_H

#include "linear.h"
#include "vector.h"

/* An instruction set, from the portable one up. */
typedef struct {
    const char *name;
    const LinearKernels *linear;
    const VectorKernels *vector;
} Tier;

/* The best tier that this CPU runs, or the one that is named; NULL: there is none of that name, or the CPU lacks it. */
const Tier *find_tier(const char *name);

/* Tier `index` of those that this CPU runs, the portable one first; NULL past the last. */
const Tier *tier_at(int index);

#endif
