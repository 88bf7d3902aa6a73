/* Kernels for AVX2 with FMA: bf16 is widened, then as float32. */
#if defined(__x86_64__)
#include "vector_avx2.h"

#define HAS_DOT 0
#define COLUMNS_bf16 3
#define CASES_bf16 CASES_3

#include "template_attention.h"
#include "template_dequant.h"
#include "template_product.h"

#define TABLE cpu_kernels_avx2
#include "template_table.h"
#else
typedef int kernels_avx2_is_empty;
#endif
