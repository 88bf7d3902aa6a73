/* Kernels over rows: embedding, norm, rotation, silu, gathering, lenses.
 *
 * All are bound by memory: a thread takes eight elements at a time, 16 bytes a
 * load or store, and what it computes hides behind them. A row whose length is
 * no multiple of eight goes element by element. Sums over a row have a fixed
 * order: eight of a thread, the threads of a warp, the warps of the block.
 */
#include "block.cuh"
#include "kernels.h"

namespace {

constexpr int THREADS = 128; /* where threads are independent */
constexpr int MAX_ROW_THREADS = 512;
constexpr int MAX_WARPS = MAX_ROW_THREADS / RK_WARP;

/* Of the grid. 32 bits are enough: no array that a kernel here takes apart has
 * as many parts. */
__device__ __forceinline__ unsigned thread_number()
{
    return blockIdx.x * THREADS + threadIdx.x;
}

/* Eight elements of a row: this thread's, of n rows cut into `parts`. */
struct piece {
    int64_t row;
    int at;
};

__device__ __forceinline__ piece piece_of(unsigned parts)
{
    const unsigned i = thread_number();
    return {(int64_t)(i / parts), (int)(i % parts) * 8};
}

int parts_of(int width)
{
    return (width + 7) / 8;
}

unsigned blocks_for(int n, int width)
{
    return rk_blocks((int64_t)n * parts_of(width), THREADS);
}

/* ---- begin --------------------------------------------------------------- */

__global__ void __launch_bounds__(THREADS)
    angles(float *cosine, float *sine, const int32_t *positions,
           const double *inv_freq, int n, int half)
{
    const unsigned i = thread_number(), row = i / (unsigned)half;
    if (row < (unsigned)n) {
        const double angle =
            (double)positions[row] * inv_freq[i % (unsigned)half];
        cosine[i] = (float)cos(angle);
        sine[i] = (float)sin(angle);
    }
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    embed(float *out, const T *table, const int32_t *tokens, int n, int width)
{
    const piece p = piece_of((unsigned)(width + 7) / 8);
    if (p.row < n) {
        float x[8];
        const bool whole = width % 8 == 0;
        rk_row_load(x, table + (int64_t)tokens[p.row] * width, p.at, width,
                    whole);
        rk_row_store(out + p.row * width, x, p.at, width, whole);
    }
}

/* ---- norm ---------------------------------------------------------------- */

/* 1 / sqrt(mean(x^2) + eps), in all threads of the block. */
__device__ __forceinline__ float norm_scale(const float *x, float eps,
                                            int width, float *sums)
{
    const bool whole = width % 8 == 0;
    float sum = 0.0f;
    for (int at = threadIdx.x * 8; at < width; at += blockDim.x * 8) {
        float v[8];
        rk_row_load(v, x, at, width, whole);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            sum += v[i] * v[i];
        }
    }
    sum = rk_block_sum(sum, sums);
    return 1.0f / sqrtf(sum / (float)width + eps);
}

template <class T>
__global__ void __launch_bounds__(MAX_ROW_THREADS)
    norm(T *out, const float *x, const float *weight, float eps, int width)
{
    RK_SHARED(float, sums, [MAX_WARPS]);
    const bool whole = width % 8 == 0;
    x += (int64_t)blockIdx.x * width;
    out += (int64_t)blockIdx.x * width;
    const float scale =
        weight != nullptr ? norm_scale(x, eps, width, sums) : 1.0f;
    for (int at = threadIdx.x * 8; at < width; at += blockDim.x * 8) {
        float v[8];
        rk_row_load(v, x, at, width, whole);
        if (weight != nullptr) {
            float w[8];
            rk_row_load(w, weight, at, width, whole);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                v[i] = v[i] * scale * w[i];
            }
        }
        rk_row_store(out, v, at, width, whole);
    }
}

__global__ void __launch_bounds__(THREADS)
    add_bias(float *out, const float *bias, int n, int width)
{
    const piece p = piece_of((unsigned)(width + 7) / 8);
    if (p.row < n) {
        float x[8], b[8];
        const bool whole = width % 8 == 0;
        rk_row_load(x, out + p.row * width, p.at, width, whole);
        rk_row_load(b, bias, p.at, width, whole);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] += b[i];
        }
        rk_row_store(out + p.row * width, x, p.at, width, whole);
    }
}

/* ---- rotation and the pool ----------------------------------------------- */

/* Where the two parts of four rotated pairs lie in a head: a[j] at a + j * by,
 * b[j] at b + j * by. */
struct pairs {
    int a, b, by;
};

/* x: a[4], then b[4] of the head that begins at `from`. `whole`: four pairs,
 * 16-byte aligned; else the first n. */
