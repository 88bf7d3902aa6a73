/* The vector vocabulary of every machine: the compiler's own four floats.
 *
 * No fused multiply-add: a product is rounded before it is added.
 */
#ifndef RKSC_CPU_VECTOR_PORTABLE_H
#define RKSC_CPU_VECTOR_PORTABLE_H

#include "kernels.h"

#define LANES 4
#define HAS_FMA 0
#define COLUMNS_MAX 3
#define COLUMNS_f32 2
#define CASES_f32 CASES_2
#define VALUE_ROWS 2
#define VALUE_VECTORS 4

typedef v4 vf;
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vb __attribute__((vector_size(16)));

INLINE vf vf_set1(float x)
{
    return (vf){x, x, x, x};
}

INLINE vf vf_zero(void)
{
    return vf_set1(0.0f);
}

INLINE vf vf_load(const float *p)
{
    return v4_load(p);
}

INLINE vf vf_load_n(const float *p, int n)
{
    vf x = vf_zero();
    memcpy(&x, p, (size_t)n * sizeof *p);
    return x;
}

INLINE void vf_store(float *p, vf x)
{
    v4_store(p, x);
}

INLINE void vf_store_n(float *p, vf x, int n)
{
    memcpy(p, &x, (size_t)n * sizeof *p);
}

INLINE vf vf_add(vf a, vf b)
{
    return a + b;
}

INLINE vf vf_sub(vf a, vf b)
{
    return a - b;
}

INLINE vf vf_mul(vf a, vf b)
{
    return a * b;
}

INLINE vf vf_div(vf a, vf b)
{
    return a / b;
}

INLINE vf vf_fma(vf a, vf b, vf c)
{
    return a * b + c;
}

INLINE vf vf_choose(vi mask, vf a, vf b)
{
    return (vf)((mask & (vi)a) | (~mask & (vi)b));
}

INLINE vf vf_max(vf a, vf b)
{
    return vf_choose(a > b, a, b);
}

INLINE vf vf_min(vf a, vf b)
{
    return vf_choose(a < b, a, b);
}

INLINE vf vf_select_nan(vf a, vf yes, vf no)
{
    return vf_choose(a == a, no, yes);
}

INLINE vf vf_select_range(int lo, int hi, vf in, vf out)
{
    const vi lane = {0, 1, 2, 3};
    const vi from = {lo, lo, lo, lo}, to = {hi, hi, hi, hi};
    return vf_choose((lane >= from) & (lane < to), in, out);
}

INLINE vf vf_select_first(int n, vf in, vf out)
{
    return vf_select_range(0, n, in, out);
}

/* p * 2^n where x >= least or x is NaN, else 0. n stands in the low bits of t
 * as well, which is what is used. */
INLINE vf vf_scale_above(vf p, vf t, vf n, vf x, vf least)
{
    vf scaled = (vf)((vb)p + ((vb)t << 23));
    (void)n;
    return vf_choose(x == x, vf_choose(x >= least, scaled, vf_set1(0.0f)), x);
}

INLINE vf vf_load_i8(const int8_t *p)
{
    return (vf){p[0], p[1], p[2], p[3]};
}

INLINE float vf_first(vf x)
{
    return x[0];
}

INLINE float vf_sum(vf x)
{
    return (x[0] + x[2]) + (x[1] + x[3]);
}

INLINE v4 vf_sum4(vf a, vf b, vf c, vf d)
{
    return (v4){vf_sum(a), vf_sum(b), vf_sum(c), vf_sum(d)};
}

INLINE float vf_hmax(vf x)
{
    float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}

INLINE vb vb_load(const uint16_t *p)
{
    vb x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE vb vb_load_n(const uint16_t *p, int n)
{
    vb x = {0, 0, 0, 0};
    memcpy(&x, p, (size_t)n * sizeof *p);
    return x;
}

INLINE void vb_store(uint16_t *p, vb x)
{
    memcpy(p, &x, sizeof x);
}

INLINE void vb_store_n(uint16_t *p, vb x, int n)
{
    memcpy(p, &x, (size_t)n * sizeof *p);
}

INLINE vf vb_even(vb x)
{
    return (vf)(x << 16);
}

INLINE vf vb_odd(vb x)
{
    return (vf)(x & 0xffff0000u);
}

/* Bits of float32 rounded to nearest even, the low half not yet cleared; a
 * NaN stays one. */
INLINE vb round_bits(vf x)
{
    vb bits = (vb)x;
    vb rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (vb)vf_choose(x == x, (vf)rounded, (vf)(bits | 0x400000u));
}

INLINE vb vb_pack(vf even, vf odd)
{
    return (round_bits(even) >> 16) | (round_bits(odd) & 0xffff0000u);
}

INLINE vf vf_load_bf16(const uint16_t *p)
{
    return (vf)((vb){p[0], p[1], p[2], p[3]} << 16);
}

INLINE vf vf_load_bf16_n(const uint16_t *p, int n)
{
    uint16_t part[LANES] = {0};
    memcpy(part, p, (size_t)n * sizeof *p);
    return vf_load_bf16(part);
}

INLINE void vf_store_bf16_n(uint16_t *p, vf x, int n)
{
    vb bits = round_bits(x) >> 16;
    for (int i = 0; i < n; i++) {
        p[i] = (uint16_t)bits[i];
    }
}

INLINE void vf_store_bf16(uint16_t *p, vf x)
{
    vf_store_bf16_n(p, x, LANES);
}

#endif
