/* Kernels in the compiler's own vectors of four floats: every machine. */
#include "vector_portable.h"

#define HAS_DOT 0
#define COLUMNS_bf16 3
#define CASES_bf16 CASES_3

#include "template_attention.h"
#include "template_dequant.h"
#include "template_product.h"

#define TABLE cpu_kernels_portable
#include "template_table.h"
