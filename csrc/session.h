/* The use cases, in the order in which they happen.
 *
 * A session is one model on one device with one pool of KV blocks and a tree
 * of branches. Every function here is called with the session's lock held (the
 * lock lives in csrc/py) and without the GIL. A call that fails leaves the
 * session as it was: tokens, scores, books (KV that was already computed may
 * stay resident; results never depend on that).
 */
#ifndef RKSC_SESSION_H
#define RKSC_SESSION_H

#include "engine/branches.h"
#include "engine/peek.h"
#include "engine/probe.h"
#include "engine/requests.h"
#include "engine/score.h"
#include "engine/verify.h"

/* Copies the model's struct (not the weights). Refuses what does not fit
 * (shapes, types) with the tensor's name. */
rk_status rk_session_create(rk_session **out, const rk_model *model,
                            const rk_options *options, rk_error *err);
void rk_session_free(rk_session *session);

/* Also cancels a request on it. */
void rk_session_drop(rk_session *session, rk_branch *branch);

/* Weights changed: all KV and the index are forgotten, tokens stay. */
void rk_session_invalidate(rk_session *session);

/* What the caller knows better; NaN: not verified, nothing generated. */
void rk_session_set_score(rk_session *session, rk_branch *branch, double score);
void rk_session_set_confidence(rk_session *session, rk_branch *branch,
                               double confidence);
/* The key of the random numbers that are drawn from now on. */
void rk_session_set_stream(rk_session *session, rk_branch *branch,
                           uint64_t stream);

rk_stats rk_session_stats(const rk_session *session);

/* Balance of the books; RK_ESTATE says what disagrees. */
rk_status rk_session_check(const rk_session *session, rk_error *err);

const rk_model *rk_session_model(const rk_session *session);

#endif
