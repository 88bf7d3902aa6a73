/* Blocks of weights as quads, written once for all instruction sets; a part of
 * template_int16.h, which tells what the including file defines.
 *
 * A block type is told by what it does for LANES rows at once:
 *
 *   open   scales and offsets of a block's groups, and bits that all units need
 *   unit   64 values of a block of 256, or a block of 32, as quads: four bytes
 * of each row, group by group
 */
#ifndef RKSC_CPU_TEMPLATE_QUADS_H
#define RKSC_CPU_TEMPLATE_QUADS_H

#include "model/unpack.h"

typedef struct scales {
    vf scale[CPU_INT16_BLOCK / 16], offset[CPU_INT16_BLOCK / 16];
} scales;

#define UNIT_QUADS 16

INLINE vu bytes_of(uint32_t byte)
{
    return (vu){0} + byte * 0x01010101u;
}

/* Four bytes of each row. */
INLINE vu column(const uint8_t *p, int64_t stride)
{
    vu x;
    uint32_t all[LANES];
    for (int r = 0; r < LANES; r++) {
        memcpy(all + r, p + r * stride, sizeof *all);
    }
    memcpy(&x, all, sizeof x);
    return x;
}

/* 32 bytes of each row. */
INLINE void turn_32(vu *out, const uint8_t *p, int64_t stride)
{
    turn(out, p, stride);
    turn(out + 4, p + 16, stride);
}

/* Types of blocks of 32. */
INLINE void open_q4_0(scales *to, int g, vu *bits, const uint8_t *b,
                      int64_t stride)
{
    (void)bits;
    to->scale[g] = vf_half(column(b, stride));
}

INLINE void open_q4_1(scales *to, int g, vu *bits, const uint8_t *b,
                      int64_t stride)
{
    const vu both = column(b, stride);
    (void)bits;
    to->scale[g] = vf_half(both);
    to->offset[g] = vf_half(both >> 16);
}

INLINE void open_q5_0(scales *to, int g, vu *bits, const uint8_t *b,
                      int64_t stride)
{
    open_q4_0(to, g, bits, b, stride);
    *bits = column(b + 2, stride);
}

INLINE void open_q5_1(scales *to, int g, vu *bits, const uint8_t *b,
                      int64_t stride)
{
    open_q4_1(to, g, bits, b, stride);
    *bits = column(b + 4, stride);
}

#define open_q8_0 open_q4_0

/* 16 bytes: low nibbles are values 0..15, high ones 16..31 */
INLINE void nibbles(vu *quads, const uint8_t *b, int64_t stride)
{
    vu x[4];
    turn(x, b, stride);
    UNROLL
    for (int j = 0; j < 4; j++) {
        quads[j] = x[j] & 0x0f0f0f0fu;
        quads[j + 4] = x[j] >> 4 & 0x0f0f0f0fu;
    }
}

/* The same with a fifth bit: bits 0..3 of a nibble go to bits 4, 12, ... */
INLINE void nibbles_and_bits(vu *quads, const uint8_t *b, int64_t stride,
                             vu fifth)
{
    nibbles(quads, b, stride);
    UNROLL
    for (int j = 0; j < 8; j++) {
        quads[j] |= ((fifth >> (4 * j) & 15u) * 0x02040810u) & 0x10101010u;
    }
}

INLINE void unit_q4_0(vu *quads, const vu *bits, const uint8_t *b,
                      int64_t stride, int unit)
{
    (void)bits, (void)unit;
    nibbles(quads, b + 2, stride);
}

INLINE void unit_q4_1(vu *quads, const vu *bits, const uint8_t *b,
                      int64_t stride, int unit)
{
    (void)bits, (void)unit;
    nibbles(quads, b + 4, stride);
}

INLINE void unit_q5_0(vu *quads, const vu *bits, const uint8_t *b,
                      int64_t stride, int unit)
{
    (void)unit;
    nibbles_and_bits(quads, b + 6, stride, *bits);
}

INLINE void unit_q5_1(vu *quads, const vu *bits, const uint8_t *b,
                      int64_t stride, int unit)
{
    (void)unit;
    nibbles_and_bits(quads, b + 8, stride, *bits);
}

INLINE void unit_q8_0(vu *quads, const vu *bits, const uint8_t *b,
                      int64_t stride, int unit)
{
    (void)bits, (void)unit;
    turn_32(quads, b + 2, stride);
    UNROLL
    for (int j = 0; j < 8; j++) {
        quads[j] ^= bytes_of(0x80);
    }
}

