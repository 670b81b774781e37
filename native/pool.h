/* Threads that share the work of a pass. All of them run the whole pass, each on its part; a barrier parts the moves.
 */
#ifndef DRAFTREE_POOL_H
#define DRAFTREE_POOL_H

typedef struct Pool Pool;

Pool *new_pool(int threads); /* NULL: threads cannot be started */
void free_pool(Pool *pool);
int pool_threads(const Pool *pool); /* that share the next task; fewer while other processes hold CPUs */

/* Run task(argument, thread) once for each thread, 0 to threads - 1; thread 0 is the caller. */
void pool_run(Pool *pool, void (*task)(void *argument, int thread), void *argument);

/* Inside a task: go on when all threads have come here. */
void pool_barrier(Pool *pool, int thread);

#endif
