/* The pool with another number of threads at each task, as a busy machine makes it.
 * tests/models/native/test_damage.py runs the engine over it. */
#define pool_run run_with_active
#include "../pool.c"
#undef pool_run

void pool_run(Pool *pool, void (*task)(void *argument, int thread, int threads), void *argument) {
    static int tasks;
    run_with_active(pool, task, argument);
    pool->active = 1 + tasks++ % pool->threads;
}
