#define _GNU_SOURCE
#include "platform.h"

#ifdef _WIN32
#include <windows.h>
#else
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#endif

void pause_cpu(void) {
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#ifdef _WIN32

void *allocate(size_t bytes) { return VirtualAlloc(NULL, bytes ? bytes : 1, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE); }

void release(void *memory, size_t bytes) {
    (void)bytes;
    if (memory)
        VirtualFree(memory, 0, MEM_RELEASE);
}

int64_t nanoseconds(void) {
    LARGE_INTEGER now, second;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&second);
    return (int64_t)((double)now.QuadPart * 1e9 / (double)second.QuadPart);
}

void yield_thread(void) { SwitchToThread(); }

#else

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

int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void yield_thread(void) { sched_yield(); }

#endif

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
