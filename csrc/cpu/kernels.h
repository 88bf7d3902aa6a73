/* What every kernels_*.c includes before its vector vocabulary.
 *
 * The vocabulary: LANES floats make a `vf`, 2 * LANES bf16 make a `vb`, four
 * floats a `v4`. `_n` loads read the first n elements and give zero in the
 * others, `_n` stores write n. Names say the rest; reductions (`vf_sum`,
 * `vf_sum4`) add lane i and i + LANES / 2, then halve again.
 */
#ifndef RKSC_CPU_KERNELS_H
#define RKSC_CPU_KERNELS_H

#include <math.h>
#include <string.h>

#include "cpu.h"

#if defined(__SANITIZE_ADDRESS__) /* -O1 cannot always obey, and warns */
#define UNROLL
#elif defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#define INLINE static inline __attribute__((always_inline, unused))

typedef float v4 __attribute__((vector_size(16)));

INLINE v4 v4_load(const float *p)
{
    v4 x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void v4_store(float *p, v4 x)
{
    memcpy(p, &x, sizeof x);
}

#endif