template <class T>
__device__ __forceinline__ void load_pairs(float x[8], const T *from,
                                           const pairs &p, int n)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        x[j] = j < n ? rk_wide(from[p.a + j * p.by]) : 0.0f;
        x[4 + j] = j < n ? rk_wide(from[p.b + j * p.by]) : 0.0f;
    }
}

/* Four pairs at 16-byte aligned places, whichever way they lie. */
__device__ __forceinline__ void load_pairs4(float x[8], const float *from,
                                            const pairs &p)
{
    if (p.by == 1) {
        rk_load4(x, from + p.a);
        rk_load4(x + 4, from + p.b);
    } else {
        float y[8];
        rk_load8(y, from + p.a);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[j] = y[2 * j];
            x[4 + j] = y[2 * j + 1];
        }
    }
}

template <class T>
__device__ __forceinline__ void store_pairs(T *to, const float x[8],
                                            const pairs &p, int n)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j < n) {
            rk_narrow(to + p.a + j * p.by, x[j]);
            rk_narrow(to + p.b + j * p.by, x[4 + j]);
        }
    }
}

__device__ __forceinline__ void store_pairs4(float *to, const float x[8],
                                             const pairs &p)
{
    if (p.by == 1) {
        rk_store4(to + p.a, x);
        rk_store4(to + p.b, x + 4);
    } else {
        const float y[8] = {x[0], x[4], x[1], x[5], x[2], x[6], x[3], x[7]};
        rk_store8(to + p.a, y);
    }
}

template <class T>
__device__ __forceinline__ void store_pairs4(T *to, const float x[8],
                                             const pairs &p)
{
    if (p.by == 1) {
        uint2 *a = reinterpret_cast<uint2 *>(to + p.a);
        uint2 *b = reinterpret_cast<uint2 *>(to + p.b);
        *a = make_uint2(rk_pack<T>(x[0], x[1]), rk_pack<T>(x[2], x[3]));
        *b = make_uint2(rk_pack<T>(x[4], x[5]), rk_pack<T>(x[6], x[7]));
    } else {
        const float y[8] = {x[0], x[4], x[1], x[5], x[2], x[6], x[3], x[7]};
        rk_store8(to + p.a, y);
    }
}

/* A thread takes four pairs of one head of Q, K or V of one row. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    rotate(rk_cuda_rotation r, rk_cuda_kv kv)
{
    const int half = kv.head_dim / 2;
    const unsigned quads = (unsigned)(half + 3) / 4;
    const unsigned n_heads = (unsigned)(r.n_heads + 2 * kv.n_kv_heads);
    const unsigned i = thread_number(), head_number = i / quads;
    const int64_t row = head_number / n_heads;
    const int at = (int)(i % quads) * 4;
    int head = (int)(head_number % n_heads);
    if (row >= r.n) {
        return;
    }
    const bool whole = half % 4 == 0;
    const pairs p =
        r.interleaved ? pairs{2 * at, 2 * at + 1, 2} : pairs{at, half + at, 1};
    const float *from = r.qkv + (int64_t)head_number * kv.head_dim;
    const bool query = head < r.n_heads;
    const bool value = head >= r.n_heads + kv.n_kv_heads;
    const float *bias = query   ? r.query_bias
                        : value ? r.value_bias
                                : r.key_bias;
    head -= query ? 0 : value ? r.n_heads + kv.n_kv_heads : r.n_heads;
    float x[8];
    if (whole) {
        load_pairs4(x, from, p);
    } else {
        load_pairs(x, from, p, half - at);
    }
    if (bias != nullptr) {
        float b[8];
        load_pairs(b, bias + head * kv.head_dim, p, half - at);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            x[j] += b[j];
        }
    }
    if (!value) {
        float c[4], s[4];
        const int64_t angle = row * half + at;
        if (whole) {
            rk_load4(c, r.cosine + angle);
            rk_load4(s, r.sine + angle);
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                c[j] = at + j < half ? r.cosine[angle + j] : 0.0f;
                s[j] = at + j < half ? r.sine[angle + j] : 0.0f;
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float a = x[j], b = x[4 + j];
            x[j] = a * c[j] - b * s[j];
            x[4 + j] = b * c[j] + a * s[j];
        }
    }
    T *to;
    if (query) {
        to = static_cast<T *>(r.q) + (row * r.n_heads + head) * kv.head_dim;
    } else {
        const int64_t slot = r.slots[row];
        if (slot < 0) {
            return;
        }
        const int64_t offset = slot & ((1 << kv.block_shift) - 1);
        const int64_t first = (value ? kv.n_kv_heads : 0) + head;
        to = reinterpret_cast<T *>(kv.layer +
                                   (slot >> kv.block_shift) * kv.block_bytes) +
             ((first << kv.block_shift) + offset) * kv.head_dim;
    }
    if (whole) {
        store_pairs4(to, x, p);
    } else {
        store_pairs(to, x, p, half - at);
    }
}

/* ---- silu ---------------------------------------------------------------- */

