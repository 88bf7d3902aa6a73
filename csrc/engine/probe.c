/* ASKS: run little of a new wording, look at the hidden states, then share the
 * root's KV or go on.
 *
 * prefix probe   The own wording runs layer by layer (all its rows, so that a
 *                rejection loses nothing: the prefill goes on from the probed
 *                layer). After each layer the mean over the tokens that differ
 *                is compared with the root's; the gate may close early.
 * suffix probe   The suffix runs over the root's KV; its last token is
 *                compared with the root's last token. Acceptance loses nothing.
 *
 * The root's means come from looking again at its differing tokens (their KV
 * is there) and are remembered on the root.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "branches.h"
#include "probe.h"
#include "step.h"

/* ---- means of hidden states ---------------------------------------------- */

/* Device memory of one probe: sums and means of n_layers layers. */
typedef struct probe {
    rk_session *s;
    int32_t n_layers;
    double *sums;  /* (n_layers, width) */
    float *means;  /* (n_layers, width) */
    float *root;   /* (n_layers, width) */
    float *center; /* (n_layers, width) or NULL */
    float *cosine; /* (1,) */
    float *held;   /* (rows, width) the residual stream between layers */
} probe;

static size_t layer_at(const probe *p, int32_t layer)
{
    return (size_t)layer * (size_t)p->s->model.config.width;
}

static void probe_free(probe *p)
{
    void *all[] = {p->sums, p->means, p->root, p->center, p->cosine, p->held};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        p->s->device->ops->free(p->s->device, all[i]);
    }
}

static rk_status sums_reset(probe *p, rk_error *err)
{
    size_t n = layer_at(p, p->n_layers);
    double *zeros = calloc(n, sizeof *zeros);
    if (zeros == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory to probe");
    }
    p->s->device->ops->upload(p->s->device, p->sums, zeros, n * sizeof *zeros);
    free(zeros);
    return RK_OK;
}

static rk_status probe_create(probe *p, rk_session *s, int32_t n_layers,
                              const float *center, rk_error *err)
{
    const rk_ops *ops = s->device->ops;
    *p = (probe){.s = s, .n_layers = n_layers};
    size_t n = layer_at(p, n_layers);
    p->sums = ops->alloc(s->device, n * sizeof(double));
    p->means = ops->alloc(s->device, n * sizeof(float));
    p->root = ops->alloc(s->device, n * sizeof(float));
    p->cosine = ops->alloc(s->device, sizeof(float));
    if (center != NULL) {
        p->center = ops->alloc(s->device, n * sizeof(float));
    }
    if (p->sums == NULL || p->means == NULL || p->root == NULL ||
        p->cosine == NULL || (center != NULL && p->center == NULL)) {
        probe_free(p);
        return rk_fail(err, RK_ENOMEM, "no memory to probe");
    }
    if (center != NULL) {
        ops->upload(s->device, p->center, center, n * sizeof *center);
    }
    rk_status status = sums_reset(p, err);
    if (status != RK_OK) {
        probe_free(p);
    }
    return status;
}

/* Add the rows of x at positions [begin, end) to layer's mean of n_total. x
 * holds positions first, first + 1, ... in n rows. */
static void mean_add(probe *p, int32_t layer, const float *x, int32_t first,
                     int32_t n, int32_t begin, int32_t end)
{
    int32_t from = begin > first ? begin : first;
    int32_t to = end < first + n ? end : first + n;
    if (from < to) {
        size_t width = (size_t)p->s->model.config.width;
        p->s->device->ops->mean(p->s->device, p->means + layer_at(p, layer),
                                p->sums + layer_at(p, layer),
                                x + (size_t)(from - first) * width, to - from,
                                end - begin);
    }
}

