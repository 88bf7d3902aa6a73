/* CGEE: verify only as much as needed. Pure functions on numbers.
 *
 * Confidences and scores lie in [0, 1]; NaN never wins a comparison. */
#ifndef RKSC_POLICY_CGEE_H
#define RKSC_POLICY_CGEE_H

#include "rksc.h"

typedef struct rk_cgee {
    /* while generating: stop all when best >= stop_top and (best - second) /
     * best >= stop_lead after min_steps; stop_top > 1 switches it off */
    int32_t min_steps;
    double stop_top, stop_lead;
    /* level 1: skip verification; the two `top`s > 1 switch it off */
    double skip_top, skip_lead;                   /* absolute lead */
    double skip_top_relative, skip_lead_relative; /* lead / top */
    double kappa;         /* contenders: confidence >= kappa * top; 0: all */
    int32_t verify_batch; /* branches verified at a time, >= 1 */
    /* level 2 */
    int32_t min_layer, lens_every; /* layers count from 1 */
    double theta, epsilon;         /* H < theta and |H - H before| < epsilon */
} rk_cgee;

bool rk_cgee_stop(const rk_cgee *cgee, const double *confidence, int32_t n,
                  int32_t step);

/* Order branches by confidence (largest first, ties by lower index, NaN last)
 * into order: (n,). */
void rk_cgee_order(const double *confidence, int32_t n, int32_t *order);

typedef enum rk_skip {
    RK_SKIP_NO = 0,
    RK_SKIP_LEAD,          /* top and absolute lead */
    RK_SKIP_RELATIVE_LEAD, /* top and relative lead */
    RK_SKIP_ONE_CONTENDER,
} rk_skip;

/* Level 1 and contenders; *n_contenders: how many of `order` are verified when
 * the answer is RK_SKIP_NO. One branch alone is still verified when kappa is 0.
 */
rk_skip rk_cgee_skip(const rk_cgee *cgee, const double *confidence,
                     const int32_t *order, int32_t n, int32_t *n_contenders);

/* score * sqrt(confidence) */
double rk_cgee_mark(double score, double confidence);

/* The exact bound: can a branch of this confidence still win against best_mark
 * (score <= 1)? True on equality: ties are decided by the mark itself. */
bool rk_cgee_can_win(double confidence, double best_mark);

/* Level 2 after layer `layer` (from 1): does this branch leave the pass?
 * previous: entropy at the check before, NaN when there was none. */
bool rk_cgee_exit(const rk_cgee *cgee, int32_t layer, int32_t n_layers,
                  double entropy, double previous);
/* Is the lens evaluated after this layer at all? */
bool rk_cgee_check(const rk_cgee *cgee, int32_t layer, int32_t n_layers);

/* Index of the best branch: the largest mark among the verified (score not
 * NaN), lowest index on ties; if none is verified the largest confidence; -1
 * for n == 0. */
int32_t rk_cgee_select(const double *score, const double *confidence,
                       int32_t n);

#endif
