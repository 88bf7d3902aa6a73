/* Device memory that is asked for again and again: a piece that is given back
 * is kept for the next who wants about as much. The system's own calls wait
 * for the whole device; taking a kept piece does not.
 *
 * Whoever had a piece on loan may have let go of it while work on it is queued,
 * on streams that we do not know of and that may be gone: no event can be
 * recorded there. So such a piece rests until the whole device has been waited
 * for. One wait does for all that rest, and takes place when LOANS of about
 * the wanted size do. */
#include "cuda.h"

#include <pthread.h>
#include <stdlib.h>

#define LOANS 16

typedef struct piece {
    struct piece *next;
    void *memory;
    size_t bytes;
    bool used;
    bool resting; /* other streams than ours may still work on it */
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

/* Give a piece back to the system; locked. */
static void drop(piece **at)
{
    piece *p = *at;
    *at = p->next;
    cudaFree(p->memory);
    free(p);
}

/* The same with all that are not used. */
static void trim(cuda_pool *pool)
{
    for (piece **at = &pool->pieces; *at != NULL;) {
        if ((*at)->used) {
            at = &(*at)->next;
        } else {
            drop(at);
        }
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

/* Wait for the device, so that nobody works on unused pieces any more; locked.
 */
static bool end_rest(cuda_pool *pool)
{
    if (cudaDeviceSynchronize() != cudaSuccess) {
        cudaGetLastError(); /* another thread captures: next time */
        return false;
    }
    for (piece *p = pool->pieces; p != NULL; p = p->next) {
        p->resting = false;
    }
    return true;
}

/* The smallest unused piece that is not far too large, or NULL; locked. */
static piece *find(cuda_pool *pool, size_t bytes)
{
    piece *best = NULL;
    int resting = 0;
    for (piece *p = pool->pieces; p != NULL; p = p->next) {
        if (p->used || p->bytes < bytes || p->bytes / 2 > bytes) {
            continue;
        }
        if (p->resting) {
            resting++;
        } else if (best == NULL || p->bytes < best->bytes) {
            best = p;
        }
    }
    return best == NULL && resting >= LOANS && end_rest(pool)
               ? find(pool, bytes)
               : best;
}

cudaError_t cuda_pool_take(cuda_pool *pool, void **out, size_t bytes)
{
    cudaError_t error = cudaSuccess;
    int ordinal = -1;
    *out = NULL;
    if (bytes > SIZE_MAX - 1024) {
        return cudaErrorMemoryAllocation;
    }
    if (cudaGetDevice(&ordinal) != cudaSuccess || ordinal != pool->ordinal) {
        return cudaErrorInvalidDevice; /* cuda_enter could not */
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

rk_status cuda_pool_reserve(cuda_pool *pool, void **out, size_t bytes,
                            const char *what, rk_error *err)
{
    cudaError_t code = cuda_pool_take(pool, out, bytes);
    return code == cudaErrorMemoryAllocation
               ? cuda_no_room(what, bytes, err)
               : cuda_error(code, "cudaMalloc", err);
}

static void give(cuda_pool *pool, void *memory, bool resting)
{
    if (memory == NULL) {
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    for (piece *p = pool->pieces; p != NULL; p = p->next) {
        if (p->memory == memory) {
            p->used = false;
            p->resting = resting;
        }
    }
    let_go(pool);
}

void cuda_pool_give(cuda_pool *pool, void *memory)
{
    give(pool, memory, false);
}

/* ---- on loan ------------------------------------------------------------- */

typedef struct cuda_lent {
    rk_lent base;
    cuda_pool *pool;
    cudaEvent_t ready; /* the contents are there */
} cuda_lent;

static rk_status lent_await(rk_lent *base, uintptr_t stream, rk_error *err)
{
    const cuda_lent *lent = (const cuda_lent *)base;
    const cuda_context here = {.base.ordinal = base->ordinal};
    int before = cuda_enter(&here);
    rk_status status =
        cuda_error(cudaStreamWaitEvent((cudaStream_t)stream, lent->ready, 0),
                   "cudaStreamWaitEvent", err);
    cuda_leave(before);
    return status;
}

/* No stream is asked for anything, so this waits for the device only as the
 * pool's last holder, or while another thread ends the pieces' rest. */
static void lent_release(rk_lent *base)
{
    cuda_lent *lent = (cuda_lent *)base;
    cudaEventDestroy(lent->ready);
    give(lent->pool, base->data, true);
    free(lent);
}

/* The copy, and the event behind it. */
static rk_status fill(cuda_lent *lent, const void *src, size_t bytes,
                      cudaStream_t stream, rk_error *err)
{
    rk_status status =
        cuda_error(cudaMemcpyAsync(lent->base.data, src, bytes,
                                   cudaMemcpyDeviceToDevice, stream),
                   "cudaMemcpyAsync", err);
    if (status == RK_OK) {
        status = cuda_error(
            cudaEventCreateWithFlags(&lent->ready, cudaEventDisableTiming),
            "cudaEventCreateWithFlags", err);
    }
    if (status == RK_OK) {
        status = cuda_error(cudaEventRecord(lent->ready, stream),
                            "cudaEventRecord", err);
    }
    return status;
}

rk_status cuda_pool_lend(cuda_pool *pool, rk_lent **out, const void *src,
                         size_t bytes, cudaStream_t stream, rk_error *err)
{
    cuda_lent *lent = calloc(1, sizeof *lent);
    if (lent == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for a result");
    }
    lent->base = (rk_lent){NULL, pool->ordinal, lent_await, lent_release};
    lent->pool = pool;
    rk_status status =
        cuda_pool_reserve(pool, &lent->base.data, bytes, "a result", err);
    if (status == RK_OK) {
        status = fill(lent, src, bytes, stream, err);
    }
    if (status == RK_OK) {
        *out = &lent->base;
        return RK_OK;
    }
    if (lent->ready != NULL) {
        cudaEventDestroy(lent->ready);
    }
    cuda_pool_give(pool, lent->base.data);
    free(lent);
    return status;
}
