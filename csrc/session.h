/* The use cases, in the order in which they happen.
 *
 * A session is one model on one device with one pool of KV blocks and a tree
 * of branches. Every function here is called with the session's lock held (the
 * lock lives in csrc/py) and without the GIL. A call that fails leaves the
 * session as it was: tokens, scores, books (KV that was already computed may
 * stay resident; results never depend on that).
 */
#ifndef RKSC_SESSION_H
#define RKSC_SESSION_H

#include "backend.h"
#include "policy/asks.h"
#include "policy/cgee.h"
#include "tree.h"

typedef struct rk_session rk_session;

/* Asked after every layer, without the GIL; true: stop with RK_EINTERRUPTED.
 */
typedef bool (*rk_interrupted)(void *context);

typedef struct rk_options {
    rk_cuda *cuda; /* borrowed; NULL: the CPU, with the two that follow */
    rk_isa isa;
    int32_t n_threads;
    int64_t kv_bytes;
    int32_t block_tokens; /* power of two, 1 .. RK_TILE */
    int32_t step_tokens;  /* rows of a step at most; prefill goes in chunks */
    rk_rounding rounding; /* rk_extent.rounding */
    bool share; /* false: no prefix index, no merging of equal rows; forks still
                 * share. For measuring what sharing brings. */
    int hash_bits;              /* 64; tests: 0 */
    bool poison;                /* tests: fill blocks with NaN when allocated */
    rk_interrupted interrupted; /* may be NULL */
    void *context;
} rk_options;

/* Copies the model's struct (not the weights). Refuses what does not fit
 * (shapes, types) with the tensor's name. */
rk_status rk_session_create(rk_session **out, const rk_model *model,
                            const rk_options *options, rk_error *err);
void rk_session_free(rk_session *session);

/* ---- branches ----------------------------------------------------------- */

/* One new branch with these tokens; KV that the index knows is shared, the rest
 * is computed when it is needed. */
rk_status rk_session_add(rk_session *session, rk_branch **out,
                         const int32_t *tokens, int32_t n_tokens,
                         rk_error *err);

/* The same, and its KV is computed now. */
rk_status rk_session_prefill(rk_session *session, rk_branch **out,
                             const int32_t *tokens, int32_t n_tokens,
                             rk_error *err);

/* n children at position `at` (-1: the parent's end). suffixes[i]: n_suffix[i]
 * tokens, both NULL: none. Costs no computation and copies no KV. */
rk_status rk_session_fork(rk_session *session, rk_branch **out,
                          rk_branch *parent, int32_t at, int32_t n,
                          const int32_t *const *suffixes,
                          const int32_t *n_suffix, rk_error *err);

rk_status rk_session_extend(rk_session *session, rk_branch *branch,
                            const int32_t *tokens, int32_t n_tokens,
                            rk_error *err);

/* Bring the KV of all these branches up to date, batched. */
rk_status rk_session_compute(rk_session *session, rk_branch *const *branches,
                             int32_t n, rk_error *err);

/* Also cancels a request on it. */
void rk_session_drop(rk_session *session, rk_branch *branch);

/* Weights changed: all KV and the index are forgotten, tokens stay. */
void rk_session_invalidate(rk_session *session);

/* The next token's logits: float32 (vocab,). */
rk_status rk_session_logits(rk_session *session, rk_branch *branch,
                            float *logits, rk_error *err);
/* Logits of what follows each of the branch's tokens [begin, end): float32 (end
 * - begin, vocab). */
rk_status rk_session_logits_at(rk_session *session, rk_branch *branch,
                               int32_t begin, int32_t end, float *logits,
                               rk_error *err);
/* Residual stream of the last token after each layer: float32 (layers, width).
 */
rk_status rk_session_hidden(rk_session *session, rk_branch *branch,
                            float *hidden, rk_error *err);
/* The same logits (layers: that residual stream) in memory of the device, which
 * belongs to whoever holds *out: rk_ops.lend, where that is not NULL. */
rk_status rk_session_lend(rk_session *session, rk_branch *branch, bool layers,
                          rk_lent **out, rk_error *err);
/* Mean residual stream after each layer over positions [begin, end) of the
 * prompt: float32 (layers, width); the branch is temporary. */
rk_status rk_session_prompt_means(rk_session *session, const int32_t *tokens,
                                  int32_t n_tokens, int32_t begin, int32_t end,
                                  float *means, rk_error *err);

/* ---- generation: requests ------------------------------------------------ */

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
/* Retire it and undo its tokens (a failed call), also one that has ended while
 * others of its group have not or since the last step or submission; but not
 * where somebody has gone on with its branch. */
