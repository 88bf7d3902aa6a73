/* The use cases that need no policy: life, branches, KV on demand, scoring.
 *
 * Reading a branch's distribution is peek.c, generation scheduler.c,
 * verification verify.c, ASKS probe.c.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"

/* ---- life ---------------------------------------------------------------- */

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
    int64_t block = (int64_t)rk_block_bytes(&s->model.config, s->model.compute,
                                            s->options.block_tokens);
    int64_t n = s->options.kv_bytes / block;
    if (n < 1) {
        return rk_fail(err, RK_EVALUE,
                       "kv_bytes: %lld bytes hold no block of %lld bytes",
                       (long long)s->options.kv_bytes, (long long)block);
    }
    *n_blocks = n > INT32_MAX - 1 ? INT32_MAX - 1 : (int32_t)n;
    return RK_OK;
}

static rk_status check_options(const rk_options *o, rk_error *err)
{
    if (o->block_tokens < 1 || o->block_tokens > RK_TILE ||
        (o->block_tokens & (o->block_tokens - 1)) != 0) {
        return rk_fail(err, RK_EVALUE,
                       "block_tokens: %d is not a power of two in 1 .. %d",
                       (int)o->block_tokens, RK_TILE);
    }
    if (o->step_tokens < 1 || o->step_tokens > 1 << 16) {
        return rk_fail(err, RK_EVALUE, "step_tokens: %d is not in 1 .. %d",
                       (int)o->step_tokens, 1 << 16);
    }
    if (o->n_threads < 1 || o->n_threads > 1024) {
        return rk_fail(err, RK_EVALUE, "n_threads: %d is not in 1 .. 1024",
                       (int)o->n_threads);
    }
    return RK_OK;
}

