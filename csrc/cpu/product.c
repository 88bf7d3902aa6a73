/* Ops that are matrix products: linear, gate and up, query key value.
 *
 * The outputs (n activation rows by w->rows) are cut into units; a unit's
 * product is one kernel call and, where there is more to do (silu, rotation,
 * the KV pool), goes to scratch that stays in the cache. Few rows: units are
 * slices of the weights, which are then read once. Many rows: squares of STEP
 * by STEP, numbered so that one panel of weights meets all rows in turn.
 *
 * Weights of a block type go through the same kernels: a few of their rows at a
 * time become rows of the activations' type in the thread's own memory, here
 * or, for few activation rows, in a kernel that can do it as it goes. The
 * result is that of a session whose weights were converted beforehand, to the
 * bit. Where activations are rounded to integers (rk_extent.rounding), such
 * weights meet those, in kernels of their own (int16.h, int8.h); activations
 * come as float32 then, and become bf16 here for matrices of that type.
 */
#include <string.h>

#include "int16.h"
#include "int8.h"
#include "model/quant.h"

#define STEP 64
/* Activations of a unit that stay in the second cache. */
#define PANEL_ELEMENTS (1 << 19)
#define AT_ONCE 32    /* weight rows of a block type that are unpacked */
#define SLICES 3      /* units of a thread, when rows are few */
#define SLICE_MAX 512 /* weight rows of such a unit */

/* How w->rows outputs and n rows are cut. */
typedef struct cut {
    int32_t n_step, m_step, m_units, n_units;
} cut;

bool rk_cpu_takes(rk_type type)
{
    return rk_type_get(type)->block_elements > 1;
}

/* Rows of a unit: where weights are copied first, as many as stay in the cache
 * and still leave some units for each thread. n: rows of w that meet them. */
static int32_t rows_of_unit(const cpu_device *dev, int32_t m, int32_t n,
                            const rk_matrix *w)
{
    const bool copied = dev->panels != NULL || rk_cpu_takes(w->type);
    int32_t step = copied ? CPU_PANEL_ROWS : STEP;
    while (step > STEP && ((int64_t)step * w->cols > PANEL_ELEMENTS ||
                           cpu_ceil_div(m, step) * cpu_ceil_div(n, STEP) <
                               4 * dev->n_threads)) {
        step /= 2;
    }
    return step;
}

static cut cut_product(const cpu_device *dev, int32_t m, const rk_matrix *w)
{
    const int32_t n = w->rows;
    cut c = {.m_step = rows_of_unit(dev, m, n, w)};
    c.n_step = c.m_step > STEP ? STEP / 2 : STEP;
    c.m_units = cpu_ceil_div(m, c.m_step);
    if (m <= STEP) {
        int32_t share = cpu_ceil_div(n, SLICES * dev->n_threads);
        c.n_step = cpu_min(SLICE_MAX, cpu_ceil_div(share, 32) * 32);
    }
    c.n_units = c.m_units * cpu_ceil_div(n, c.n_step);
    return c;
}

typedef struct range {
    int32_t m_begin, m, n_begin, n;
} range;

static range unit_range(const cut *c, int32_t m, int32_t n, int32_t unit)
{
    range r;
    r.m_begin = unit % c->m_units * c->m_step;
    r.n_begin = unit / c->m_units * c->n_step;
    r.m = cpu_min(c->m_step, m - r.m_begin);
    r.n = cpu_min(c->n_step, n - r.n_begin);
    return r;
}

/* ---- packing ------------------------------------------------------------- */

typedef struct pack_job {
    const cpu_device *dev;
    const void *a;
    int32_t n, k;
} pack_job;

/* A group of rows as `compute` (where they come as another type), then as
 * kernels want them. */
static void pack_unit(void *argument, int32_t unit, int32_t thread)
{
    const pack_job *job = argument;
    const cpu_device *dev = job->dev;
    const int32_t row = unit * CPU_PACK_ROWS;
    const int32_t n = cpu_min(CPU_PACK_ROWS, job->n - row);
    const int64_t at = (int64_t)row * job->k;
    const char *a = (const char *)job->a + at * (int64_t)dev->input->bytes;
    (void)thread;
    if (dev->narrow != NULL) {
        char *narrow = dev->narrow + at * (int64_t)dev->compute->bytes;
        dev->compute->convert(narrow, (const float *)a, n * job->k);
        a = narrow;
    }
    if (dev->packed != NULL) {
        dev->compute->pack(dev->packed + (size_t)unit *
                                             dev->compute->packed_bytes(job->k),
                           a, n, job->k, job->n > CPU_FEW_ROWS);
    }
}

/* Bytes of a row of k activations as integers. */
static size_t integers_bytes(const cpu_device *dev, int32_t k)
{
    return dev->int16 != NULL
               ? (size_t)cpu_int16_blocks(k) * sizeof(cpu_int16_block)
               : (size_t)(k / CPU_INT8_BLOCK) * sizeof(cpu_integers);
}

