/* The decisions of CGEE.
 *
 * A mark is score * sqrt(confidence) with score <= 1. Rounding is monotone, so
 * mark <= sqrt(confidence) holds for the rounded numbers too, and the bound is
 * exact. A lead needs a rival: one branch alone has none.
 */
#include "cgee.h"

#include <math.h>

bool rk_cgee_stop(const rk_cgee *cgee, const double *confidence, int32_t n,
                  int32_t step)
{
    double best = NAN, second = NAN;
    for (int32_t i = 0; i < n; i++) {
        double c = confidence[i];
        if (isnan(c)) {
            continue;
        }
        if (isnan(best) || c > best) {
            second = best;
            best = c;
        } else if (isnan(second) || c > second) {
            second = c;
        }
    }
    return step >= cgee->min_steps && best >= cgee->stop_top &&
           (best - second) / best >= cgee->stop_lead;
}

/* Does confidence a stand before b? */
static bool larger(double a, double b)
{
    return a > b || (isnan(b) && !isnan(a));
}

void rk_cgee_order(const double *confidence, int32_t n, int32_t *order)
{
    for (int32_t i = 0; i < n; i++) {
        int32_t j = i;
        while (j > 0 && larger(confidence[i], confidence[order[j - 1]])) {
            order[j] = order[j - 1];
            j--;
        }
        order[j] = i;
    }
}

rk_skip rk_cgee_skip(const rk_cgee *cgee, const double *confidence,
                     const int32_t *order, int32_t n, int32_t *n_contenders)
{
    *n_contenders = n;
    if (n == 0 || isnan(confidence[order[0]])) {
        return RK_SKIP_NO; /* nothing is known, so nothing is left out */
    }
    double top = confidence[order[0]];
    double lead = n > 1 ? top - confidence[order[1]] : NAN;
    if (top >= cgee->skip_top && lead >= cgee->skip_lead) {
        *n_contenders = 0;
        return RK_SKIP_LEAD;
    }
    if (top >= cgee->skip_top_relative &&
        lead / top >= cgee->skip_lead_relative) {
        *n_contenders = 0;
        return RK_SKIP_RELATIVE_LEAD;
    }
    if (!(cgee->kappa > 0)) {
        return RK_SKIP_NO;
    }
    int32_t kept = 1; /* the top itself, whatever kappa */
    while (kept < n && confidence[order[kept]] >= cgee->kappa * top) {
        kept++;
    }
    *n_contenders = kept == 1 ? 0 : kept;
    return kept == 1 ? RK_SKIP_ONE_CONTENDER : RK_SKIP_NO;
}

double rk_cgee_mark(double score, double confidence)
{
    return score * sqrt(confidence);
}

bool rk_cgee_can_win(double confidence, double best_mark)
{
    return isnan(best_mark) || rk_cgee_mark(1, confidence) >= best_mark;
}

bool rk_cgee_check(const rk_cgee *cgee, int32_t layer, int32_t n_layers)
{
    /* After the last layer there is nothing left to save. */
    return cgee->lens_every >= 1 && cgee->theta > 0 &&
           layer >= cgee->min_layer && layer < n_layers &&
           (layer - cgee->min_layer) % cgee->lens_every == 0;
}

bool rk_cgee_exit(const rk_cgee *cgee, int32_t layer, int32_t n_layers,
                  double entropy, double previous)
{
    return rk_cgee_check(cgee, layer, n_layers) && entropy < cgee->theta &&
           fabs(entropy - previous) < cgee->epsilon;
}

int32_t rk_cgee_select(const double *score, const double *confidence, int32_t n)
{
    int32_t best = -1;
    for (int32_t i = 0; i < n; i++) {
        if (!isnan(score[i]) &&
            (best < 0 || larger(rk_cgee_mark(score[i], confidence[i]),
                                rk_cgee_mark(score[best], confidence[best])))) {
            best = i;
        }
    }
    if (best >= 0) {
        return best;
    }
    for (int32_t i = 0; i < n; i++) {
        if (best < 0 || larger(confidence[i], confidence[best])) {
            best = i;
        }
    }
    return best;
}
