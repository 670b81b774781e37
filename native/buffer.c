#include "buffer.h"

#include <stdlib.h>
#include <string.h>

#include "draftree.h"

int reserve(Buffer *buffer, int64_t count, size_t size) {
    const int64_t bytes = count * (int64_t)size;
    if (bytes <= buffer->capacity)
        return DRAFTREE_OK;
    const int64_t larger = bytes + bytes / 2 + 64;
    char *data = realloc(buffer->data, (size_t)larger);
    if (!data)
        return DRAFTREE_NO_MEMORY;
    memset(data + buffer->capacity, 0, (size_t)(larger - buffer->capacity));
    buffer->data = data;
    buffer->capacity = larger;
    return DRAFTREE_OK;
}
