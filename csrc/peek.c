/* What a branch would say next: the logits after its tokens, and the residual
 * stream on the way to them, for the host or, on a GPU, in memory that others
 * use where it lies. What the host is given holds no NaN; what stays on the
 * device is not looked at.
 */
#include <math.h>

#include "state.h"

rk_status rk_session_peek(rk_session *s, rk_branch *branch, rk_error *err)
{
    rk_status status = rk_session_compute(s, &branch, 1, err);
    if (status != RK_OK) {
        return status;
    }
    rk_item item = {branch, branch->n_tokens - 1, branch->n_tokens, false};
    return rk_step_open(s, &item, 1, NULL, err);
}

/* `rows` rows of numbers, after the branch's tokens from `position` on. */
static rk_status check_rows(const char *what, const float *values, int32_t rows,
                            int32_t cols, const rk_branch *branch,
                            int32_t position, rk_error *err)
{
    for (int32_t i = 0; i < rows; i++, values += cols) {
        for (int32_t j = 0; j < cols; j++) {
            if (isnan(values[j])) {
                return rk_session_fail_nan(what, branch, position + i, err);
            }
        }
    }
    return RK_OK;
}

/* Into `host`, or into memory of the device that is read later, if at all. */
static rk_status logits(rk_session *s, rk_branch *branch, float *host,
                        float *device, rk_error *err)
{
    rk_forward *f = &s->forward;
    rk_status status = rk_session_peek(s, branch, err);
    if (status != RK_OK) {
        return status;
    }
    status = rk_step_layers(s, 0, s->model.config.n_layers, NULL, err);
    if (status == RK_OK && host != NULL) {
        status = rk_forward_logits(f, s->step.first_rows, 1, host, err);
        if (status == RK_OK) {
            status = check_rows("logits", host, 1, s->model.config.vocab_size,
                                branch, branch->n_tokens - 1, err);
        }
    } else if (status == RK_OK) {
        status = rk_forward_leave(f, s->step.first_rows, 1, device, err);
    }
    rk_step_close(s, status == RK_OK);
    return status;
}

rk_status rk_session_logits(rk_session *s, rk_branch *branch, float *out,
                            rk_error *err)
{
    return logits(s, branch, out, NULL, err);
}

rk_status rk_session_logits_at(rk_session *s, rk_branch *branch, int32_t begin,
                               int32_t end, float *logits, rk_error *err)
{
    rk_status status = rk_session_compute(s, &branch, 1, err);
    while (begin < end && status == RK_OK) {
        int32_t n = end - begin;
        n = n < s->options.step_tokens ? n : s->options.step_tokens;
        n = n < RK_MAX_OUTPUTS ? n : RK_MAX_OUTPUTS;
        rk_item item = {branch, begin, begin + n, false};
        status = rk_step_open(s, &item, 1, NULL, err);
        if (status != RK_OK) {
            break;
        }
        status = rk_step_layers(s, 0, s->model.config.n_layers, NULL, err);
        if (status == RK_OK) {
            for (int32_t i = 0; i < n; i++) {
                s->step.rows[i] = s->step.first_rows[0] + i;
            }
            status =
                rk_forward_logits(&s->forward, s->step.rows, n, logits, err);
        }
        if (status == RK_OK) {
            status = check_rows("logits", logits, n, s->model.config.vocab_size,
                                branch, begin, err);
        }
        rk_step_close(s, status == RK_OK);
        logits += (size_t)n * (size_t)s->model.config.vocab_size;
        begin += n;
    }
    return status;
}

/* As above; one row of the residual stream after each layer. */
static rk_status hidden(rk_session *s, rk_branch *branch, float *host,
                        float *device, rk_error *err)
{
    const rk_forward *f = &s->forward;
    rk_status status = rk_session_peek(s, branch, err);
    int32_t width = s->model.config.width;
    if (status != RK_OK) {
        return status;
    }
    for (int32_t l = 0; l < s->model.config.n_layers && status == RK_OK; l++) {
        size_t at = (size_t)l * (size_t)width;
        status = rk_step_layers(s, l, l + 1, NULL, err);
        if (status == RK_OK && host != NULL) {
            status = rk_forward_fetch(f, host + at, f->x,
                                      (size_t)width * sizeof *host, err);
            if (status == RK_OK) {
                status = check_rows("hidden states", host + at, 1, width,
                                    branch, branch->n_tokens - 1, err);
            }
        } else if (status == RK_OK) {
            s->device->ops->gather(s->device, device + at, f->x,
                                   s->step.first_rows, 1, width);
        }
    }
    rk_step_close(s, status == RK_OK);
    return status;
}

rk_status rk_session_hidden(rk_session *s, rk_branch *branch, float *out,
                            rk_error *err)
{
    return hidden(s, branch, out, NULL, err);
}

rk_status rk_session_lend(rk_session *s, rk_branch *branch, bool layers,
                          rk_lent **out, rk_error *err)
{
    const rk_config *c = &s->model.config;
    const rk_ops *ops = s->device->ops;
    size_t n =
        layers ? (size_t)c->n_layers * (size_t)c->width : (size_t)c->vocab_size;
    float *memory = ops->alloc(s->device, n * sizeof *memory);
    *out = NULL;
    if (memory == NULL) {
        return rk_fail(err, RK_ENOMEM,
                       "the device has no memory for a result of %zu bytes",
                       n * sizeof *memory);
    }
    rk_status status = layers ? hidden(s, branch, NULL, memory, err)
                              : logits(s, branch, NULL, memory, err);
    if (status == RK_OK) {
        status = ops->lend(s->device, out, memory, err);
    }
    if (status != RK_OK) {
        ops->free(s->device, memory);
    }
    return status;
}
