/* A step over the rows of some branches: open, layers, close (step.c). */
#ifndef RKSC_STEP_H
#define RKSC_STEP_H

#include "state.h"

/* The next rows that the branches still need, at most a step's worth, into
 * items: (step_tokens,). Returns how many items those are. */
int32_t rk_step_pending(const rk_session *s, rk_branch *const *branches,
                        int32_t n, rk_item *items);

/* RK_ECAPACITY when so many blocks cannot be free at once, whatever is evicted:
 * branches that are pinned keep theirs. */
rk_status rk_step_check_room(const rk_session *s, int64_t needed,
                             rk_error *err);

/* Make room (cached blocks first, then RSBCM), give the items blocks, build
 * the batch and embed its rows into `x` (NULL: the forward's own). The items'
 * branches are pinned until the close. RK_ECAPACITY: no room; nothing is open.
 */
rk_status rk_step_open(rk_session *s, const rk_item *items, int32_t n_items,
                       float *x, rk_error *err);
/* The same for rows whose residual stream the caller holds already. */
rk_status rk_step_reopen(rk_session *s, const rk_item *items, int32_t n_items,
                         rk_error *err);
/* Run layers [from, to) over the open step; RK_EINTERRUPTED in between. */
rk_status rk_step_layers(rk_session *s, int32_t from, int32_t to, float *x,
                         rk_error *err);
/* After every layer, and after evictions: has a signal come? */
rk_status rk_step_signal(const rk_session *s, rk_error *err);
/* Keep only items[keep[i]], i < n, of the open step and their rows of f->x;
 * the others are closed without their KV. keep rises. */
rk_status rk_step_shrink(rk_session *s, const int32_t *keep, int32_t n,
                         rk_error *err);
/* commit false: the rows' KV is forgotten. */
void rk_step_close(rk_session *s, bool commit);

/* Close, neither forgetting nor counting: the rows' KV is there for some
 * layers, and the caller goes on with the same rows later. */
void rk_step_suspend(rk_session *s);

/* Open, all layers, the choice of n_outputs rows, close with commit.
 * Output i is the last row of items[output_items[i]] minus back[i] (NULL: 0);
 * draws and picks: (n_outputs,). */
rk_status rk_step_run(rk_session *s, const rk_item *items, int32_t n_items,
                      const int32_t *output_items, const int32_t *back,
                      const rk_draw *draws, int32_t n_outputs, rk_pick *picks,
                      rk_error *err);

#endif
