/* Memory of drafts, which grows (buffer.c). */
#ifndef DRAFTREE_BUFFER_H
#define DRAFTREE_BUFFER_H

#include <stddef.h>
#include <stdint.h>

/* Memory that grows: zeroed where it is new, and kept from step to step. */
typedef struct {
    void *data;
    int64_t capacity; /* bytes */
} Buffer;

/* Make room for `count` entries of `size` bytes: 0 or an error code. */
int reserve(Buffer *buffer, int64_t count, size_t size);

#endif
