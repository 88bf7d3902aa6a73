/* Products in 16-bit integers: a . w, block by block of 256 of K (the last one
 * what remains, a multiple of 32).
 *
 *   a_i = s q_i        of each row's block: s = max |a| / 32767,
 *                      q in -32767 .. 32767
 *   w_i = d r_i + t    of each group of 16 or 32, as GGUF's block types have it
 *   a . w = sum over blocks of  s (sum over groups of d (sum of q_i r_i)
 *                                                   + t (sum of q_i))
 *
 * Sums of products are exact integers, whatever their order: 32 products are
 * at most 32 * 255 * 32767 = 267,378,720 (Q8_0 with 128 added), and what takes
 * the added number away 32 * 128 * 32767, so int32 has room eight times over,
 * for any file; of bytes, 256 times the sum of `high` is at most
 * 32 * 255 * 32768, that of `low` 32 * 255 * 255. A sum over a group is rounded
 * to float once; then all is fused multiply-adds of floats in the order of
 * groups, each block from zero, and of blocks:
 *
 *   x = fma(float(sum of q r), d, x), x = fma(t, float(sum of q), x)
 *   y = fma(x, s, y)
 *
 * No lanes, no trees: every instruction set gives the same bits, and every row
 * alone the same as in a batch.
 */
#ifndef RKSC_CPU_INT16_H
#define RKSC_CPU_INT16_H

#include "cpu.h"

#define CPU_INT16_BLOCK 256

/* A row's block of activations: as 16-bit integers, of which four in a row lie
 * as 0, 2, 1, 3, since bytes of weights become even and odd ones; or as bytes,
 * q = 256 high + low, where an instruction multiplies bytes. Sums: 0 .. 7 of
 * 32, 8 .. 23 of 16. NaN or infinity among them: scale is NaN and q zero. */
typedef struct cpu_int16_block {
    union {
        int16_t q[CPU_INT16_BLOCK];
        struct {
            int8_t high[CPU_INT16_BLOCK];
            uint8_t low[CPU_INT16_BLOCK];
        };
    };
    int32_t less[24];     /* -sum of q */
    float sum[24];        /* sum of q */
    int32_t less_high[8]; /* -256 sum of high, of 32 */
    float scale;
    float unused[7];
} cpu_int16_block;

/* Blocks of a row of k. */
static inline int32_t cpu_int16_blocks(int32_t k)
{
    return cpu_ceil_div(k, CPU_INT16_BLOCK);
}

typedef struct cpu_int16_kernels {
    /* k values to blocks */
    void (*quantize)(cpu_int16_block *out, const float *a, int32_t k);
    void (*product)(const cpu_integer_product *job);
    size_t scratch_bytes;
} cpu_int16_kernels;

extern const cpu_int16_kernels cpu_int16_portable;
#if defined(__x86_64__)
extern const cpu_int16_kernels cpu_int16_avx2;
extern const cpu_int16_kernels cpu_int16_avxvnni;
extern const cpu_int16_kernels cpu_int16_avx512vnni;
#endif

/* The best that this machine has, within a supported `isa`. */
const cpu_int16_kernels *cpu_int16_of(rk_isa isa);

#endif