static void quantize_unit(void *argument, int32_t unit, int32_t thread)
{
    const pack_job *job = argument;
    const cpu_device *dev = job->dev;
    const int32_t begin = unit * CPU_PACK_ROWS;
    const int32_t end = cpu_min(begin + CPU_PACK_ROWS, job->n);
    (void)thread;
    for (int32_t i = begin; i < end; i++) {
        const float *row = (const float *)job->a + (int64_t)i * job->k;
        void *to =
            (char *)dev->integers + i * (int64_t)integers_bytes(dev, job->k);
        if (dev->int16 != NULL) {
            dev->int16->quantize(to, row, job->k);
        } else {
            dev->int8->quantize(to, row, job->k);
        }
    }
}

/* Do activations meet this matrix as integers? */
static bool in_integers(const cpu_device *dev, const rk_matrix *w)
{
    return dev->integers != NULL && rk_cpu_takes(w->type);
}

/* Activations in the forms that products want them. */
typedef struct input {
    const void *act;
    const char *integers;
    int32_t n; /* rows in all */
} input;

/* a: in (n, k) as these matrices want it. Valid until the next one. */
static input prepare(const cpu_device *dev, const void *a, int32_t n,
                     const rk_matrix *const *matrices, int n_matrices)
{
    const int32_t n_units = cpu_ceil_div(n, CPU_PACK_ROWS);
    pack_job job = {dev, a, n, matrices[0]->cols};
    input in = {NULL, NULL, n};
    for (int i = 0; i < n_matrices; i++) {
        if (in_integers(dev, matrices[i])) {
            in.integers = dev->integers;
        } else {
            in.act = dev->packed != NULL   ? dev->packed
                     : dev->narrow != NULL ? dev->narrow
                                           : a;
        }
    }
    if (in.integers != NULL) {
        cpu_pool_run(dev->pool, quantize_unit, &job, n_units);
    }
    if (in.act != NULL && in.act != a) {
        cpu_pool_run(dev->pool, pack_unit, &job, n_units);
    }
    return in;
}

bool cpu_product_allocate(cpu_device *dev)
{
    const rk_config *c = &dev->config;
    const int32_t k =
        cpu_max(cpu_max(c->width, c->ffn_width), c->n_heads * c->head_dim);
    const int32_t rows = cpu_max(dev->extent.max_rows, dev->extent.max_outputs);
    dev->rows_bytes = cpu_align(AT_ONCE * (size_t)k * dev->compute->bytes);
    if (dev->int16 != NULL || dev->int8 != NULL) {
        size_t panel =
            cpu_align(dev->int16 != NULL ? dev->int16->scratch_bytes
                                         : dev->int8->scratch_bytes(k));
        dev->rows_bytes = panel > dev->rows_bytes ? panel : dev->rows_bytes;
        dev->integers = dev->base.ops->alloc(
            &dev->base, (size_t)rows * integers_bytes(dev, k));
        if (dev->integers == NULL) {
            return false;
        }
    }
    if (dev->input != dev->compute) {
        dev->narrow = dev->base.ops->alloc(
            &dev->base, (size_t)rows * (size_t)k * dev->compute->bytes);
        if (dev->narrow == NULL) {
            return false;
        }
    }
    dev->rows = dev->base.ops->alloc(&dev->base,
                                     dev->rows_bytes * (size_t)dev->n_threads);
    if (dev->rows == NULL || dev->compute->pack == NULL) {
        return dev->rows != NULL;
    }
    size_t bytes = (size_t)cpu_ceil_div(rows, CPU_PACK_ROWS) *
                   dev->compute->packed_bytes(k);
    dev->packed = dev->base.ops->alloc(&dev->base, bytes);
    if (dev->packed == NULL || dev->compute->product_scratch_bytes == NULL) {
        return dev->packed != NULL;
    }
    dev->panel_bytes = cpu_align(dev->compute->product_scratch_bytes(k));
    dev->panels = dev->base.ops->alloc(&dev->base, dev->panel_bytes *
                                                       (size_t)dev->n_threads);
    return dev->panels != NULL;
}

/* Unpack weight rows [from, from + n) of a block type into `rows`. */
static void unpack_rows(const cpu_device *dev, char *rows, const rk_matrix *w,
                        int32_t from, int32_t n)
{
    const int64_t row_bytes = rk_type_bytes(w->type, w->cols);
    const char *blocks = (const char *)w->data + from * row_bytes;
    for (int32_t i = 0; i < n; i++) {
        dev->compute->dequant(rows + (int64_t)i * w->cols *
                                         (int64_t)dev->compute->bytes,
                              blocks + i * row_bytes, w->type, w->cols);
    }
}