static rk_status create_device(rk_session *s, const rk_extent *extent,
                               rk_error *err)
{
    const rk_options *o = &s->options;
    const rk_config *config = &s->model.config;
    if (o->cuda != NULL) {
        return o->cuda->calls->create(&s->device, o->cuda, config, extent, err);
    }
    return rk_cpu_create(&s->device, config, extent, o->isa, o->n_threads, err);
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
        .block_tokens = options->block_tokens,
        .n_blocks = n_blocks,
        .max_rows = options->step_tokens,
        .max_outputs = RK_MAX_OUTPUTS,
        .rounding = options->rounding,
    };
    if ((status = create_device(s, &extent, err)) ||
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

/* ---- checks -------------------------------------------------------------- */

rk_status rk_session_check_branch(const rk_branch *branch, rk_error *err)
{
    if (branch->busy) {
        return rk_fail(err, RK_ESTATE,
                       "branch %llu is generating: step or cancel its request "
                       "first",
                       (unsigned long long)branch->id);
    }
    return RK_OK;
}

rk_status rk_session_check_tokens(const rk_session *s, const char *field,
                                  const int32_t *tokens, int32_t n_tokens,
                                  int64_t n_before, rk_error *err)
{
    const rk_config *c = &s->model.config;
    for (int32_t i = 0; i < n_tokens; i++) {
        if (tokens[i] < 0 || tokens[i] >= c->vocab_size) {
            return rk_fail(err, RK_EVALUE,
                           "%s[%d]: id %d is not in the vocabulary [0, %d)",
                           field, (int)i, (int)tokens[i], (int)c->vocab_size);
        }
    }
    if (n_before + n_tokens > c->max_positions) {
        return rk_fail(err, RK_EVALUE,
                       "%s: %lld tokens exceed the model's %d positions", field,
                       (long long)(n_before + n_tokens), (int)c->max_positions);
    }
    return RK_OK;
}

rk_status rk_session_check_pick(const rk_pick *pick, const rk_branch *branch,
                                int32_t position, rk_error *err)
{
    return pick->token < 0
               ? rk_session_fail_nan("logits", branch, position, err)
               : RK_OK;
}

rk_status rk_session_fail_nan(const char *what, const rk_branch *branch,
                              int32_t position, rk_error *err)
{
    return rk_fail(err, RK_EVALUE,
                   "weights: the %s of branch %llu at position %d are NaN",
                   what, (unsigned long long)branch->id, (int)position);
}

/* ---- branches ------------------------------------------------------------ */

rk_status rk_session_add(rk_session *s, rk_branch **out, const int32_t *tokens,
                         int32_t n_tokens, rk_error *err)
{
    *out = NULL;
    if (n_tokens < 1) {
        return rk_fail(err, RK_EVALUE, "tokens: a prompt needs one at least");
    }
    rk_status status =
        rk_session_check_tokens(s, "tokens", tokens, n_tokens, 0, err);
    if (status != RK_OK) {
        return status;
    }
    int32_t n_reused = 0;
    status = rk_tree_add(&s->tree, out, tokens, n_tokens, &n_reused, err);
    s->stats.tokens_reused += n_reused;
    return status;
}

rk_status rk_session_prefill(rk_session *s, rk_branch **out,
                             const int32_t *tokens, int32_t n_tokens,
                             rk_error *err)
{
    int64_t reused_before = s->stats.tokens_reused;
    rk_status status = rk_session_add(s, out, tokens, n_tokens, err);
    if (status != RK_OK) {
        return status;
    }
    status = rk_session_compute(s, out, 1, err);
    if (status != RK_OK) {
        rk_tree_drop(&s->tree, *out);
        *out = NULL;
        s->stats.tokens_reused = reused_before;
    }
    return status;
}

rk_status rk_session_fork(rk_session *s, rk_branch **out, rk_branch *parent,
                          int32_t at, int32_t n, const int32_t *const *suffixes,
                          const int32_t *n_suffix, rk_error *err)
{
    at = at < 0 ? parent->n_tokens : at;
    if (n < 1) {
        return rk_fail(err, RK_EVALUE, "fork: %d children", (int)n);
    }
    if (at < 1 || at > parent->n_tokens) {
        return rk_fail(err, RK_EVALUE, "at: %d is not in 1 .. %d", (int)at,
                       (int)parent->n_tokens);
    }
    rk_status status = RK_OK;
    for (int32_t i = 0; i < n && suffixes != NULL && status == RK_OK; i++) {
        status = rk_session_check_tokens(s, "suffix", suffixes[i], n_suffix[i],
                                         at, err);
    }
    int32_t made = 0;
    for (; made < n && status == RK_OK; made++) {
        status = rk_tree_fork(&s->tree, &out[made], parent, at,
                              suffixes != NULL ? suffixes[made] : NULL,
                              suffixes != NULL ? n_suffix[made] : 0, made, err);
        if (status != RK_OK) {
            break;
        }
    }
    if (status != RK_OK) {
        while (made > 0) {
            rk_tree_drop(&s->tree, out[--made]);
        }
        return status;
    }
    for (int32_t i = 0; i < n; i++) {
        s->stats.tokens_forked += out[i]->n_computed;
    }
    return RK_OK;
}

rk_status rk_session_extend(rk_session *s, rk_branch *branch,
                            const int32_t *tokens, int32_t n_tokens,
                            rk_error *err)
{
    rk_status status = rk_session_check_branch(branch, err);
    if (status == RK_OK) {
        status = rk_session_check_tokens(s, "tokens", tokens, n_tokens,
                                         branch->n_tokens, err);
    }
    if (status == RK_OK) {
        status = rk_branch_append(branch, tokens, n_tokens, err);
    }
    return status;
}

/* The next rows that the branches still need, at most a step's worth. */
static int32_t pending(rk_session *s, rk_branch *const *branches, int32_t n,
                       rk_item *items)
{
    int32_t n_items = 0, room = s->options.step_tokens;
    for (int32_t i = 0; i < n && room > 0; i++) {
        rk_branch *b = branches[i];
        int32_t left = b->n_tokens - b->n_computed;
        if (left > 0) {
            left = left < room ? left : room;
            items[n_items++] =
                (rk_item){b, b->n_computed, b->n_computed + left, true};
            room -= left;
        }
    }
    return n_items;
}

/* The longest of them alone must fit beside what is pinned. */
static rk_status check_longest(const rk_session *s, rk_branch *const *branches,
                               int32_t n, rk_error *err)
{
    int32_t needed = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t more = rk_tree_blocks_of(&s->tree, branches[i]->n_tokens) -
                       branches[i]->n_blocks;
        needed = more > needed ? more : needed;
    }
    return rk_step_check_room(s, needed, err);
}

