/* Blocks of GGUF types to activations' type: the bits of rk_dequantize, and for
 * bf16 those of rk_to_bf16 after it. How a block is unpacked is unpack.h's;
 * here its integers become floats, LANES at a time.
 */
#ifndef RKSC_CPU_TEMPLATE_DEQUANT_H
#define RKSC_CPU_TEMPLATE_DEQUANT_H

#include "unpack.h"

/* Values of blocks are multiples of 2^-24 where they are finite, so none is
 * subnormal. */
#if !defined(OWN_STORE_NORMAL)
#define vf_store_normal_bf16 vf_store_bf16
#endif

#define PUT_f32(p, x) vf_store(p, x)
#define PUT_bf16(p, x) vf_store_normal_bf16(p, x)

/* n values of a row of blocks. */
#define DEFINE_DEQUANT(NAME, TYPE, BLOCK, GROUP, OFFSET, COMPUTE, ELEMENT)     \
    static void dequant_##TYPE##_##COMPUTE(ELEMENT *out, const uint8_t *bytes, \
                                           int32_t n, int32_t block_bytes)     \
    {                                                                          \
        rk_unpacked x;                                                         \
        for (const ELEMENT *end = out + n; out < end; out += BLOCK) {          \
            rk_unpack_##TYPE(&x, bytes);                                       \
            bytes += block_bytes;                                              \
            for (int g = 0; g < BLOCK / GROUP; g++) {                          \
                const vf scale = vf_set1(x.scale[g]);                          \
                const vf offset = OFFSET ? vf_set1(x.offset[g]) : vf_zero();   \
                UNROLL                                                         \
                for (int i = g * GROUP; i < (g + 1) * GROUP; i += LANES) {     \
                    vf value = vf_mul(scale, vf_load_i8(x.q + i));             \
                    value = OFFSET ? vf_add(value, offset) : value;            \
                    PUT_##COMPUTE(out + i, value);                             \
                }                                                              \
            }                                                                  \
        }                                                                      \
    }

#define DEFINE_DEQUANT_F32(NAME, TYPE, BLOCK, GROUP, OFFSET)                   \
    DEFINE_DEQUANT(NAME, TYPE, BLOCK, GROUP, OFFSET, f32, float)
#define DEFINE_DEQUANT_BF16(NAME, TYPE, BLOCK, GROUP, OFFSET)                  \
    DEFINE_DEQUANT(NAME, TYPE, BLOCK, GROUP, OFFSET, bf16, uint16_t)

RK_BLOCK_TYPES(DEFINE_DEQUANT_F32)
RK_BLOCK_TYPES(DEFINE_DEQUANT_BF16)

#define DEQUANT_CASE(NAME, TYPE, COMPUTE)                                      \
    case RK_##NAME:                                                            \
        dequant_##TYPE##_##COMPUTE(out, blocks, n, block_bytes);               \
        break;
#define DEQUANT_CASE_F32(NAME, TYPE, BLOCK, GROUP, OFFSET)                     \
    DEQUANT_CASE(NAME, TYPE, f32)
#define DEQUANT_CASE_BF16(NAME, TYPE, BLOCK, GROUP, OFFSET)                    \
    DEQUANT_CASE(NAME, TYPE, bf16)

static void row_dequant_f32(void *out, const void *blocks, rk_type type,
                            int32_t n)
{
    const int32_t block_bytes = rk_type_get(type)->block_bytes;
    switch (type) {
        RK_BLOCK_TYPES(DEQUANT_CASE_F32)
    default:
        break;
    }
}

static void row_dequant_bf16(void *out, const void *blocks, rk_type type,
                             int32_t n)
{
    const int32_t block_bytes = rk_type_get(type)->block_bytes;
    switch (type) {
        RK_BLOCK_TYPES(DEQUANT_CASE_BF16)
    default:
        break;
    }
}

#endif
