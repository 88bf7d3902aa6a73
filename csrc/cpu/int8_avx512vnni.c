/* Products in integers for AVX-512 VNNI: VPDPBUSD wants one side unsigned, so
 * 128 is added to the weights, and taken away again 128 times the sum of the
 * activations. */
#if defined(__x86_64__)
#include "int8.h"

#include "vector_avx512.h"

#define COLUMNS 8
#define OFFSET_BYTES 128

typedef __m512i vi;

INLINE vi vi_set1(int32_t x)
{
    return _mm512_set1_epi32(x);
}

INLINE vf vf_of_vi(vi x)
{
    return _mm512_cvtepi32_ps(x);
}

INLINE vi vi_dot(vi acc, const uint8_t *p, int32_t q)
{
    return _mm512_dpbusd_epi32(acc, _mm512_loadu_si512(p), vi_set1(q));
}

/* Rows r and r + 8 of eight quads lie in the halves of a vector; either half is
 * turned: row r becomes lane r. */
INLINE void interleave(uint8_t *p, const int8_t *x, size_t stride)
{
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    __m512i a[8], b[8];
    UNROLL
    for (int r = 0; r < 8; r++) {
        const __m256i *near = (const __m256i *)(x + r * stride);
        const __m256i *far = (const __m256i *)(x + (r + 8) * stride);
        a[r] =
            _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(near)),
                               _mm256_loadu_si256(far), 1);
        a[r] = _mm512_xor_si512(a[r], _mm512_set1_epi8((char)OFFSET_BYTES));
    }
    UNROLL
    for (int r = 0; r < 8; r += 2) {
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    UNROLL
    for (int r = 0; r < 8; r += 4) {
        a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
        a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
        a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
        a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    UNROLL
    for (int r = 0; r < 4; r++) {
        _mm512_storeu_si512(p + 64 * r,
                            _mm512_permutex2var_epi64(a[r], low, a[r + 4]));
        _mm512_storeu_si512(p + 64 * (r + 4),
                            _mm512_permutex2var_epi64(a[r], high, a[r + 4]));
    }
}

#define TABLE cpu_int8_avx512vnni
#include "template_int8.h"
#else
typedef int int8_avx512vnni_is_empty;
#endif
