/* GGUF's block types, each written down once: blocks of small integers q with
 * scales of their own, a group g of 16 or 32 values at a time:
 *
 *   plain blocks of 32     x = d * q                  Q4_0 Q5_0 Q8_0
 *                          x = d * q + m              Q4_1 Q5_1
 *   super-blocks of 256    x = (d * s[g]) * q         Q3_K Q6_K
 *                          x = (d * s[g]) * q + -(dmin * m[g])
 *                                                     Q2_K Q4_K Q5_K
 *
 * with d, m, dmin in half precision and s, m small integers. Fields lie in the
 * order of the layouts below, without padding, little-endian. Products are
 * rounded in the order written (the build has no contraction), which makes
 * results the same everywhere.
 *
 * All is inline, because every instruction set compiles it with its own flags,
 * and in vectors of sixteen bytes, which every compiler has.
 */
#ifndef RKSC_UNPACK_H
#define RKSC_UNPACK_H

#include "quant.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

/* Name, function, elements and bytes of a block, elements of a group, has it
 * offsets? */
#define RK_BLOCK_TYPES(X)                                                      \
    X(Q4_0, q4_0, 32, 18, 32, false)                                           \
    X(Q4_1, q4_1, 32, 20, 32, true)                                            \
    X(Q5_0, q5_0, 32, 22, 32, false)                                           \
    X(Q5_1, q5_1, 32, 24, 32, true)                                            \
    X(Q8_0, q8_0, 32, 34, 32, false)                                           \
    X(Q2_K, q2_k, 256, 84, 16, true)                                           \
    X(Q3_K, q3_k, 256, 110, 16, false)                                         \
    X(Q4_K, q4_k, 256, 144, 32, true)                                          \
    X(Q5_K, q5_k, 256, 176, 32, true)                                          \
    X(Q6_K, q6_k, 256, 210, 16, false)

/* One block: value i of group g is scale[g] * q[i], + offset[g] where the type
 * has offsets. */
typedef struct rk_unpacked {
    int8_t q[RK_MAX_BLOCK_ELEMENTS];
    float scale[RK_MAX_BLOCK_ELEMENTS / 16];
    float offset[RK_MAX_BLOCK_ELEMENTS / 16];
} rk_unpacked;

#define RK_UNPACK static inline __attribute__((always_inline)) void

typedef uint8_t rk_bytes __attribute__((vector_size(16)));

static inline rk_bytes rk_bytes_load(const uint8_t *p)
{
    rk_bytes x;

    memcpy(&x, p, sizeof x);
    return x;
}

static inline void rk_bytes_store(int8_t *p, rk_bytes x)
{
    memcpy(p, &x, sizeof x);
}

static inline uint16_t rk_read_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static inline float rk_read_half(const uint8_t *p)
{
#if defined(__F16C__)
    return _cvtsh_ss(rk_read_u16(p)); /* the same bits, NaN quiet too */
#else
    return rk_f16_to_f32(rk_read_u16(p));
#endif
}

/* ---- one block of 32 --------------------------------------------------- */

/* 16 bytes: low nibbles are values 0..15, high ones 16..31 */
RK_UNPACK rk_unpack_nibbles(int8_t *q, const uint8_t *b, uint8_t zero)
{
    rk_bytes x = rk_bytes_load(b);

    rk_bytes_store(q, (x & 15) - zero);
    rk_bytes_store(q + 16, (x >> 4) - zero);
}

/* 16 where bit i of the two bytes at b is set, 0 elsewhere */
static inline rk_bytes rk_fifth_bits(const uint8_t *b)
{
    const rk_bytes bit = {1, 2, 4, 8, 16, 32, 64, 128,
                          1, 2, 4, 8, 16, 32, 64, 128};
    const uint64_t copies[2] = {b[0] * UINT64_C(0x0101010101010101),
                                b[1] * UINT64_C(0x0101010101010101)};
    rk_bytes x;

    memcpy(&x, copies, sizeof x);
    return (rk_bytes)((x & bit) == bit) & 16;
}

