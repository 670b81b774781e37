#define _GNU_SOURCE
#include "platform.h"

#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#include <windows.h>
#else
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#endif

struct Thread {
    void (*run)(void *);
    void *argument;
#ifdef _WIN32
    HANDLE handle;
#else
    pthread_t handle;
#endif
};

struct Signal {
#ifdef _WIN32
    CRITICAL_SECTION lock;
    CONDITION_VARIABLE condition;
#else
    pthread_mutex_t lock;
    pthread_cond_t condition;
#endif
};

static Thread *new_thread(void (*run)(void *), void *argument) {
    Thread *thread = malloc(sizeof *thread);
    if (thread)
        *thread = (Thread){.run = run, .argument = argument};
    return thread;
}

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

static DWORD WINAPI enter_thread(LPVOID thread) {
    Thread *self = thread;
    self->run(self->argument);
    return 0;
}

Thread *start_thread(void (*run)(void *), void *argument) {
    Thread *thread = new_thread(run, argument);
    if (!thread)
        return NULL;
    thread->handle = CreateThread(NULL, 0, enter_thread, thread, 0, NULL);
    if (!thread->handle) {
        free(thread);
        return NULL;
    }
    return thread;
}

void join_thread(Thread *thread) {
    WaitForSingleObject(thread->handle, INFINITE);
    CloseHandle(thread->handle);
    free(thread);
}

Signal *new_signal(void) {
    Signal *signal = malloc(sizeof *signal);
    if (signal) {
        InitializeCriticalSection(&signal->lock);
        InitializeConditionVariable(&signal->condition);
    }
    return signal;
}

void free_signal(Signal *signal) {
    if (signal)
        DeleteCriticalSection(&signal->lock);
    free(signal);
}

void lock_signal(Signal *signal) { EnterCriticalSection(&signal->lock); }

void unlock_signal(Signal *signal) { LeaveCriticalSection(&signal->lock); }

void wait_signal(Signal *signal) { SleepConditionVariableCS(&signal->condition, &signal->lock, INFINITE); }

void wake_all(Signal *signal) { WakeAllConditionVariable(&signal->condition); }

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

static void *enter_thread(void *thread) {
    Thread *self = thread;
    self->run(self->argument);
    return NULL;
}

Thread *start_thread(void (*run)(void *), void *argument) {
    Thread *thread = new_thread(run, argument);
    if (!thread)
        return NULL;
    if (pthread_create(&thread->handle, NULL, enter_thread, thread)) {
        free(thread);
        return NULL;
    }
    return thread;
}

void join_thread(Thread *thread) {
    pthread_join(thread->handle, NULL);
    free(thread);
}

Signal *new_signal(void) {
    Signal *signal = malloc(sizeof *signal);
    if (signal) {
        pthread_mutex_init(&signal->lock, NULL);
        pthread_cond_init(&signal->condition, NULL);
    }
    return signal;
}

void free_signal(Signal *signal) {
    if (signal) {
        pthread_cond_destroy(&signal->condition);
        pthread_mutex_destroy(&signal->lock);
    }
    free(signal);
}

void lock_signal(Signal *signal) { pthread_mutex_lock(&signal->lock); }

void unlock_signal(Signal *signal) { pthread_mutex_unlock(&signal->lock); }

void wait_signal(Signal *signal) { pthread_cond_wait(&signal->condition, &signal->lock); }

void wake_all(Signal *signal) { pthread_cond_broadcast(&signal->condition); }

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