rk_status rk_session_compute(rk_session *s, rk_branch *const *branches,
                             int32_t n, rk_error *err)
{
    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = 0; j < i; j++) {
            if (branches[i] == branches[j]) {
                return rk_fail(err, RK_EVALUE,
                               "branches: branch %llu stands there twice",
                               (unsigned long long)branches[i]->id);
            }
        }
    }
    for (int32_t i = 0; i < n; i++) {
        branches[i]->pins++;
        s->stats.tokens_reused += rk_tree_revive(&s->tree, branches[i]);
    }
    rk_status status = check_longest(s, branches, n, err);
    while (status == RK_OK) {
        int32_t n_items = pending(s, branches, n, s->step.items);
        if (n_items == 0) {
            break;
        }
        status = rk_step_run(s, s->step.items, n_items, NULL, NULL, NULL, 0,
                             NULL, err);
    }
    for (int32_t i = 0; i < n; i++) {
        branches[i]->pins--;
    }
    return status;
}

void rk_session_drop(rk_session *s, rk_branch *branch)
{
    rk_scheduler_forget(s, branch);
    rk_tree_drop(&s->tree, branch);
}

void rk_session_invalidate(rk_session *s)
{
    for (rk_branch *b = s->tree.first; b != NULL; b = b->next) {
        rk_tree_release(&s->tree, b, 0);
        free(b->memory.means);
        b->memory = (rk_probe_memory){0};
    }
    rk_kv_forget(s->kv);
    rk_placed_refresh(s->placed);
}

/* ---- scoring ------------------------------------------------------------- */

/* log p(first token | branch) for all continuations: one row, many targets. */
static rk_status score_first(rk_session *s, rk_branch *branch,
                             const int32_t *const *continuations,
                             const int32_t *lengths, int32_t n,
                             rk_pick *const *picks, rk_error *err)
{
    rk_status status = rk_session_peek(s, branch, err);
    if (status != RK_OK) {
        return status;
    }
    status = rk_step_layers(s, 0, s->model.config.n_layers, NULL, err);
    for (int32_t i = 0, next; i < n && status == RK_OK; i = next) {
        int32_t m = 0;
        for (next = i; next < n && m < s->options.step_tokens; next++) {
            if (lengths[next] > 0) {
                s->outputs[m] = next;
                s->step.rows[m] = s->step.first_rows[0];
                s->step.draws[m++] =
                    (rk_draw){.forced = continuations[next][0]};
            }
        }
        status = rk_forward_pick(&s->forward, s->step.rows, s->step.draws, m,
                                 true, s->step.picks, err);
        for (int32_t j = 0; j < m && status == RK_OK; j++) {
            status = rk_session_check_pick(&s->step.picks[j], branch,
                                           branch->n_tokens - 1, err);
            picks[s->outputs[j]][0] = s->step.picks[j];
        }
    }
    rk_step_close(s, status == RK_OK);
    return status;
}

/* The open step's rows: each scores the token that follows it in its child's
 * continuation, which begins at position `at` of the child. */
static rk_status score_rows(rk_session *s, rk_branch *const *children,
                            int32_t at, const int32_t *const *continuations,
                            rk_pick *const *picks, rk_error *err)
{
    const rk_step *step = &s->step;
    int32_t m = 0, child = 0;
    for (int32_t i = 0; i < step->n_items; i++) {
        const rk_item *item = &step->items[i];
        while (children[child] != item->branch) { /* both in the same order */
            child++;
        }
        for (int32_t p = item->begin; p < item->end; p++, m++) {
            s->outputs[m] = child;
            step->source[m] = p + 1 - at;
            step->rows[m] = step->first_rows[i] + p - item->begin;
            step->draws[m] =
                (rk_draw){.forced = continuations[child][p + 1 - at]};
        }
    }
    rk_status status = rk_forward_pick(&s->forward, step->rows, step->draws, m,
                                       true, step->picks, err);
    for (int32_t j = 0; j < m && status == RK_OK; j++) {
        status = rk_session_check_pick(&step->picks[j], children[s->outputs[j]],
                                       at + step->source[j] - 1, err);
        picks[s->outputs[j]][step->source[j]] = step->picks[j];
    }
    return status;
}

