/* Log-probabilities of given continuations. */
#ifndef RKSC_SCORE_H
#define RKSC_SCORE_H

#include "kv/tree.h"
#include "options.h"

/* Every token of the continuations of one branch as a pick (its
 * log-probability, and the token that would have been the most likely one),
 * teacher-forced, batched; picks[i]: (lengths[i],). */
rk_status rk_session_score(rk_session *session, rk_branch *branch,
                           const int32_t *const *continuations,
                           const int32_t *lengths, int32_t n,
                           rk_pick *const *picks, rk_error *err);

#endif
