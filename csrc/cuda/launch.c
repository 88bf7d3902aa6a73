/* One op -> matrix products and kernels.
 *
 * cuBLAS thinks in columns. A row-major (n, k) matrix is to it a (k, n) one,
 * so out (n, m) = a (n, k) w (m, k)^T becomes C (m, n) = op(W) A with W
 * transposed: no data moves. Products of one op that read the same input
 * write side by side into one scratch matrix.
 */
#include "cuda.h"

/* ---- matrix products ----------------------------------------------------- */

static cudaDataType_t data_type(rk_type type)
{
    return type == RK_BF16  ? CUDA_R_16BF
           : type == RK_F16 ? CUDA_R_16F
                            : CUDA_R_32F;
}

/* out (n, w->rows), rows `stride` floats apart, = or += a w^T. */
static void product(cuda_device *dev, float *out, int32_t stride, const void *a,
                    const rk_matrix *w, int32_t n, bool accumulate)
{
    const float one = 1.0f, beta = accumulate ? 1.0f : 0.0f;
    const rk_type compute = dev->extent.compute;
    cudaDataType_t type = data_type(compute);
    if (dev->error.status != RK_OK) {
        return;
    }
    if (w->type != compute) {
        rk_fail(&dev->error, RK_ETYPE,
                "a matrix that is not of the session's type");
        return;
    }
    cublasStatus_t code = cublasGemmEx(
        dev->cublas, CUBLAS_OP_T, CUBLAS_OP_N, w->rows, n, w->cols, &one,
        w->data, type, w->cols, a, type, w->cols, &beta, out, CUDA_R_32F,
        stride, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    cublas_error(code, "cublasGemmEx", &dev->error);
}

/* ---- what an op does ----------------------------------------------------- */

static const void *fact(const cuda_device *dev, size_t offset)
{
    return dev->staging.device + offset;
}

static rk_cuda_kv layer_kv(const cuda_device *dev, int32_t layer)
{
    return (rk_cuda_kv){
        .layer = dev->kv + layer * dev->layer_bytes,
        .block_bytes = dev->block_bytes,
        .block_shift = dev->block_shift,
        .n_kv_heads = dev->config.n_kv_heads,
        .head_dim = dev->config.head_dim,
        .type = dev->extent.kv_type,
    };
}

static void issue_qkv(cuda_device *dev, const cuda_op *op)
{
    const rk_config *c = &dev->config;
    int32_t queries = c->n_heads * c->head_dim;
    int32_t keys = c->n_kv_heads * c->head_dim;
    int32_t stride = queries + 2 * keys;
    rk_cuda_kv kv = layer_kv(dev, op->layer);
    product(dev, dev->qkv, stride, op->a, &op->w[0], op->n, false);
    product(dev, dev->qkv + queries, stride, op->a, &op->w[1], op->n, false);
    product(dev, dev->qkv + queries + keys, stride, op->a, &op->w[2], op->n,
            false);
    rk_cuda_rotation rotation = {
        .q = op->out,
        .qkv = dev->qkv,
        .query_bias = op->w[0].bias,
        .key_bias = op->w[1].bias,
        .value_bias = op->w[2].bias,
        .cosine = dev->cosine,
        .sine = dev->sine,
        .slots = fact(dev, dev->facts.slots),
        .n = op->n,
        .n_heads = c->n_heads,
        .interleaved = c->rope_interleaved,
    };
    CUDA_TRY(dev, rk_cuda_rotate, &rotation, &kv, dev->context->stream);
}

static void issue_attention(cuda_device *dev, const cuda_op *op)
{
    const rk_config *c = &dev->config;
    const cuda_facts *f = &dev->facts;
    rk_cuda_attention attention = {
        .out = op->out,
        .out_type = dev->base.input,
        .q = op->a,
        .kv = layer_kv(dev, op->layer),
        .n_rows = op->n,
        .n_heads = c->n_heads,
        .window = op->layer >= c->window_from ? c->window : 0,
        .positions = fact(dev, f->positions),
        .n_units = fact(dev, f->n_units),
        .units = fact(dev, f->units),
        .places = fact(dev, f->places),
        .rows_first = fact(dev, f->rows_first),
        .tables = fact(dev, f->tables),
        .partials = dev->partials,
        .sums = dev->sums,
        .n_blocks = f->n_blocks,
        .wide = f->wide,
        .merge = f->merge,
    };
    CUDA_TRY(dev, rk_cuda_attend, &attention, dev->context->stream);
}

static void issue_linear(cuda_device *dev, const cuda_op *op)
{
    const rk_matrix *w = &op->w[0];
    product(dev, op->out, w->rows, op->a, w, op->n, op->flag);
    if (w->bias != NULL) {
        CUDA_TRY(dev, rk_cuda_add_bias, op->out, w->bias, op->n, w->rows,
                 dev->context->stream);
    }
}

static void issue_swiglu(cuda_device *dev, const cuda_op *op)
{
    int32_t ffn = dev->config.ffn_width;
    product(dev, dev->gate_up, 2 * ffn, op->a, &op->w[0], op->n, false);
    product(dev, dev->gate_up + ffn, 2 * ffn, op->a, &op->w[1], op->n, false);
    CUDA_TRY(dev, rk_cuda_swiglu, op->out, dev->base.input, dev->gate_up,
             dev->gate_up + ffn, 2 * (int64_t)ffn, op->n, ffn,
             dev->context->stream);
}

void cuda_issue(cuda_device *dev, const cuda_op *op)
{
    const rk_config *c = &dev->config;
    const cuda_facts *f = &dev->facts;
    cudaStream_t stream = dev->context->stream;
    if (dev->error.status != RK_OK) {
        return; /* its facts may not have come: nothing runs on what is there */
    }
    switch ((cuda_kind)op->kind) {
    case CUDA_BEGIN:
        CUDA_TRY(dev, rk_cuda_angles, dev->cosine, dev->sine,
                 fact(dev, f->positions), dev->inv_freq, op->n, c->head_dim / 2,
                 stream);
        break;
    case CUDA_EMBED:
        CUDA_TRY(dev, rk_cuda_embed, op->out, op->w[0].data, op->w[0].type,
                 fact(dev, f->tokens), op->n, op->w[0].cols, stream);
        break;
    case CUDA_NORM:
        CUDA_TRY(dev, rk_cuda_norm, op->out, dev->base.input, op->a, op->b,
                 c->norm_eps, op->n, c->width, stream);
        break;
    case CUDA_QKV:
        issue_qkv(dev, op);
        break;
    case CUDA_ATTENTION:
        issue_attention(dev, op);
        break;
    case CUDA_LINEAR:
        issue_linear(dev, op);
        break;
    case CUDA_SWIGLU:
        issue_swiglu(dev, op);
        break;
    case CUDA_GATHER:
        CUDA_TRY(dev, rk_cuda_gather, op->out, op->a, op->b, op->n, op->size,
                 stream);
        break;
    case CUDA_PICK:
        CUDA_TRY(dev, rk_cuda_pick, op->out, op->a, op->b, dev->pick, op->n,
                 c->vocab_size, stream);
        break;
    case CUDA_ANSWER:
        CUDA_TRY(dev, rk_cuda_answer, op->out, op->a, op->b, c->norm_eps,
                 op->w[0].data, op->w[0].type, op->c, op->n, op->size, c->width,
                 stream);
        break;
    case CUDA_MEAN:
        CUDA_TRY(dev, rk_cuda_mean, op->out, op->extra, op->a, op->n,
                 op->n_total, c->width, stream);
        break;
    case CUDA_COSINE:
        CUDA_TRY(dev, rk_cuda_cosine, op->out, op->a, op->b, op->c, op->n,
                 c->width, stream);
        break;
    }
}
