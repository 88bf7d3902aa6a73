/* What several kernels need: eight elements at a time, sums over a warp and a
 * block in a fixed order. */
#ifndef RKSC_CUDA_BLOCK_CUH
#define RKSC_CUDA_BLOCK_CUH

#include "port.h"
#include "rksc.h"

#define RK_WARP 32
#define RK_ALL_LANES 0xffffffffu

/* ---- eight elements ------------------------------------------------------ */

/* `from` and `to` are aligned to 16 bytes. */
__device__ __forceinline__ void rk_load4(float out[4], const float *from)
{
    const uint4 v = rk_load16(from);
    out[0] = __uint_as_float(v.x);
    out[1] = __uint_as_float(v.y);
    out[2] = __uint_as_float(v.z);
    out[3] = __uint_as_float(v.w);
}

__device__ __forceinline__ void rk_store4(float *to, const float x[4])
{
    rk_store16(to, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]),
                              __float_as_uint(x[2]), __float_as_uint(x[3])));
}

__device__ __forceinline__ void rk_load8(float out[8], const float *from)
{
    rk_load4(out, from);
    rk_load4(out + 4, from + 4);
}

template <class T>
__device__ __forceinline__ void rk_load8(float out[8], const T *from)
{
    union {
        uint4 bits;
        T halves[8];
    } u = {};
    u.bits = rk_load16(from);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        out[i] = rk_wide(u.halves[i]);
    }
}

__device__ __forceinline__ void rk_store8(float *to, const float x[8])
{
    rk_store4(to, x);
    rk_store4(to + 4, x + 4);
}

template <class T>
__device__ __forceinline__ void rk_store8(T *to, const float x[8])
{
    rk_store16(to, make_uint4(rk_pack<T>(x[0], x[1]), rk_pack<T>(x[2], x[3]),
                              rk_pack<T>(x[4], x[5]), rk_pack<T>(x[6], x[7])));
}

/* The same for the first n <= 8 elements anywhere. */
template <class T>
__device__ __forceinline__ void rk_load_few(float out[8], const T *from, int n)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        out[i] = i < n ? rk_wide(from[i]) : 0.0f;
    }
}

template <class T>
__device__ __forceinline__ void rk_store_few(T *to, const float x[8], int n)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i < n) {
            rk_narrow(to + i, x[i]);
        }
    }
}

/* Elements [at, at + 8) of a row of n, zeros beyond its end; the row's address
 * is aligned and n a multiple of 8, or not (`whole`). */
template <class T>
__device__ __forceinline__ void rk_row_load(float out[8], const T *row, int at,
                                            int n, bool whole)
{
    if (whole) {
        rk_load8(out, row + at);
    } else {
        rk_load_few(out, row + at, n - at);
    }
}

template <class T>
__device__ __forceinline__ void rk_row_store(T *row, const float x[8], int at,
                                             int n, bool whole)
{
    if (whole) {
        rk_store8(row + at, x);
    } else {
        rk_store_few(row + at, x, n - at);
    }
}

/* ---- sums ---------------------------------------------------------------- */

template <class T> __device__ __forceinline__ T rk_warp_sum(T x)
{
#pragma unroll
    for (int step = RK_WARP / 2; step > 0; step /= 2) {
        x += __shfl_xor_sync(RK_ALL_LANES, x, step);
    }
    return x;
}

__device__ __forceinline__ float rk_warp_max(float x)
{
#pragma unroll
    for (int step = RK_WARP / 2; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(RK_ALL_LANES, x, step));
    }
    return x;
}

/* Sum over the block, in all threads. `sums` is shared, one for each warp, and
 * not in use by a sum that some thread may still be reading. */
template <class T> __device__ __forceinline__ T rk_block_sum(T x, T *sums)
{
    x = rk_warp_sum(x);
    if (threadIdx.x % RK_WARP == 0) {
        sums[threadIdx.x / RK_WARP] = x;
    }
    __syncthreads(); /* the sums of all warps are there */
    T total = sums[0];
    for (unsigned i = 1; i < blockDim.x / RK_WARP; i++) {
        total += sums[i];
    }
    return total;
}

/* Threads for rows of n elements: whole warps, eight elements each, `most` at
 * most. */
static inline unsigned rk_row_threads(int n, int most)
{
    const int wanted = (n + 8 * RK_WARP - 1) / (8 * RK_WARP) * RK_WARP;
    return (unsigned)(wanted < most ? wanted : most);
}

static inline unsigned rk_blocks(int64_t n, int64_t per_block)
{
    return (unsigned)((n + per_block - 1) / per_block);
}

/* ---- types --------------------------------------------------------------- */

/* Call `body` with a value of the element type that `type` names: of
 * activations, or of keys and values, */
template <class Body> static inline void rk_with_act(rk_type type, Body body)
{
    if (type == RK_F32) {
        body(0.0f);
    } else {
        body(rk_bf16());
    }
}

/* or of a table of weights. */
template <class Body> static inline void rk_with_type(rk_type type, Body body)
{
    if (type == RK_F16) {
        body(rk_f16());
    } else {
        rk_with_act(type, body);
    }
}

#endif
