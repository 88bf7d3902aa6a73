/* rksc._core.Request: a continuation of a branch, and what has come of it.
 *
 * All calls share one scheduler, so a step of one thread also advances the
 * requests of others: events go to their request, and who waits for it finds
 * them there. A caller holds its requests before they are submitted and as
 * long as it has not handed out what came of them. So whatever ends the call,
 * and wherever, it can take everything back.
 *
 * Requests of `_submit` are kept alive by the session until their end has been
 * told, those of `_generate` by its caller.
 */
#ifndef RKSC_PY_REQUEST_H
#define RKSC_PY_REQUEST_H

#include "settings.h"

/* A running `_generate`, on its stack; all of it is guarded by the lock. */
typedef struct rk_wait {
    PyObject *requests; /* tuple, borrowed */
    int32_t n_left;     /* of them, those that run */
    rk_error failure;   /* of one of them, in another's step */
} rk_wait;

typedef struct request_object {
    PyObject_HEAD branch_object *branch; /* strong, never NULL */
    uint64_t id;                         /* 0: never submitted */
    PyObject *number;                    /* id as an int, or NULL */
    bool kept;                           /* by the session, under its number */
    /* guarded by the session's lock */
    rk_wait *wait;    /* the running `_generate` of it, or NULL */
    int32_t n_before; /* the branch's tokens, and confidence, before */
    double confidence_before;
    int32_t n, capacity;
    int32_t *tokens; /* (capacity,) as the next three, owned */
    float *top_probs, *logprobs, *entropies;
    rk_token end;      /* end.finish: RK_FINISH_NONE while it runs */
    rk_error *failure; /* owned; why it could not go on, or NULL */
    int32_t n_told;    /* tokens that `_step` has handed out */
    bool end_told, undone;
} request_object;

struct rk_requests {
    rk_token_table table;
    PyObject *kept; /* {number: request} of `_submit`, their end not told */
    /* guarded by the session's lock; needs no GIL */
    request_object **running; /* (n,) borrowed; their ids rise */
    int32_t n, capacity;
    int32_t n_ended;     /* of them, those that do not run any more */
    int32_t n_submitted; /* of `_submit` and running */
    uint64_t last_group;
};

/* All that follows is called with the lock held. */

/* Submit it. wait: the `_generate` that it belongs to; NULL: `_step` tells. */
rk_status rk_request_submit(session_object *session, request_object *request,
                            const rk_generation_options *options,
                            uint64_t group, rk_wait *wait, rk_error *err);

/* One step of the engine for a running `_generate`, or for `_step` (own NULL);
 * after a failure what came before it is kept. A request that cannot go on is
 * ended and its owner hears of it: but for own's requests this step has
 * succeeded. */
rk_status rk_requests_step(session_object *session, const rk_wait *own,
                           int32_t *n_active, rk_error *err);

/* End it now where it runs. */
void rk_request_stop(session_object *session, request_object *request);
/* And its branch has the first `keep` of its tokens only, unless somebody has
 * gone on with it. */
void rk_request_undo(session_object *session, request_object *request,
                     int32_t keep);
/* Forget the running ones that have ended. Before any of them goes. */
void rk_requests_sweep(rk_requests *requests);

/* Mean probability of the most likely token, of the end's step where no token
 * came; NaN when no step ran. */
double rk_request_confidence(const request_object *request);

#endif
