/* What kernels say in their own words, because nvcc alone understands CUDA's.
 *
 * A .cu file includes this and nothing else of CUDA. nvcc compiles it for
 * devices; an ordinary C++ compiler compiles the same file for the host
 * runtime of the tests (tests/cuda_host), which puts its own <cuda_runtime.h>,
 * <cuda_bf16.h>, <cuda_fp16.h> and <rk_port_host.h> before NVIDIA's.
 *
 * Besides what is below, a kernel may use: __global__, __device__,
 * __forceinline__, __launch_bounds__, __restrict__, threadIdx, blockIdx,
 * blockDim, gridDim, __syncthreads, __syncthreads_count/and/or, __syncwarp,
 * __shfl_sync, __shfl_xor_sync, __shfl_up_sync, __shfl_down_sync,
 * __ballot_sync, __any_sync, __all_sync, __activemask is not among them,
 * atomicAdd (int, unsigned, 64 bits, float, double), atomicMax, atomicMin,
 * atomicCAS, atomicExch, __threadfence, __ldg, __popc, __ffs, __clz, min, max,
 * rsqrtf, exp2f, log2f, __expf, __logf, __fdividef, __fmaf_rn, __float_as_uint,
 * __uint_as_float, __float_as_int, __int_as_float, __umulhi, the C functions
 * of <math.h>, dim3, int2, int4, uint2, uint4, float2, float4, double2 and
 * their make_ functions. Local arrays, templates and lambdas are fine; static,
 * __shared__, __constant__ and textures are not.
 *
 * Vector accesses go through rk_load16 and its kin: an address that is not
 * aligned stops a test there. A launcher returns cudaGetLastError().
 */
#ifndef RKSC_CUDA_PORT_H
#define RKSC_CUDA_PORT_H

#include <math.h>
#include <stdint.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

typedef __nv_bfloat16 rk_bf16;
typedef __half rk_f16;

#if defined(__CUDACC__)

/* ---- launching, shared memory -------------------------------------------- */

/* RK_LAUNCH((kernel<float, 4>), grid, block, bytes, stream, arguments...):
 * bytes of dynamic shared memory; above 48 KiB the attribute
 * cudaFuncAttributeMaxDynamicSharedMemorySize must have been set. */
#define RK_LAUNCH(kernel, grid, block, bytes, stream, ...)                     \
    kernel<<<(grid), (block), (bytes), (stream)>>>(__VA_ARGS__)

/* RK_SHARED(float, tile, [4][32]); aligned to 16 bytes, contents undefined. */
#define RK_SHARED(type, name, dims) __shared__ __align__(16) type name dims

/* unsigned char *name: the dynamic shared memory, aligned to 16 bytes. */
#define RK_SHARED_DYNAMIC(name)                                                \
    extern __shared__ __align__(16) unsigned char rk_dynamic_shared[];         \
    unsigned char *name = rk_dynamic_shared

/* ---- 16 bytes at a time -------------------------------------------------- */

__device__ __forceinline__ uint4 rk_load16(const void *from)
{
    return *static_cast<const uint4 *>(from);
}

__device__ __forceinline__ void rk_store16(void *to, uint4 value)
{
    *static_cast<uint4 *>(to) = value;
}

/* ---- asynchronous copies to shared memory -------------------------------- */

__device__ __forceinline__ unsigned rk_shared_address(const void *shared)
{
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

/* 16 bytes of global memory to shared memory, both aligned to 16; 16 zero
 * bytes where `valid` is false (then `global` is not read, but must be an
 * address). Visible to this thread after its wait, to others after a barrier
 * that follows the wait. */
__device__ __forceinline__ void rk_copy16(void *shared, const void *global,
                                          bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(rk_shared_address(shared)), "l"(global),
                   "r"(valid ? 16 : 0)
                 : "memory");
}

/* Close this thread's group of copies. */
__device__ __forceinline__ void rk_copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Wait until at most n of this thread's groups are still under way. */
template <int n> __device__ __forceinline__ void rk_copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

/* 2^x to a relative error of 2^-22; 0 where that is below the normal numbers.
 */
__device__ __forceinline__ float rk_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- matrix fragments ---------------------------------------------------- */

/* Four 8x8 matrices of 16-bit elements. Lane 8*i + r gives the address of row
 * r (16 bytes, aligned) of matrix i; result i of lane l holds elements
 * (l / 4, 2 * (l % 4)) and the one after it; transposed: (2 * (l % 4), l / 4)
 * and the one below it. All lanes of the warp take part. */
__device__ __forceinline__ void rk_ldmatrix(uint32_t out[4], const void *row)
{
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
        : "r"(rk_shared_address(row))
        : "memory");
}

__device__ __forceinline__ void rk_ldmatrix_trans(uint32_t out[4],
                                                  const void *row)
{
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
        : "r"(rk_shared_address(row))
        : "memory");
}

/* d (16, 8) += a (16, 16) b (16, 8): bf16, float32 accumulators. Fragments of
 * lane l, with g = l / 4 and t = 2 * (l % 4), low half first:
 *   a[0] (g, t..t+1)  a[1] (g+8, t..)  a[2] (g, t+8..)  a[3] (g+8, t+8..)
 *   b[0] (t..t+1, g)  b[1] (t+8..t+9, g)
 *   d[0] (g, t)  d[1] (g, t+1)  d[2] (g+8, t)  d[3] (g+8, t+1) */
__device__ __forceinline__ void rk_mma(float d[4], const uint32_t a[4],
                                       const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]),
                   "r"(b[1]));
}

#else
#include <rk_port_host.h>
#endif

/* ---- element types, on either side --------------------------------------- */

__device__ __forceinline__ float rk_wide(float x)
{
    return x;
}
__device__ __forceinline__ float rk_wide(rk_bf16 x)
{
    return __bfloat162float(x);
}
__device__ __forceinline__ float rk_wide(rk_f16 x)
{
    return __half2float(x);
}

/* Rounded to nearest even. */
__device__ __forceinline__ void rk_narrow(float *out, float x)
{
    *out = x;
}
__device__ __forceinline__ void rk_narrow(rk_bf16 *out, float x)
{
    *out = __float2bfloat16_rn(x);
}
__device__ __forceinline__ void rk_narrow(rk_f16 *out, float x)
{
    *out = __float2half_rn(x);
}

/* Two 16-bit elements in a register, `low` in the low half. */
template <class T>
__device__ __forceinline__ uint32_t rk_pack(float low, float high)
{
    union {
        T halves[2];
        uint32_t word;
    } u = {};
    rk_narrow(&u.halves[0], low);
    rk_narrow(&u.halves[1], high);
    return u.word;
}

#endif
