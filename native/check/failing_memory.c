/* Memory and threads that are refused at chosen calls: tests/models/native/test_memory.py links the engine with
 * --wrap of each function below. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

static atomic_long calls, first = 1, last, live;

/* Calls first..last from now on fail: none if first > last. */
__attribute__((visibility("default"))) void memory_fail(long from, long to) {
    first = from;
    last = to;
    calls = 0;
}

__attribute__((visibility("default"))) long memory_calls(void) { return calls; }

/* Pieces of memory that the engine holds. */
__attribute__((visibility("default"))) long memory_live(void) { return live; }

static int fails(void) {
    const long call = atomic_fetch_add(&calls, 1) + 1;
    return call >= first && call <= last;
}

static void *counted(void *memory) {
    live += memory != NULL && memory != MAP_FAILED;
    return memory;
}

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void __real_free(void *memory);
void *__real_mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset);
int __real_munmap(void *address, size_t bytes);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);

void *__wrap_malloc(size_t bytes) { return fails() ? NULL : counted(__real_malloc(bytes)); }

void *__wrap_calloc(size_t count, size_t bytes) { return fails() ? NULL : counted(__real_calloc(count, bytes)); }

void *__wrap_realloc(void *memory, size_t bytes) {
    if (fails())
        return NULL;
    void *grown = __real_realloc(memory, bytes);
    return memory ? grown : counted(grown);
}

void __wrap_free(void *memory) {
    live -= memory != NULL;
    __real_free(memory);
}

void *__wrap_mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    return fails() ? MAP_FAILED : counted(__real_mmap(address, bytes, protection, flags, file, offset));
}

int __wrap_munmap(void *address, size_t bytes) {
    live--;
    return __real_munmap(address, bytes);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    return fails() ? -1 : __real_pthread_create(thread, attributes, run, argument);
}
