/* The transformer, once, over a backend's operations. */
#ifndef RKSC_FORWARD_H
#define RKSC_FORWARD_H

#include "backend.h"

/* Working memory of a step, on the device, sized at creation. */
typedef struct rk_forward {
    rk_device *device;     /* borrowed */
    const rk_model *model; /* borrowed */
    int32_t max_rows, max_outputs;
    float *x;       /* (max_rows, width) residual stream */
    float *y;       /* (max_outputs, width) rows on their way to the head */
    void *a;        /* in (max_rows, max(width, n_heads * head_dim)) */
    void *q;        /* q (max_rows, n_heads * head_dim) */
    void *h;        /* in (max_rows, ffn_width) */
    float *logits;  /* (max_outputs, vocab_size) */
    rk_pick *picks; /* (max_outputs,) */
    float *few;     /* (max_outputs, 2) answers and cosines */
    float *hidden;  /* (n_layers, width) one row after each layer */
} rk_forward;

rk_status rk_forward_create(rk_forward *f, rk_device *device,
                            const rk_model *model, int32_t max_rows,
                            int32_t max_outputs, rk_error *err);
/* Takes a half-built or zeroed one. */
void rk_forward_free(rk_forward *f);

/* Take the batch; x (NULL: f->x) becomes the embeddings of its rows. */
void rk_forward_begin(rk_forward *f, const rk_batch *batch, float *x);

/* Run layer `layer` (from 0) over the n rows of the batch, in place on x. */
void rk_forward_layer(rk_forward *f, int32_t layer, float *x, int32_t n);

/* Next-token statistics and choice of n rows of f->x; picks: host (n,).
 * norm false: the head sees the rows as they are (a lens without norm). */
rk_status rk_forward_pick(rk_forward *f, const int32_t *rows,
                          const rk_draw *draws, int32_t n, bool norm,
                          rk_pick *picks, rk_error *err);

/* Logits of n rows (n <= max_outputs) of f->x; host (n, vocab_size). */
rk_status rk_forward_logits(rk_forward *f, const int32_t *rows, int32_t n,
                            float *logits, rk_error *err);

/* The same, left in f->logits. */
void rk_forward_leave(rk_forward *f, const int32_t *rows, int32_t n);

/* float32 logits of two tokens; answers: host (n, 2). */
rk_status rk_forward_answer(rk_forward *f, const int32_t *rows, int32_t n,
                            bool norm, const int32_t ids[2], float *answers,
                            rk_error *err);

/* Bytes of the device to the host; not RK_OK: the device broke, and what came
 * is no number. */
rk_status rk_forward_fetch(const rk_forward *f, void *host, const void *src,
                           size_t bytes, rk_error *err);

#endif