template <class T>
__global__ void __launch_bounds__(THREADS)
    swiglu(T *out, const float *gate, const float *up, int64_t stride, int n,
           int ffn)
{
    const piece p = piece_of((unsigned)(ffn + 7) / 8);
    if (p.row < n) {
        float g[8], u[8];
        const bool whole = ffn % 8 == 0 && stride % 4 == 0;
        rk_row_load(g, gate + p.row * stride, p.at, ffn, whole);
        rk_row_load(u, up + p.row * stride, p.at, ffn, whole);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            g[i] = g[i] / (1.0f + expf(-g[i])) * u[i];
        }
        rk_row_store(out + p.row * ffn, g, p.at, ffn, whole);
    }
}

/* ---- gathering ----------------------------------------------------------- */

constexpr int AT_ONCE = 8;

/* A thread moves one column of all rows. Where dst is src, rows[i] >= i rises,
 * so AT_ONCE rows may be read before they are written: no later read looks
 * below them. Each block of the grid's second dimension would break that; there
 * is one unless the arrays are apart. */
__global__ void __launch_bounds__(THREADS)
    gather(float *dst, const float *src, const int32_t *rows, int n, int width)
{
    const int column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= width) {
        return;
    }
    for (int i = blockIdx.y * AT_ONCE; i < n; i += gridDim.y * AT_ONCE) {
        float x[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            x[j] =
                i + j < n ? src[(int64_t)rows[i + j] * width + column] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            if (i + j < n) {
                dst[(int64_t)(i + j) * width + column] = x[j];
            }
        }
    }
}

/* ---- lenses -------------------------------------------------------------- */

/* A block takes one row: its norm, then one dot product for each id. */
template <class T>
__global__ void __launch_bounds__(MAX_ROW_THREADS)
    answer(float *out, const float *x, const float *weight, float eps,
           const T *head, const int32_t *ids, int n_ids, int width)
{
    RK_SHARED(float, norm_sums, [MAX_WARPS]);
    RK_SHARED(float, sums, [2][MAX_WARPS]);
    const bool whole = width % 8 == 0;
    x += (int64_t)blockIdx.x * width;
    const float scale =
        weight != nullptr ? norm_scale(x, eps, width, norm_sums) : 1.0f;
    for (int id = 0; id < n_ids; id++) {
        const T *row = head + (int64_t)ids[id] * width;
        float sum = 0.0f;
        for (int at = threadIdx.x * 8; at < width; at += blockDim.x * 8) {
            float v[8], h[8], w[8];
            rk_row_load(v, x, at, width, whole);
            rk_row_load(h, row, at, width, whole);
            if (weight != nullptr) {
                rk_row_load(w, weight, at, width, whole);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float y = weight != nullptr ? v[i] * scale * w[i] : v[i];
                sum += y * h[i];
            }
        }
        /* Two arrays in turn: the barrier inside the next sum keeps the one
         * after it from overwriting what is still being read. */
        sum = rk_block_sum(sum, sums[id % 2]);
        if (threadIdx.x == 0) {
            out[(int64_t)blockIdx.x * n_ids + id] = sum;
        }
    }
}

__global__ void __launch_bounds__(THREADS)
    mean(float *out, double *sum, const float *x, int n, double n_total,
         int width)
{
    const int column = blockIdx.x * THREADS + threadIdx.x;
    if (column < width) {
        double total = sum[column];
#pragma unroll 8
        for (int i = 0; i < n; i++) {
            total += (double)x[(int64_t)i * width + column];
        }
        sum[column] = total;
        out[column] = (float)(total / n_total);
    }
}

__global__ void __launch_bounds__(MAX_ROW_THREADS)
    cosine(float *out, const float *a, const float *b, const float *center,
           int width)
{
    RK_SHARED(double, sums, [3][MAX_WARPS]);
    a += (int64_t)blockIdx.x * width;
    double ab = 0.0, aa = 0.0, bb = 0.0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const double c = center != nullptr ? (double)center[i] : 0.0;
        const double u = (double)a[i] - c, v = (double)b[i] - c;
        ab += u * v;
        aa += u * u;
        bb += v * v;
    }
    ab = rk_block_sum(ab, sums[0]);
    aa = rk_block_sum(aa, sums[1]);
    bb = rk_block_sum(bb, sums[2]);
    if (threadIdx.x == 0) {
        out[blockIdx.x] = (float)(ab / (sqrt(aa) * sqrt(bb)));
    }
}

} // namespace

