/* A pool of threads that shares out numbered units of work.
 *
 * One 64-bit word says all: generation in the high half, units not yet taken
 * in the low half. Taking a unit is one compare-and-swap on it, so a thread
 * that comes late to a job, or sleeps through it, can never take a unit of the
 * wrong one; and a job cannot be replaced while one of its units runs, since
 * `pending` counts those down. The caller works too and waits for `pending`.
 *
 * An idle thread looks at the word for some microseconds (the gap between two
 * ops of a step), then sleeps on a condition variable: no spinning while
 * nothing happens.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "cpu.h"

/* Looks at the word before sleeping; a pause takes 15 to 50 ns. */
#define SPINS 3000

struct cpu_pool {
    _Alignas(128) _Atomic uint64_t word;
    _Alignas(128) _Atomic int32_t pending;
    _Alignas(128) cpu_unit *unit;
    void *job;
    int32_t n_units;
    int forks; /* value of `n_forks` at creation */

    pthread_mutex_t lock;
    pthread_cond_t work, done;
    _Atomic int32_t n_sleeping;
    _Atomic bool caller_sleeps;
    _Atomic bool stop;

    int n_threads, n_started;
    struct cpu_worker {
        cpu_pool *pool;
        int32_t id;
        pthread_t thread;
    } *workers; /* (n_threads - 1,) */
};

/* A child of fork() has none of our threads: it computes alone. */
static atomic_int n_forks;
static pthread_once_t watch_once = PTHREAD_ONCE_INIT;

static void count_fork(void)
{
    atomic_fetch_add(&n_forks, 1);
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, count_fork);
}

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Run units until none is left. */
static void drain(cpu_pool *pool, int32_t thread)
{
    uint64_t word = atomic_load_explicit(&pool->word, memory_order_acquire);
    while ((uint32_t)word != 0) {
        if (!atomic_compare_exchange_weak_explicit(&pool->word, &word, word - 1,
                                                   memory_order_acq_rel,
                                                   memory_order_acquire)) {
            continue;
        }
        pool->unit(pool->job, pool->n_units - (int32_t)(uint32_t)word, thread);
        if (atomic_fetch_sub(&pool->pending, 1) == 1 &&
            atomic_load(&pool->caller_sleeps)) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->lock);
        }
        word = atomic_load_explicit(&pool->word, memory_order_acquire);
    }
}

static bool has_work(cpu_pool *pool)
{
    return (uint32_t)atomic_load(&pool->word) != 0 || atomic_load(&pool->stop);
}

static void wait_for_work(cpu_pool *pool)
{
    for (int i = 0; i < SPINS; i++) {
        if (has_work(pool)) {
            return;
        }
        relax();
    }
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->n_sleeping, 1);
    while (!has_work(pool)) {
        pthread_cond_wait(&pool->work, &pool->lock);
    }
    atomic_fetch_sub(&pool->n_sleeping, 1);
    pthread_mutex_unlock(&pool->lock);
}

static void *worker_main(void *argument)
{
    struct cpu_worker *worker = argument;
    cpu_pool *pool = worker->pool;
    while (!atomic_load(&pool->stop)) {
        drain(pool, worker->id);
        wait_for_work(pool);
    }
    return NULL;
}

static void wait_for_units(cpu_pool *pool)
{
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&pool->pending, memory_order_acquire) == 0) {
            return;
        }
        relax();
    }
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->caller_sleeps, true);
    while (atomic_load(&pool->pending) != 0) {
        pthread_cond_wait(&pool->done, &pool->lock);
    }
    atomic_store(&pool->caller_sleeps, false);
    pthread_mutex_unlock(&pool->lock);
}

void cpu_pool_run(cpu_pool *pool, cpu_unit *unit, void *job, int32_t n_units)
{
    if (n_units <= 1 || pool->n_threads == 1 ||
        pool->forks != atomic_load(&n_forks)) {
        for (int32_t i = 0; i < n_units; i++) {
            unit(job, i, 0);
        }
        return;
    }
    pool->unit = unit;
    pool->job = job;
    pool->n_units = n_units;
    atomic_store_explicit(&pool->pending, n_units, memory_order_relaxed);
    uint64_t generation = (atomic_load(&pool->word) >> 32) + 1;
    atomic_store(&pool->word, generation << 32 | (uint32_t)n_units);
    if (atomic_load(&pool->n_sleeping) > 0) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->lock);
    }
    drain(pool, 0);
    wait_for_units(pool);
}

/* Signals belong to the program's own threads. */
static void start_workers(cpu_pool *pool)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (int i = 0; i < pool->n_threads - 1; i++) {
        struct cpu_worker *worker = &pool->workers[i];
        worker->pool = pool;
        worker->id = i + 1;
        if (pthread_create(&worker->thread, NULL, worker_main, worker)) {
            break;
        }
        pool->n_started++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

cpu_pool *cpu_pool_create(int n_threads)
{
    cpu_pool *pool = NULL;
    pthread_once(&watch_once, watch_forks);
    if (posix_memalign((void **)&pool, 128, sizeof *pool) != 0) {
        return NULL;
    }
    *pool = (cpu_pool){.n_threads = n_threads, .forks = atomic_load(&n_forks)};
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    if (n_threads > 1) {
        pool->workers = calloc((size_t)n_threads - 1, sizeof *pool->workers);
        if (pool->workers == NULL) {
            goto fail;
        }
        start_workers(pool);
        if (pool->n_started != n_threads - 1) {
            goto fail;
        }
    }
    return pool;
fail:
    cpu_pool_free(pool);
    return NULL;
}

void cpu_pool_free(cpu_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    if (pool->forks == atomic_load(&n_forks)) {
        pthread_mutex_lock(&pool->lock);
        atomic_store(&pool->stop, true);
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->lock);
        for (int i = 0; i < pool->n_started; i++) {
            pthread_join(pool->workers[i].thread, NULL);
        }
        pthread_cond_destroy(&pool->work);
        pthread_cond_destroy(&pool->done);
        pthread_mutex_destroy(&pool->lock);
    }
    free(pool->workers);
    free(pool);
}
