/* The gate of ASKS.
 *
 * The weights sum to 1, so sigma = 1 - sum_l w_l (1 - cos_l). Written like
 * this, every layer takes something away: the value after some layers is the
 * best that is left, equal directions give exactly 1, and a rejection ahead of
 * time is the very decision that the whole sum would have given.
 */
#include "asks.h"

#include <math.h>

void rk_asks_weights(double *out, int32_t n_layers, double alpha)
{
    /* Relative to the largest exponent, so that no alpha overflows. */
    double top = alpha > 0 ? alpha : alpha / n_layers, sum = 0;
    for (int32_t i = 0; i < n_layers; i++) {
        out[i] = exp(alpha * (i + 1) / n_layers - top);
        sum += out[i];
    }
    for (int32_t i = 0; i < n_layers; i++) {
        out[i] /= sum;
    }
}

rk_gate rk_asks_decide(const float *cosines, int32_t n_seen,
                       const double *weights, int32_t n_layers, double tau,
                       double *sigma)
{
    double best = 1, so_far = 0;
    bool undefined = false;
    for (int32_t i = 0; i < n_seen; i++) {
        double c = cosines[i];
        c = c > 1 ? 1 : c; /* rounding of the device */
        undefined = undefined || isnan(c);
        best -= weights[i] * (1 - c);
        so_far += weights[i] * c;
    }
    bool complete = n_seen == n_layers;
    *sigma = complete ? best : so_far;
    if (undefined) {
        return RK_GATE_UNDEFINED;
    }
    if (complete) {
        return best >= tau ? RK_GATE_ACCEPTED : RK_GATE_REJECTED;
    }
    return best >= tau ? RK_GATE_OPEN : RK_GATE_UNREACHABLE;
}
