#define _GNU_SOURCE
#include "platform.h"

#ifdef _WIN32
#include <windows.h>
#else
#include <errno.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
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

/* Some of the bytes; 0: the file has ended, -1: an error. */
static int64_t read_some(int64_t file, uint8_t *target, size_t bytes, int64_t offset) {
    OVERLAPPED at = {.Offset = (DWORD)offset, .OffsetHigh = (DWORD)(offset >> 32)};
    DWORD found = 0;
    const DWORD most = bytes < 1u << 30 ? (DWORD)bytes : 1u << 30;
    return ReadFile((HANDLE)(intptr_t)file, target, most, &found, &at) ? (int64_t)found : -1;
}

int64_t nanoseconds(void) {
    LARGE_INTEGER now, second;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&second);
    return (int64_t)((double)now.QuadPart * 1e9 / (double)second.QuadPart);
}

int64_t process_number(void) { return (int64_t)GetCurrentProcessId(); }

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

/* Some of the bytes; 0: the file has ended, -1: an error. */
static int64_t read_some(int64_t file, uint8_t *target, size_t bytes, int64_t offset) {
    ssize_t found;
    do
        found = pread((int)file, target, bytes, (off_t)offset);
    while (found < 0 && errno == EINTR);
    return (int64_t)found;
}

int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t process_number(void) { return (int64_t)getpid(); }

void yield_thread(void) { sched_yield(); }

#endif

int read_file(int64_t file, uint8_t *target, size_t bytes, int64_t offset) {
    while (bytes) {
        const int64_t found = read_some(file, target, bytes, offset);
        if (found <= 0)
            return -1;
        target += found;
        bytes -= (size_t)found;
        offset += found;
    }
    return 0;
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
