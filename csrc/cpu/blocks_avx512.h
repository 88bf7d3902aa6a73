/* Blocks of the types that decode meets most, to bf16, 32 values a vector
 * (included by the kernels of AVX-512 before template_dequant.h).
 *
 * A group of 4-bit values has sixteen different ones at most, one of 5-bit
 * values 32: they are computed and rounded once and then looked up.
 */
#ifndef RKSC_CPU_BLOCKS_AVX512_H
#define RKSC_CPU_BLOCKS_AVX512_H

#include "model/unpack.h"
#include "vector_avx512.h"

#define OWN_BLOCKS

/* The half at p in all lanes. */
INLINE vf vf_half(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_set1_epi16((short)rk_read_u16(p)));
}

/* 0, 1, ... 15, from `first` on. */
INLINE vf vf_count(float first)
{
    const vf i =
        _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return vf_add(i, vf_set1(first));
}

/* values[low nibble] of 16 bytes, then values[high nibble]. */
INLINE vb look_up(vf values, const uint8_t *nibbles)
{
    const __m512i shift =
        _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    const __m128i bytes = _mm_loadu_si128((const __m128i *)nibbles);
    const __m512i twice =
        _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(bytes));

    /* An index has five bits; the fifth does not matter, the table being there
     * twice. */
    return _mm512_permutexvar_epi16(_mm512_srlv_epi16(twice, shift),
                                    vb_join(values, values));
}

/* x = scale * q of 16 signed bytes. */
INLINE vf scaled(vf scale, const uint8_t *q)
{
    return vf_mul(scale, vf_load_i8((const int8_t *)q));
}

/* The block at b as `out`; false: not a type for which there is a way of its
 * own. `type` is a constant where this is called. */
INLINE bool own_block(vb *out, rk_type type, const uint8_t *b)
{
    switch (type) {
    case RK_Q4_0:
        *out = look_up(vf_mul(vf_half(b), vf_count(-8)), b + 2);
        return true;
    case RK_Q4_1: {
        int32_t both;
        memcpy(&both, b, sizeof both);
        const vf d_m = _mm512_cvtph_ps(_mm256_set1_epi32(both));
        const vf d = _mm512_moveldup_ps(d_m), m = _mm512_movehdup_ps(d_m);
        *out = look_up(vf_add(vf_mul(d, vf_count(0)), m), b + 4);
        return true;
    }
    case RK_Q8_0: {
        const vf d = vf_half(b);
        *out = vb_join(scaled(d, b + 2), scaled(d, b + 18));
        return true;
    }
    default:
        return false;
    }
}

/* ---- super-blocks of 256, a run of 32 values at a time --------------------
 */

/* Scales, then offsets, of eight groups of 32 as floats: d, dmin | 12 bytes. */
INLINE void eight_scales(float *out, const uint8_t *b)
{
    int32_t both;
    uint64_t low, high;
    memcpy(&both, b, sizeof both);
    memcpy(&low, b + 4, sizeof low);
    memcpy(&high, b + 8, sizeof high);
    /* bytes 0..7 hold six bits of groups 0..3 (scales, minima) and two of
     * groups 4..7, bytes 8..11 the other four of both */
    const uint64_t six = low & UINT64_C(0x3f3f3f3f3f3f3f3f);
    const uint64_t two = low >> 2 & UINT64_C(0x3030303030303030);
    const uint64_t four = high >> 32;
    const uint64_t rest =
        two | (four & 0x0f0f0f0fu) | (four >> 4 & 0x0f0f0f0fu) << 32;
    /* scales 0..3 | minima 0..3 | scales 4..7 | minima 4..7 */
    const __m128i bytes = _mm_shuffle_epi32(
        _mm_set_epi64x((int64_t)rest, (int64_t)six), _MM_SHUFFLE(3, 1, 2, 0));
    const vf d_m = _mm512_cvtph_ps(_mm256_set1_epi32(both));
    const vf d = _mm512_moveldup_ps(d_m), m = _mm512_movehdup_ps(d_m);
    const vf by = _mm512_mask_sub_ps(d, 0xff00, vf_zero(), m);
    vf_store(out, vf_mul(by, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))));
}

