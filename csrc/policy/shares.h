/* Equal shares of a step's rows. A pure function on integers. */
#ifndef RKSC_POLICY_SHARES_H
#define RKSC_POLICY_SHARES_H

#include "rksc.h"

/* Divide `room` rows among n groups that want some, in equal shares: granted
 * [i] <= wanted[i], what one leaves goes to the others, and no group that gets
 * fewer rows than it wants gets fewer than another, but for the last rows,
 * which are too few for all: they go one each to groups from `first` on, round
 * the circle. Returns the group behind the last of these, `first` where there
 * were none. 0 <= first < n, or n == 0. */
int32_t rk_shares_divide(int32_t *granted, const int32_t *wanted, int32_t n,
                         int32_t room, int32_t first);

#endif
