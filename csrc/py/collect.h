/* Where the engine's events go: to the running `_generate` that owns the
 * request, or to the queue of `_step`.
 *
 * All calls share one scheduler, so a step of one thread also advances the
 * requests of others. Everything here is guarded by the session's lock and
 * needs no GIL, but for making and freeing a rk_generating.
 */
#ifndef RKSC_PY_COLLECT_H
#define RKSC_PY_COLLECT_H

#include "py.h"

/* One request of a running `_generate`. */
typedef struct rk_series {
    uint64_t request;
    rk_branch *branch; /* NULL: dropped */
    int32_t n_before;  /* its tokens, and confidence, at the submission */
    double confidence_before;
    int32_t n, capacity;
    int32_t *tokens; /* (capacity,) as the next three, owned */
    float *top_probs, *logprobs, *entropies;
    rk_token end; /* end.finish: RK_FINISH_NONE while it runs */
} rk_series;

/* A running `_generate`, on its stack. */
typedef struct rk_collector {
    struct rk_collector *next;
    rk_series *series; /* (n,) owned; their requests rise */
    int32_t n, n_left; /* n_left: that run */
    rk_error failure;  /* of one of them, in another's step */
} rk_collector;

/* A request of `_submit` that has not ended, or failed. */
typedef struct rk_submission {
    struct rk_submission *next; /* of those that failed */
    uint64_t request;
    rk_error failure;
} rk_submission;

struct rk_generating {
    uint8_t *token_bytes;   /* of all tokens, one after the other */
    int64_t *token_offsets; /* (vocab_size + 1,); NULL: no table */
    uint8_t *special;       /* (vocab_size,); NULL: no special tokens */
    uint64_t next_group;
    rk_collector *collectors;
    rk_submission **submissions; /* (n_submissions,) owned; requests rise */
    int32_t n_submissions, submissions_capacity;
    rk_token *queue; /* (n_queue,) events for `_step` */
    int32_t n_queue, queue_capacity;
    rk_submission *failed; /* owned, for `_step` to tell */
    int32_t n_failed;
};

/* One step of the engine for a running `_generate`, or for `_step` (own NULL).
 * Its events go where they belong, after a failure those that came before it.
 * The failure does, too: a request that cannot go on is ended, its owner hears
 * of it, and but for own's requests this step has succeeded. */
rk_status rk_generating_step(session_object *session, const rk_collector *own,
                             int32_t *n_active, rk_error *err);

/* Does a running `_generate` own the request? */
bool rk_generating_collects(const rk_generating *g, uint64_t request);

/* One for the request that has the largest id so far. False: no memory. */
bool rk_submission_add(rk_generating *g, uint64_t request);
/* Where that of the request stands, NULL: there is none. */
rk_submission **rk_submission_find(const rk_generating *g, uint64_t request);
void rk_submission_remove(rk_generating *g, rk_submission **at);

/* Forget those that failed. */
void rk_failed_free(rk_generating *g);

/* Undo all of its requests. */
void rk_collector_undo(session_object *session, const rk_collector *c);
void rk_collector_link(rk_generating *g, rk_collector *c);
void rk_collector_unlink(rk_generating *g, const rk_collector *c);
void rk_collector_free(rk_collector *c);

#endif
