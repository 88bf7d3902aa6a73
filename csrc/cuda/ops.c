/* The table's entries: each writes its arguments down as one op of the step,
 * which launches it now or later with the others (step.c). */
#include "cuda.h"

#include <string.h>

/* With its padding, which stays what it is as long as the weights do: ops are
 * compared by their bytes. */
static void set_matrix(rk_matrix *to, const rk_matrix *from)
{
    memcpy(to, from, sizeof *to);
}

void cuda_embed(rk_device *base, float *out, const rk_matrix *table)
{
    cuda_device *dev = cuda_of(base);
    cuda_op *op = cuda_next(dev, CUDA_EMBED, dev->facts.n_rows);
    op->out = out;
    set_matrix(&op->w[0], table);
    cuda_take(dev);
}

void cuda_norm(rk_device *base, void *out, const float *x, const float *weight,
               int32_t n)
{
    cuda_device *dev = cuda_of(base);
    cuda_op *op = cuda_next(dev, CUDA_NORM, cuda_padded(dev, n));
    op->out = out;
    op->a = x;
    op->b = weight;
    cuda_take(dev);
}

void cuda_qkv(rk_device *base, void *out, const void *a, const rk_layer *layer,
              int32_t layer_id)
{
    cuda_device *dev = cuda_of(base);
    cuda_op *op = cuda_next(dev, CUDA_QKV, dev->facts.n_rows);
    op->layer = layer_id;
    op->out = out;
    op->a = a;
    set_matrix(&op->w[0], &layer->query);
    set_matrix(&op->w[1], &layer->key);
    set_matrix(&op->w[2], &layer->value);
    cuda_take(dev);
}

void cuda_attention(rk_device *base, void *out, const void *q, int32_t layer_id)
{
    cuda_device *dev = cuda_of(base);
    cuda_op *op = cuda_next(dev, CUDA_ATTENTION, dev->facts.n_rows);
    op->layer = layer_id;
    op->out = out;
    op->a = q;
    cuda_take(dev);
}

void cuda_linear(rk_device *base, float *out, const void *a, const rk_matrix *w,
                 int32_t n, bool accumulate)
{
    cuda_device *dev = cuda_of(base);
    cuda_op *op = cuda_next(dev, CUDA_LINEAR, cuda_padded(dev, n));
    op->out = out;
    op->a = a;
    op->flag = accumulate;
    set_matrix(&op->w[0], w);
    cuda_take(dev);
}

void cuda_swiglu(rk_device *base, void *out, const void *a,
                 const rk_matrix *gate, const rk_matrix *up, int32_t n)
{
    cuda_device *dev = cuda_of(base);
    cuda_op *op = cuda_next(dev, CUDA_SWIGLU, cuda_padded(dev, n));
    op->out = out;
    op->a = a;
    set_matrix(&op->w[0], gate);
    set_matrix(&op->w[1], up);
    cuda_take(dev);
}

void cuda_gather(rk_device *base, float *dst, const float *src,
                 const int32_t *rows, int32_t n, int32_t width)
{
    cuda_device *dev = cuda_of(base);
    /* Padding asks for row 0, which a compaction in place has moved. */
    int32_t padded = dst == src ? n : cuda_padded(dev, n);
    const void *staged = cuda_stage(dev, rows, (size_t)n * sizeof *rows,
                                    (size_t)padded * sizeof *rows);
    cuda_op *op = cuda_next(dev, CUDA_GATHER, padded);
    op->size = width;
    op->out = dst;
    op->a = src;
    op->b = staged;
    cuda_take(dev);
}

void cuda_pick(rk_device *base, rk_pick *out, const float *logits,
               const rk_draw *draws, int32_t n)
{
    cuda_device *dev = cuda_of(base);
    int32_t padded = cuda_padded(dev, n);
    const void *staged = cuda_stage(dev, draws, (size_t)n * sizeof *draws,
                                    (size_t)padded * sizeof *draws);
    cuda_op *op = cuda_next(dev, CUDA_PICK, padded);
    op->out = out;
    op->a = logits;
    op->b = staged;
    cuda_take(dev);
}

void cuda_answer(rk_device *base, float *out, const float *x,
                 const float *weight, const rk_matrix *head, const int32_t *ids,
                 int32_t n, int32_t n_ids)
{
    cuda_device *dev = cuda_of(base);
    size_t bytes = (size_t)n_ids * sizeof *ids;
    const void *staged = cuda_stage(dev, ids, bytes, bytes);
    cuda_op *op = cuda_next(dev, CUDA_ANSWER, cuda_padded(dev, n));
    op->size = n_ids;
    op->out = out;
    op->a = x;
    op->b = weight;
    op->c = staged;
    set_matrix(&op->w[0], head);
    cuda_take(dev);
}

void cuda_mean(rk_device *base, float *out, double *sum, const float *x,
               int32_t n, int64_t n_total)
{
    cuda_device *dev = cuda_of(base);
    cuda_op *op = cuda_next(dev, CUDA_MEAN, n);
    op->out = out;
    op->extra = sum;
    op->a = x;
    op->n_total = n_total;
    cuda_take(dev);
}

void cuda_cosine(rk_device *base, float *out, const float *a, const float *b,
                 const float *center, int32_t n)
{
    cuda_device *dev = cuda_of(base);
    cuda_op *op = cuda_next(dev, CUDA_COSINE, n);
    op->out = out;
    op->a = a;
    op->b = b;
    op->c = center;
    cuda_take(dev);
}
