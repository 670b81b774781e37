/* What a pass needs beside linear layers, for vectors of float32. One written order of operations for all tiers. */
#ifndef DRAFTREE_VECTOR_H
#define DRAFTREE_VECTOR_H

#include <stdint.h>

typedef struct VectorKernels VectorKernels;

#endif
