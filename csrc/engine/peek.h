/* What a branch would say next. */
#ifndef RKSC_PEEK_H
#define RKSC_PEEK_H

#include "kv/tree.h"
#include "options.h"

/* The next token's logits: float32 (vocab,). */
rk_status rk_session_logits(rk_session *session, rk_branch *branch,
                            float *logits, rk_error *err);
/* Logits of what follows each of the branch's tokens [begin, end): float32 (end
 * - begin, vocab). */
rk_status rk_session_logits_at(rk_session *session, rk_branch *branch,
                               int32_t begin, int32_t end, float *logits,
                               rk_error *err);
/* Residual stream of the last token after each layer: float32 (layers, width).
 */
rk_status rk_session_hidden(rk_session *session, rk_branch *branch,
                            float *hidden, rk_error *err);
/* The same logits (layers: that residual stream) in memory of the device, which
 * belongs to whoever holds *out: rk_ops.lend, where that is not NULL. */
rk_status rk_session_lend(rk_session *session, rk_branch *branch, bool layers,
                          rk_lent **out, rk_error *err);

/* Open a step with one row: the branch's last token, all KV in place. */
rk_status rk_session_peek(rk_session *s, rk_branch *branch, rk_error *err);

#endif
