/* Reading weights: matrices are packed and vectors decoded as they come, by all threads of a pool.
 *
 * Files are read, not mapped: what is packed leaves no pages behind, and a file that is cut meanwhile is an error.
 */
#ifndef DRAFTREE_READ_H
#define DRAFTREE_READ_H

#include "draftree.h"
#include "pool.h"

/* Where weights lie: in files that are open for reading, one after the other, or in memory. */
typedef struct {
    const int64_t *files; /* platform.h; NULL: in memory */
    const int64_t *sizes;
    int32_t file_count;
    const uint8_t *memory;
} Stored;

/* A tensor, and where it goes: one of the two. */
typedef struct {
    const TensorPlace *place;
    const char *name;
    int layer; /* -1: the model's own */
    uint8_t *tiles;
    float *vector; /* [columns][rows] of a matrix, which has MOST_COLUMNS at most */
} Tensor;

enum { TENSOR_NAME = 64, MOST_COLUMNS = 16 };

/* What people call a tensor. */
void name_tensor(const Tensor *tensor, char name[TENSOR_NAME]);

/* The bytes from an offset on that lie in one file; 0: none. */
int64_t stored_bytes(const Stored *stored, int64_t offset);

/* Read tensors that lie inside of what is stored; 0, DRAFTREE_NO_MEMORY, or DRAFTREE_BAD_FILE with a message: they
 * cannot be read, hold numbers that are NaN or infinite, or `progress` (draftree_load) has returned 0. */
int read_tensors(const Stored *stored, const Tensor *tensors, int count, Pool *pool, int (*progress)(double),
                 char message[256]);

/* Write what is wrong with a file, and return DRAFTREE_BAD_FILE. */
int fail(char message[256], const char *format, ...);

#endif
