/* The vector vocabulary of AVX2 with FMA: eight floats. */
#ifndef RKSC_CPU_VECTOR_AVX2_H
#define RKSC_CPU_VECTOR_AVX2_H

#include <immintrin.h>

#include "kernels.h"

#define LANES 8
#define HAS_FMA 1
#define COLUMNS_MAX 3
#define COLUMNS_f32 3
#define CASES_f32 CASES_3
#define VALUE_ROWS 2
#define VALUE_VECTORS 4

typedef __m256 vf;
typedef __m256i vb;

INLINE vf vf_set1(float x)
{
    return _mm256_set1_ps(x);
}

INLINE vf vf_zero(void)
{
    return _mm256_setzero_ps();
}

/* All ones in lanes lo <= i < hi. */
INLINE __m256i lanes(int lo, int hi)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane),
                               _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
}

INLINE vf vf_load(const float *p)
{
    return _mm256_loadu_ps(p);
}

INLINE vf vf_load_n(const float *p, int n)
{
    return _mm256_maskload_ps(p, lanes(0, n));
}

INLINE void vf_store(float *p, vf x)
{
    _mm256_storeu_ps(p, x);
}

INLINE void vf_store_n(float *p, vf x, int n)
{
    _mm256_maskstore_ps(p, lanes(0, n), x);
}

INLINE vf vf_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}

INLINE vf vf_sub(vf a, vf b)
{
    return _mm256_sub_ps(a, b);
}

INLINE vf vf_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}

INLINE vf vf_div(vf a, vf b)
{
    return _mm256_div_ps(a, b);
}

INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

INLINE vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}

INLINE vf vf_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}

INLINE vf vf_select_nan(vf a, vf yes, vf no)
{
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

INLINE vf vf_select_range(int lo, int hi, vf in, vf out)
{
    return _mm256_blendv_ps(out, in, _mm256_castsi256_ps(lanes(lo, hi)));
}

INLINE vf vf_select_first(int n, vf in, vf out)
{
    return vf_select_range(0, n, in, out);
}

/* p * 2^n where x >= least or x is NaN, else 0. n stands in the low bits of t
 * as well, which is what is used. */
INLINE vf vf_scale_above(vf p, vf t, vf n, vf x, vf least)
{
    __m256i shift = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    vf scaled =
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), shift));
    (void)n;
    scaled = _mm256_and_ps(scaled, _mm256_cmp_ps(x, least, _CMP_GE_OQ));
    return vf_select_nan(x, x, scaled);
}

INLINE vf vf_load_i8(const int8_t *p)
{
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

INLINE float vf_first(vf x)
{
    return _mm256_cvtss_f32(x);
}

INLINE v4 vf_sum4(vf a, vf b, vf c, vf d)
{
    __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20),
                              _mm256_permute2f128_ps(a, b, 0x31));
    __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20),
                              _mm256_permute2f128_ps(c, d, 0x31));
    __m256 ac_bd = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44),
                                 _mm256_shuffle_ps(ab, cd, 0xee));
    __m256 sums = _mm256_add_ps(_mm256_shuffle_ps(ac_bd, ac_bd, 0x88),
                                _mm256_shuffle_ps(ac_bd, ac_bd, 0xdd));
    return (v4)_mm_unpacklo_ps(_mm256_castps256_ps128(sums),
                               _mm256_extractf128_ps(sums, 1));
}

INLINE float vf_sum(vf x)
{
    return vf_sum4(x, x, x, x)[0];
}

INLINE float vf_hmax(vf x)
{
    __m128 m =
        _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_movehdup_ps(m));
    return _mm_cvtss_f32(m);
}

INLINE vb vb_load(const uint16_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

INLINE vb vb_load_n(const uint16_t *p, int n)
{
    uint16_t part[2 * LANES] = {0};
    memcpy(part, p, (size_t)n * sizeof *p);
    return vb_load(part);
}

INLINE void vb_store(uint16_t *p, vb x)
{
    _mm256_storeu_si256((__m256i *)p, x);
}

INLINE void vb_store_n(uint16_t *p, vb x, int n)
{
    uint16_t part[2 * LANES];
    vb_store(part, x);
    memcpy(p, part, (size_t)n * sizeof *p);
}

INLINE vf vb_even(vb x)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}

INLINE vf vb_odd(vb x)
{
    return _mm256_castsi256_ps(
        _mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
}

/* Bits of float32 rounded to nearest even, the low half not yet cleared; a
 * NaN stays one. */
INLINE vb round_bits(vf x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd =
        _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(
        bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_castps_si256(vf_select_nan(x, _mm256_castsi256_ps(quiet),
                                             _mm256_castsi256_ps(rounded)));
}

INLINE vb vb_pack(vf even, vf odd)
{
    return _mm256_blend_epi16(_mm256_srli_epi32(round_bits(even), 16),
                              round_bits(odd), 0xaa);
}

INLINE vf vf_load_bf16(const uint16_t *p)
{
    __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}

INLINE vf vf_load_bf16_n(const uint16_t *p, int n)
{
    uint16_t part[LANES] = {0};
    memcpy(part, p, (size_t)n * sizeof *p);
    return vf_load_bf16(part);
}

INLINE void vf_store_bf16(uint16_t *p, vf x)
{
    __m256i high = _mm256_srli_epi32(round_bits(x), 16);
    _mm_storeu_si128((__m128i *)p,
                     _mm_packus_epi32(_mm256_castsi256_si128(high),
                                      _mm256_extracti128_si256(high, 1)));
}

INLINE void vf_store_bf16_n(uint16_t *p, vf x, int n)
{
    uint16_t part[LANES];
    vf_store_bf16(part, x);
    memcpy(p, part, (size_t)n * sizeof *p);
}

#endif
