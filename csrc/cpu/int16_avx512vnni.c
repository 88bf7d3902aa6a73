/* Products in 16-bit integers for AVX-512 VNNI (VPDPBUSD). */
#if defined(__x86_64__)
#include "int16.h"

#include "vector_avx512.h"

#define VECTORS 2
#define COLUMNS 6
#define COLUMN_CASES(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define FEW 4
#define FEW_CASES(X) X(1) X(2) X(3) X(4)

typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(64)));

#define vf_fused vf_fma

INLINE vi vi_set1(int32_t x)
{
    return (vi)_mm512_set1_epi32(x);
}

INLINE vf vf_of_vi(vi x)
{
    return _mm512_cvtepi32_ps((__m512i)x);
}

INLINE vf vf_half(vu x)
{
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)x));
}

#define vi_dot_bytes vi_dot_bytes
INLINE vi vi_dot_bytes(vi acc, vu p, vi q)
{
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)p, (__m512i)q);
}

/* Four rows a lane are put together while they are loaded, which leaves half
 * the shuffles. */
INLINE void turn(vu *out, const uint8_t *p, int64_t stride)
{
    __m512i x[4], t[4];
    UNROLL
    for (int r = 0; r < 4; r++) {
        const uint8_t *at = p + r * stride;
        x[r] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)at));
        UNROLL
        for (int lane = 1; lane < 4; lane++) {
            x[r] = _mm512_mask_broadcast_i32x4(
                x[r], (__mmask16)(0xf << 4 * lane),
                _mm_loadu_si128((const __m128i *)(at + 4 * lane * stride)));
        }
    }
    UNROLL
    for (int i = 0; i < 4; i += 2) {
        t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    UNROLL
    for (int i = 0; i < 2; i++) {
        out[2 * i] = (vu)_mm512_unpacklo_epi64(t[i], t[i + 2]);
        out[2 * i + 1] = (vu)_mm512_unpackhi_epi64(t[i], t[i + 2]);
    }
}

#define TABLE cpu_int16_avx512vnni
#include "template_int16.h"
#else
typedef int int16_avx512vnni_is_empty;
#endif
