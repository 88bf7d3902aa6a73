/* What the host's files of the CUDA backend share.
 *
 * From below, each calling only those above it in this list:
 *
 * gpu.c      errors, making the GPU current
 * pool.c     device memory that outlives its first user
 * context.c  birth and death of a GPU's stream and pool
 * panels.c, work.c  the batch -> units of attention work
 * launch.c   one op -> matrix products and kernels
 * step.c     the batch's facts on their way to the device; recorded steps
 * ops.c      the table's entries -> ops of the step
 * device.c   birth and death of a session's device, memory, the table of ops
 */
#ifndef RKSC_CUDA_H
#define RKSC_CUDA_H

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include "backend.h"
#include "kernels.h"
#include "work.h"

/* ---- the GPU (gpu.c, context.c) ------------------------------------------ */

typedef struct cuda_pool cuda_pool;

typedef struct cuda_context {
    rk_cuda base;
    cudaStream_t stream;
    cuda_pool *pool;
    int n_processors;
} cuda_context;

/* Make the GPU current and forget errors that others have left; the GPU that
 * was current: to be given to cuda_leave. Where that fails, what the caller
 * asks of the GPU's stream fails, too, and so does cuda_pool_take. */
int cuda_enter(const cuda_context *context);
void cuda_leave(int before);

rk_status cuda_context_open(rk_cuda **out, int ordinal, rk_error *err);
void cuda_context_close(rk_cuda *base);
uintptr_t cuda_context_stream(const rk_cuda *base);
rk_status cuda_context_fetch(rk_cuda *base, void *host, const void *src,
                             size_t bytes, rk_error *err);
rk_status cuda_context_settle(rk_cuda *base, rk_error *err);

/* Status and text of a CUDA error; the failing call by name. */
rk_status cuda_error(cudaError_t code, const char *call, rk_error *err);
rk_status cublas_error(cublasStatus_t code, const char *call, rk_error *err);

/* RK_ENOMEM: `what` wanted so many bytes; and how many are free. */
rk_status cuda_no_room(const char *what, size_t bytes, rk_error *err);

/* ---- memory (pool.c) ----------------------------------------------------- */

/* Pieces of device memory, kept when they are given back. Safe to use from any
 * thread; lives until the context and all pieces have let go of it. */
cuda_pool *cuda_pool_create(int ordinal); /* NULL: no memory */
void cuda_pool_release(cuda_pool *pool);
/* A piece of the GPU that is current; 16 bytes behind it may be read. */
cudaError_t cuda_pool_take(cuda_pool *pool, void **out, size_t bytes);
/* The same; the error names `what` the bytes are for. */
rk_status cuda_pool_reserve(cuda_pool *pool, void **out, size_t bytes,
                            const char *what, rk_error *err);
/* Give a piece back (NULL: nothing). Work on the pool's one stream that still
 * uses it is done before the next user's. */
void cuda_pool_give(cuda_pool *pool, void *memory);
/* rk_ops.lend: a copy, made in the order of `stream`. */
rk_status cuda_pool_lend(cuda_pool *pool, rk_lent **out, const void *src,
                         size_t bytes, cudaStream_t stream, rk_error *err);

/* ---- recorded steps (step.c) --------------------------------------------- */

typedef enum cuda_kind {
    CUDA_BEGIN,
    CUDA_EMBED,
    CUDA_NORM,
    CUDA_QKV,
    CUDA_ATTENTION,
    CUDA_LINEAR,
    CUDA_SWIGLU,
    CUDA_GATHER,
    CUDA_PICK,
    CUDA_ANSWER,
    CUDA_MEAN,
    CUDA_COSINE,
} cuda_kind;

/* One op with its arguments; all bytes count when two are compared, so it is
 * zeroed before it is filled. `a`, `b`, `c`: the op's inputs in the order of
 * its arguments. */
typedef struct cuda_op {
    int32_t kind, n; /* n as padded */
    int32_t layer, size;
    void *out, *extra;
    const void *a, *b, *c;
    rk_matrix w[3];
    int64_t n_total;
    int64_t flag;
} cuda_op;

/* Where the facts of a step lie in the staging memory, and what else of a
 * batch decides how ops are launched. Sizes are rounded up, so that steps of
 * about the same size look the same. Offsets are in bytes. */
typedef struct cuda_facts {
    int32_t n_rows, n_blocks; /* padded rows; thread blocks of attention */
    bool wide, merge;
    size_t n_units, tokens, positions, slots, rows_first;
    size_t units, places, tables, end;
} cuda_facts;

