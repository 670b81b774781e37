#include "pool.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "platform.h"

#ifdef _WIN32

#include <windows.h>

typedef HANDLE Thread;
typedef SRWLOCK Lock;
typedef CONDITION_VARIABLE Condition;
typedef DWORD Ended; /* what the function of a thread returns */

static void start_lock(Lock *lock) { InitializeSRWLock(lock); }
static void start_condition(Condition *condition) { InitializeConditionVariable(condition); }
static void lock(Lock *lock) { AcquireSRWLockExclusive(lock); }
static void unlock(Lock *lock) { ReleaseSRWLockExclusive(lock); }
static void await(Condition *condition, Lock *lock) { SleepConditionVariableSRW(condition, lock, INFINITE, 0); }
static void wake_all(Condition *condition) { WakeAllConditionVariable(condition); }

static int start_thread(Thread *thread, Ended (*run)(void *), void *argument) {
    *thread = CreateThread(NULL, 0, run, argument, 0, NULL);
    return *thread ? 0 : -1;
}

static void join_thread(Thread thread) {
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}

#else

#include <pthread.h>

typedef pthread_t Thread;
typedef pthread_mutex_t Lock;
typedef pthread_cond_t Condition;
typedef void *Ended;

static void start_lock(Lock *lock) { pthread_mutex_init(lock, NULL); }
static void start_condition(Condition *condition) { pthread_cond_init(condition, NULL); }
static void lock(Lock *lock) { pthread_mutex_lock(lock); }
static void unlock(Lock *lock) { pthread_mutex_unlock(lock); }
static void await(Condition *condition, Lock *lock) { pthread_cond_wait(condition, lock); }
static void wake_all(Condition *condition) { pthread_cond_broadcast(condition); }

static int start_thread(Thread *thread, Ended (*run)(void *), void *argument) {
    return pthread_create(thread, NULL, run, argument);
}

static void join_thread(Thread thread) { pthread_join(thread, NULL); }

#endif

/* A thread whose CPU another process holds makes all others wait at the next barrier, for as long as that process runs.
 * So the pool adds up what such waits cost, and works with a thread fewer where that costs less; now and then it tries
 * all threads again. What they compute does not depend on how many they are. */

enum {
    /* A worker waits for the next task this many pauses (1.6 ms on an EPYC: a step's Python fits in), then sleeps: to
     * be woken takes longer than a short pass's layers. */
    PAUSES_BEFORE_SLEEP = 60000,
    /* At a barrier the others are on their way: only a CPU that another process holds makes the wait long. */
    PAUSES_BEFORE_YIELD = 2000,
    CACHE_LINE = 64,
};

/* Nanoseconds. */
enum {
    /* A wait that a system's scheduler makes, not an uneven share of the work. */
    LATE = 500000,
    /* What tasks lose is a mean over so long: a single wait of a few milliseconds says little. */
    WINDOW = 50000000,
    /* With fewer threads, until all are tried again: at first, and at most. Each probe that fails doubles it. */
    FIRST_PROBE_DELAY = 50000000,
};
static const int64_t LONGEST_PROBE_DELAY = 5000000000;

/* Counters that different threads write lie in cache lines of their own. */
typedef struct {
    Pool *pool;
    Thread thread; /* not of the first: the caller's */
    int number;
    int64_t late;                                /* nanoseconds that it waited in vain since the pool last looked */
    _Alignas(CACHE_LINE) atomic_uint generation; /* of tasks */
    atomic_int sleeping;
} Worker;

struct Pool {
    int64_t process; /* that has the threads */
    int threads;     /* that there are */
    int active;      /* that work: the first ones */
    Worker **workers;
    Lock sleep; /* of workers that go to sleep, or wake */
    Condition woken;
    Lock running; /* held while a task runs */
    void (*task)(void *, int, int);
    void *argument;
    double lost;           /* share of the last tasks' time that waits took */
    int64_t probe_delay;   /* nanoseconds with fewer threads until all are tried again */
    int64_t probe_time;    /* when all threads are tried again, or were last */
    atomic_int references; /* models that run on it */
    atomic_int stopping;
    _Alignas(CACHE_LINE) atomic_int finished;
    _Alignas(CACHE_LINE) atomic_int arrived;
    _Alignas(CACHE_LINE) atomic_uint phase;
};

/* Wait for a task after `seen`; the new generation. */
static unsigned await_task(Worker *worker, unsigned seen) {
    for (int pause = 0; pause < PAUSES_BEFORE_SLEEP; pause++) {
        unsigned now = atomic_load_explicit(&worker->generation, memory_order_acquire);
        if (now != seen)
            return now;
        pause_cpu();
    }
    Pool *pool = worker->pool;
    lock(&pool->sleep);
    atomic_store(&worker->sleeping, 1);
    while (atomic_load(&worker->generation) == seen)
        await(&pool->woken, &pool->sleep);
    atomic_store(&worker->sleeping, 0);
    unlock(&pool->sleep);
    return atomic_load_explicit(&worker->generation, memory_order_acquire);
}

static Ended work(void *argument) {
    Worker *worker = argument;
    Pool *pool = worker->pool;
    unsigned seen = 0;
    for (;;) {
        seen = await_task(worker, seen);
        if (atomic_load(&pool->stopping))
            return 0;
        pool->task(pool->argument, worker->number, pool->active);
        atomic_fetch_add_explicit(&pool->finished, 1, memory_order_release);
    }
}

/* Begin a generation of the first threads. A worker that is about to sleep sees it under the lock, or counts as
 * sleeping and is woken. */
