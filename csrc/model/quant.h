/* Tensor types: names, block sizes, and the way from blocks to float.
 *
 * Pure C, no state, no allocation; every function may run on any thread.
 */
#ifndef RKSC_QUANT_H
#define RKSC_QUANT_H

#include "rksc.h"

#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One row of the type table. A tensor of n elements along its last dimension
 * takes n / block_elements * block_bytes bytes a row. */
typedef struct rk_type_info {
    const char *name; /* "F32", "BF16", "Q4_K", ...; static storage */
    rk_type type;
    int32_t block_elements; /* 1 for F32, F16, BF16 */
    int32_t block_bytes;
} rk_type_info;

/* Elements of the largest block. */
#define RK_MAX_BLOCK_ELEMENTS 256

/* The row of `type`, which must be below RK_N_TYPES. Never NULL. */
const rk_type_info *rk_type_get(rk_type type);

/* The row whose name equals `name` (case matters), or NULL. */
const rk_type_info *rk_type_find(const char *name);

/* Bytes of n elements of `type`; n is a non-negative multiple of the block and
 * the result must fit int64 (callers check n against a buffer first). */
int64_t rk_type_bytes(rk_type type, int64_t n);

/* out[0..n) = the values of n elements stored at `blocks`, in float32. n is a
 * multiple of the type's block; `blocks` needs no alignment; the ranges must
 * not overlap. A row, or any run of whole blocks, may be converted by itself,
 * so callers split the work between threads as they like. */
void rk_dequantize(float *out, const void *blocks, rk_type type, int64_t n);

/* out[0..n) = x rounded to bfloat16, ties to even; NaN stays NaN. */
void rk_to_bf16(uint16_t *out, const float *x, int64_t n);

/* The bfloat16 `bits` as a float; exact. */
static inline float rk_bf16_to_f32(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &wide, sizeof value);
    return value;
}

/* `x` rounded to bfloat16, ties to even; a NaN becomes a quiet NaN. */
static inline uint16_t rk_f32_to_bf16(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((bits >> 16) | 0x40u);
    }
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* The IEEE half `bits` as a float; exact, subnormals included. */
static inline float rk_f16_to_f32(uint16_t bits)
{
    /* A subnormal half is an integer times 2^-24, a normal float: no step
     * here depends on whether the thread flushes subnormal floats to zero. */
    uint32_t magnitude = (uint32_t)(bits & 0x7fffu) << 13;
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t wide;
    float value = (float)(bits & 0x3ffu) * 0x1p-24f;

    memcpy(&wide, &value, sizeof wide);
    if (magnitude >= 0x00800000u) {
        wide = magnitude + (112u << 23);
    }
    if (magnitude >= 0x0f800000u) { /* infinity, or NaN made quiet */
        wide = magnitude | 0x7f800000u;
        wide |= magnitude > 0x0f800000u ? 0x00400000u : 0u;
    }
    wide |= sign;
    memcpy(&value, &wide, sizeof value);
    return value;
}

#ifdef __cplusplus
}
#endif

#endif
