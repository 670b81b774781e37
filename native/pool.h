/* Threads that share the work of a pass. All of them run the whole pass, each on its part; a barrier parts the moves.
 */
#ifndef DRAFTREE_POOL_H
#define DRAFTREE_POOL_H

typedef struct Pool Pool;

Pool *new_pool(int threads);        /* NULL: threads cannot be started */
Pool *retain_pool(Pool *pool);      /* for one more model: their tasks take turns */
void release_pool(Pool *pool);      /* a model less; the last one ends the threads */
int pool_threads(const Pool *pool); /* the most that share a task: so many need memory of their own */

/* Run task(argument, thread, threads) once for each thread, 0 to threads - 1; thread 0 is the caller. Fewer threads
 * share a task while other processes hold CPUs; in a process that fork() has made, the caller runs it alone. */
void pool_run(Pool *pool, void (*task)(void *argument, int thread, int threads), void *argument);

/* Inside a task: go on when all threads have come here. */
void pool_barrier(Pool *pool, int thread);

#endif
