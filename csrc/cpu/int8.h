/* Products in integers (activations="int8"): a . w, block by block of 32.
 *
 *   a_i = d q_i        of each row's block: d = max |a| / 127, q in -127 .. 127
 *   w_i = s r_i + t    of each group of 16 or 32, as GGUF's block types have it
 *   a . w = sum over blocks of  (s d) (sum of q_i r_i) + t (d (sum of q_i))
 *
 * Sums of q r are exact. Floats are added in the order of blocks, then groups,
 * one fused multiply-add at a time where the instruction set has them; so every
 * output has the same bits whatever m and n, and for all vector sets alike.
 */
#ifndef RKSC_CPU_INT8_H
#define RKSC_CPU_INT8_H

#include "cpu.h"

#define CPU_INT8_BLOCK 32

/* 32 activations of a row, a cache line. NaN or infinity among them: scale is
 * NaN and q zero. */
typedef struct cpu_integers {
    int8_t q[CPU_INT8_BLOCK];
    float scale;
    float sum[3];    /* scale * sum of q: of all, of each half */
    int32_t zero[3]; /* -128 * sum of q, likewise */
    int32_t unused;
} cpu_integers;

typedef struct cpu_int8_kernels {
    /* k values */
    void (*quantize)(cpu_integers *out, const float *a, int32_t k);
    void (*product)(const cpu_integer_product *job);
    size_t (*scratch_bytes)(int32_t k);
} cpu_int8_kernels;

extern const cpu_int8_kernels cpu_int8_portable;
#if defined(__x86_64__)
extern const cpu_int8_kernels cpu_int8_avx2;
extern const cpu_int8_kernels cpu_int8_avxvnni;
extern const cpu_int8_kernels cpu_int8_avx512vnni;
#endif

/* The best that this machine has, within a supported `isa`. */
const cpu_int8_kernels *cpu_int8_of(rk_isa isa);

#endif