static void begin_generation(Pool *pool, int threads) {
    int sleeping = 0;
    for (int number = 1; number < threads; number++) {
        atomic_fetch_add(&pool->workers[number]->generation, 1);
        sleeping |= atomic_load(&pool->workers[number]->sleeping);
    }
    if (sleeping) {
        lock(&pool->sleep);
        wake_all(&pool->woken);
        unlock(&pool->sleep);
    }
}

/* Add a worker, with a thread of its own unless it is the first; 0, or -1: there is no memory or no thread. */
static int add_worker(Pool *pool) {
    Worker *worker = allocate(sizeof *worker);
    if (!worker)
        return -1;
    worker->pool = pool;
    worker->number = pool->threads;
    if (worker->number && start_thread(&worker->thread, work, worker)) {
        release(worker, sizeof *worker);
        return -1;
    }
    pool->workers[pool->threads++] = worker;
    return 0;
}

Pool *new_pool(int threads) {
    Pool *pool = allocate(sizeof *pool);
    if (!pool)
        return NULL;
    pool->process = process_number();
    pool->probe_time = -LONGEST_PROBE_DELAY;
    pool->references = 1;
    start_lock(&pool->sleep);
    start_condition(&pool->woken);
    start_lock(&pool->running);
    pool->workers = calloc((size_t)threads, sizeof(Worker *));
    int error = !pool->workers;
    while (!error && pool->threads < threads)
        error = add_worker(pool);
    if (error) {
        release_pool(pool);
        return NULL;
    }
    pool->active = threads;
    return pool;
}

Pool *retain_pool(Pool *pool) {
    atomic_fetch_add(&pool->references, 1);
    return pool;
}

/* The process is a copy that fork() has made: it has the memory of the pool, but none of its workers, and who held a
 * lock in the other process frees none here. */
static int is_forked(const Pool *pool) { return pool->process != process_number(); }

void release_pool(Pool *pool) {
    if (!pool || atomic_fetch_sub(&pool->references, 1) > 1)
        return;
    const int forked = is_forked(pool);
    atomic_store(&pool->stopping, 1);
    if (!forked)
        begin_generation(pool, pool->threads);
    for (int number = 0; number < pool->threads; number++) {
        if (number && !forked)
            join_thread(pool->workers[number]->thread);
        release(pool->workers[number], sizeof(Worker));
    }
    free(pool->workers);
    release(pool, sizeof *pool);
}

int pool_threads(const Pool *pool) { return pool->threads; }

/* Wait a little more, after so many pauses; `began` becomes the time from which the wait counts as long. */
static void keep_waiting(unsigned pause, int64_t *began) {
    if (pause < PAUSES_BEFORE_YIELD) {
        pause_cpu();
        return;
    }
    if (!*began)
        *began = nanoseconds();
    yield_thread();
}

static void end_waiting(Worker *worker, int64_t began) {
    int64_t waited = began ? nanoseconds() - began : 0;
    if (waited > LATE)
        worker->late += waited;
}

/* Take fewer threads for the next tasks, or all of them again, by what the last ones lost. */
static void choose_threads(Pool *pool, int64_t duration, int64_t now) {
    int64_t late = 0;
    for (int number = 0; number < pool->active; number++) {
        late += pool->workers[number]->late;
        pool->workers[number]->late = 0;
    }
    const double mean_late = pool->active > 1 ? (double)late / (pool->active - 1) : 0;
    pool->lost += (mean_late - pool->lost * (double)duration) / (double)(duration > WINDOW ? duration : WINDOW);
    /* A thread fewer takes n / (n - 1) times as long: as much as is lost where 1 / n of the time is. */
    if (pool->active > 1 && pool->lost * pool->active > 1) {
        if (pool->active == pool->threads)
            pool->probe_delay =
                now - pool->probe_time > LONGEST_PROBE_DELAY ? FIRST_PROBE_DELAY : pool->probe_delay * 2;
        if (pool->probe_delay > LONGEST_PROBE_DELAY)
            pool->probe_delay = LONGEST_PROBE_DELAY;
        pool->active--;
        pool->probe_time = now + pool->probe_delay;
        pool->lost = 0;
    } else if (pool->active < pool->threads && now > pool->probe_time) {
        pool->active = pool->threads;
        pool->probe_time = now;
        pool->lost = 0;
    }
}

void pool_run(Pool *pool, void (*task)(void *argument, int thread, int threads), void *argument) {
    if (pool->threads == 1 || is_forked(pool)) {
        if (pool->active > 1) /* no barrier waits for the others */
            pool->active = 1;
        task(argument, 0, 1);
        return;
    }
    lock(&pool->running);
    const int others = pool->active - 1;
    int64_t began = nanoseconds(), waiting = 0;
    pool->task = task;
    pool->argument = argument;
    atomic_store_explicit(&pool->finished, 0, memory_order_relaxed);
    begin_generation(pool, pool->active);
    task(argument, 0, pool->active);
    for (unsigned pause = 0; atomic_load_explicit(&pool->finished, memory_order_acquire) != others; pause++)
        keep_waiting(pause, &waiting);
    end_waiting(pool->workers[0], waiting);
    const int64_t now = nanoseconds();
    choose_threads(pool, now - began, now);
    unlock(&pool->running);
}

void pool_barrier(Pool *pool, int thread) {
    if (pool->active == 1)
        return;
    int64_t waiting = 0;
    unsigned phase = atomic_load_explicit(&pool->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel) == pool->active - 1) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&pool->phase, phase + 1, memory_order_release);
        return;
    }
    for (unsigned pause = 0; atomic_load_explicit(&pool->phase, memory_order_acquire) == phase; pause++)
        keep_waiting(pause, &waiting);
    end_waiting(pool->workers[thread], waiting);
}
