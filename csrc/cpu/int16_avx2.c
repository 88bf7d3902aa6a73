/* Products in 16-bit integers for AVX2 with FMA (VPMADDWD), and, compiled once
 * more, for AVX-VNNI (VPDPBUSD). */
#if defined(__x86_64__)
#include "int16.h"

#include "vector_avx2.h"

#define VECTORS 1
#define COLUMNS 4
#define COLUMN_CASES(X) X(1) X(2) X(3) X(4)
#define FEW 2
#define FEW_CASES(X) X(1) X(2)

typedef int32_t vi __attribute__((vector_size(32)));
typedef uint32_t vu __attribute__((vector_size(32)));
typedef uint16_t vh __attribute__((vector_size(32)));

#define vf_fused vf_fma

INLINE vi vi_set1(int32_t x)
{
    return (vi)_mm256_set1_epi32(x);
}

INLINE vf vf_of_vi(vi x)
{
    return _mm256_cvtepi32_ps((__m256i)x);
}

INLINE vf vf_half(vu x)
{
    const __m256i low = (__m256i)(x & 0xffffu);
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(low),
                                            _mm256_extracti128_si256(low, 1)));
}

#if defined(__AVXVNNI__)
#define TABLE cpu_int16_avxvnni
#define vi_dot_bytes vi_dot_bytes
INLINE vi vi_dot_bytes(vi acc, vu p, vi q)
{
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)p, (__m256i)q);
}
#else
#define TABLE cpu_int16_avx2
INLINE vi vi_dot(vi acc, vi p, vi q)
{
    return acc + (vi)_mm256_madd_epi16((__m256i)p, (__m256i)q);
}
#endif

/* Rows r and r + 4 lie in the halves of a vector. */
INLINE void turn(vu *out, const uint8_t *p, int64_t stride)
{
    __m256i x[4], t[4];
    UNROLL
    for (int r = 0; r < 4; r++) {
        const __m128i *near = (const __m128i *)(p + r * stride);
        const __m128i *far = (const __m128i *)(p + (r + 4) * stride);
        x[r] = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128(near)), _mm_loadu_si128(far),
            1);
    }
    UNROLL
    for (int i = 0; i < 4; i += 2) {
        t[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    }
    UNROLL
    for (int i = 0; i < 2; i++) {
        out[2 * i] = (vu)_mm256_unpacklo_epi64(t[i], t[i + 2]);
        out[2 * i + 1] = (vu)_mm256_unpackhi_epi64(t[i], t[i + 2]);
    }
}

#include "template_int16.h"
#else
typedef int int16_avx2_is_empty;
#endif
