/* Blocks of the types that decode meets most, to bf16, 32 values a vector
 * (included by the kernels of AVX-512 before template_dequant.h).
 *
 * A block of 4-bit values has sixteen different ones at most: they are computed
 * and rounded once and then looked up.
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

#endif
