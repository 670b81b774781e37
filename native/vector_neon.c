#define WIDTH 4
#include "vector_kernels.h"

const VectorKernels vector_neon = VECTOR_KERNELS;
