/* What a session is made with, and what it counts. */
#ifndef RKSC_OPTIONS_H
#define RKSC_OPTIONS_H

#include "backend.h"
#include "kv/kv.h"

typedef struct rk_session rk_session;

/* Asked after every layer, without the GIL; true: stop with RK_EINTERRUPTED.
 */
typedef bool (*rk_interrupted)(void *context);

typedef struct rk_options {
    rk_cuda *cuda; /* borrowed; NULL: the CPU, with the two that follow */
    rk_isa isa;
    int32_t n_threads;
    int64_t kv_bytes;
    rk_type kv_type;      /* rk_extent.kv_type */
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

#endif