/* Means over positions [begin, end) of a branch whose KV is complete. */
static rk_status branch_means(probe *p, rk_branch *branch, int32_t begin,
                              int32_t end, rk_error *err)
{
    rk_session *s = p->s;
    rk_status status = sums_reset(p, err);
    for (int32_t at = begin, n; at < end && status == RK_OK; at += n) {
        n = end - at;
        n = n < s->options.step_tokens ? n : s->options.step_tokens;
        rk_item item = {branch, at, at + n, false};
        status = rk_step_open(s, &item, 1, NULL, err);
        if (status != RK_OK) {
            break;
        }
        for (int32_t l = 0; l < p->n_layers && status == RK_OK; l++) {
            status = rk_step_layers(s, l, l + 1, NULL, err);
            mean_add(p, l, s->forward.x, at, n, begin, end);
        }
        rk_step_close(s, false);
    }
    return status;
}

rk_status rk_session_prompt_means(rk_session *s, const int32_t *tokens,
                                  int32_t n_tokens, int32_t begin, int32_t end,
                                  float *means, rk_error *err)
{
    if (begin < 0 || begin >= end || end > n_tokens) {
        return rk_fail(err, RK_EVALUE, "positions [%d, %d) of %d tokens",
                       (int)begin, (int)end, (int)n_tokens);
    }
    rk_branch *branch = NULL;
    rk_status status = rk_session_prefill(s, &branch, tokens, n_tokens, err);
    if (status != RK_OK) {
        return status;
    }
    probe p;
    status = probe_create(&p, s, s->model.config.n_layers, NULL, err);
    if (status == RK_OK) {
        status = branch_means(&p, branch, begin, end, err);
        if (status == RK_OK) {
            status =
                rk_forward_fetch(&s->forward, means, p.means,
                                 layer_at(&p, p.n_layers) * sizeof *means, err);
        }
        probe_free(&p);
    }
    rk_tree_drop(&s->tree, branch);
    return status;
}

/* p->root = the root's means over [begin, end), remembered or computed. */
static rk_status root_means(probe *p, rk_branch *root, int32_t begin,
                            int32_t end, rk_gate_report *report, rk_error *err)
{
    rk_session *s = p->s;
    const rk_ops *ops = s->device->ops;
    const rk_probe_memory *memory = rk_branch_memory(root);
    size_t bytes = layer_at(p, p->n_layers) * sizeof(float);
    if (memory->means != NULL && memory->begin == begin && memory->end == end &&
        memory->n_layers >= p->n_layers) {
        ops->upload(s->device, p->root, memory->means, bytes);
        return RK_OK;
    }
    rk_status status = rk_session_compute(s, &root, 1, err);
    if (status == RK_OK) {
        status = branch_means(p, root, begin, end, err);
    }
    if (status != RK_OK) {
        return status;
    }
    report->root_token_layers += (int64_t)(end - begin) * p->n_layers;
    float *means = malloc(bytes);
    if (means == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory to probe");
    }
    status = rk_forward_fetch(&s->forward, means, p->means, bytes, err);
    if (status != RK_OK) {
        free(means);
        return status;
    }
    ops->upload(s->device, p->root, means, bytes);
    rk_branch_remember(root, (rk_probe_memory){means, p->n_layers, begin, end});
    return RK_OK;
}

/* ---- the gate ------------------------------------------------------------ */

/* Compare layer's mean with the root's and decide as far as that goes. */
static rk_status compare(probe *p, int32_t layer, const rk_asks *asks,
                         const double *weights, rk_gate_report *report,
                         rk_error *err)
{
    const rk_ops *ops = p->s->device->ops;
    ops->cosine(p->s->device, p->cosine, p->means + layer_at(p, layer),
                p->root + layer_at(p, layer),
                p->center != NULL ? p->center + layer_at(p, layer) : NULL, 1);
    rk_status status = rk_forward_fetch(&p->s->forward, &report->cosines[layer],
                                        p->cosine, sizeof(float), err);
    if (status == RK_OK) {
        report->n_layers = layer + 1;
        report->gate = rk_asks_decide(report->cosines, layer + 1, weights,
                                      p->n_layers, asks->tau, &report->sigma);
    }
    return status;
}

