/* The table of one instruction set; the including file names it TABLE. What
 * an instruction set does its own way for products of bf16 it names before
 * (kernels_amx.c).
 */
#if !defined(OWN_PRODUCT_BF16)
#define SCRATCH_BYTES NULL
#define BLOCK_ROWS 0
#if HAS_DOT
#define PACK_ROWS NULL
#define PACKED_BYTES NULL
#else
#define PACK_ROWS split_rows
#define PACKED_BYTES split_bytes
#endif
#endif

const cpu_kernels TABLE = {
    .f32 = {.bytes = 4,
            .product = product_f32,
            .dequant = row_dequant_f32,
            .convert = row_convert_f32,
            .norm = row_norm_f32,
            .swiglu = row_swiglu_f32},
    .bf16 = {.bytes = 2,
             .product = product_bf16,
             .pack = PACK_ROWS,
             .packed_bytes = PACKED_BYTES,
             .product_scratch_bytes = SCRATCH_BYTES,
             .block_rows = BLOCK_ROWS,
             .dequant = row_dequant_bf16,
             .convert = row_convert_bf16,
             .norm = row_norm_bf16,
             .swiglu = row_swiglu_bf16},
    .kv_f32 = &attention_f32,
    .kv_bf16 = &attention_bf16,
    .rope = row_rope,
    .merge = merge_tile,
    .statistics = row_statistics,
    .weights = row_weights,
    .sum = row_sum,
    .dot = row_dot,
};
