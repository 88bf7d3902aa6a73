/* Verification: is an answer correct, YES or NO? */
#ifndef RKSC_VERIFY_H
#define RKSC_VERIFY_H

#include "kv/tree.h"
#include "options.h"
#include "policy/cgee.h"

typedef enum rk_lens { RK_LENS_NONE = 0, RK_LENS_ANSWER, RK_LENS_FULL } rk_lens;

typedef enum rk_outcome {
    RK_VERIFIED = 0,
    RK_NOT_CONTENDER, /* confidence < kappa * top */
    RK_BOUND,         /* cannot win any more */
    RK_SKIPPED_LEAD,  /* level 1 */
    RK_SKIPPED_RELATIVE_LEAD,
    RK_SKIPPED_ONE_CONTENDER,
} rk_outcome;

typedef struct rk_verdict {
    rk_outcome outcome;
    double score; /* p(yes) / (p(yes) + p(no)), NaN unless verified */
    double mass;  /* p(yes) + p(no) of the whole distribution; NaN after an
                   * exit under the answer lens */
    float yes_logit, no_logit; /* float32 accumulation */
    int32_t layers;            /* layers run for this branch */
} rk_verdict;

typedef struct rk_verification {
    const int32_t *prompt;
    int32_t n_prompt, yes, no;
    bool shortcuts; /* false: verify all, fully; cgee is not looked at */
    rk_cgee cgee;
    rk_lens lens; /* level 2, RK_LENS_NONE: off */
    bool lens_norm;
} rk_verification;

/* Changes nothing of the branches: the scores are theirs once the caller sets
 * them. */
rk_status rk_session_verify(rk_session *session, rk_branch *const *branches,
                            int32_t n, const rk_verification *verification,
                            rk_verdict *verdicts, rk_error *err);

#endif
