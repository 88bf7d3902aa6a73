/* Ops on rows: begin, embedding, norm, gathering, lenses and means.
 *
 * Small ones run on the calling thread; the others are cut into runs of ROWS
 * rows, each row computed by itself.
 */
#include <math.h>
#include <string.h>

#include "cpu.h"
#include "model/quant.h"

#define ROWS 16      /* rows of a unit */
#define SERIAL 16384 /* elements below which other threads do not pay */

/* Run `unit` over runs of ROWS rows, or all in turn when there is little. */
static void run_rows(const cpu_device *dev, cpu_unit *unit, void *job,
                     int32_t n, int64_t width)
{
    const int32_t n_units = cpu_ceil_div(n, ROWS);
    if (n * width <= SERIAL) {
        for (int32_t i = 0; i < n_units; i++) {
            unit(job, i, 0);
        }
    } else {
        cpu_pool_run(dev->pool, unit, job, n_units);
    }
}

/* ---- begin --------------------------------------------------------------- */

static void angles_unit(void *argument, int32_t unit, int32_t thread)
{
    cpu_device *dev = argument;
    const int32_t half = dev->config.head_dim / 2;
    const int32_t end = cpu_min((unit + 1) * ROWS, dev->batch.n_rows);
    (void)thread;
    for (int32_t row = unit * ROWS; row < end; row++) {
        const double position = (double)dev->batch.positions[row];
        for (int32_t i = 0; i < half; i++) {
            double angle = position * dev->config.inv_freq[i];
            dev->cosine[(int64_t)row * half + i] = (float)cos(angle);
            dev->sine[(int64_t)row * half + i] = (float)sin(angle);
        }
    }
}

void cpu_begin(rk_device *base, const rk_batch *batch)
{
    cpu_device *dev = (cpu_device *)base;
    dev->batch = *batch;
    run_rows(dev, angles_unit, dev, batch->n_rows,
             8 * (int64_t)dev->config.head_dim); /* sin and cos are slow */
    cpu_attention_begin(dev);
}

/* ---- embedding, norm ----------------------------------------------------- */

typedef struct rows_job {
    const cpu_device *dev;
    void *out;
    const float *x;
    const float *weight;
    const rk_matrix *matrix;
    const int32_t *ids;
    int32_t n, n_ids;
} rows_job;

/* row id of a matrix as float32 */
static void widen_row(float *out, const rk_matrix *matrix, int32_t id)
{
    const int64_t row_bytes = rk_type_bytes(matrix->type, matrix->cols);
    rk_dequantize(out, (const char *)matrix->data + id * row_bytes,
                  matrix->type, matrix->cols);
}

static void embed_unit(void *argument, int32_t unit, int32_t thread)
{
    const rows_job *job = argument;
    const int32_t end = cpu_min((unit + 1) * ROWS, job->n);
    (void)thread;
    for (int32_t i = unit * ROWS; i < end; i++) {
        widen_row((float *)job->out + (int64_t)i * job->matrix->cols,
                  job->matrix, job->ids[i]);
    }
}

void cpu_embed(rk_device *base, float *out, const rk_matrix *table)
{
    cpu_device *dev = (cpu_device *)base;
    rows_job job = {.dev = dev,
                    .out = out,
                    .matrix = table,
                    .ids = dev->batch.tokens,
                    .n = dev->batch.n_rows};
    run_rows(dev, embed_unit, &job, job.n, table->cols);
}

static void norm_unit(void *argument, int32_t unit, int32_t thread)
{
    const rows_job *job = argument;
    const cpu_device *dev = job->dev;
    const int32_t width = dev->config.width;
    const int32_t end = cpu_min((unit + 1) * ROWS, job->n);
    (void)thread;
    for (int32_t i = unit * ROWS; i < end; i++) {
        const float *x = job->x + (int64_t)i * width;
        void *out =
            (char *)job->out + (int64_t)i * width * (int64_t)dev->input->bytes;
        if (job->weight != NULL) {
            dev->input->norm(out, x, job->weight, dev->config.norm_eps, width);
        } else {
            dev->input->convert(out, x, width);
        }
    }
}

void cpu_norm(rk_device *base, void *out, const float *x, const float *weight,
              int32_t n)
{
    cpu_device *dev = (cpu_device *)base;
    rows_job job = {.dev = dev, .out = out, .x = x, .weight = weight, .n = n};
    run_rows(dev, norm_unit, &job, n, dev->config.width);
}

/* ---- lenses, statistics -------------------------------------------------- */

void cpu_gather(rk_device *base, float *dst, const float *src,
                const int32_t *rows, int32_t n, int32_t width)
{
    (void)base;
    for (int32_t i = 0; i < n; i++) {
        memmove(dst + (int64_t)i * width, src + (int64_t)rows[i] * width,
                (size_t)width * sizeof *dst);
    }
}

static void answer_unit(void *argument, int32_t unit, int32_t thread)
{
    const rows_job *job = argument;
    const cpu_device *dev = job->dev;
    const int32_t width = dev->config.width;
    const int32_t end = cpu_min((unit + 1) * ROWS, job->n);
    float *normed = cpu_scratch(dev, thread), *wide = normed + width;
    for (int32_t i = unit * ROWS; i < end; i++) {
        const float *x = job->x + (int64_t)i * width;
        if (job->weight != NULL) {
            dev->kernels->f32.norm(normed, x, job->weight, dev->config.norm_eps,
                                   width);
            x = normed;
        }
        for (int32_t j = 0; j < job->n_ids; j++) {
            widen_row(wide, job->matrix, job->ids[j]);
            ((float *)job->out)[(int64_t)i * job->n_ids + j] =
                dev->kernels->dot(x, wide, width);
        }
    }
}

void cpu_answer(rk_device *base, float *out, const float *x,
                const float *weight, const rk_matrix *head, const int32_t *ids,
                int32_t n, int32_t n_ids)
{
    cpu_device *dev = (cpu_device *)base;
    rows_job job = {.dev = dev,
                    .out = out,
                    .x = x,
                    .weight = weight,
                    .matrix = head,
                    .ids = ids,
                    .n = n,
                    .n_ids = n_ids};
    run_rows(dev, answer_unit, &job, n, (int64_t)dev->config.width * n_ids);
}

void cpu_mean(rk_device *base, float *out, double *sum, const float *x,
              int32_t n, int64_t n_total)
{
    const int32_t width = ((cpu_device *)base)->config.width;
    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = 0; j < width; j++) {
            sum[j] += (double)x[(int64_t)i * width + j];
        }
    }
    for (int32_t j = 0; j < width; j++) {
        out[j] = (float)(sum[j] / (double)n_total);
    }
}

void cpu_cosine(rk_device *base, float *out, const float *a, const float *b,
                const float *center, int32_t n)
{
    const int32_t width = ((cpu_device *)base)->config.width;
    for (int32_t i = 0; i < n; i++) {
        const float *x = a + (int64_t)i * width;
        double ab = 0.0, aa = 0.0, bb = 0.0;
        for (int32_t j = 0; j < width; j++) {
            double c = center != NULL ? (double)center[j] : 0.0;
            double u = (double)x[j] - c, v = (double)b[j] - c;
            ab += u * v;
            aa += u * u;
            bb += v * v;
        }
        out[i] = (float)(ab / (sqrt(aa) * sqrt(bb)));
    }
}

size_t cpu_rows_scratch(const cpu_device *dev)
{
    return 2 * (size_t)dev->config.width * sizeof(float);
}
