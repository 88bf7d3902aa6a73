/* What scheduler.c (the life of a request), turns.c (its rows) and session.c
 * share. */
#ifndef RKSC_SCHEDULER_H
#define RKSC_SCHEDULER_H

#include "step.h"
#include "stops.h"

typedef struct rk_group {
    uint64_t id;              /* 0: of one request alone */
    rk_request *first, *last; /* its requests, linked by `peer` */
    int32_t n_active;         /* of them, those that have not ended */
    int32_t n_running;        /* of these, the admitted ones */
} rk_group;

struct rk_request {
    uint64_t id;
    rk_group *group;
    rk_request *peer;              /* the next one of its group */
    rk_branch *branch;             /* NULL: dropped */
    rk_generation_options options; /* its stops are in `stops` */
    rk_stops stops;
    int32_t n_new;
    double sum_top;    /* of top_prob over new tokens */
    double confidence; /* NaN before the first pick */
    rk_finish finish;
    bool running; /* admitted: the branch is pinned */
};

static inline bool rk_request_active(const rk_request *request)
{
    return request->finish == RK_FINISH_NONE;
}

/* ---- turns.c ------------------------------------------------------------- */

/* Fill s->step.items with the rows of the next step, at most
 * options.step_tokens, and owners: (step_tokens,) with whose they are; admits
 * requests. Returns how many items there are. */
int32_t rk_turns_choose(rk_session *s, rk_request **owners);

/* The request runs no more; it may be chosen again. */
void rk_turns_release(rk_request *request);

/* Blocks have run out: send one running request back to wait; false when only
 * one runs, which is to blame then. */
bool rk_turns_preempt(rk_scheduler *scheduler);

/* ---- scheduler.c --------------------------------------------------------- */

void rk_scheduler_free(rk_scheduler *scheduler);
/* The branch is about to go: retire its request, forget it in records. */
void rk_scheduler_forget(rk_session *s, rk_branch *branch);
/* Outside a step exactly the branches of running requests are pinned, and
 * those of requests that have not ended are busy. */
rk_status rk_scheduler_check(const rk_session *s, rk_error *err);

#endif
