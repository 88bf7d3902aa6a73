/* Kernels for AVX-512 with dot products of bf16 pairs (VDPBF16PS). */
#if defined(__x86_64__)
#include "blocks_avx512.h"
#include "vector_avx512.h"

#define HAS_DOT 1
#define COLUMNS_bf16 6
#define CASES_bf16 CASES_6

INLINE vb vb_set1(uint32_t pair)
{
    return _mm512_set1_epi32((int)pair);
}

INLINE vf vf_dot(vf acc, vb a, vb b)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}

#include "template_attention.h"
#include "template_dequant.h"
#include "template_product.h"

#define TABLE cpu_kernels_avx512_bf16
#include "template_table.h"
#else
typedef int kernels_avx512_bf16_is_empty;
#endif
