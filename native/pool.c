#include "pool.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "platform.h"

enum {
    /* A worker waits for the next task this many pauses (some 100 microseconds: a step's Python fits in), then sleeps.
     */
    PAUSES_BEFORE_SLEEP = 4000,
    /* At a barrier the others are on their way: only a CPU that another process holds makes the wait long. */
    PAUSES_BEFORE_YIELD = 2000,
    CACHE_LINE = 64,
};

/* Counters that different threads write lie in cache lines of their own. */
struct Pool {
    int threads;
    Thread **workers;
    Signal *signal;
    void (*task)(void *, int);
    void *argument;
    _Alignas(CACHE_LINE) atomic_uint generation; /* of tasks */
    _Alignas(CACHE_LINE) atomic_int finished;
    _Alignas(CACHE_LINE) atomic_int arrived;
    _Alignas(CACHE_LINE) atomic_uint phase;
    atomic_int sleeping;
    atomic_int stopping;
};

typedef struct {
    Pool *pool;
    int number;
} Worker;

/* Wait for a task after `seen`; the new generation. */
static unsigned await_task(Pool *pool, unsigned seen) {
    for (int pause = 0; pause < PAUSES_BEFORE_SLEEP; pause++) {
        unsigned now = atomic_load_explicit(&pool->generation, memory_order_acquire);
        if (now != seen)
            return now;
        pause_cpu();
    }
    lock_signal(pool->signal);
    atomic_fetch_add(&pool->sleeping, 1);
    while (atomic_load(&pool->generation) == seen)
        wait_signal(pool->signal);
    atomic_fetch_sub(&pool->sleeping, 1);
    unlock_signal(pool->signal);
    return atomic_load_explicit(&pool->generation, memory_order_acquire);
}

static void work(void *argument) {
    Worker *worker = argument;
    Pool *pool = worker->pool;
    int number = worker->number;
    free(worker);
    unsigned seen = 0;
    for (;;) {
        seen = await_task(pool, seen);
        if (atomic_load(&pool->stopping))
            return;
        pool->task(pool->argument, number);
        atomic_fetch_add_explicit(&pool->finished, 1, memory_order_release);
    }
}

/* Begin a generation. A worker that is about to sleep sees it under the lock, or is counted as sleeping and woken. */
static void begin_generation(Pool *pool) {
    atomic_fetch_add(&pool->generation, 1);
    if (atomic_load(&pool->sleeping)) {
        lock_signal(pool->signal);
        wake_all(pool->signal);
        unlock_signal(pool->signal);
    }
}

Pool *new_pool(int threads) {
    Pool *pool = allocate(sizeof *pool);
    if (!pool)
        return NULL;
    pool->threads = 1;
    pool->signal = new_signal();
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    while (pool->signal && pool->workers && pool->threads < threads) {
        Worker *worker = malloc(sizeof *worker);
        if (!worker)
            break;
        *worker = (Worker){pool, pool->threads};
        pool->workers[pool->threads] = start_thread(work, worker);
        if (!pool->workers[pool->threads]) {
            free(worker);
            break;
        }
        pool->threads++;
    }
    if (pool->threads < threads || !pool->signal || !pool->workers) {
        free_pool(pool);
        return NULL;
    }
    return pool;
}

void free_pool(Pool *pool) {
    if (!pool)
        return;
    if (pool->threads > 1) {
        atomic_store(&pool->stopping, 1);
        begin_generation(pool);
        for (int number = 1; number < pool->threads; number++)
            join_thread(pool->workers[number]);
    }
    free_signal(pool->signal);
    free(pool->workers);
    release(pool, sizeof *pool);
}

int pool_threads(const Pool *pool) { return pool->threads; }

void pool_run(Pool *pool, void (*task)(void *argument, int thread), void *argument) {
    if (pool->threads == 1) {
        task(argument, 0);
        return;
    }
    pool->task = task;
    pool->argument = argument;
    atomic_store_explicit(&pool->finished, 0, memory_order_relaxed);
    begin_generation(pool);
    task(argument, 0);
    int others = pool->threads - 1;
    for (int pause = 0; atomic_load_explicit(&pool->finished, memory_order_acquire) != others; pause++) {
        if (pause < PAUSES_BEFORE_YIELD)
            pause_cpu();
        else
            yield_thread();
    }
}

void pool_barrier(Pool *pool) {
    if (pool->threads == 1)
        return;
    unsigned phase = atomic_load_explicit(&pool->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel) == pool->threads - 1) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&pool->phase, phase + 1, memory_order_release);
        return;
    }
    for (int pause = 0; atomic_load_explicit(&pool->phase, memory_order_acquire) == phase; pause++) {
        if (pause < PAUSES_BEFORE_YIELD)
            pause_cpu();
        else
            yield_thread();
    }
}
