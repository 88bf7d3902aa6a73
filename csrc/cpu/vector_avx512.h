/* The vector vocabulary of AVX-512 (F, BW, VL, DQ): sixteen floats. */
#ifndef RKSC_CPU_VECTOR_AVX512_H
#define RKSC_CPU_VECTOR_AVX512_H

#include <immintrin.h>

#include "kernels.h"

#define LANES 16
#define HAS_FMA 1
#define COLUMNS_MAX 6
#define COLUMNS_f32 6
#define CASES_f32 CASES_6
#define VALUE_ROWS 6
#define VALUE_VECTORS 4

typedef __m512 vf;
typedef __m512i vb;

INLINE vf vf_set1(float x)
{
    return _mm512_set1_ps(x);
}

INLINE vf vf_zero(void)
{
    return _mm512_setzero_ps();
}

/* The first n lanes, n <= 16. */
INLINE __mmask16 first16(int n)
{
    return (__mmask16)((1u << n) - 1u);
}

INLINE vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

INLINE vf vf_load_n(const float *p, int n)
{
    return _mm512_maskz_loadu_ps(first16(n), p);
}

INLINE void vf_store(float *p, vf x)
{
    _mm512_storeu_ps(p, x);
}

INLINE void vf_store_n(float *p, vf x, int n)
{
    _mm512_mask_storeu_ps(p, first16(n), x);
}

INLINE vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}

INLINE vf vf_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}

INLINE vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}

INLINE vf vf_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}

INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

INLINE vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}

INLINE vf vf_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}

INLINE vf vf_select_nan(vf a, vf yes, vf no)
{
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), yes);
}

INLINE vf vf_select_range(int lo, int hi, vf in, vf out)
{
    lo = lo < 0 ? 0 : lo > 16 ? 16 : lo;
    hi = hi < 0 ? 0 : hi > 16 ? 16 : hi;
    return _mm512_mask_mov_ps(
        out, (__mmask16)(first16(hi) & (unsigned)~first16(lo)), in);
}

INLINE vf vf_select_first(int n, vf in, vf out)
{
    return _mm512_mask_mov_ps(out, first16(n), in);
}

/* p * 2^n where x >= least or x is NaN, else 0. n stands in the low bits of t
 * as well. */
INLINE vf vf_scale_above(vf p, vf t, vf n, vf x, vf least)
{
    (void)t;
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), p,
                                  n);
}

INLINE vf vf_load_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

INLINE float vf_first(vf x)
{
    return _mm512_cvtss_f32(x);
}

INLINE v4 vf_sum4(vf a, vf b, vf c, vf d)
{
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44),
                              _mm512_shuffle_f32x4(a, b, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44),
                              _mm512_shuffle_f32x4(c, d, 0xee));
    __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88),
                             _mm512_shuffle_f32x4(ab, cd, 0xdd));
    x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4e));
    x = _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
    const __m512i first =
        _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    return (v4)_mm512_castps512_ps128(_mm512_permutexvar_ps(first, x));
}

INLINE float vf_sum(vf x)
{
    return vf_sum4(x, x, x, x)[0];
}

INLINE float vf_hmax(vf x)
{
    return _mm512_reduce_max_ps(x);
}

INLINE vb vb_load(const uint16_t *p)
{
    return _mm512_loadu_si512(p);
}

INLINE __mmask32 first32(int n)
{
    return (__mmask32)(((uint64_t)1 << n) - 1u);
}

INLINE vb vb_load_n(const uint16_t *p, int n)
{
    return _mm512_maskz_loadu_epi16(first32(n), p);
}

INLINE void vb_store(uint16_t *p, vb x)
{
    _mm512_storeu_si512(p, x);
}

INLINE void vb_store_n(uint16_t *p, vb x, int n)
{
    _mm512_mask_storeu_epi16(p, first32(n), x);
}

INLINE vf vb_even(vb x)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}

INLINE vf vb_odd(vb x)
{
    return _mm512_castsi512_ps(
        _mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
}

/* Bits of float32 rounded to nearest even, the low half not yet cleared; a
 * NaN stays one. */
INLINE vb round_bits(vf x)
{
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd =
        _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(
        bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(rounded, nan, bits,
                                _mm512_set1_epi32(0x400000));
}

INLINE vb vb_pack(vf even, vf odd)
{
    return _mm512_mask_blend_epi16(
        0xaaaaaaaau, _mm512_srli_epi32(round_bits(even), 16), round_bits(odd));
}

INLINE vf vf_load_bf16(const uint16_t *p)
{
    __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}

INLINE vf vf_load_bf16_n(const uint16_t *p, int n)
{
    __m256i x = _mm256_maskz_loadu_epi16(first16(n), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

INLINE void vf_store_bf16(uint16_t *p, vf x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(
                                          round_bits(x), 16)));
}

#if defined(__AVX512BF16__)
/* As vf_store_bf16, but for subnormal numbers, which it flushes to zero. */
#define OWN_STORE_NORMAL
INLINE void vf_store_normal_bf16(uint16_t *p, vf x)
{
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x));
}

/* Both as bf16, one behind the other; neither has subnormal numbers. */
INLINE vb vb_join(vf first, vf second)
{
    return (vb)_mm512_cvtne2ps_pbh(second, first);
}
#else
INLINE vb vb_join(vf first, vf second)
{
    const __m512i order = _mm512_set_epi16(
        63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29,
        27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(round_bits(first), order,
                                     round_bits(second));
}
#endif

INLINE void vf_store_bf16_n(uint16_t *p, vf x, int n)
{
    _mm256_mask_storeu_epi16(
        p, first16(n),
        _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bits(x), 16)));
}

#endif