void rk_session_abort(rk_session *session, uint64_t request);
/* Undo tokens of a branch that has no request (a result that could not be
 * handed out): forget those from n_tokens on. */
void rk_session_undo(rk_session *session, rk_branch *branch, int32_t n_tokens);

/* ---- scoring, verification, selection ------------------------------------ */

/* Every token of the continuations of one branch as a pick (its
 * log-probability, and the token that would have been the most likely one),
 * teacher-forced, batched; picks[i]: (lengths[i],). */
rk_status rk_session_score(rk_session *session, rk_branch *branch,
                           const int32_t *const *continuations,
                           const int32_t *lengths, int32_t n,
                           rk_pick *const *picks, rk_error *err);

typedef enum rk_lens { RK_LENS_NONE = 0, RK_LENS_ANSWER, RK_LENS_FULL } rk_lens;

typedef enum rk_outcome {
    RK_VERIFIED = 0,
    RK_NOT_CONTENDER, /* confidence < kappa * top */
    RK_BOUND,         /* cannot win any more */
    RK_SKIPPED_LEAD,  /* level 1 */
    RK_SKIPPED_RELATIVE_LEAD,
    RK_SKIPPED_ONE_CONTENDER,
} rk_outcome;

typedef struct rk_verdict {
    rk_outcome outcome;
    double score; /* p(yes) / (p(yes) + p(no)), NaN unless verified */
    double mass;  /* p(yes) + p(no) of the whole distribution; NaN after an
                   * exit under the answer lens */
    float yes_logit, no_logit; /* float32 accumulation */
    int32_t layers;            /* layers run for this branch */
} rk_verdict;

typedef struct rk_verification {
    const int32_t *prompt;
    int32_t n_prompt, yes, no;
    bool shortcuts; /* false: verify all, fully; cgee is not looked at */
    rk_cgee cgee;
    rk_lens lens; /* level 2, RK_LENS_NONE: off */
    bool lens_norm;
} rk_verification;

/* Sets the branches' scores. */
rk_status rk_session_verify(rk_session *session, rk_branch *const *branches,
                            int32_t n, const rk_verification *verification,
                            rk_verdict *verdicts, rk_error *err);

/* ---- ASKS ---------------------------------------------------------------- */

typedef enum rk_probe { RK_PROBE_PREFIX = 0, RK_PROBE_SUFFIX } rk_probe;

typedef struct rk_asks {
    rk_probe probe;
    bool pool_mean;       /* mean over the tokens that differ; else the last */
    int32_t probe_layers; /* 1 .. n_layers */
    double tau, alpha;
    const float *center; /* host (probe_layers, width) or NULL */
} rk_asks;

typedef struct rk_gate_report {
    rk_gate gate;
    bool equal; /* same tokens: shared exactly, nothing was probed */
    double sigma;
    int32_t n_layers;          /* layers compared */
    float *cosines;            /* caller's (probe_layers,) */
    int64_t own_token_layers;  /* tokens x layers run for this branch's probe */
    int64_t root_token_layers; /* and again for the root; 0 when remembered */
} rk_gate_report;

/* A branch for `tokens` + `suffix` that stands on root's KV when the gate
 * accepts (then its tokens are root's tokens + suffix and it is approximate),
 * on its own otherwise. All of the prompt is computed; the suffix too under
 * RK_PROBE_SUFFIX. `allowed` false: the guard said no, nothing is probed. */
rk_status rk_session_prefill_similar(rk_session *session, rk_branch **out,
                                     rk_branch *root, const int32_t *tokens,
                                     int32_t n_tokens, const int32_t *suffix,
                                     int32_t n_suffix, const rk_asks *asks,
                                     bool allowed, rk_gate_report *report,
                                     rk_error *err);

/* ---- books ----------------------------------------------------------------
 */

typedef struct rk_stats {
    rk_kv_counts blocks;
    int64_t block_bytes;
    int32_t block_tokens, n_branches;
    int64_t tokens_computed;   /* first time, rows x all layers */
    int64_t tokens_recomputed; /* again: after an eviction, or a peek */
    int64_t tokens_reused;     /* found by the exact index */
    int64_t tokens_forked;     /* shared by forks */
    int64_t steps;
    int64_t evictions;                /* blocks */
    int64_t layers_run, layers_saved; /* verification rows x layers */
    int64_t verifications, verifications_skipped, exits;
    int64_t gate_accepted, gate_rejected;
} rk_stats;

rk_stats rk_session_stats(const rk_session *session);

/* Balance of the books; RK_ESTATE says what disagrees. */
rk_status rk_session_check(const rk_session *session, rk_error *err);

const rk_model *rk_session_model(const rk_session *session);

#endif
