#define _GNU_SOURCE
#include "platform.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int map_file(const char *path, MappedFile *file) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return -1;
    struct stat status;
    void *data = MAP_FAILED;
    if (!fstat(descriptor, &status) && S_ISREG(status.st_mode) && status.st_size > 0)
        data = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    close(descriptor);
    if (data == MAP_FAILED)
        return -1;
    file->data = data;
    file->size = (size_t)status.st_size;
    return 0;
}

void unmap_file(MappedFile *file) {
    if (file->data)
        munmap((void *)(uintptr_t)file->data, file->size);
    memset(file, 0, sizeof *file);
}

static size_t mapped_bytes(size_t bytes) {
    const size_t page = 4096;
    return (bytes + page) / page * page;
}

void *allocate(size_t bytes) {
    void *memory = mmap(NULL, mapped_bytes(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
#ifdef MADV_HUGEPAGE
    if (bytes >= (size_t)1 << 21)
        madvise(memory, mapped_bytes(bytes), MADV_HUGEPAGE);
#endif
    return memory;
}

void release(void *memory, size_t bytes) {
    if (memory)
        munmap(memory, mapped_bytes(bytes));
}

void *enlarged(void *memory, int64_t *capacity, int64_t wanted, size_t size) {
    if (memory && wanted <= *capacity)
        return memory;
    const int64_t larger = wanted + wanted / 4 + 1;
    void *grown = allocate((size_t)larger * size);
    if (grown) {
        release(memory, (size_t)*capacity * size);
        *capacity = larger;
    }
    return grown;
}

int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
