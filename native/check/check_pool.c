/* Does the pool run its tasks whole, and leave out a thread that is always late? Returns 0 if so.
 * tests/models/native/test_pool.py runs it. */
#include <stdio.h>
#include <string.h>

#include "../platform.h"
#include "../pool.h"

enum { MOST_THREADS = 4, BARRIERS = 6, TASKS = 300, LATE_TASKS = 200, MOST_REST = 10000 };

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
        if (!run_until(&check, 1, MOST_REST)) {
            fprintf(stderr, "%d threads: one was left out for good\n", threads);
            errors++;
        }
        errors += run(&check, TASKS);
    }
    free_pool(check.pool);
    return errors;
}

int main(void) {
    int errors = 0;
    for (int threads = 1; threads <= MOST_THREADS; threads++)
        errors += check_threads(threads);
    printf("%d errors\n", errors);
    return errors != 0;
}