/* Run all own rows [first, n_tokens) through layers [from, to): each chunk of
 * a step in turn. Chunks see the KV of the chunks before at the same layer.
 * The branch must be committed or dropped afterwards. */
static rk_status run_rows(probe *p, rk_branch *own, int32_t first, int32_t from,
                          int32_t to, rk_error *err)
{
    rk_session *s = p->s;
    size_t width = (size_t)s->model.config.width;
    rk_status status = RK_OK;
    for (int32_t at = first, n; at < rk_look(own)->n_tokens && status == RK_OK;
         at += n) {
        n = rk_look(own)->n_tokens - at;
        n = n < s->options.step_tokens ? n : s->options.step_tokens;
        float *x = p->held + (size_t)(at - first) * width;
        rk_item item = {own, at, at + n, true};
        rk_branch_stage(own, at);
        status = from == 0 ? rk_step_open(s, &item, 1, x, err)
                           : rk_step_reopen(s, &item, 1, err);
        if (status == RK_OK) {
            status = rk_step_layers(s, from, to, x, err);
            rk_step_suspend(s);
        }
    }
    return status;
}

/* Run the own wording until the gate has decided. *layer: layers done. */
static rk_status probe_prefix(probe *p, rk_branch *own, int32_t first,
                              int32_t begin, int32_t end, const rk_asks *asks,
                              const double *weights, rk_gate_report *report,
                              int32_t *layer, rk_error *err)
{
    rk_status status = sums_reset(p, err);
    int32_t n = rk_look(own)->n_tokens - first;
    *layer = 0;
    while (status == RK_OK && report->gate == RK_GATE_OPEN) {
        status = run_rows(p, own, first, *layer, *layer + 1, err);
        if (status == RK_OK) {
            mean_add(p, *layer, p->held, first, n, begin, end);
            status = compare(p, *layer, asks, weights, report, err);
        }
        if (status == RK_OK) {
            report->own_token_layers += n;
            ++*layer;
        }
    }
    return status;
}

/* ---- the tokens that differ ---------------------------------------------- */

typedef struct difference {
    int32_t begin;             /* common prefix */
    int32_t own_end, root_end; /* exclusive; at least one token each */
} difference;

static difference differing(const rk_branch *branch, const int32_t *tokens,
                            int32_t n_tokens, bool pool_mean)
{
    const rk_branch_facts *root = rk_look(branch);
    if (!pool_mean) {
        return (difference){-1, n_tokens, root->n_tokens};
    }
    int32_t shorter = n_tokens < root->n_tokens ? n_tokens : root->n_tokens;
    int32_t head = 0, tail = 0;
    while (head < shorter && tokens[head] == root->tokens[head]) {
        head++;
    }
    while (tail < shorter - head &&
           tokens[n_tokens - 1 - tail] ==
               root->tokens[root->n_tokens - 1 - tail]) {
        tail++;
    }
    /* Pure insertion: one side would be empty; take a shared neighbour. */
    if (head == n_tokens - tail || head == root->n_tokens - tail) {
        if (tail > 0) {
            tail--;
        } else {
            head--;
        }
    }
    return (difference){head, n_tokens - tail, root->n_tokens - tail};
}

/* ---- the two probes ------------------------------------------------------ */

/* A child of the root. approximate: it stands for another wording. */
static rk_status share(rk_session *s, rk_branch **out, rk_branch *root,
                       const int32_t *suffix, int32_t n_suffix,
                       bool approximate, rk_error *err)
{
    rk_status status = rk_session_fork(
        s, out, root, -1, 1, (const int32_t *const[]){suffix}, &n_suffix, err);
    if (status == RK_OK && approximate) {
        rk_branch_set_approximate(*out);
    }
    return status;
}

/* The own rows from `first` on: the gate's layers, then what its decision
 * asks for. */
