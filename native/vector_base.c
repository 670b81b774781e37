#define WIDTH 1
#include "vector_kernels.h"

const VectorKernels vector_base = VECTOR_KERNELS;