/* 4 bytes: bit i is the fifth bit of value i | 16 bytes of nibbles */
RK_UNPACK rk_unpack_fives(int8_t *q, const uint8_t *b, uint8_t zero)
{
    rk_bytes x = rk_bytes_load(b + 4);

    rk_bytes_store(q, ((x & 15) | rk_fifth_bits(b)) - zero);
    rk_bytes_store(q + 16, ((x >> 4) | rk_fifth_bits(b + 2)) - zero);
}

/* d:f16 | nibbles */
RK_UNPACK rk_unpack_q4_0(rk_unpacked *x, const uint8_t *b)
{
    x->scale[0] = rk_read_half(b);
    rk_unpack_nibbles(x->q, b + 2, 8);
}

/* d:f16 | m:f16 | nibbles */
RK_UNPACK rk_unpack_q4_1(rk_unpacked *x, const uint8_t *b)
{
    x->scale[0] = rk_read_half(b);
    x->offset[0] = rk_read_half(b + 2);
    rk_unpack_nibbles(x->q, b + 4, 0);
}

/* d:f16 | fives */
RK_UNPACK rk_unpack_q5_0(rk_unpacked *x, const uint8_t *b)
{
    x->scale[0] = rk_read_half(b);
    rk_unpack_fives(x->q, b + 2, 16);
}

/* d:f16 | m:f16 | fives */
RK_UNPACK rk_unpack_q5_1(rk_unpacked *x, const uint8_t *b)
{
    x->scale[0] = rk_read_half(b);
    x->offset[0] = rk_read_half(b + 2);
    rk_unpack_fives(x->q, b + 4, 0);
}

/* d:f16 | 32 signed bytes */
RK_UNPACK rk_unpack_q8_0(rk_unpacked *x, const uint8_t *b)
{
    x->scale[0] = rk_read_half(b);
    memcpy(x->q, b + 2, 32);
}

/* ---- one super-block of 256: sixteen runs of 16 -------------------------- */

/* 16 bytes: scale (low nibble) and minimum (high) of 16 groups of 16
 * | 64 bytes of 2-bit values | d:f16 | dmin:f16
 * Each run of 32 bytes holds four times 32 values, one per pair of bits. */
RK_UNPACK rk_unpack_q2_k(rk_unpacked *x, const uint8_t *b)
{
    float d = rk_read_half(b + 80), dmin = rk_read_half(b + 82);

    for (int group = 0; group < 16; group++) {
        x->scale[group] = d * (float)(b[group] & 15);
        x->offset[group] = -(dmin * (float)(b[group] >> 4));
    }
    for (int run = 0; run < 4; run++) {
        rk_bytes pairs = rk_bytes_load(b + 16 + 16 * run);
        int8_t *q = x->q + run / 2 * 128 + run % 2 * 16;

        rk_bytes_store(q, pairs & 3);
        rk_bytes_store(q + 32, pairs >> 2 & 3);
        rk_bytes_store(q + 64, pairs >> 4 & 3);
        rk_bytes_store(q + 96, pairs >> 6);
    }
}

/* 32 bytes: third bits, bit k of byte i belongs to value 32 k + i
 * | 64 bytes of 2-bit values | 12 bytes: 16 scales of 6 bits | d:f16
 * A scale's low nibble lies in bytes 0..7 (first eight in low nibbles), its
 * two high bits in bytes 8..11. A value is 4 less where its third bit is 0. */
RK_UNPACK rk_unpack_q3_k(rk_unpacked *x, const uint8_t *b)
{
    const uint8_t *packed = b + 96;
    float d = rk_read_half(b + 108);

    for (int group = 0; group < 16; group++) {
        int low = packed[group % 8] >> (group / 8 * 4) & 15;
        int high = packed[8 + group % 4] >> (group / 4 * 2) & 3;

        x->scale[group] = d * (float)((low | high << 4) - 32);
    }
    for (int run = 0; run < 4; run++) {
        rk_bytes pairs = rk_bytes_load(b + 32 + 16 * run);
        rk_bytes third = rk_bytes_load(b + run % 2 * 16);
        int8_t *q = x->q + run / 2 * 128 + run % 2 * 16;

        third = run < 2 ? third : third >> 4;
        rk_bytes_store(q, ((pairs & 3) | (third & 1) << 2) - 4);
        rk_bytes_store(q + 32, ((pairs >> 2 & 3) | (third & 2) << 1) - 4);
        rk_bytes_store(q + 64, ((pairs >> 4 & 3) | (third & 4)) - 4);
        rk_bytes_store(q + 96, (pairs >> 6 | (third & 8) >> 1) - 4);
    }
}

