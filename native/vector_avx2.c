#define WIDTH 8
#include "vector_kernels.h"

const VectorKernels vector_avx2 = VECTOR_KERNELS;