typedef struct cuda_graph {
    uint64_t hash;
    cuda_facts facts;
    cuda_op *ops; /* (n_ops,) owned */
    int32_t n_ops;
    uint64_t used;        /* when it was last asked for */
    cudaGraphExec_t exec; /* NULL: seen once, or no capture came to its end */
    int64_t n_spoiled;    /* captures that did not */
} cuda_graph;

#define CUDA_N_GRAPHS 64

/* Host memory on its way to the device: filled in turn, so that one can be
 * written while the other is still being read. */
typedef struct cuda_staging {
    unsigned char *host[2]; /* pinned, `bytes` each */
    cudaEvent_t sent[2];
    int turn;
    unsigned char *device;
    size_t bytes, end, uploaded; /* of the current turn */
} cuda_staging;

typedef struct cuda_device {
    rk_device base;
    cuda_context *context; /* borrowed */
    rk_config config;      /* inv_freq: on the device */
    rk_extent extent;
    rk_error error; /* the first that happened; status RK_OK: none */
    cublasHandle_t cublas;

    unsigned char *kv;
    int64_t block_bytes, layer_bytes;
    int32_t block_shift;

    /* scratch, sized at creation */
    double *inv_freq;     /* (head_dim / 2,) */
    float *cosine, *sine; /* (max_rows, head_dim / 2) */
    float *qkv;           /* (max_rows, (n_heads + 2 n_kv_heads) head_dim) */
    float *gate_up;       /* (max_rows, 2 ffn_width) */
    float *partials;      /* (max_partials, n_heads, head_dim) */
    float *sums;          /* (max_partials, n_heads, 2) */
    void *pick, *workspace;
    unsigned char *bounce; /* pinned, CUDA_BOUNCE bytes */

    rk_worker *worker;
    rk_work work;
    int32_t n_rows; /* of the batch, not padded */
    bool roomy, recording;
    cuda_facts facts;
    cuda_staging staging;

    cuda_op *ops; /* recorded and not played yet */
    int32_t n_ops, ops_room;
    cuda_graph graphs[CUDA_N_GRAPHS];
    uint64_t n_plays, n_replays; /* how often; replays: of a graph */
} cuda_device;

#define CUDA_BOUNCE ((size_t)64 << 10)

static inline cuda_device *cuda_of(rk_device *base)
{
    return (cuda_device *)base;
}

/* Remember the first failure. */
void cuda_note(cuda_device *dev, cudaError_t code, const char *call);
#define CUDA_TRY(dev, call, ...) cuda_note(dev, call(__VA_ARGS__), #call)

rk_status cuda_step_create(cuda_device *dev, rk_error *err);
void cuda_step_free(cuda_device *dev);
void cuda_begin(rk_device *base, const rk_batch *batch);
/* Host bytes -> where they will lie on the device; `room` >= bytes, the rest
 * zero. NULL: the device is broken. */
void *cuda_stage(cuda_device *dev, const void *host, size_t bytes, size_t room);
/* A blank op to be filled in; cuda_take does it, now or later with the others
 * that are recorded. */
cuda_op *cuda_next(cuda_device *dev, cuda_kind kind, int32_t n);
void cuda_take(cuda_device *dev);
/* Launch what was recorded. */
void cuda_play(cuda_device *dev);
/* Rows that an op with n of them works on. */
int32_t cuda_padded(const cuda_device *dev, int32_t n);

/* ---- ops (launch.c, ops.c) ----------------------------------------------- */

/* Nothing where the device is broken: the op's addresses may be no good. */
void cuda_issue(cuda_device *dev, const cuda_op *op);

void cuda_embed(rk_device *base, float *out, const rk_matrix *table);
void cuda_norm(rk_device *base, void *out, const float *x, const float *weight,
               int32_t n);
void cuda_qkv(rk_device *base, void *out, const void *a, const rk_layer *layer,
              int32_t layer_id);
void cuda_attention(rk_device *base, void *out, const void *q,
                    int32_t layer_id);
void cuda_linear(rk_device *base, float *out, const void *a, const rk_matrix *w,
                 int32_t n, bool accumulate);
void cuda_swiglu(rk_device *base, void *out, const void *a,
                 const rk_matrix *gate, const rk_matrix *up, int32_t n);
void cuda_gather(rk_device *base, float *dst, const float *src,
                 const int32_t *rows, int32_t n, int32_t width);
void cuda_pick(rk_device *base, rk_pick *out, const float *logits,
               const rk_draw *draws, int32_t n);
void cuda_answer(rk_device *base, float *out, const float *x,
                 const float *weight, const rk_matrix *head, const int32_t *ids,
                 int32_t n, int32_t n_ids);
void cuda_mean(rk_device *base, float *out, double *sum, const float *x,
               int32_t n, int64_t n_total);
void cuda_cosine(rk_device *base, float *out, const float *a, const float *b,
                 const float *center, int32_t n);

#endif
