/* Does the pool run its tasks whole, and leave out a thread that is always late, and no other? Returns 0 if so.
 * tests/models/native/test_pool.py runs it. */
#include "../pool.c"

#include <stdio.h>
#include <string.h>

enum { MOST_THREADS = 4, BARRIERS = 6, TASKS = 300, LATE_TASKS = 200, MOST_PROBE_TASKS = 10000000 };

typedef struct {
    Pool *pool;
    int late_thread; /* waits a scheduler's slice before each barrier; -1: none */
    int written[BARRIERS][MOST_THREADS];
    int errors[MOST_THREADS];
    int threads; /* that shared the last task */
} Check;

static void wait_until(int64_t moment) {
    while (nanoseconds() < moment)
        yield_thread();
}

/* Behind each barrier every thread sees what the others wrote in front of it. */
static void task(void *argument, int thread, int threads) {
    Check *check = argument;
    if (thread == 0)
        check->threads = threads;
    for (int round = 0; round < BARRIERS; round++) {
        if (thread == check->late_thread)
            wait_until(nanoseconds() + 1000000);
        check->written[round][thread] = round + 1;
        pool_barrier(check->pool, thread);
        for (int other = 0; other < threads; other++)
            check->errors[thread] += check->written[round][other] != round + 1;
    }
}

static int run(Check *check, int tasks) {
    int errors = 0;
    for (int i = 0; i < tasks; i++) {
        memset(check->written, 0, sizeof check->written);
        pool_run(check->pool, task, check);
        for (int thread = 0; thread < MOST_THREADS; thread++)
            errors += check->errors[thread];
    }
    return errors;
}

/* Run tasks until all threads share them, or fewer do; 0: that does not come. */
static int run_until(Check *check, int all, int most) {
    for (int tasks = 0; tasks < most; tasks++) {
        run(check, 1);
        if ((check->threads == pool_threads(check->pool)) == all)
            return 1;
    }
    return 0;
}

static int check_threads(int threads) {
    Check check = {.pool = new_pool(threads), .late_thread = -1};
    if (!check.pool)
        return 1;
    int errors = run(&check, TASKS);
    wait_until(nanoseconds() + 20000000); /* the workers sleep */
    errors += run(&check, TASKS);
    if (threads > 1) {
        check.late_thread = threads - 1;
        if (!run_until(&check, 0, LATE_TASKS)) {
            fprintf(stderr, "%d threads: none was left out\n", threads);
            errors++;
        }
        check.late_thread = -1;
        if (!run_until(&check, 1, MOST_PROBE_TASKS)) {
            fprintf(stderr, "%d threads: one was left out for good\n", threads);
            errors++;
        }
        errors += run(&check, TASKS);
    }
    release_pool(check.pool);
    return errors;
}

/* Report to the pool `tasks` tasks of `duration` nanoseconds, `late` of them lost to a wait. Returns how many threads
 * the next task will have. */
static int report(Pool *pool, int64_t *clock, int tasks, int64_t duration, int64_t late) {
    for (int i = 0; i < tasks; i++) {
        pool->workers[0]->late = late;
        choose_threads(pool, duration, *clock += duration);
    }
    return pool->active;
}

/* Which waits make the pool leave a thread out, and for how long: reported, not measured. Returns the wrong choices. */
static int check_choice(void) {
    enum { MS = 1000000 };
    Pool *pool = new_pool(2);
    if (!pool)
        return 1;
    int64_t clock = 1000LL * MS;
    int errors = report(pool, &clock, 1, 3 * MS, 2 * MS) != 2; /* the first task of all */
    errors += report(pool, &clock, 50, MS / 50, 0) != 2;
    errors += report(pool, &clock, 1, 6 * MS, 5 * MS) != 2; /* one wait, among short tasks */
    errors += report(pool, &clock, 20, 4 * MS, 1 * MS) != 2;
    errors += report(pool, &clock, 20, 4 * MS, 3 * MS) != 1; /* a CPU is held */
    int64_t began = clock;
    while (pool->active == 1 && clock < 10000LL * MS)
        report(pool, &clock, 1, MS, 0);
    const int64_t delay = clock - began;
    errors += report(pool, &clock, 1, 3 * MS, 2 * MS) != 2; /* a probe is not judged by one wait */
    errors += report(pool, &clock, 1, 200 * MS, 150 * MS) != 1;
    began = clock;
    while (pool->active == 1 && clock < 10000LL * MS)
        report(pool, &clock, 1, MS, 0);
    errors += delay > FIRST_PROBE_DELAY + MS || clock - began < 2 * FIRST_PROBE_DELAY ||
              clock - began > 2 * FIRST_PROBE_DELAY + MS;
    if (errors)
        fprintf(stderr, "%d wrong choices of threads\n", errors);
    release_pool(pool);
    return errors;
}

int main(void) {
    int errors = check_choice();
    for (int threads = 1; threads <= MOST_THREADS; threads++)
        errors += check_threads(threads);
    printf("%d errors\n", errors);
    return errors != 0;
}