/* Types of blocks of 256; unpack.h tells the layouts. */
INLINE void open_q2_k(scales *to, int g, vu *bits, const uint8_t *b,
                      int64_t stride)
{
    vu s[4];
    (void)g, (void)bits;
    turn(s, b + 68, stride);
    const vf d = vf_half(s[3]);
    const vf less = vf_sub(vf_zero(), vf_half(s[3] >> 16));
    turn(s, b, stride);
    for (g = 0; g < 16; g++) {
        const vu both = s[g / 4] >> (8 * (g % 4));
        to->scale[g] = vf_mul(d, vf_of_vi((vi)(both & 15u)));
        to->offset[g] = vf_mul(less, vf_of_vi((vi)(both >> 4 & 15u)));
    }
}

INLINE void unit_q2_k(vu *quads, const vu *bits, const uint8_t *b,
                      int64_t stride, int unit)
{
    vu x[4];
    (void)bits;
    turn(x, b + 16 + 16 * unit, stride);
    UNROLL
    for (int i = 0; i < 16; i++) {
        quads[i] = x[i % 4] >> (i / 4 * 2) & 0x03030303u;
    }
}

INLINE void open_q3_k(scales *to, int g, vu *bits, const uint8_t *b,
                      int64_t stride)
{
    vu s[4];
    (void)g;
    turn(s, b + 94, stride); /* two bytes early: a block ends at 110 */
    const vf d = vf_half(s[3] >> 16);
    for (int i = 0; i < 3; i++) {
        s[i] = s[i] >> 16 | s[i + 1] << 16;
    }
    for (g = 0; g < 16; g++) {
        const vu low = s[g / 4 % 2] >> (8 * (g % 4) + g / 8 * 4) & 15u;
        const vu high = s[2] >> (8 * (g % 4) + g / 4 * 2) & 3u;
        to->scale[g] = vf_mul(d, vf_of_vi((vi)(low | high << 4) - 32));
    }
    turn_32(bits, b, stride);
}

INLINE void unit_q3_k(vu *quads, const vu *bits, const uint8_t *b,
                      int64_t stride, int unit)
{
    vu x[4];
    turn(x, b + 32 + 16 * unit, stride);
    UNROLL
    for (int i = 0; i < 16; i++) {
        const vu third = bits[unit % 2 * 4 + i % 4] >> (unit / 2 * 4 + i / 4);
        quads[i] = (x[i % 4] >> (i / 4 * 2) & 0x03030303u) |
                   (third & 0x01010101u) << 2;
    }
}

/* d, dmin | 12 bytes of scales and minima */
INLINE void open_q4_k(scales *to, int g, vu *bits, const uint8_t *b,
                      int64_t stride)
{
    vu x[4];
    (void)g, (void)bits;
    turn(x, b, stride);
    const vf d = vf_half(x[0]);
    const vf less = vf_sub(vf_zero(), vf_half(x[0] >> 16));
    for (int i = 0; i < 4; i++) {
        const vu s = x[1] >> (8 * i) & 255u, m = x[2] >> (8 * i) & 255u;
        const vu both = x[3] >> (8 * i) & 255u;
        to->scale[i] = vf_mul(d, vf_of_vi((vi)(s & 63u)));
        to->offset[i] = vf_mul(less, vf_of_vi((vi)(m & 63u)));
        to->scale[i + 4] =
            vf_mul(d, vf_of_vi((vi)((both & 15u) | s >> 6 << 4)));
        to->offset[i + 4] =
            vf_mul(less, vf_of_vi((vi)(both >> 4 | m >> 6 << 4)));
    }
}

INLINE void open_q5_k(scales *to, int g, vu *bits, const uint8_t *b,
                      int64_t stride)
{
    open_q4_k(to, g, bits, b, stride);
    turn_32(bits, b + 16, stride);
}

/* 32 bytes: low nibbles are a group, high ones the next. */
INLINE void unit_q4_k(vu *quads, const vu *bits, const uint8_t *b,
                      int64_t stride, int unit)
{
    vu x[8];
    (void)bits;
    turn_32(x, b + 16 + 32 * unit, stride);
    UNROLL
    for (int j = 0; j < 8; j++) {
        quads[j] = x[j] & 0x0f0f0f0fu;
        quads[j + 8] = x[j] >> 4 & 0x0f0f0f0fu;
    }
}

INLINE void unit_q5_k(vu *quads, const vu *bits, const uint8_t *b,
                      int64_t stride, int unit)
{
    unit_q4_k(quads, bits, b + 32, stride, unit);
    UNROLL
    for (int j = 0; j < 8; j++) {
        const vu fifth = bits[j] >> (2 * unit);
        quads[j] |= (fifth & 0x01010101u) << 4;
        quads[j + 8] |= (fifth & 0x02020202u) << 3;
    }
}

INLINE void open_q6_k(scales *to, int g, vu *bits, const uint8_t *b,
                      int64_t stride)
{
    vu s[4];
    (void)g, (void)bits;
    turn(s, b + 194, stride); /* a block ends with d at 210 */
    const vf d = vf_half(s[3] >> 16);
    turn(s, b + 192, stride);
    for (g = 0; g < 16; g++) {
        const vi scale = (vi)(s[g / 4] << (24 - 8 * (g % 4))) >> 24;
        to->scale[g] = vf_mul(d, vf_of_vi(scale));
    }
}

