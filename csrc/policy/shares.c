/* Equal shares of a step's rows.
 *
 * Rows rise like water in vessels of the heights `wanted`: everybody gets
 * min(wanted, level), with the highest level whose sum fits into the room. Less
 * than one row for each who wants more is left then.
 */
#include "shares.h"

static int32_t min(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static int64_t sum_at(const int32_t *wanted, int32_t n, int32_t level)
{
    int64_t sum = 0;
    for (int32_t i = 0; i < n; i++) {
        sum += min(wanted[i], level);
    }
    return sum;
}

int32_t rk_shares_divide(int32_t *granted, const int32_t *wanted, int32_t n,
                         int32_t room, int32_t first)
{
    int32_t low = 0, high = room;
    while (low < high) {
        int32_t middle = high - (high - low) / 2;
        if (sum_at(wanted, n, middle) <= room) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    for (int32_t i = 0; i < n; i++) {
        granted[i] = min(wanted[i], low);
    }
    int32_t left = room - (int32_t)sum_at(wanted, n, low), next = first;
    for (int32_t k = 0; k < n && left > 0; k++) {
        int32_t i = (int32_t)(((int64_t)first + k) % n);
        if (granted[i] < wanted[i]) {
            granted[i]++;
            left--;
            next = (i + 1) % n;
        }
    }
    return next;
}
