/* CUDA's vocabulary inside kernels, for C++: a block's threads are fibers of
 * one thread, and what makes them meet is a call of fibers.cpp. */
#ifndef RK_HOST_DEVICE_H
#define RK_HOST_DEVICE_H

#include <cmath>
#include <cstdint>
#include <cstring>

using std::max;
using std::min;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(n) alignas(n)

/* ---- vectors ------------------------------------------------------------- */

struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct uint3 {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1)
        : x(x_), y(y_), z(z_)
    {
    }
};

inline int2 make_int2(int x, int y)
{
    return {x, y};
}
inline int4 make_int4(int x, int y, int z, int w)
{
    return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y)
{
    return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
    return {x, y, z, w};
}
inline float2 make_float2(float x, float y)
{
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}
inline double2 make_double2(double x, double y)
{
    return {x, y};
}

/* ---- who am I: set whenever a fiber goes on ------------------------------ */

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

/* ---- meeting ------------------------------------------------------------- */

/* End the kernel with an error: what, printed once. */
[[noreturn]] void rk_host_fault(const char *what);

enum rk_host_vote { RK_HOST_SYNC, RK_HOST_COUNT, RK_HOST_AND, RK_HOST_OR };
int rk_host_barrier(rk_host_vote vote, int value);

/* All lanes in `mask` call this with the same `act` and mask; the last to come
 * runs it once over what they brought. */
typedef void rk_host_act(void *const lanes[32], unsigned mask);
void rk_host_meet(unsigned mask, rk_host_act *act, void *mine);
int rk_host_lane();

inline void __syncthreads()
{
    rk_host_barrier(RK_HOST_SYNC, 0);
}
inline int __syncthreads_count(int value)
{
    return rk_host_barrier(RK_HOST_COUNT, value);
}
inline int __syncthreads_and(int value)
{
    return rk_host_barrier(RK_HOST_AND, value);
}
inline int __syncthreads_or(int value)
{
    return rk_host_barrier(RK_HOST_OR, value);
}

inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    rk_host_meet(mask, [](void *const *, unsigned) {}, nullptr);
}

/* A shuffle: each lane brings a value and says whose it wants. */
template <class T> struct rk_host_shuffle {
    T value, result;
    int from;
};

template <class T>
inline T rk_host_exchange(unsigned mask, T value, int from)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "32 or 64 bits");
    rk_host_shuffle<T> mine = {value, value, from};
    rk_host_meet(
        mask,
        [](void *const lanes[32], unsigned present) {
            for (int i = 0; i < 32; i++) {
                if (present >> i & 1) {
                    auto *me = static_cast<rk_host_shuffle<T> *>(lanes[i]);
                    if (!(present >> me->from & 1)) {
                        rk_host_fault("a shuffle reads a lane that is not in "
                                      "its mask");
                    }
                    me->result =
                        static_cast<rk_host_shuffle<T> *>(lanes[me->from])
                            ->value;
                }
            }
        },
        &mine);
    return mine.result;
}

inline void rk_host_width(int width)
{
    if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
        rk_host_fault("a shuffle's width is not a power of two up to 32");
    }
}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int from, int width = 32)
{
    rk_host_width(width);
    int base = rk_host_lane() & ~(width - 1);
    return rk_host_exchange(mask, value, base + (from & (width - 1)));
}

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32)
{
    rk_host_width(width);
    int lane = rk_host_lane(), from = lane ^ bits;
    int end = (lane | (width - 1)) + 1;
    return rk_host_exchange(mask, value, from < end ? from : lane);
}

template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32)
{
    rk_host_width(width);
    int lane = rk_host_lane(), base = lane & ~(width - 1);
    int from = lane - static_cast<int>(by);
    return rk_host_exchange(mask, value, from >= base ? from : lane);
}

template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32)
{
    rk_host_width(width);
    int lane = rk_host_lane(), end = (lane | (width - 1)) + 1;
    int from = lane + static_cast<int>(by);
    return rk_host_exchange(mask, value, from < end ? from : lane);
}

inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    struct ballot {
        int value;
        unsigned result;
    } mine = {predicate, 0};
    rk_host_meet(
        mask,
        [](void *const lanes[32], unsigned present) {
            unsigned votes = 0;
            for (int i = 0; i < 32; i++) {
                if (present >> i & 1 &&
                    static_cast<ballot *>(lanes[i])->value) {
                    votes |= 1u << i;
                }
            }
            for (int i = 0; i < 32; i++) {
                if (present >> i & 1) {
                    static_cast<ballot *>(lanes[i])->result = votes;
                }
            }
        },
        &mine);
    return mine.result;
}

inline int __any_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) == mask;
}

/* ---- memory: a fiber is not interrupted between two meetings ------------- */

template <class T> inline T atomicAdd(T *at, T value)
{
    T old = *at;
    *at = old + value;
    return old;
}
template <class T> inline T atomicMax(T *at, T value)
{
    T old = *at;
    *at = old > value ? old : value;
    return old;
}
template <class T> inline T atomicMin(T *at, T value)
{
    T old = *at;
    *at = old < value ? old : value;
    return old;
}
template <class T> inline T atomicExch(T *at, T value)
{
    T old = *at;
    *at = value;
    return old;
}
template <class T> inline T atomicCAS(T *at, T expected, T value)
{
    T old = *at;
    *at = old == expected ? value : old;
    return old;
}
inline void __threadfence()
{
}
inline void __threadfence_block()
{
}
template <class T> inline T __ldg(const T *from)
{
    return *from;
}

/* ---- numbers ------------------------------------------------------------- */

template <class To, class From> inline To rk_host_bits(From x)
{
    static_assert(sizeof(To) == sizeof(From), "same size");
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
inline unsigned __float_as_uint(float x)
{
    return rk_host_bits<unsigned>(x);
}
inline float __uint_as_float(unsigned x)
{
    return rk_host_bits<float>(x);
}
inline int __float_as_int(float x)
{
    return rk_host_bits<int>(x);
}
inline float __int_as_float(int x)
{
    return rk_host_bits<float>(x);
}
inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x)
{
    return __builtin_popcountll(x);
}
inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
inline int __clz(int x)
{
    return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline unsigned __umulhi(unsigned a, unsigned b)
{
    return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline float rsqrtf(float x)
{
    return 1.0f / std::sqrt(x);
}
inline float __expf(float x)
{
    return std::exp(x);
}
inline float __logf(float x)
{
    return std::log(x);
}
inline float __fdividef(float a, float b)
{
    return a / b;
}
inline float __fmaf_rn(float a, float b, float c)
{
    return std::fma(a, b, c);
}
inline float __fadd_rn(float a, float b)
{
    return a + b;
}
inline float __fmul_rn(float a, float b)
{
    return a * b;
}

#endif
