/* Generation: requests, and the events of a step. */
#ifndef RKSC_REQUESTS_H
#define RKSC_REQUESTS_H

#include "kv/tree.h"
#include "options.h"
#include "policy/cgee.h"

typedef enum rk_finish {
    RK_FINISH_NONE = 0, /* still running */
    RK_FINISH_LENGTH,   /* max_new_tokens or the model's positions */
    RK_FINISH_EOS,      /* a stop id; not part of the tokens */
    RK_FINISH_STOP,     /* a stop string */
    RK_FINISH_EARLY,    /* CGEE stopped the group */
    RK_FINISH_CANCELLED,
} rk_finish;

/* What all requests of one call have in common; copied, but for the tokens'
 * bytes, which are borrowed until all of them are retired. */
typedef struct rk_generation_options {
    int32_t max_new_tokens;
    rk_draw draw; /* stream, position and forced are filled in per row */
    const int32_t *stop_ids;
    int32_t n_stop_ids;
    const uint8_t *const *stop_strings; /* bytes */
    const int32_t *stop_lengths;
    int32_t n_stop_strings;
    /* bytes of token t: token_bytes[token_offsets[t] .. token_offsets[t+1]);
     * NULL without stop strings */
    const uint8_t *token_bytes;
    const int64_t *token_offsets;
    /* by token: 1 where these bytes are no part of the text and only spell a
     * special token; NULL: nowhere */
    const uint8_t *special;
    rk_cgee cgee; /* stop_top > 1: no early stop */
} rk_generation_options;

typedef struct rk_token {
    uint64_t request;
    int32_t token; /* -1: none came with this event */
    float logprob, top_prob, entropy;
    rk_finish finish;
    int32_t stop_bytes; /* RK_FINISH_STOP: bytes of the stop string and what
                         * follows it in the last token, to cut from the text;
                         * special tokens are no part of it */
    int32_t stop_index; /* which stop string or stop id, -1 */
} rk_token;

/* Queue a continuation of the branch. Requests with the same group > 0 take
 * turns as one (turns.c) and stop together under CGEE, by the settings of the
 * first of them. The branch is busy until the request is retired. */
rk_status rk_session_submit(rk_session *session, rk_branch *branch,
                            const rk_generation_options *options,
                            uint64_t group, uint64_t *request, rk_error *err);

/* One step: admit what fits, compute one batch, pick tokens, retire what is
 * finished. *events points into the session, valid until the next call;
 * *n_events may be 0 while prompts are computed. *n_active: requests left.
 * After a failure the events are those that came before it, and nothing is
 * lost: the next step tries the rest again. */
rk_status rk_session_step(rk_session *session, const rk_token **events,
                          int32_t *n_events, int32_t *n_active, rk_error *err);

/* The request that the last step failed for: its KV does not fit although
 * nobody else runs, or its logits are NaN; 0: the failure was nobody's (an
 * interruption, no memory). Others can go on once it is cancelled. */
uint64_t rk_session_blamed(const rk_session *session);

/* Retire a request now; tokens so far stay. Unknown ids are ignored. */
void rk_session_cancel(rk_session *session, uint64_t request);
/* Undo what a request has done (a failed call, a result that could not be
 * handed out): the branch, which is not busy any more, forgets its tokens from
 * n_tokens on and has this confidence. */
void rk_session_undo(rk_session *session, rk_branch *branch, int32_t n_tokens,
                     double confidence);

#endif
