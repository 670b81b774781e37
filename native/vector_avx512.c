#define WIDTH 16
#include "vector_kernels.h"

const VectorKernels vector_avx512 = VECTOR_KERNELS;
