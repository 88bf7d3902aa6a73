/* Device memory that is asked for again and again: a piece that is given back
 * is kept for the next who wants about as much. The system's own calls wait
 * for the whole device; taking a kept piece does not. */
#include "cuda.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct piece {
    struct piece *next;
    void *memory;
    size_t bytes;
    bool used;
} piece;

struct cuda_pool {
    pthread_mutex_t mutex;
    int ordinal;
    size_t n_holders; /* the context and every piece in use */
    piece *pieces;
};

cuda_pool *cuda_pool_create(int ordinal)
{
    cuda_pool *pool = calloc(1, sizeof *pool);
    if (pool != NULL && pthread_mutex_init(&pool->mutex, NULL) != 0) {
        free(pool);
        return NULL;
    }
    if (pool != NULL) {
        pool->ordinal = ordinal;
        pool->n_holders = 1;
    }
    return pool;
}

/* Give unused pieces back to the system; locked. */
static void trim(cuda_pool *pool)
{
    for (piece **at = &pool->pieces; *at != NULL;) {
        piece *p = *at;
        if (p->used) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        cudaFree(p->memory);
        free(p);
    }
}

/* One holder less; locked, gives the lock up. */
static void let_go(cuda_pool *pool)
{
    bool last = --pool->n_holders == 0;
    if (last) {
        cuda_context here = {.base.ordinal = pool->ordinal};
        int before = cuda_enter(&here);
        trim(pool);
        cuda_leave(before);
    }
    pthread_mutex_unlock(&pool->mutex);
    if (last) {
        pthread_mutex_destroy(&pool->mutex);
        free(pool);
    }
}

void cuda_pool_release(cuda_pool *pool)
{
    if (pool != NULL) {
        pthread_mutex_lock(&pool->mutex);
        let_go(pool);
    }
}

static piece *find(cuda_pool *pool, size_t bytes)
{
    piece *best = NULL;
    for (piece *p = pool->pieces; p != NULL; p = p->next) {
        if (!p->used && p->bytes >= bytes && p->bytes / 2 <= bytes &&
            (best == NULL || p->bytes < best->bytes)) {
            best = p;
        }
    }
    return best;
}

cudaError_t cuda_pool_take(cuda_pool *pool, void **out, size_t bytes)
{
    cudaError_t error = cudaSuccess;
    *out = NULL;
    if (bytes > SIZE_MAX - 1024) {
        return cudaErrorMemoryAllocation;
    }
    bytes = (bytes + 16 + 511) / 512 * 512;
    pthread_mutex_lock(&pool->mutex);
    piece *p = find(pool, bytes);
    if (p == NULL) {
        p = calloc(1, sizeof *p);
        error = p != NULL ? cudaMalloc(&p->memory, bytes)
                          : cudaErrorMemoryAllocation;
        if (error == cudaErrorMemoryAllocation && p != NULL) {
            cudaGetLastError();
            trim(pool);
            error = cudaMalloc(&p->memory, bytes);
        }
        if (error != cudaSuccess) {
            cudaGetLastError();
            free(p);
            pthread_mutex_unlock(&pool->mutex);
            return error;
        }
        p->bytes = bytes;
        p->next = pool->pieces;
        pool->pieces = p;
    }
    p->used = true;
    pool->n_holders++;
    *out = p->memory;
    pthread_mutex_unlock(&pool->mutex);
    return cudaSuccess;
}

void cuda_pool_give(cuda_pool *pool, void *memory)
{
    if (memory == NULL) {
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    for (piece *p = pool->pieces; p != NULL; p = p->next) {
        if (p->memory == memory) {
            p->used = false;
        }
    }
    let_go(pool);
}
