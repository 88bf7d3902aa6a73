/* What a branch would say next: the logits after its tokens, and the residual
 * stream on the way to them, for the host or, on a GPU, in memory that others
 * use where it lies. Either is left in the forward's own memory first, so that
 * a device sees the same step each time. What the host is given holds no NaN;
 * what stays on the device is not looked at.
 */
#include <math.h>

#include "branches.h"
#include "peek.h"
#include "step.h"

rk_status rk_session_peek(rk_session *s, rk_branch *branch, rk_error *err)
{
    rk_status status = rk_session_compute(s, &branch, 1, err);
    if (status != RK_OK) {
        return status;
    }
    rk_item item = {branch, rk_look(branch)->n_tokens - 1,
                    rk_look(branch)->n_tokens, false};
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

/* The last token once more: its logits are left in the forward's `logits`, or,
 * `layers`, its residual stream after each layer in `hidden`. */
static rk_status leave(rk_session *s, rk_branch *branch, bool layers,
                       rk_error *err)
{
    rk_forward *f = &s->forward;
    const rk_config *c = &s->model.config;
    rk_status status = rk_session_peek(s, branch, err);
    if (status != RK_OK) {
        return status;
    }
    for (int32_t l = 0; l < c->n_layers && status == RK_OK; l++) {
        status = rk_step_layers(s, l, l + 1, NULL, err);
        if (status == RK_OK && layers) {
            s->device->ops->gather(s->device,
                                   f->hidden + (size_t)l * (size_t)c->width,
                                   f->x, s->step.first_rows, 1, c->width);
        }
    }
    if (status == RK_OK && !layers) {
        rk_forward_leave(f, s->step.first_rows, 1);
    }
    rk_step_close(s, status == RK_OK);
    return status;
}

/* What `leave` left, n numbers. */
static const float *left(const rk_session *s, bool layers, size_t *n)
{
    const rk_config *c = &s->model.config;
    *n =
        layers ? (size_t)c->n_layers * (size_t)c->width : (size_t)c->vocab_size;
    return layers ? s->forward.hidden : s->forward.logits;
}

static rk_status peek(rk_session *s, rk_branch *branch, bool layers, float *out,
                      rk_error *err)
{
    rk_status status = leave(s, branch, layers, err);
    size_t n;
    const float *values = left(s, layers, &n);
    if (status == RK_OK) {
        status =
            rk_forward_fetch(&s->forward, out, values, n * sizeof *out, err);
    }
    return status != RK_OK ? status
                           : check_rows(layers ? "hidden states" : "logits",
                                        out, 1, (int32_t)n, branch,
                                        rk_look(branch)->n_tokens - 1, err);
}

rk_status rk_session_logits(rk_session *s, rk_branch *branch, float *out,
                            rk_error *err)
{
    return peek(s, branch, false, out, err);
}

rk_status rk_session_hidden(rk_session *s, rk_branch *branch, float *out,
                            rk_error *err)
{
    return peek(s, branch, true, out, err);
}

rk_status rk_session_lend(rk_session *s, rk_branch *branch, bool layers,
                          rk_lent **out, rk_error *err)
{
    rk_status status = leave(s, branch, layers, err);
    size_t n;
    const float *values = left(s, layers, &n);
    *out = NULL;
    return status != RK_OK ? status
                           : s->device->ops->lend(s->device, out, values,
                                                  n * sizeof *values, err);
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