/* `multiply` for weights that `in_integers`. */
static void multiply_integers(const cpu_device *dev, float *out,
                              int64_t out_stride, const char *integers,
                              const rk_matrix *w, const range *r,
                              bool accumulate, int32_t thread)
{
    const int64_t row_bytes = rk_type_bytes(w->type, w->cols);
    const cpu_integer_product job = {
        .out = out,
        .out_stride = out_stride,
        .a = integers + r->m_begin * (int64_t)integers_bytes(dev, w->cols),
        .w = (const char *)w->data + r->n_begin * row_bytes,
        .row_bytes = row_bytes,
        .type = w->type,
        .bias = w->bias != NULL ? w->bias + r->n_begin : NULL,
        .m = r->m,
        .n = r->n,
        .k = w->cols,
        .accumulate = accumulate,
        .scratch = dev->rows + (size_t)thread * dev->rows_bytes,
    };
    if (dev->int16 != NULL) {
        dev->int16->product(&job);
    } else {
        dev->int8->product(&job);
    }
}

/* The part `r` of a w^T + bias to out, whose rows lie out_stride apart; a is
 * `prepare`d, r->m_begin a multiple of CPU_PACK_ROWS. */
static void multiply(const cpu_device *dev, float *out, int64_t out_stride,
                     const input *a, const rk_matrix *w, const range *r,
                     bool accumulate, int32_t thread)
{
    if (in_integers(dev, w)) {
        multiply_integers(dev, out, out_stride, a->integers, w, r, accumulate,
                          thread);
        return;
    }
    const int64_t row_bytes = (int64_t)w->cols * (int64_t)dev->compute->bytes;
    const int64_t a_bytes =
        dev->packed == NULL ? r->m_begin * row_bytes
                            : r->m_begin / CPU_PACK_ROWS *
                                  (int64_t)dev->compute->packed_bytes(w->cols);
    const bool unpack =
        rk_cpu_takes(w->type) && a->n > dev->compute->block_rows;
    const int32_t step = unpack ? AT_ONCE : r->n;
    char *rows = dev->rows + (size_t)thread * dev->rows_bytes;
    cpu_product job = {
        .out_stride = out_stride,
        .a = (const char *)a->act + a_bytes,
        .type = unpack ? dev->extent.compute : w->type,
        .m = r->m,
        .k = w->cols,
        .accumulate = accumulate,
        .many = a->n > CPU_FEW_ROWS,
        .scratch = dev->panels != NULL
                       ? dev->panels + (size_t)thread * dev->panel_bytes
                       : NULL,
    };
    for (int32_t j = 0; j < r->n; j += step) {
        const int32_t from = r->n_begin + j;
        job.n = cpu_min(step, r->n - j);
        job.out = out + j;
        job.bias = w->bias != NULL ? w->bias + from : NULL;
        job.w = (const char *)w->data + from * rk_type_bytes(w->type, w->cols);
        if (unpack) {
            unpack_rows(dev, rows, w, from, job.n);
            job.w = rows;
        }
        dev->compute->product(&job);
    }
}

/* ---- linear -------------------------------------------------------------- */

typedef struct linear_job {
    const cpu_device *dev;
    float *out;
    input a;
    const rk_matrix *w;
    int32_t n;
    bool accumulate;
    cut c;
} linear_job;

static void linear_unit(void *argument, int32_t unit, int32_t thread)
{
    const linear_job *job = argument;
    range r = unit_range(&job->c, job->n, job->w->rows, unit);
    multiply(job->dev, job->out + (int64_t)r.m_begin * job->w->rows + r.n_begin,
             job->w->rows, &job->a, job->w, &r, job->accumulate, thread);
}

void cpu_linear(rk_device *base, float *out, const void *a, const rk_matrix *w,
                int32_t n, bool accumulate)
{
    cpu_device *dev = (cpu_device *)base;
    linear_job job = {dev, out,        prepare(dev, a, n, &w, 1), w,
                      n,   accumulate, cut_product(dev, n, w)};
    cpu_pool_run(dev->pool, linear_unit, &job, job.c.n_units);
}

/* ---- gate and up --------------------------------------------------------- */

typedef struct swiglu_job {
    const cpu_device *dev;
    char *out;
    input a;
    const rk_matrix *gate, *up;
    int32_t n;
    cut c;
} swiglu_job;

static void swiglu_unit(void *argument, int32_t unit, int32_t thread)
{
    const swiglu_job *job = argument;
    const cpu_device *dev = job->dev;
    const int64_t ffn = job->gate->rows;
    range r = unit_range(&job->c, job->n, job->gate->rows, unit);
    float *gate = cpu_scratch(dev, thread), *up = gate + (int64_t)r.m * r.n;
    multiply(dev, gate, r.n, &job->a, job->gate, &r, false, thread);
    multiply(dev, up, r.n, &job->a, job->up, &r, false, thread);
    for (int32_t i = 0; i < r.m; i++) {
        int64_t at = (r.m_begin + i) * ffn + r.n_begin;
        dev->input->swiglu(job->out + at * (int64_t)dev->input->bytes,
                           gate + (int64_t)i * r.n, up + (int64_t)i * r.n, r.n);
    }
}

