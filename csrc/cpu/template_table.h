/* The table of one instruction set; the including file names it TABLE, and
 * PACK_ROWS and PACKED_BYTES where products want packed activations. */
#if !defined(PACK_ROWS)
#define PACK_ROWS NULL
#define PACKED_BYTES NULL
#define SCRATCH_BYTES NULL
#endif

const cpu_kernels TABLE = {
    .product = {product_f32, product_bf16},
    .pack = PACK_ROWS,
    .packed_bytes = PACKED_BYTES,
    .product_scratch_bytes = SCRATCH_BYTES,
    .convert = {row_convert_f32, row_convert_bf16},
    .norm = {row_norm_f32, row_norm_bf16},
    .swiglu = {row_swiglu_f32, row_swiglu_bf16},
    .rope = row_rope,
    .acc_stride = {acc_stride_f32, acc_stride_bf16},
    .query_bytes = {query_bytes_f32, query_bytes_bf16},
    .query = {query_f32, query_bf16},
    .scores = {scores_f32, scores_bf16},
    .softmax = softmax_tile,
    .values = {values_f32, values_bf16},
    .merge = merge_tile,
    .finish = {finish_f32, finish_bf16},
    .statistics = row_statistics,
    .weights = row_weights,
    .sum = row_sum,
    .dot = row_dot,
};
