/* Products in integers for AVX2 with FMA, and, compiled once more, for AVX-VNNI
 * (VPDPBUSD), which wants one side unsigned: 128 is added to the weights, and
 * taken away again 128 times the sum of the activations. */
#if defined(__x86_64__)
#include "int8.h"

#include "vector_avx2.h"

#define COLUMNS 4

typedef __m256i vi;

INLINE vi vi_set1(int32_t x)
{
    return _mm256_set1_epi32(x);
}

INLINE vf vf_of_vi(vi x)
{
    return _mm256_cvtepi32_ps(x);
}

INLINE vi vi_load(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

#if defined(__AVXVNNI__)
#define OFFSET_BYTES 128
#define TABLE cpu_int8_avxvnni
INLINE vi vi_dot(vi acc, const uint8_t *p, int32_t q)
{
    return _mm256_dpbusd_avx_epi32(acc, vi_load(p), vi_set1(q));
}
#else
#define OFFSET_BYTES 0
#define TABLE cpu_int8_avx2
/* |r| times q with r's sign: pairs are at most 2 * 128 * 127, below 2^15. */
INLINE vi vi_dot(vi acc, const uint8_t *p, int32_t q)
{
    const vi r = vi_load(p);
    const vi pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(r),
                                          _mm256_sign_epi8(vi_set1(q), r));
    return _mm256_add_epi32(acc,
                            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

/* Eight rows of eight quads are turned: row r becomes lane r. */
INLINE void interleave(uint8_t *p, const int8_t *x, size_t stride)
{
    __m256i a[8], b[8];
    UNROLL
    for (int r = 0; r < 8; r++) {
        a[r] = _mm256_xor_si256(vi_load((const uint8_t *)x + r * stride),
                                _mm256_set1_epi8((char)OFFSET_BYTES));
    }
    UNROLL
    for (int r = 0; r < 8; r += 2) {
        b[r] = _mm256_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm256_unpackhi_epi32(a[r], a[r + 1]);
    }
    UNROLL
    for (int r = 0; r < 8; r += 4) {
        a[r] = _mm256_unpacklo_epi64(b[r], b[r + 2]);
        a[r + 1] = _mm256_unpackhi_epi64(b[r], b[r + 2]);
        a[r + 2] = _mm256_unpacklo_epi64(b[r + 1], b[r + 3]);
        a[r + 3] = _mm256_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    UNROLL
    for (int r = 0; r < 4; r++) {
        _mm256_storeu_si256((__m256i *)(p + 32 * r),
                            _mm256_permute2x128_si256(a[r], a[r + 4], 0x20));
        _mm256_storeu_si256((__m256i *)(p + 32 * (r + 4)),
                            _mm256_permute2x128_si256(a[r], a[r + 4], 0x31));
    }
}

#include "template_int8.h"
#else
typedef int int8_avx2_is_empty;
#endif
