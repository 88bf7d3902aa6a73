/* Branches: where they come from, and their KV on demand; and the checks of
 * what the calls of a session were given.
 */
#include "branches.h"

#include "step.h"

/* ---- checks -------------------------------------------------------------- */

rk_status rk_session_check_branch(const rk_branch *branch, rk_error *err)
{
    if (rk_look(branch)->busy) {
        return rk_fail(err, RK_ESTATE,
                       "branch %llu is generating: step or cancel its request "
                       "first",
                       (unsigned long long)rk_look(branch)->id);
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
    return rk_fail(
        err, RK_EVALUE, "weights: the %s of branch %llu at position %d are NaN",
        what, (unsigned long long)rk_look(branch)->id, (int)position);
}

/* ---- branches ------------------------------------------------------------ */

rk_status rk_session_add(rk_session *s, rk_branch **out, const int32_t *tokens,
                         int32_t n_tokens, rk_error *err)
{
    *out = NULL;
    if (n_tokens < 1) {
        return rk_fail(err, RK_EVALUE,
                       "tokens: a prompt needs at least one token");
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
    at = at < 0 ? rk_look(parent)->n_tokens : at;
    if (n < 1) {
        return rk_fail(err, RK_EVALUE, "fork: %d children", (int)n);
    }
    if (at < 1 || at > rk_look(parent)->n_tokens) {
        return rk_fail(err, RK_EVALUE, "at: %d is not in 1 .. %d", (int)at,
                       (int)rk_look(parent)->n_tokens);
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
        s->stats.tokens_forked += rk_look(out[i])->n_computed;
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
                                         rk_look(branch)->n_tokens, err);
    }
    if (status == RK_OK) {
        status = rk_branch_append(branch, tokens, n_tokens, err);
    }
    return status;
}

/* The longest of them alone must fit beside what is pinned. */
static rk_status check_longest(const rk_session *s, rk_branch *const *branches,
                               int32_t n, rk_error *err)
{
    int32_t needed = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t more =
            rk_tree_blocks_of(&s->tree, rk_look(branches[i])->n_tokens) -
            rk_look(branches[i])->n_blocks;
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
                               "branches: branch %llu is given twice",
                               (unsigned long long)rk_look(branches[i])->id);
            }
        }
    }
    for (int32_t i = 0; i < n; i++) {
        rk_branch_pin(branches[i]);
        s->stats.tokens_reused += rk_tree_revive(&s->tree, branches[i]);
    }
    rk_status status = check_longest(s, branches, n, err);
    while (status == RK_OK) {
        int32_t n_items = rk_step_pending(s, branches, n, s->step.items);
        if (n_items == 0) {
            break;
        }
        status = rk_step_run(s, s->step.items, n_items, NULL, NULL, NULL, 0,
                             NULL, err);
    }
    for (int32_t i = 0; i < n; i++) {
        rk_branch_unpin(branches[i]);
    }
    return status;
}