/* 32 bytes as words. */
INLINE __m512i words(const uint8_t *p)
{
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
}

/* scale * (first + i) + offset, i = 0 .. 15 */
INLINE vf steps(const float *group, float first)
{
    return vf_add(vf_mul(vf_set1(group[0]), vf_count(first)),
                  vf_set1(group[8]));
}

INLINE void put_q4_k(uint16_t *out, int64_t run, const uint8_t *b)
{
    float scales[16];
    eight_scales(scales, b);
    UNROLL
    for (int g = 0; g < 8; g += 2) {
        const __m512i x = words(b + 16 + 16 * g);
        const vf low = steps(scales + g, 0), high = steps(scales + g + 1, 0);
        vb_store(out + g * run, _mm512_permutexvar_epi16(x, vb_join(low, low)));
        vb_store(out + (g + 1) * run,
                 _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 4),
                                          vb_join(high, high)));
    }
}

INLINE void put_q5_k(uint16_t *out, int64_t run, const uint8_t *b)
{
    const __m512i nibble = _mm512_set1_epi16(15), fifth = _mm512_set1_epi16(16);
    const __m512i bits = _mm512_slli_epi16(words(b + 16), 4);
    float scales[16];
    eight_scales(scales, b);
    UNROLL
    for (int g = 0; g < 8; g++) {
        const __m512i x =
            _mm512_srli_epi16(words(b + 48 + g / 2 * 32), g % 2 * 4);
        const __m512i index = _mm512_or_si512(
            _mm512_and_si512(x, nibble),
            _mm512_and_si512(_mm512_srli_epi16(bits, (unsigned)g), fifth));
        vb_store(out + g * run, _mm512_permutexvar_epi16(
                                    index, vb_join(steps(scales + g, 0),
                                                   steps(scales + g, 16))));
    }
}

INLINE void put_q6_k(uint16_t *out, int64_t run, const uint8_t *b)
{
    const __m256i low = _mm256_set1_epi8(15), high = _mm256_set1_epi8(48);
    const __m256i zero = _mm256_set1_epi8(32);
    float scales[16];
    vf_store(scales,
             vf_mul(vf_half(b + 208), vf_load_i8((const int8_t *)b + 192)));
    UNROLL
    for (int r = 0; r < 8; r++) { /* of a half's four: nibbles of two runs */
        const __m256i *at = (const __m256i *)(b + r / 4 * 64 + r % 2 * 32);
        const __m256i *pairs = (const __m256i *)(b + 128 + r / 4 * 32);
        const __m256i nibbles =
            _mm256_srli_epi16(_mm256_loadu_si256(at), r % 4 / 2 * 4);
        const __m256i all = _mm256_loadu_si256(pairs);
        const __m256i top = r % 4 < 2 ? _mm256_slli_epi16(all, 4 - r % 4 * 2)
                                      : _mm256_srli_epi16(all, r % 4 * 2 - 4);
        const __m256i q =
            _mm256_sub_epi8(_mm256_or_si256(_mm256_and_si256(nibbles, low),
                                            _mm256_and_si256(top, high)),
                            zero);
        const vf first =
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(q)));
        const vf second = _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm256_extracti128_si256(q, 1)));
        vb_store(out + r * run,
                 vb_join(vf_mul(vf_set1(scales[2 * r]), first),
                         vf_mul(vf_set1(scales[2 * r + 1]), second)));
    }
}

/* The super-block at b, runs of 32 values `run` elements apart; false as
 * above. */
INLINE bool own_super_block(uint16_t *out, int64_t run, rk_type type,
                            const uint8_t *b)
{
    switch (type) {
    case RK_Q4_K:
        put_q4_k(out, run, b);
        return true;
    case RK_Q5_K:
        put_q5_k(out, run, b);
        return true;
    case RK_Q6_K:
        put_q6_k(out, run, b);
        return true;
    default:
        return false;
    }
}

#endif
