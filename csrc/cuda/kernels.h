/* The kernels of the CUDA backend, as plain C sees them.
 *
 * A launcher queues its kernels on `stream` and returns the error of the
 * launch; it never waits and never allocates. Every address is the device's,
 * aligned to 16 bytes where an array begins. Outputs come first. What varies
 * from step to step (tokens, positions, slots, units) is read from device
 * memory, so that a captured launch can be replayed over new contents; row
 * counts may be padded as long as the padding's inputs can be read: token 0,
 * position 0, slot -1, no units, rows_first equal to the last one.
 */
#ifndef RKSC_CUDA_KERNELS_H
#define RKSC_CUDA_KERNELS_H

#include <cuda_runtime.h>

#include "backend.h"
#include "work.h"

#ifdef __cplusplus
extern "C" {
#endif

/* K and V of one layer in the pool. Inside a block they lie as (K | V,
 * n_kv_heads, block_tokens, head_dim), layer by layer. */
typedef struct rk_cuda_kv {
    unsigned char *layer; /* this layer of block 0 */
    int64_t block_bytes;  /* from block to block: all layers */
    int32_t block_shift;  /* log2(block_tokens) */
    int32_t n_kv_heads, head_dim;
    rk_type type; /* rk_extent.kv_type, and q's: RK_F32 or RK_BF16 */
} rk_cuda_kv;

/* ---- once per process and device ----------------------------------------- */

/* Let attention use as much shared memory as it needs. Before any capture. */
cudaError_t rk_cuda_attention_prepare(void);

/* ---- rows ---------------------------------------------------------------- */

/* cosine, sine: (n, half) of positions[i] * inv_freq[j], in float64 inside. */
cudaError_t rk_cuda_angles(float *cosine, float *sine, const int32_t *positions,
                           const double *inv_freq, int32_t n, int32_t half,
                           cudaStream_t stream);

/* out[i] = table[tokens[i]]: (n, width); table: F32, F16 or BF16. */
cudaError_t rk_cuda_embed(float *out, const void *table, rk_type type,
                          const int32_t *tokens, int32_t n, int32_t width,
                          cudaStream_t stream);

/* rk_ops.norm; weight NULL: conversion alone. out: `type` (n, width). */
cudaError_t rk_cuda_norm(void *out, rk_type type, const float *x,
                         const float *weight, float eps, int32_t n,
                         int32_t width, cudaStream_t stream);

/* out[i] += bias: (n, width) */
cudaError_t rk_cuda_add_bias(float *out, const float *bias, int32_t n,
                             int32_t width, cudaStream_t stream);

/* qkv: float32 (n, (n_heads + 2 n_kv_heads) * head_dim), the products without
 * bias (each bias NULL or (rows,)). q: kv->type (n, n_heads * head_dim),
 * rotated. K, rotated, and V go to the pool where slots[i] >= 0. */
typedef struct rk_cuda_rotation {
    void *q;
    const float *qkv;
    const float *query_bias, *key_bias, *value_bias;
    const float *cosine, *sine; /* (n, head_dim / 2) */
    const int64_t *slots;       /* (n,) block * block_tokens + offset, or -1 */
    int32_t n, n_heads;
    bool interleaved;
} rk_cuda_rotation;

cudaError_t rk_cuda_rotate(const rk_cuda_rotation *r, const rk_cuda_kv *kv,
                           cudaStream_t stream);

/* out: `type` (n, ffn) = silu(gate) * up; rows of gate and up lie `stride`
 * floats apart. */
cudaError_t rk_cuda_swiglu(void *out, rk_type type, const float *gate,
                           const float *up, int64_t stride, int32_t n,
                           int32_t ffn, cudaStream_t stream);

/* rk_ops.gather with `rows` on the device; dst == src under its rule. */
cudaError_t rk_cuda_gather(float *dst, const float *src, const int32_t *rows,
                           int32_t n, int32_t width, cudaStream_t stream);

/* rk_ops.answer with `ids` on the device; head: F32, F16 or BF16. */
cudaError_t rk_cuda_answer(float *out, const float *x, const float *weight,
                           float eps, const void *head, rk_type type,
                           const int32_t *ids, int32_t n, int32_t n_ids,
                           int32_t width, cudaStream_t stream);

/* rk_ops.mean and rk_ops.cosine */
cudaError_t rk_cuda_mean(float *out, double *sum, const float *x, int32_t n,
                         int64_t n_total, int32_t width, cudaStream_t stream);
cudaError_t rk_cuda_cosine(float *out, const float *a, const float *b,
                           const float *center, int32_t n, int32_t width,
                           cudaStream_t stream);

/* ---- the head ------------------------------------------------------------ */

/* Bytes of `scratch` for n rows. */
size_t rk_cuda_pick_scratch(int32_t n, int32_t vocab);

/* rk_ops.pick with `draws` on the device. */
cudaError_t rk_cuda_pick(rk_pick *out, const float *logits,
                         const rk_draw *draws, void *scratch, int32_t n,
                         int32_t vocab, cudaStream_t stream);

/* ---- attention ----------------------------------------------------------- */

/* Attention of one layer over the units of the step (work.h), all arrays on
 * the device. A unit's partial results go to `partials`; rows that have more
 * than one are merged in the order of keys. */
typedef struct rk_cuda_attention {
    void *out;        /* out_type (n_rows, n_heads, head_dim) */
    rk_type out_type; /* rk_device.input: RK_F32 or RK_BF16 */
    const void *q;    /* kv.type, the same shape, rotated */
    rk_cuda_kv kv;
    int32_t n_rows, n_heads;
    int32_t window;            /* of this layer; 0: all keys */
    const int32_t *positions;  /* (n_rows,) */
    const int32_t *n_units;    /* one number */
    const rk_work_unit *units; /* (*n_units,) */
    const int32_t *places;     /* rk_work.places */
    const int32_t *rows_first; /* (n_rows + 1,) */
    const int32_t *tables;     /* rk_work.tables */
    float *partials;           /* (max_partials, n_heads, head_dim) */
    float *sums;               /* (max_partials, n_heads, 2): maximum, sum */
    int32_t n_blocks; /* thread blocks to launch, no fewer than *n_units *
                       * n_kv_heads; `units` has room for each */
    bool wide;        /* rk_work.wide */
    bool merge;       /* false: rk_work.n_partials is 0 */
} rk_cuda_attention;

cudaError_t rk_cuda_attend(const rk_cuda_attention *a, cudaStream_t stream);

/* Pairs (row, head of the group) of one unit that a block of threads takes:
 * what rk_work_rule.narrow_pairs and wide_pairs must be. */
int32_t rk_cuda_attend_pairs(rk_type kv_type, int32_t head_dim, bool wide);

#ifdef __cplusplus
}
#endif

#endif
