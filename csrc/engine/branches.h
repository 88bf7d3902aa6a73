/* Branches: where they come from, and their KV on demand. */
#ifndef RKSC_BRANCHES_H
#define RKSC_BRANCHES_H

#include "kv/tree.h"
#include "options.h"

/* One new branch with these tokens; KV that the index knows is shared, the rest
 * is computed when it is needed. */
rk_status rk_session_add(rk_session *session, rk_branch **out,
                         const int32_t *tokens, int32_t n_tokens,
                         rk_error *err);

/* The same, and its KV is computed now. */
rk_status rk_session_prefill(rk_session *session, rk_branch **out,
                             const int32_t *tokens, int32_t n_tokens,
                             rk_error *err);

/* n children at position `at` (-1: the parent's end). suffixes[i]: n_suffix[i]
 * tokens, both NULL: none. Costs no computation and copies no KV. */
rk_status rk_session_fork(rk_session *session, rk_branch **out,
                          rk_branch *parent, int32_t at, int32_t n,
                          const int32_t *const *suffixes,
                          const int32_t *n_suffix, rk_error *err);

rk_status rk_session_extend(rk_session *session, rk_branch *branch,
                            const int32_t *tokens, int32_t n_tokens,
                            rk_error *err);

/* Bring the KV of all these branches up to date, batched. */
rk_status rk_session_compute(rk_session *session, rk_branch *const *branches,
                             int32_t n, rk_error *err);

/* ---- checks of what a call was given ---------------------------------------
 */

/* Refuse a branch that is busy. */
rk_status rk_session_check_branch(const rk_branch *branch, rk_error *err);
rk_status rk_session_check_tokens(const rk_session *s, const char *field,
                                  const int32_t *tokens, int32_t n_tokens,
                                  int64_t n_before, rk_error *err);
/* A row whose logits were NaN is an error that names branch and position. */
rk_status rk_session_check_pick(const rk_pick *pick, const rk_branch *branch,
                                int32_t position, rk_error *err);
/* That error; what: "logits". */
rk_status rk_session_fail_nan(const char *what, const rk_branch *branch,
                              int32_t position, rk_error *err);

#endif