static rk_status probe_own(probe *p, rk_branch **out, rk_branch *root,
                           rk_branch *own, int32_t first, int32_t begin,
                           int32_t end, const int32_t *suffix, int32_t n_suffix,
                           const rk_asks *asks, const double *weights,
                           rk_gate_report *report, rk_error *err)
{
    rk_session *s = p->s;
    int32_t layer = 0;
    rk_status status = probe_prefix(p, own, first, begin, end, asks, weights,
                                    report, &layer, err);
    if (status == RK_OK && report->gate == RK_GATE_ACCEPTED) {
        return share(s, out, root, suffix, n_suffix, true, err);
    }
    if (status == RK_OK) {
        status = run_rows(p, own, first, layer, s->model.config.n_layers, err);
    }
    if (status == RK_OK) {
        s->stats.tokens_reused += first;
        s->stats.tokens_computed += rk_look(own)->n_tokens - first;
        rk_tree_commit(&s->tree, own, rk_look(own)->n_tokens);
    }
    return status;
}

static rk_status by_prefix(rk_session *s, rk_branch **out, rk_branch *root,
                           rk_branch *own, const int32_t *suffix,
                           int32_t n_suffix, const rk_asks *asks,
                           const double *weights, rk_gate_report *report,
                           rk_error *err)
{
    difference d = differing(root, rk_look(own)->tokens, rk_look(own)->n_tokens,
                             asks->pool_mean);
    int32_t own_begin = d.begin < 0 ? d.own_end - 1 : d.begin;
    int32_t root_begin = d.begin < 0 ? d.root_end - 1 : d.begin;
    probe p;
    rk_status status =
        probe_create(&p, s, asks->probe_layers, asks->center, err);
    if (status != RK_OK) {
        return status;
    }
    status = root_means(&p, root, root_begin, d.root_end, report, err);
    /* The decision must not depend on what the index happens to hold. */
    rk_tree_release(&s->tree, own, own_begin);
    int32_t first = rk_look(own)->n_computed;
    if (status == RK_OK) {
        p.held = s->device->ops->alloc(
            s->device, (size_t)(rk_look(own)->n_tokens - first) *
                           (size_t)s->model.config.width * sizeof(float));
        if (p.held == NULL) {
            status = rk_fail(err, RK_ENOMEM, "no memory to probe");
        }
    }
    if (status == RK_OK) {
        rk_branch_pin(own);
        status = probe_own(&p, out, root, own, first, own_begin, d.own_end,
                           suffix, n_suffix, asks, weights, report, err);
        rk_branch_unpin(own);
    }
    probe_free(&p);
    return status;
}

static rk_status by_suffix(rk_session *s, rk_branch **out, rk_branch *root,
                           const int32_t *suffix, int32_t n_suffix,
                           const rk_asks *asks, const double *weights,
                           rk_gate_report *report, rk_error *err)
{
    rk_branch *child = NULL;
    rk_status status = share(s, &child, root, suffix, n_suffix, true, err);
    if (status != RK_OK) {
        return status;
    }
    probe p;
    status = probe_create(&p, s, asks->probe_layers, asks->center, err);
    if (status == RK_OK) {
        status = root_means(&p, root, rk_look(root)->n_tokens - 1,
                            rk_look(root)->n_tokens, report, err);
        if (status == RK_OK) {
            status = rk_session_compute(s, &child, 1, err);
        }
        if (status == RK_OK) {
            status = branch_means(&p, child, rk_look(child)->n_tokens - 1,
                                  rk_look(child)->n_tokens, err);
        }
        report->own_token_layers = (int64_t)n_suffix * s->model.config.n_layers;
        for (int32_t l = 0;
             l < p.n_layers && status == RK_OK && report->gate == RK_GATE_OPEN;
             l++) {
            status = compare(&p, l, asks, weights, report, err);
        }
        probe_free(&p);
    }
    if (status == RK_OK && report->gate == RK_GATE_ACCEPTED) {
        *out = child;
    } else {
        rk_tree_drop(&s->tree, child);
    }
    return status;
}

