/* Kernels for AVX-512 without bf16 instructions: bf16 is widened. */
#if defined(__x86_64__)
#include "blocks_avx512.h"
#include "vector_avx512.h"

#define HAS_DOT 0
#define COLUMNS_bf16 6
#define CASES_bf16 CASES_6

#include "template_attention.h"
#include "template_dequant.h"
#include "template_product.h"

#define TABLE cpu_kernels_avx512
#include "template_table.h"
#else
typedef int kernels_avx512_is_empty;
#endif
