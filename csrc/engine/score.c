/* Scoring: the log-probabilities of continuations that are given.
 *
 * All first tokens come from one row of the branch, the others from children
 * that hold the continuations and live only here.
 */
#include "score.h"

#include <stdio.h>
#include <stdlib.h>

#include "branches.h"
#include "peek.h"
#include "step.h"

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
                                           rk_look(branch)->n_tokens - 1, err);
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
        int32_t n_items = rk_step_pending(s, children, n, s->step.items);
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
    int32_t made = 0, at = rk_look(branch)->n_tokens;
    while (made < n && status == RK_OK) {
        int32_t rest = lengths[made] > 0 ? lengths[made] - 1 : 0;
        status = rk_tree_fork(&s->tree, &children[made], branch, at,
                              continuations[made], rest, made, err);
        if (status == RK_OK) {
            rk_branch_pin(children[made++]);
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
                                         rk_look(branch)->n_tokens, err);
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
