/* What differs between operating systems, threads (pool.c) apart: large memory, files, clocks. */
#ifndef DRAFTREE_PLATFORM_H
#define DRAFTREE_PLATFORM_H

#include <stddef.h>
#include <stdint.h>

/* Zeroed memory at a multiple of 64 bytes, in large pages where the system has them; NULL: there is none. */
void *allocate(size_t bytes);
void release(void *memory, size_t bytes);

/* Such memory for `wanted` entries of `size` bytes or more, whose old contents are not kept; NULL: there is none, and
 * the old memory stays. */
void *enlarged(void *memory, int64_t *capacity, int64_t wanted, size_t size);

/* Read from an open file, a descriptor or on Windows a handle, at an offset; 0, or -1: it cannot be read, or has ended.
 * Several threads may read from one file. */
int read_file(int64_t file, uint8_t *target, size_t bytes, int64_t offset);

int64_t nanoseconds(void);    /* of a clock that only goes on */
int64_t process_number(void); /* of this process: a copy of it that fork() has made has another */
void yield_thread(void);
void pause_cpu(void); /* inside a loop that waits for another thread */

#endif