INLINE void unit_q6_k(vu *quads, const vu *bits, const uint8_t *b,
                      int64_t stride, int unit)
{
    vu even[4], odd[4], pairs[4];
    (void)bits;
    turn(even, b + unit / 2 * 64 + unit % 2 * 16, stride);
    turn(odd, b + unit / 2 * 64 + unit % 2 * 16 + 32, stride);
    turn(pairs, b + 128 + 16 * unit, stride);
    UNROLL
    for (int j = 0; j < 4; j++) {
        quads[j] = (even[j] & 0x0f0f0f0fu) | (pairs[j] & 0x03030303u) << 4;
        quads[j + 4] = (odd[j] & 0x0f0f0f0fu) | (pairs[j] & 0x0c0c0c0cu) << 2;
        quads[j + 8] = (even[j] >> 4 & 0x0f0f0f0fu) | (pairs[j] & 0x30303030u);
        quads[j + 12] =
            (odd[j] >> 4 & 0x0f0f0f0fu) | (pairs[j] >> 2 & 0x30303030u);
    }
}

/* What a type's integers have too much: 2^ZERO, and -1 for nothing. */
#define ZERO_q4_0 3
#define ZERO_q4_1 -1
#define ZERO_q5_0 4
#define ZERO_q5_1 -1
#define ZERO_q8_0 7
#define ZERO_q2_k -1
#define ZERO_q3_k 2
#define ZERO_q4_k -1
#define ZERO_q5_k -1
#define ZERO_q6_k 5

/* A type's arithmetic, known at compile time. zero: integers are 2^zero too
 * much; -1: they are not, but groups have an offset. */
typedef struct kind {
    rk_type type;
    int elements, bytes, group, zero;
} kind;

#define KIND(NAME, TYPE, BLOCK, BYTES, GROUP)                                  \
    ((kind){RK_##NAME, BLOCK, BYTES, GROUP, ZERO_##TYPE})

INLINE void open_block(kind of, scales *to, int g, vu *bits, const uint8_t *b,
                       int64_t stride)
{
    switch (of.type) {
#define OPEN_CASE(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET)                     \
    case RK_##NAME:                                                            \
        open_##TYPE(to, g, bits, b, stride);                                   \
        break;
        RK_BLOCK_TYPES(OPEN_CASE)
    default:
        break;
    }
}

INLINE void read_unit(kind of, vu *quads, const vu *bits, const uint8_t *b,
                      int64_t stride, int unit)
{
    switch (of.type) {
#define UNIT_CASE(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET)                     \
    case RK_##NAME:                                                            \
        unit_##TYPE(quads, bits, b, stride, unit);                             \
        break;
        RK_BLOCK_TYPES(UNIT_CASE)
    default:
        break;
    }
}

/* Blocks of the type in a block of n activations. */
INLINE int blocks_of(kind of, int32_t n)
{
    return of.elements == 32 ? n / 32 : 1;
}

INLINE int units_of(kind of)
{
    return of.elements == 32 ? 1 : 4;
}

INLINE int groups_of_unit(kind of)
{
    return of.elements / units_of(of) / of.group;
}

/* The h-th group of a unit, counted from the block's first. */
INLINE int group_of(kind of, int unit, int h)
{
    return of.elements == 32 ? 0
           : of.group == 32  ? 2 * unit + h
                             : unit / 2 * 8 + unit % 2 + 2 * h;
}

/* To the second cache. Where it stands: a compiler gathers its own prefetches,
 * and a burst of them holds up what follows. */
INLINE void fetch_line(const uint8_t *p)
{
#if defined(__x86_64__)
    __asm__ volatile("prefetcht1 %0" ::"m"(*p));
#else
    __builtin_prefetch(p, 0, 2);
#endif
}

/* What goes with the h-th group of a unit, of what LANES rows' next blocks,
 * side by side at p, have: a burst of fetches would hold up what follows. */
INLINE void fetch(kind of, const uint8_t *p, int unit, int h)
{
    const int parts = units_of(of) * groups_of_unit(of);
    const int part = unit * groups_of_unit(of) + h;
    const int lines = (LANES * of.bytes + 63) / 64;
    for (int i = part * lines / parts; i < (part + 1) * lines / parts; i++) {
        fetch_line(p + i * 64);
    }
}

/* LANES rows of n values (<= 256): the first of them, how far apart they are,
 * and where the rows after them begin. */
typedef struct rows {
    const uint8_t *first, *ahead;
    int64_t bytes;
    int32_t n;
} rows;

#endif
