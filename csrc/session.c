/* The life of a session, and of its branches' end.
 *
 * What is done with branches in between is in csrc/engine: branches.c makes
 * them and computes their KV, peek.c reads their distribution, score.c scores,
 * scheduler.c generates, verify.c verifies, probe.c is ASKS.
 */
#include "session.h"

#include <stdlib.h>

#include "engine/scheduler.h"

static rk_status step_create(rk_session *s, rk_error *err)
{
    rk_step *step = &s->step;
    size_t n = (size_t)s->options.step_tokens;
    step->items = calloc(n, sizeof *step->items);
    step->spans = calloc(n, sizeof *step->spans);
    step->first_rows = calloc(n, sizeof *step->first_rows);
    step->leaders = calloc(n, sizeof *step->leaders);
    step->starts = calloc(n, sizeof *step->starts);
    step->rows = calloc(n, sizeof *step->rows);
    step->source = calloc(n, sizeof *step->source);
    step->draws = calloc(n, sizeof *step->draws);
    step->picks = calloc(n, sizeof *step->picks);
    s->owners = calloc(n, sizeof(void *));
    s->outputs = calloc(n, sizeof *s->outputs);
    if (step->items == NULL || step->spans == NULL ||
        step->first_rows == NULL || step->leaders == NULL ||
        step->starts == NULL || step->rows == NULL || step->source == NULL ||
        step->draws == NULL || step->picks == NULL || s->owners == NULL ||
        s->outputs == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for a step of %d tokens",
                       (int)s->options.step_tokens);
    }
    return RK_OK;
}

static rk_status pool_size(const rk_session *s, int32_t *n_blocks,
                           rk_error *err)
{
    int64_t block = (int64_t)rk_block_bytes(
        &s->model.config, s->options.kv_type, s->options.block_tokens);
    int64_t n = s->options.kv_bytes / block;
    if (n < 1) {
        return rk_fail(
            err, RK_EVALUE,
            "kv_bytes: %lld bytes are less than one KV block, %lld bytes",
            (long long)s->options.kv_bytes, (long long)block);
    }
    *n_blocks = n > INT32_MAX - 1 ? INT32_MAX - 1 : (int32_t)n;
    return RK_OK;
}

static rk_status check_options(const rk_options *o, rk_error *err)
{
    rk_status status = rk_check_block_tokens(o->block_tokens, err);
    if (status != RK_OK) {
        return status;
    }
    if (o->step_tokens < 1 || o->step_tokens > 1 << 16) {
        return rk_fail(err, RK_EVALUE, "step_tokens: %d is not in 1 .. %d",
                       (int)o->step_tokens, 1 << 16);
    }
    if (o->n_threads < 1 || o->n_threads > 1024) {
        return rk_fail(err, RK_EVALUE, "n_threads: %d is not in 1 .. 1024",
                       (int)o->n_threads);
    }
    return rk_check_kv_type(o->kv_type, err);
}

rk_status rk_session_create(rk_session **out, const rk_model *model,
                            const rk_options *options, rk_error *err)
{
    *out = NULL;
    rk_status status = check_options(options, err);
    if (status != RK_OK) {
        return status;
    }
    rk_session *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for a session");
    }
    s->model = *model; /* until it has been placed */
    s->options = *options;
    int32_t n_blocks = 0;
    if ((status = step_create(s, err)) ||
        (status = pool_size(s, &n_blocks, err))) {
        goto fail;
    }
    rk_extent extent = {
        .compute = model->compute,
        .kv_type = options->kv_type,
        .block_tokens = options->block_tokens,
        .n_blocks = n_blocks,
        .max_rows = options->step_tokens,
        .max_outputs = RK_MAX_OUTPUTS,
        .rounding = options->rounding,
    };
    if ((status = rk_device_create(&s->device, options->cuda, options->isa,
                                   options->n_threads, &model->config, &extent,
                                   err)) ||
        (status = rk_place(&s->placed, &s->model, s->device, model, err)) ||
        (status =
             rk_forward_create(&s->forward, s->device, &s->model,
                               options->step_tokens, RK_MAX_OUTPUTS, err)) ||
        (status = rk_kv_create(&s->kv, n_blocks, options->block_tokens,
                               options->hash_bits, err)) ||
        (status = rk_plan_create(&s->plan, options->block_tokens, err))) {
        goto fail;
    }
    s->tree.kv = s->kv;
    s->tree.block_tokens = options->block_tokens;
    s->tree.indexed = options->share;
    *out = s;
    return RK_OK;
fail:
    rk_session_free(s);
    return status;
}

void rk_session_free(rk_session *s)
{
    if (s == NULL) {
        return;
    }
    rk_scheduler_free(&s->scheduler);
    rk_tree_free(&s->tree);
    rk_plan_free(s->plan);
    rk_kv_free(s->kv);
    rk_forward_free(&s->forward);
    rk_placed_free(s->placed);
    if (s->device != NULL) {
        s->device->ops->destroy(s->device);
    }
    void *arrays[] = {s->step.items,   s->step.spans,  s->step.first_rows,
                      s->step.leaders, s->step.starts, s->step.rows,
                      s->step.source,  s->step.draws,  s->step.picks,
                      s->owners,       s->outputs};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        free(arrays[i]);
    }
    free(s);
}

void rk_session_drop(rk_session *s, rk_branch *branch)
{
    rk_scheduler_forget(s, branch);
    rk_tree_drop(&s->tree, branch);
}

void rk_session_invalidate(rk_session *s)
{
    rk_tree_forget(&s->tree);
    rk_kv_forget(s->kv);
    rk_placed_refresh(s->placed);
}

void rk_session_set_score(rk_session *s, rk_branch *branch, double score)
{
    (void)s;
    rk_branch_set_score(branch, score);
}

void rk_session_set_confidence(rk_session *s, rk_branch *branch,
                               double confidence)
{
    (void)s;
    rk_branch_set_confidence(branch, confidence);
}

void rk_session_set_stream(rk_session *s, rk_branch *branch, uint64_t stream)
{
    (void)s;
    rk_branch_set_stream(branch, stream);
}

/* ---- books --------------------------------------------------------------- */

rk_stats rk_session_stats(const rk_session *s)
{
    rk_stats stats = s->stats;
    stats.blocks = rk_kv_count(s->kv);
    stats.block_bytes = (int64_t)rk_block_bytes(
        &s->model.config, s->options.kv_type, s->options.block_tokens);
    stats.block_tokens = s->options.block_tokens;
    stats.n_branches = s->tree.n_branches;
    stats.evictions = s->tree.evictions;
    return stats;
}

rk_status rk_session_check(const rk_session *s, rk_error *err)
{
    rk_status status = rk_tree_check(&s->tree, err);
    return status == RK_OK ? rk_scheduler_check(s, err) : status;
}

const rk_model *rk_session_model(const rk_session *s)
{
    return &s->model;
}
