/* ASKS: sharing between wordings, and the means that it is centred by. */
#ifndef RKSC_PROBE_H
#define RKSC_PROBE_H

#include "kv/tree.h"
#include "options.h"
#include "policy/asks.h"

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

/* Mean residual stream after each layer over positions [begin, end) of the
 * prompt: float32 (layers, width); the branch is temporary. */
rk_status rk_session_prompt_means(rk_session *session, const int32_t *tokens,
                                  int32_t n_tokens, int32_t begin, int32_t end,
                                  float *means, rk_error *err);

#endif