static bool same_tokens(const rk_branch *root, const int32_t *tokens,
                        int32_t n_tokens)
{
    return rk_look(root)->n_tokens == n_tokens &&
           memcmp(rk_look(root)->tokens, tokens,
                  (size_t)n_tokens * sizeof *tokens) == 0;
}

static rk_status probe_and_share(rk_session *s, rk_branch **out,
                                 rk_branch *root, rk_branch *own,
                                 const int32_t *suffix, int32_t n_suffix,
                                 const rk_asks *asks, rk_gate_report *report,
                                 rk_error *err)
{
    double *weights = malloc((size_t)asks->probe_layers * sizeof *weights);
    if (weights == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory to probe");
    }
    rk_asks_weights(weights, asks->probe_layers, asks->alpha);
    rk_status status = asks->probe == RK_PROBE_PREFIX
                           ? by_prefix(s, out, root, own, suffix, n_suffix,
                                       asks, weights, report, err)
                           : by_suffix(s, out, root, suffix, n_suffix, asks,
                                       weights, report, err);
    free(weights);
    return status;
}

rk_status rk_session_prefill_similar(rk_session *s, rk_branch **out,
                                     rk_branch *root, const int32_t *tokens,
                                     int32_t n_tokens, const int32_t *suffix,
                                     int32_t n_suffix, const rk_asks *asks,
                                     bool allowed, rk_gate_report *report,
                                     rk_error *err)
{
    *out = NULL;
    report->gate = RK_GATE_OPEN;
    report->equal = false;
    report->sigma = NAN;
    report->n_layers = 0;
    report->own_token_layers = report->root_token_layers = 0;
    rk_status status = rk_session_check_branch(root, err);
    if (status == RK_OK && n_tokens < 1) {
        status = rk_fail(err, RK_EVALUE,
                         "tokens: a prompt needs at least one token");
    }
    if (status == RK_OK && asks->probe == RK_PROBE_SUFFIX && n_suffix < 1) {
        status = rk_fail(err, RK_EVALUE, "suffix: probe \"suffix\" needs one");
    }
    if (status == RK_OK) {
        status = rk_session_check_tokens(s, "tokens", tokens, n_tokens, 0, err);
    }
    if (status == RK_OK) {
        status = rk_session_check_tokens(s, "suffix", suffix, n_suffix,
                                         n_tokens, err);
    }
    if (status != RK_OK) {
        return status;
    }
    if (same_tokens(root, tokens, n_tokens)) {
        report->equal = true;
        report->gate = RK_GATE_ACCEPTED;
        report->sigma = 1.0;
        return share(s, out, root, suffix, n_suffix, false, err);
    }
    /* On a longer root there may be no position left for the suffix. */
    allowed = allowed && n_suffix <= s->model.config.max_positions -
                                         rk_look(root)->n_tokens;
    rk_branch *own = NULL;
    int32_t n_reused = 0;
    status = rk_tree_add(&s->tree, &own, tokens, n_tokens, &n_reused, err);
    if (status == RK_OK && allowed) {
        status = probe_and_share(s, out, root, own, suffix, n_suffix, asks,
                                 report, err);
    }
    if (status == RK_OK && *out == NULL) {
        /* Rejected or not allowed: everything is its own. */
        int32_t n_kept = rk_look(own)->n_computed;
        status = rk_session_compute(s, &own, 1, err);
        if (status == RK_OK) {
            status = rk_branch_append(own, suffix, n_suffix, err);
        }
        if (status == RK_OK) {
            s->stats.tokens_reused += n_kept < n_tokens ? n_kept : 0;
            rk_branch_set_prompt(own);
            *out = own;
            own = NULL;
        }
    }
    if (own != NULL) {
        rk_tree_drop(&s->tree, own);
    }
    if (status == RK_OK) {
        *(report->gate == RK_GATE_ACCEPTED ? &s->stats.gate_accepted
                                           : &s->stats.gate_rejected) += 1;
    }
    return status;
}
