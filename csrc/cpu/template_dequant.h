/* Blocks of GGUF types to activations' type: the bits of rk_dequantize, and for
 * bf16 those of rk_to_bf16 after it. How a block is unpacked is unpack.h's;
 * here its integers become floats, LANES at a time.
 */
#ifndef RKSC_CPU_TEMPLATE_DEQUANT_H
#define RKSC_CPU_TEMPLATE_DEQUANT_H

#include "model/unpack.h"

/* Values of blocks are multiples of 2^-24 where they are finite, so none is
 * subnormal. */
#if !defined(OWN_STORE_NORMAL)
#define vf_store_normal_bf16 vf_store_bf16
#endif

#define PUT_f32(p, x) vf_store(p, x)
#define PUT_bf16(p, x) vf_store_normal_bf16(p, x)

/* Types with a way of their own in an instruction set. */
#if !defined(OWN_BLOCKS)
#define OWN_bf16(out, run, type, bytes) false
#else
#define OWN_bf16(out, run, type, bytes) put_own_block(out, run, type, bytes)
INLINE bool put_own_block(uint16_t *out, int64_t run, rk_type type,
                          const uint8_t *bytes)
{
    vb x;
    if (!own_block(&x, type, bytes)) {
        return own_super_block(out, run, type, bytes);
    }
    vb_store(out, x);
    return true;
}
#endif
#define OWN_f32(out, run, type, bytes) false

/* n blocks that lie `step` bytes apart to `out`, `to` elements apart; of one
 * block, runs of 32 values lie `run` elements apart. What follows a block in
 * its row is fetched: no processor foresees a walk down the rows of a tile. */
typedef struct block_walk {
    const uint8_t *from;
    int64_t step, to, run;
    int32_t n;
    /* NULL, or n more blocks, side by side, that will be wanted later: fetched
     * a block at a time, since a burst of fetches holds up what follows. */
    const uint8_t *later;
} block_walk;

#define DEFINE_DEQUANT(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET, COMPUTE,       \
                       ELEMENT)                                                \
    INLINE void block_##TYPE##_##COMPUTE(ELEMENT *out, int64_t run,            \
                                         const uint8_t *bytes)                 \
    {                                                                          \
        rk_unpacked x;                                                         \
        if (OWN_##COMPUTE(out, run, RK_##NAME, bytes)) {                       \
            return;                                                            \
        }                                                                      \
        rk_unpack_##TYPE(&x, bytes);                                           \
        for (int g = 0; g < BLOCK / GROUP; g++) {                              \
            const vf scale = vf_set1(x.scale[g]);                              \
            const vf offset = OFFSET ? vf_set1(x.offset[g]) : vf_zero();       \
            UNROLL                                                             \
            for (int i = g * GROUP; i < (g + 1) * GROUP; i += LANES) {         \
                vf value = vf_mul(scale, vf_load_i8(x.q + i));                 \
                value = OFFSET ? vf_add(value, offset) : value;                \
                PUT_##COMPUTE(out + i / 32 * run + i % 32, value);             \
            }                                                                  \
        }                                                                      \
    }                                                                          \
    static void dequant_##TYPE##_##COMPUTE(ELEMENT *out,                       \
                                           const block_walk *walk)             \
    {                                                                          \
        const uint8_t *from = walk->from;                                      \
        const int64_t step = walk->step, to = walk->to, run = walk->run;       \
        const uint8_t *later = walk->later;                                    \
        for (int32_t i = 0; i < walk->n; i++, from += step, out += to) {       \
            __builtin_prefetch(from + 128);                                    \
            for (int64_t b = 0; later != NULL && b < BYTES; b += 64) {         \
                __builtin_prefetch(later + i * BYTES + b, 0, 2);               \
            }                                                                  \
            block_##TYPE##_##COMPUTE(out, run, from);                          \
        }                                                                      \
    }

#define DEFINE_DEQUANT_F32(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET)            \
    DEFINE_DEQUANT(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET, f32, float)
#define DEFINE_DEQUANT_BF16(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET)           \
    DEFINE_DEQUANT(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET, bf16, uint16_t)

RK_BLOCK_TYPES(DEFINE_DEQUANT_F32)
RK_BLOCK_TYPES(DEFINE_DEQUANT_BF16)

#define DEQUANT_CASE(NAME, TYPE, COMPUTE)                                      \
    case RK_##NAME:                                                            \
        dequant_##TYPE##_##COMPUTE(out, walk);                                 \
        break;
#define DEQUANT_CASE_F32(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET)              \
    DEQUANT_CASE(NAME, TYPE, f32)
#define DEQUANT_CASE_BF16(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET)             \
    DEQUANT_CASE(NAME, TYPE, bf16)

static void blocks_f32(float *out, rk_type type, const block_walk *walk)
{
    switch (type) {
        RK_BLOCK_TYPES(DEQUANT_CASE_F32)
    default:
        break;
    }
}

static void blocks_bf16(uint16_t *out, rk_type type, const block_walk *walk)
{
    switch (type) {
        RK_BLOCK_TYPES(DEQUANT_CASE_BF16)
    default:
        break;
    }
}

/* The blocks of a row of n values. */
INLINE block_walk row_walk(const void *blocks, rk_type type, int32_t n)
{
    const rk_type_info *info = rk_type_get(type);
    return (block_walk){.from = blocks,
                        .step = info->block_bytes,
                        .to = info->block_elements,
                        .run = 32,
                        .n = n / info->block_elements};
}

static void row_dequant_f32(void *out, const void *blocks, rk_type type,
                            int32_t n)
{
    const block_walk walk = row_walk(blocks, type, n);
    blocks_f32(out, type, &walk);
}

static void row_dequant_bf16(void *out, const void *blocks, rk_type type,
                             int32_t n)
{
    const block_walk walk = row_walk(blocks, type, n);
    blocks_bf16(out, type, &walk);
}

#endif