/* Scales and minima of groups 0..7, six bits each, from 12 bytes: those of
 * groups 0..3 in the low six bits of bytes 0..3 and 4..7; groups 4..7 have
 * their low nibbles in bytes 8..11 and two high bits atop the first eight. */
RK_UNPACK rk_unpack_scales(rk_unpacked *x, const uint8_t *packed, float d,
                           float dmin)
{
    for (int i = 0; i < 4; i++) {
        int s = packed[i], m = packed[i + 4], both = packed[i + 8];

        x->scale[i] = d * (float)(s & 63);
        x->offset[i] = -(dmin * (float)(m & 63));
        x->scale[i + 4] = d * (float)((both & 15) | s >> 6 << 4);
        x->offset[i + 4] = -(dmin * (float)(both >> 4 | m >> 6 << 4));
    }
}

/* d:f16 | dmin:f16 | 12 bytes of scales and minima | 128 bytes of nibbles:
 * each run of 32 bytes holds two groups of 32 */
RK_UNPACK rk_unpack_q4_k(rk_unpacked *x, const uint8_t *b)
{
    rk_unpack_scales(x, b + 4, rk_read_half(b), rk_read_half(b + 2));
    for (int run = 0; run < 8; run++) {
        rk_bytes nibbles = rk_bytes_load(b + 16 + 16 * run);
        int8_t *q = x->q + run / 2 * 64 + run % 2 * 16;

        rk_bytes_store(q, nibbles & 15);
        rk_bytes_store(q + 32, nibbles >> 4);
    }
}

/* d:f16 | dmin:f16 | 12 bytes of scales and minima | 32 bytes of fifth bits,
 * bit k of byte i belongs to value 32 k + i | 128 bytes of nibbles */
RK_UNPACK rk_unpack_q5_k(rk_unpacked *x, const uint8_t *b)
{
    rk_bytes fifth[2] = {rk_bytes_load(b + 16), rk_bytes_load(b + 32)};

    rk_unpack_scales(x, b + 4, rk_read_half(b), rk_read_half(b + 2));
    for (int run = 0; run < 8; run++) {
        rk_bytes nibbles = rk_bytes_load(b + 48 + 16 * run);
        rk_bytes *bits = &fifth[run % 2];
        int8_t *q = x->q + run / 2 * 64 + run % 2 * 16;

        rk_bytes_store(q, (nibbles & 15) | (*bits & 1) << 4);
        rk_bytes_store(q + 32, nibbles >> 4 | (*bits & 2) << 3);
        *bits >>= 2;
    }
}

/* 128 bytes of low nibbles | 64 bytes of high bit pairs | 16 signed scales
 * | d:f16
 * Each half of 128 values: value 32 k + i takes its nibble from byte
 * 32 (k % 2) + i, low for k < 2, and bits 2 k of byte i of the pairs. */
RK_UNPACK rk_unpack_q6_k(rk_unpacked *x, const uint8_t *b)
{
    float d = rk_read_half(b + 208);

    for (int group = 0; group < 16; group++) {
        x->scale[group] = d * (float)(int8_t)b[192 + group];
    }
    for (int run = 0; run < 4; run++) {
        const uint8_t *low = b + run / 2 * 64 + run % 2 * 16;
        rk_bytes even = rk_bytes_load(low), odd = rk_bytes_load(low + 32);
        rk_bytes pairs = rk_bytes_load(b + 128 + 16 * run);
        int8_t *q = x->q + run / 2 * 128 + run % 2 * 16;

        rk_bytes_store(q, ((even & 15) | (pairs & 3) << 4) - 32);
        rk_bytes_store(q + 32, ((odd & 15) | (pairs & 12) << 2) - 32);
        rk_bytes_store(q + 64, (even >> 4 | (pairs & 48)) - 32);
        rk_bytes_store(q + 96, (odd >> 4 | (pairs & 192) >> 2) - 32);
    }
}

#endif
