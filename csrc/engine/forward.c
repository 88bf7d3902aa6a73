/* The transformer, once, over a backend's operations (Llama family):
 *
 *     x = embedding[token]
 *     for each layer:
 *         q, k, v = rotate(project(norm(x)));  k, v -> blocks
 *         x += output(attention(q, blocks))
 *         x += down(silu(gate(norm(x))) * up(norm(x)))
 *     logits = head(norm(x))
 *
 * x stays float32 throughout; what enters a matrix product is of the device's
 * input type. Rows that leave early, probes and lenses are the caller's
 * business: a layer is one call.
 */
#include "forward.h"

#include <string.h>

rk_status rk_forward_create(rk_forward *f, rk_device *device,
                            const rk_model *model, int32_t max_rows,
                            int32_t max_outputs, rk_error *err)
{
    const rk_config *c = &model->config;
    size_t in = rk_act_bytes(device->input);
    size_t query = rk_act_bytes(device->query);
    size_t rows = (size_t)rk_rows_room(max_rows);
    size_t outputs = (size_t)rk_rows_room(max_outputs);
    size_t width = (size_t)c->width;
    size_t heads = (size_t)c->n_heads * (size_t)c->head_dim;
    *f = (rk_forward){
        .device = device,
        .model = model,
        .max_rows = max_rows,
        .max_outputs = max_outputs,
    };
    const rk_ops *ops = device->ops;
    f->x = ops->alloc(device, rows * width * sizeof(float));
    f->y = ops->alloc(device, outputs * width * sizeof(float));
    f->a = ops->alloc(device, rows * (width > heads ? width : heads) * in);
    f->q = ops->alloc(device, rows * heads * query);
    f->h = ops->alloc(device, rows * (size_t)c->ffn_width * in);
    f->logits =
        ops->alloc(device, outputs * (size_t)c->vocab_size * sizeof(float));
    f->picks = ops->alloc(device, outputs * sizeof(rk_pick));
    f->few = ops->alloc(device, outputs * 2 * sizeof(float));
    f->hidden = ops->alloc(device, (size_t)c->n_layers * width * sizeof(float));
    if (f->x == NULL || f->y == NULL || f->a == NULL || f->q == NULL ||
        f->h == NULL || f->logits == NULL || f->picks == NULL ||
        f->few == NULL || f->hidden == NULL) {
        rk_forward_free(f);
        return rk_fail(err, RK_ENOMEM, "no memory for a step of %d rows",
                       (int)max_rows);
    }
    return RK_OK;
}

void rk_forward_free(rk_forward *f)
{
    if (f->device != NULL) {
        void *all[] = {f->x,      f->y,     f->a,   f->q,     f->h,
                       f->logits, f->picks, f->few, f->hidden};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
            f->device->ops->free(f->device, all[i]);
        }
    }
    memset(f, 0, sizeof *f);
}

void rk_forward_begin(rk_forward *f, const rk_batch *batch, float *x)
{
    const rk_ops *ops = f->device->ops;
    ops->begin(f->device, batch);
    ops->embed(f->device, x != NULL ? x : f->x, &f->model->embedding);
}

void rk_forward_layer(rk_forward *f, int32_t layer_id, float *x, int32_t n)
{
    rk_device *dev = f->device;
    const rk_ops *ops = dev->ops;
    const rk_layer *layer = &f->model->layers[layer_id];
    ops->norm(dev, f->a, x, layer->attention_norm, n);
    ops->qkv(dev, f->q, f->a, layer, layer_id);
    ops->attention(dev, f->a, f->q, layer_id);
    ops->linear(dev, x, f->a, &layer->output, n, true);
    ops->norm(dev, f->a, x, layer->ffn_norm, n);
    ops->swiglu(dev, f->h, f->a, &layer->gate, &layer->up, n);
    ops->linear(dev, x, f->h, &layer->down, n, true);
}

/* f->logits = head(norm(x[rows])) for n <= max_outputs rows. */
static void head(rk_forward *f, const int32_t *rows, int32_t n, bool norm)
{
    rk_device *dev = f->device;
    const rk_ops *ops = dev->ops;
    ops->gather(dev, f->y, f->x, rows, n, f->model->config.width);
    ops->norm(dev, f->a, f->y, norm ? f->model->norm : NULL, n);
    ops->linear(dev, f->logits, f->a, &f->model->head, n, false);
}

rk_status rk_forward_fetch(const rk_forward *f, void *host, const void *src,
                           size_t bytes, rk_error *err)
{
    f->device->ops->download(f->device, host, src, bytes);
    return f->device->ops->check(f->device, err);
}

rk_status rk_forward_pick(rk_forward *f, const int32_t *rows,
                          const rk_draw *draws, int32_t n, bool norm,
                          rk_pick *picks, rk_error *err)
{
    rk_device *dev = f->device;
    rk_status status = RK_OK;
    for (int32_t i = 0; i < n && status == RK_OK; i += f->max_outputs) {
        int32_t m = n - i < f->max_outputs ? n - i : f->max_outputs;
        head(f, rows + i, m, norm);
        dev->ops->pick(dev, f->picks, f->logits, draws + i, m);
        status = rk_forward_fetch(f, picks + i, f->picks,
                                  (size_t)m * sizeof *picks, err);
    }
    return status;
}

void rk_forward_leave(rk_forward *f, const int32_t *rows, int32_t n)
{
    head(f, rows, n, true);
}

rk_status rk_forward_logits(rk_forward *f, const int32_t *rows, int32_t n,
                            float *logits, rk_error *err)
{
    rk_forward_leave(f, rows, n);
    return rk_forward_fetch(
        f, logits, f->logits,
        (size_t)n * (size_t)f->model->config.vocab_size * sizeof *logits, err);
}

rk_status rk_forward_answer(rk_forward *f, const int32_t *rows, int32_t n,
                            bool norm, const int32_t ids[2], float *answers,
                            rk_error *err)
{
    rk_device *dev = f->device;
    const rk_ops *ops = dev->ops;
    rk_status status = RK_OK;
    for (int32_t i = 0; i < n && status == RK_OK; i += f->max_outputs) {
        int32_t m = n - i < f->max_outputs ? n - i : f->max_outputs;
        ops->gather(dev, f->y, f->x, rows + i, m, f->model->config.width);
        ops->answer(dev, f->few, f->y, norm ? f->model->norm : NULL,
                    &f->model->head, ids, m, 2);
        status = rk_forward_fetch(f, answers + 2 * i, f->few,
                                  (size_t)m * 2 * sizeof *answers, err);
    }
    return status;
}
