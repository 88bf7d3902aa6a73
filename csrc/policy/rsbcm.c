/* The order in which blocks leave the budget: a strict order, so that two runs
 * evict alike. */
#include "rsbcm.h"

#include <math.h>

double rk_rsbcm_omega(double score, double confidence, int32_t depth)
{
    double value = !isnan(score) ? score : !isnan(confidence) ? confidence : 1;
    return value / ((double)depth + 1);
}

bool rk_rsbcm_before(const rk_candidate *a, const rk_candidate *b)
{
    if (a->omega != b->omega) {
        return a->omega < b->omega;
    }
    if (a->last_use != b->last_use) {
        return a->last_use < b->last_use;
    }
    return a->id < b->id;
}