void cpu_swiglu(rk_device *base, void *out, const void *a,
                const rk_matrix *gate, const rk_matrix *up, int32_t n)
{
    cpu_device *dev = (cpu_device *)base;
    const rk_matrix *const both[] = {gate, up};
    swiglu_job job = {dev, out, prepare(dev, a, n, both, 2), gate,
                      up,  n,   cut_product(dev, n, gate)};
    cpu_pool_run(dev->pool, swiglu_unit, &job, job.c.n_units);
}

/* ---- query, key, value --------------------------------------------------- */

typedef struct qkv_job {
    const cpu_device *dev;
    char *out;
    input a;
    const rk_layer *layer;
    int32_t layer_id;
    int32_t m_step, m_units;
} qkv_job;

/* A row of one head of K or V into the pool. */
static void store_row(const qkv_job *job, int32_t row, int32_t kv_head,
                      bool key, const float *x)
{
    const cpu_device *dev = job->dev;
    const int32_t tokens = dev->extent.block_tokens;
    const int64_t head = (key ? 0 : dev->config.n_kv_heads) + kv_head;
    const int64_t slot = dev->batch.slots[row];
    if (slot < 0) {
        return;
    }
    char *block = dev->kv + (slot >> dev->block_shift) * dev->block_bytes +
                  job->layer_id * dev->layer_bytes + head * dev->head_bytes;
    (key ? dev->attention->store_key : dev->attention->store_value)(
        block, (int32_t)(slot & (tokens - 1)), tokens, x, dev->config.head_dim);
}

/* All rows of one head of Q, K or V. */
static void qkv_unit(void *argument, int32_t unit, int32_t thread)
{
    const qkv_job *job = argument;
    const cpu_device *dev = job->dev;
    const rk_config *config = &dev->config;
    const int32_t head_dim = config->head_dim, half = head_dim / 2;
    const int32_t n_heads = config->n_heads, n_kv = config->n_kv_heads;
    const int32_t head = unit / job->m_units;
    const bool query = head < n_heads, value = head >= n_heads + n_kv;
    const int32_t first = query ? 0 : value ? n_heads + n_kv : n_heads;
    const rk_matrix *w = query   ? &job->layer->query
                         : value ? &job->layer->value
                                 : &job->layer->key;
    range r = {.m_begin = unit % job->m_units * job->m_step,
               .n_begin = (head - first) * head_dim,
               .n = head_dim};
    r.m = cpu_min(job->m_step, dev->batch.n_rows - r.m_begin);
    float *rows = cpu_scratch(dev, thread);
    multiply(dev, rows, head_dim, &job->a, w, &r, false, thread);
    for (int32_t i = 0; i < r.m; i++) {
        const int64_t row = r.m_begin + i;
        float *x = rows + (int64_t)i * head_dim;
        if (!value) {
            dev->kernels->rope(x, dev->cosine + row * half,
                               dev->sine + row * half, half,
                               config->rope_interleaved);
        }
        if (query) {
            int64_t at = (row * n_heads + head) * head_dim;
            dev->query->convert(job->out + at * (int64_t)dev->query->bytes, x,
                                head_dim);
        } else {
            store_row(job, (int32_t)row, head - first, !value, x);
        }
    }
}

void cpu_qkv(rk_device *base, void *out, const void *a, const rk_layer *layer,
             int32_t layer_id)
{
    cpu_device *dev = (cpu_device *)base;
    const int32_t n_rows = dev->batch.n_rows;
    const int32_t n_heads = dev->config.n_heads + 2 * dev->config.n_kv_heads;
    const rk_matrix *const all[] = {&layer->query, &layer->key, &layer->value};
    qkv_job job = {.dev = dev,
                   .out = out,
                   .a = prepare(dev, a, n_rows, all, 3),
                   .layer = layer,
                   .layer_id = layer_id};
    job.m_step = rows_of_unit(dev, n_rows, n_heads * STEP, &layer->query);
    job.m_units = cpu_ceil_div(n_rows, job.m_step);
    cpu_pool_run(dev->pool, qkv_unit, &job, job.m_units * n_heads);
}

size_t cpu_product_scratch(const cpu_device *dev)
{
    size_t tiles = 2 * STEP * SLICE_MAX * sizeof(float); /* >= a panel's */
    size_t head = CPU_PANEL_ROWS * (size_t)dev->config.head_dim * sizeof(float);
    return tiles > head ? tiles : head;
}
