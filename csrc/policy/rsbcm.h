/* RSBCM: which block leaves the budget first? Pure functions.
 *
 * omega = value / (depth + 1), value = the branch's score, else its
 * confidence, else 1. A block of several branches takes the largest omega. */
#ifndef RKSC_POLICY_RSBCM_H
#define RKSC_POLICY_RSBCM_H

#include "rksc.h"

/* score, confidence: NaN when there is none */
double rk_rsbcm_omega(double score, double confidence, int32_t depth);

typedef struct rk_candidate {
    double omega;
    uint64_t last_use; /* a counter, not a clock */
    uint64_t id;       /* breaks the last tie, so that runs repeat */
} rk_candidate;

/* Does a leave before b? Lowest omega, then least recently used, then id. */
bool rk_rsbcm_before(const rk_candidate *a, const rk_candidate *b);

#endif
