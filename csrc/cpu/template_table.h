/* The table of one instruction set; the including file names it TABLE. What
 * an instruction set does its own way for bf16 it names before (kernels_amx.c).
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
#if !defined(OWN_ATTENTION_BF16)
#define ACC_STRIDE acc_stride_bf16
#define QUERY_BYTES query_bytes_bf16
#define QUERY query_bf16
#define SCORES scores_bf16
#define SOFTMAX softmax_tile
#define VALUES values_bf16
#define ATTEND NULL
#define ATTEND_BYTES NULL
#define STORE_VALUE NULL
#define FINISH finish_bf16
#define FINISH_WIDE finish_wide
#endif

const cpu_kernels TABLE = {
    .product = {product_f32, product_bf16},
    .pack = PACK_ROWS,
    .packed_bytes = PACKED_BYTES,
    .product_scratch_bytes = SCRATCH_BYTES,
    .block_rows = BLOCK_ROWS,
    .dequant = {row_dequant_f32, row_dequant_bf16},
    .convert = {row_convert_f32, row_convert_bf16},
    .norm = {row_norm_f32, row_norm_bf16},
    .swiglu = {row_swiglu_f32, row_swiglu_bf16},
    .rope = row_rope,
    .acc_stride = {acc_stride_f32, ACC_STRIDE},
    .query_bytes = {query_bytes_f32, QUERY_BYTES},
    .query = {query_f32, QUERY},
    .scores = {scores_f32, SCORES},
    .softmax = {softmax_tile, SOFTMAX},
    .values = {values_f32, VALUES},
    .attend = ATTEND,
    .attend_bytes = ATTEND_BYTES,
    .store_value = STORE_VALUE,
    .merge = merge_tile,
    .finish = {finish_f32, FINISH},
    .finish_wide = FINISH_WIDE,
    .statistics = row_statistics,
    .weights = row_weights,
    .sum = row_sum,
    .dot = row_dot,
};