/* Compute children that hold continuations less their last token. */
static rk_status score_rest(rk_session *s, rk_branch *const *children,
                            int32_t n, int32_t at,
                            const int32_t *const *continuations,
                            rk_pick *const *picks, rk_error *err)
{
    rk_status status = RK_OK;
    while (status == RK_OK) {
        int32_t n_items = pending(s, children, n, s->step.items);
        if (n_items == 0) {
            break;
        }
        status = rk_step_open(s, s->step.items, n_items, NULL, err);
        if (status != RK_OK) {
            break;
        }
        status = rk_step_layers(s, 0, s->model.config.n_layers, NULL, err);
        if (status == RK_OK) {
            status = score_rows(s, children, at, continuations, picks, err);
        }
        rk_step_close(s, status == RK_OK);
    }
    return status;
}

/* How many continuations from i on fit a step together (one at least). */
static int32_t group_size(const rk_session *s, const int32_t *lengths,
                          int32_t i, int32_t n)
{
    int64_t rows = 0;
    int32_t j = i;
    while (j < n && (j == i || rows + lengths[j] <= s->options.step_tokens)) {
        rows += lengths[j++];
    }
    return j - i;
}

/* The continuations of one group, as children that live only here. They are
 * pinned and hold all of the branch's KV, so that it may be evicted itself. */
static rk_status score_group(rk_session *s, rk_branch *branch,
                             const int32_t *const *continuations,
                             const int32_t *lengths, int32_t n,
                             rk_pick *const *picks, rk_error *err)
{
    rk_branch **children = calloc((size_t)n, sizeof(rk_branch *));
    if (children == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory to score");
    }
    rk_status status = rk_session_compute(s, &branch, 1, err);
    int32_t made = 0, at = branch->n_tokens;
    while (made < n && status == RK_OK) {
        int32_t rest = lengths[made] > 0 ? lengths[made] - 1 : 0;
        status = rk_tree_fork(&s->tree, &children[made], branch, at,
                              continuations[made], rest, made, err);
        if (status == RK_OK) {
            children[made++]->pins++;
        }
    }
    if (status == RK_OK) {
        status = score_rest(s, children, n, at, continuations, picks, err);
    }
    while (made > 0) {
        rk_tree_drop(&s->tree, children[--made]);
    }
    free(children);
    return status;
}

rk_status rk_session_score(rk_session *s, rk_branch *branch,
                           const int32_t *const *continuations,
                           const int32_t *lengths, int32_t n,
                           rk_pick *const *picks, rk_error *err)
{
    rk_status status = rk_session_check_branch(branch, err);
    for (int32_t i = 0; i < n && status == RK_OK; i++) {
        char field[32];
        snprintf(field, sizeof field, "continuations[%d]", (int)i);
        status = rk_session_check_tokens(s, field, continuations[i], lengths[i],
                                         branch->n_tokens, err);
    }
    if (status == RK_OK && n > 0) {
        status = score_first(s, branch, continuations, lengths, n, picks, err);
    }
    int32_t limit = n;
    for (int32_t i = 0, size; i < n && status == RK_OK; i += size) {
        size = group_size(s, lengths, i, n);
        size = size < limit ? size : limit;
        status = score_group(s, branch, continuations + i, lengths + i, size,
                             picks + i, err);
        if (status == RK_ECAPACITY && size > 1) {
            limit = size / 2; /* fewer at a time may fit */
            size = 0;
            status = RK_OK;
        }
    }
    return status;
}

/* ---- books --------------------------------------------------------------- */

rk_stats rk_session_stats(const rk_session *s)
{
    rk_stats stats = s->stats;
    stats.blocks = rk_kv_count(s->kv);
    stats.block_bytes = (int64_t)rk_block_bytes(
        &s->model.config, s->model.compute, s->options.block_tokens);
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
