#define PORTABLE /* on ARM too */
#include "vector_kernels.h"

const VectorKernels vector_base = VECTOR_KERNELS;
