/* ASKS: may a branch use the KV of another wording? Pure functions.
 *
 * sigma = sum_l w_l cos_l, w_l = exp(alpha l / L) / sum_k exp(alpha k / L),
 * l = 1 .. L over the probed layers. Accept when sigma >= tau. */
#ifndef RKSC_POLICY_ASKS_H
#define RKSC_POLICY_ASKS_H

#include "rksc.h"

/* out: (n_layers,), sums to 1 */
void rk_asks_weights(double *out, int32_t n_layers, double alpha);

typedef enum rk_gate {
    RK_GATE_OPEN = 0, /* not decided yet */
    RK_GATE_ACCEPTED,
    RK_GATE_REJECTED,    /* sigma < tau */
    RK_GATE_UNREACHABLE, /* cos 1 on all remaining layers would not suffice */
    RK_GATE_UNDEFINED,   /* a cosine is NaN: zero or broken hidden state */
} rk_gate;

/* Decide after n_seen of n_layers cosines. *sigma receives the sum so far.
 * Open only when n_seen < n_layers and tau can still be reached. */
rk_gate rk_asks_decide(const float *cosines, int32_t n_seen,
                       const double *weights, int32_t n_layers, double tau,
                       double *sigma);

#endif