/* ---- launchers ----------------------------------------------------------- */

cudaError_t rk_cuda_angles(float *cosine, float *sine, const int32_t *positions,
                           const double *inv_freq, int32_t n, int32_t half,
                           cudaStream_t stream)
{
    RK_LAUNCH((angles), rk_blocks((int64_t)n * half, THREADS), THREADS, 0,
              stream, cosine, sine, positions, inv_freq, n, half);
    return cudaGetLastError();
}

cudaError_t rk_cuda_embed(float *out, const void *table, rk_type type,
                          const int32_t *tokens, int32_t n, int32_t width,
                          cudaStream_t stream)
{
    rk_with_type(type, [=](auto element) {
        using T = decltype(element);
        RK_LAUNCH((embed<T>), blocks_for(n, width), THREADS, 0, stream, out,
                  static_cast<const T *>(table), tokens, n, width);
    });
    return cudaGetLastError();
}

cudaError_t rk_cuda_norm(void *out, rk_type type, const float *x,
                         const float *weight, float eps, int32_t n,
                         int32_t width, cudaStream_t stream)
{
    rk_with_act(type, [=](auto element) {
        using T = decltype(element);
        RK_LAUNCH((norm<T>), (unsigned)n,
                  rk_row_threads(width, MAX_ROW_THREADS), 0, stream,
                  static_cast<T *>(out), x, weight, eps, width);
    });
    return cudaGetLastError();
}

cudaError_t rk_cuda_add_bias(float *out, const float *bias, int32_t n,
                             int32_t width, cudaStream_t stream)
{
    RK_LAUNCH((add_bias), blocks_for(n, width), THREADS, 0, stream, out, bias,
              n, width);
    return cudaGetLastError();
}

cudaError_t rk_cuda_rotate(const rk_cuda_rotation *r, const rk_cuda_kv *kv,
                           cudaStream_t stream)
{
    const int64_t quads = (kv->head_dim / 2 + 3) / 4;
    const int64_t heads = r->n_heads + 2 * kv->n_kv_heads;
    rk_with_act(kv->type, [=](auto element) {
        using T = decltype(element);
        RK_LAUNCH((rotate<T>), rk_blocks(r->n * heads * quads, THREADS),
                  THREADS, 0, stream, *r, *kv);
    });
    return cudaGetLastError();
}

cudaError_t rk_cuda_swiglu(void *out, rk_type type, const float *gate,
                           const float *up, int64_t stride, int32_t n,
                           int32_t ffn, cudaStream_t stream)
{
    rk_with_act(type, [=](auto element) {
        using T = decltype(element);
        RK_LAUNCH((swiglu<T>), blocks_for(n, ffn), THREADS, 0, stream,
                  static_cast<T *>(out), gate, up, stride, n, ffn);
    });
    return cudaGetLastError();
}

cudaError_t rk_cuda_gather(float *dst, const float *src, const int32_t *rows,
                           int32_t n, int32_t width, cudaStream_t stream)
{
    const dim3 grid(rk_blocks(width, THREADS),
                    dst == src ? 1 : rk_blocks(n, AT_ONCE));
    RK_LAUNCH((gather), grid, THREADS, 0, stream, dst, src, rows, n, width);
    return cudaGetLastError();
}

cudaError_t rk_cuda_answer(float *out, const float *x, const float *weight,
                           float eps, const void *head, rk_type type,
                           const int32_t *ids, int32_t n, int32_t n_ids,
                           int32_t width, cudaStream_t stream)
{
    rk_with_type(type, [=](auto element) {
        using T = decltype(element);
        RK_LAUNCH((answer<T>), (unsigned)n,
                  rk_row_threads(width, MAX_ROW_THREADS), 0, stream, out, x,
                  weight, eps, static_cast<const T *>(head), ids, n_ids, width);
    });
    return cudaGetLastError();
}

cudaError_t rk_cuda_mean(float *out, double *sum, const float *x, int32_t n,
                         int64_t n_total, int32_t width, cudaStream_t stream)
{
    RK_LAUNCH((mean), rk_blocks(width, THREADS), THREADS, 0, stream, out, sum,
              x, n, (double)n_total, width);
    return cudaGetLastError();
}

cudaError_t rk_cuda_cosine(float *out, const float *a, const float *b,
                           const float *center, int32_t n, int32_t width,
                           cudaStream_t stream)
{
    RK_LAUNCH((cosine), (unsigned)n, rk_row_threads(width, MAX_ROW_THREADS), 0,
              stream, out, a, b, center, width);
    return cudaGetLastError();
}
