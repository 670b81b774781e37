/* Files in memory, aligned memory, and waiting. */
#ifndef DRAFTREE_PLATFORM_H
#define DRAFTREE_PLATFORM_H

#include <stddef.h>
#include <stdint.h>

/* A file in memory, read-only. */
typedef struct {
    const uint8_t *data;
    size_t size;
} MappedFile;

int map_file(const char *path, MappedFile *file); /* 0, or -1: it cannot be read */
void unmap_file(MappedFile *file);

/* Zeroed memory at a multiple of 64 bytes, in large pages where the system has them; NULL: there is none. */
void *allocate(size_t bytes);
void release(void *memory, size_t bytes);

/* Such memory for `wanted` entries of `size` bytes or more, whose old contents are not kept; NULL: there is none, and
 * the old memory stays. */
void *enlarged(void *memory, int64_t *capacity, int64_t wanted, size_t size);

int64_t nanoseconds(void); /* of a clock that only goes on */
void pause_cpu(void);      /* inside a loop that waits for another thread */

#endif
