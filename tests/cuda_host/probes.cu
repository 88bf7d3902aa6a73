/* Kernels that try the host runtime: right ones, and ones that break a rule.
 * Every launcher takes an array of device addresses. */
#include "port.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

/* ---- fragments ------------------------------------------------------------ */

__global__ void mma(float *d, const uint32_t *a, const uint32_t *b)
{
    int lane = threadIdx.x;
    float mine[4];
    uint32_t left[4], right[2];
    for (int i = 0; i < 4; i++) {
        mine[i] = d[4 * lane + i];
        left[i] = a[4 * lane + i];
    }
    for (int i = 0; i < 2; i++) {
        right[i] = b[2 * lane + i];
    }
    rk_mma(mine, left, right);
    for (int i = 0; i < 4; i++) {
        d[4 * lane + i] = mine[i];
    }
}

EXPORT int probe_mma(float *d, const uint32_t *a, const uint32_t *b)
{
    RK_LAUNCH(mma, 1, 32, 0, nullptr, d, a, b);
    return cudaGetLastError();
}

/* matrices: 32 rows of 8 elements; out: (32, 4) registers. */
__global__ void ldmatrix(uint32_t *out, const uint16_t *matrices, int trans)
{
    RK_SHARED(uint16_t, rows, [32][8]);
    int lane = threadIdx.x;
    uint32_t mine[4];
    rk_store16(rows[lane], rk_load16(matrices + 8 * lane));
    __syncwarp();
    if (trans) {
        rk_ldmatrix_trans(mine, rows[lane]);
    } else {
        rk_ldmatrix(mine, rows[lane]);
    }
    for (int i = 0; i < 4; i++) {
        out[4 * lane + i] = mine[i];
    }
}

EXPORT int probe_ldmatrix(uint32_t *out, const uint16_t *matrices, int trans)
{
    RK_LAUNCH(ldmatrix, 1, 32, 0, nullptr, out, matrices, trans);
    return cudaGetLastError();
}

/* ---- meeting --------------------------------------------------------------- */

/* out[i] = in[n - 1 - i] through shared memory, twice; `rules` says which of
 * the two barriers are there. */
__global__ void reverse(float *out, const float *in, int rules)
{
    RK_SHARED(float, held, [64]);
    int i = threadIdx.x, n = blockDim.x;
    held[i] = in[i];
    if (rules & 1) {
        __syncthreads();
    }
    float x = held[n - 1 - i];
    if (rules & 2) {
        __syncthreads();
    }
    held[i] = x;
    __syncthreads();
    out[i] = held[n - 1 - i];
}

EXPORT int probe_reverse(float *out, const float *in, int n, int rules)
{
    RK_LAUNCH(reverse, 1, n, 0, nullptr, out, in, rules);
    return cudaGetLastError();
}

/* out: (4, 64) sums by butterfly, sums from below, votes, neighbours. */
__global__ void warps(float *out, const float *in)
{
    int i = threadIdx.x, n = blockDim.x;
    float sum = in[i], below = in[i];
    for (int bits = 16; bits > 0; bits /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, bits);
    }
    for (int by = 1; by < 32; by *= 2) {
        float other = __shfl_up_sync(0xffffffffu, below, by);
        below += i % 32 >= by ? other : 0.0f;
    }
    out[i] = sum;
    out[n + i] = below;
    out[2 * n + i] = __popc(__ballot_sync(0xffffffffu, in[i] > 0.0f));
    out[3 * n + i] = __shfl_down_sync(0xffffffffu, in[i], 1, 8);
}

EXPORT int probe_warps(float *out, const float *in)
{
    RK_LAUNCH(warps, 1, 64, 0, nullptr, out, in);
    return cudaGetLastError();
}

/* ---- broken rules ------------------------------------------------------------ */

__global__ void broken(float *out, const float *in, int rule)
{
    RK_SHARED(float, held, [64]);
    int i = threadIdx.x;
    held[i] = in[i];
    __syncthreads();
    if (rule == 0 && i == 3) {
        return; /* the others wait for it below */
    }
    if (rule == 1 && i % 2 == 0) {
        out[i] = __shfl_sync(0x55555555u, held[i], 1); /* not in the mask */
        return;
    }
    if (rule == 2 && i < 16) {
        held[i] = __shfl_sync(0xffffffffu, held[i], 0); /* half a warp */
    }
    if (rule == 3) {
        held[i] += rk_load16(in + 1).x; /* not aligned */
    }
    if (rule == 4) {
        rk_copy16(&held[4 * (i % 16)], in, true); /* never waited for */
        rk_copy_commit();
    }
    if (rule == 5 && i % 2 == 0) {
        __syncwarp(); /* the odd lanes are elsewhere */
    }
    __syncthreads();
    out[i] = held[i];
}

EXPORT int probe_broken(float *out, const float *in, int rule)
{
    RK_LAUNCH(broken, 1, 64, 0, nullptr, out, in, rule);
    return cudaGetLastError();
}

/* in -> shared -> out; `wait` false: read before the copy has come. */
__global__ void copy(float *out, const float *in, int n, bool wait)
{
    RK_SHARED(float, held, [128]);
    int i = threadIdx.x;
    rk_copy16(&held[4 * i], in + 4 * i, 4 * i < n);
    rk_copy_commit();
    if (wait) {
        rk_copy_wait<0>();
    }
    for (int j = 0; j < 4; j++) {
        out[4 * i + j] = held[4 * i + j];
    }
    rk_copy_wait<0>();
}

EXPORT int probe_copy(float *out, const float *in, int n, bool wait)
{
    RK_LAUNCH(copy, 1, 32, 0, nullptr, out, in, n, wait);
    return cudaGetLastError();
}

/* What shared memory holds when a block starts. */
__global__ void fresh(float *out)
{
    RK_SHARED(float, held, [32]);
    RK_SHARED_DYNAMIC(more);
    out[threadIdx.x] =
        held[threadIdx.x] + reinterpret_cast<float *>(more)[threadIdx.x];
    held[threadIdx.x] = 0.0f;
}

EXPORT int probe_fresh(float *out, int grid, int block, int bytes, int allowed)
{
    if (allowed > 0) {
        cudaFuncSetAttribute(fresh, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             allowed);
    }
    RK_LAUNCH(fresh, grid, block, bytes, nullptr, out);
    return cudaGetLastError();
}

/* out[0] = the sum over all threads of all blocks. */
__global__ void count(int *out)
{
    atomicAdd(out, 1);
}

EXPORT int probe_count(int *out, int grid, int block, cudaStream_t stream)
{
    RK_LAUNCH(count, dim3(grid, 2), block, 0, stream, out);
    return cudaGetLastError();
}

/* ---- element types ------------------------------------------------------------ */

EXPORT void probe_round(uint16_t *bf16, uint16_t *f16, float *wide,
                        const float *x, int n)
{
    for (int i = 0; i < n; i++) {
        rk_bf16 b;
        rk_f16 h;
        rk_narrow(&b, x[i]);
        rk_narrow(&h, x[i]);
        bf16[i] = b.bits;
        f16[i] = h.bits;
        wide[i] = rk_wide(h);
    }
}
