/* Branches: token histories over shared KV blocks.
 *
 * A branch is its tokens; positions [0, n_computed) have their KV in `blocks`.
 * Everything else follows from that: prefill, a fork's suffix, the last token
 * that was generated and the tail that an eviction took away are all the same
 * thing, tokens that still have to be computed. No float array belongs to a
 * branch: the distribution of the next token is computed again from the last
 * position's KV when somebody asks (one row that writes nothing).
 */
#ifndef RKSC_TREE_H
#define RKSC_TREE_H

#include "kv.h"
#include "policy/rsbcm.h"
#include "rksc.h"

/* Remembered hidden-state means of a span of this branch (ASKS, probe.c). */
typedef struct rk_probe_memory {
    float *means; /* (n_layers, width), owned */
    int32_t n_layers, begin, end;
} rk_probe_memory;

/* A branch; what it is made of is known to tree.c alone. */
typedef struct rk_branch rk_branch;

/* What anybody may read of one. */
typedef struct rk_branch_facts {
    uint64_t id;        /* never reused in a session */
    uint64_t parent_id; /* 0: none */
    int32_t depth;      /* forks between a root and this */

    const int32_t *tokens; /* (n_tokens,) */
    int32_t n_tokens;
    int32_t n_prompt;      /* tokens it was born with; the rest is generated */
    int32_t n_computed;    /* positions with KV, a prefix of tokens */
    int32_t n_ever;        /* most positions computed at once: beyond n_computed
                            * and below this means evicted */
    const int32_t *blocks; /* (n_blocks,) block table covering n_computed */
    int32_t n_blocks;

    uint64_t stream;    /* key of its random numbers */
    double score;       /* NaN: not verified */
    double confidence;  /* NaN: nothing generated */
    bool approximate;   /* stands on KV of another wording */
    int32_t pins;       /* > 0: a step or a request needs it: no eviction */
    bool busy;          /* a submitted request owns its tokens */
    uint64_t request;   /* id of the newest of its requests; 0: none ever */
    int32_t n_requests; /* records that name it, of ended requests too */
} rk_branch_facts;

/* They follow every change, and last as long as the branch. A branch begins
 * with them, so that looking costs no call. */
static inline const rk_branch_facts *rk_look(const rk_branch *branch)
{
    return (const rk_branch_facts *)branch;
}

/* Eviction's scratch: the last block of some unpinned branches. */
typedef struct rk_tail {
    int32_t block, n_branches;
    rk_branch *first;  /* of them, in the order of the tree */
    rk_candidate rank; /* as its best branch's */
} rk_tail;

/* The list of live branches of a session and their blocks' books. Zeroed but
 * for kv (borrowed) and block_tokens it is an empty tree. */
typedef struct rk_tree {
    rk_branch *first;
    rk_kv *kv;
    int32_t block_tokens;
    bool indexed; /* prefixes are found and published */
    uint64_t next_id;
    int32_t n_branches;
    int64_t evictions; /* blocks taken by RSBCM */
    rk_tail *tails;    /* owned, one for every branch at most */
    int32_t tails_capacity;
    int32_t *tail_of; /* owned, (blocks,): 1 + place in tails, 0: none */
} rk_tree;

void rk_tree_free(rk_tree *tree);

static inline int32_t rk_tree_blocks_of(const rk_tree *tree, int32_t n_tokens)
{
    return (n_tokens + tree->block_tokens - 1) / tree->block_tokens;
}

/* A root with these tokens; shares the longest indexed prefix, but leaves at
 * least the last token to be computed. *n_reused: positions found. */
rk_status rk_tree_add(rk_tree *tree, rk_branch **out, const int32_t *tokens,
                      int32_t n_tokens, int32_t *n_reused, rk_error *err);

/* A child that begins with the first `at` tokens of the parent (all of its KV
 * up to there is shared, no copy) followed by suffix. ordinal: place in its
 * fork, mixed into the stream. */
rk_status rk_tree_fork(rk_tree *tree, rk_branch **out, rk_branch *parent,
                       int32_t at, const int32_t *suffix, int32_t n_suffix,
                       int32_t ordinal, rk_error *err);

void rk_tree_drop(rk_tree *tree, rk_branch *branch);

/* ---- what is noted on a branch ------------------------------------------- */

/* While it is pinned its KV is not evicted. Pins are counted. */
void rk_branch_pin(rk_branch *branch);
void rk_branch_unpin(rk_branch *branch);
/* A step has read it at this time of the session's clock. */
void rk_branch_use(rk_branch *branch, uint64_t clock);
/* A request owns its tokens, from `submit` to `retire`; a record names it until
 * `unname`. */
void rk_branch_submit(rk_branch *branch, uint64_t request);
void rk_branch_retire(rk_branch *branch);
void rk_branch_unname(rk_branch *branch);
/* NaN: not verified; nothing generated. */
void rk_branch_set_score(rk_branch *branch, double score);
void rk_branch_set_confidence(rk_branch *branch, double confidence);
void rk_branch_set_stream(rk_branch *branch, uint64_t stream);
/* From now on it stands for another wording: its blocks are not published. */
void rk_branch_set_approximate(rk_branch *branch);
/* All tokens so far are its prompt. */
void rk_branch_set_prompt(rk_branch *branch);
/* What a probe found, which owns means from now on; what was there goes. */
void rk_branch_remember(rk_branch *branch, rk_probe_memory memory);
const rk_probe_memory *rk_branch_memory(const rk_branch *branch);

/* ---- tokens and KV ------------------------------------------------------- */

rk_status rk_branch_append(rk_branch *branch, const int32_t *tokens,
                           int32_t n_tokens, rk_error *err);

/* Forget tokens and KV from position n_tokens on. */
void rk_tree_truncate(rk_tree *tree, rk_branch *branch, int32_t n_tokens);
/* Forget KV from position n_computed on; the tokens stay. */
void rk_tree_release(rk_tree *tree, rk_branch *branch, int32_t n_computed);

/* Forget all KV and all that probes found. */
void rk_tree_forget(rk_tree *tree);

/* End at n_tokens for as long as a call wants, and at what this returns again:
 * the tokens behind are kept. n_computed <= n_tokens <= the end that was. */
int32_t rk_branch_end(rk_branch *branch, int32_t n_tokens);
/* The next step's rows begin at `position`: below it KV is there for some
 * layers, above it none counts. For a prompt that goes through the layers in
 * pieces; commit or release it, or drop the branch. */
void rk_branch_stage(rk_branch *branch, int32_t position);

/* Take from the index what it knows of the tokens that are not computed;
 * returns how many positions that brought. */
int32_t rk_tree_revive(rk_tree *tree, rk_branch *branch);

/* How many blocks a write of positions [n_computed, n_tokens) needs beyond
 * those that the branch may write to (a shared tail block is copied). The
 * write is for `writers` branches with the same blocks, this one among them. */
int32_t rk_tree_blocks_needed(const rk_tree *tree, const rk_branch *branch,
                              int32_t n_tokens, int32_t writers);

/* Give the branch blocks for positions [n_computed, n_tokens), which nobody
 * but the writers reads. A half-filled block that they may not write to is
 * replaced: *copy_from is the old block and *copy_to the new one (-1: none),
 * and the caller copies the KV before anything else is computed. Needs
 * rk_tree_blocks_needed free blocks; a failure changes nothing. */
rk_status rk_tree_reserve(rk_tree *tree, rk_branch *branch, int32_t n_tokens,
                          int32_t writers, int32_t *copy_from, int32_t *copy_to,
                          rk_error *err);

/* Positions up to n_computed now have their KV: note it and enter full blocks
 * into the exact index (never for approximate branches). */
void rk_tree_commit(rk_tree *tree, rk_branch *branch, int32_t n_computed);

/* The leader has just committed n_computed tokens that are also this branch's:
 * share all of its blocks. */
void rk_tree_follow(rk_tree *tree, rk_branch *branch, const rk_branch *leader,
                    int32_t n_computed);

/* Free blocks by RSBCM until n_blocks are free; returns whether they are.
 * Only tails of unpinned branches that nobody else still needs. */
bool rk_tree_evict(rk_tree *tree, int32_t n_blocks);

/* The last resort after that: every unpinned branch forgets its KV, also what
 * others hold, and the tail block of `branch` leaves the index, so that its
 * `writers` need no copy of it where only they are left. */
void rk_tree_yield(rk_tree *tree, const rk_branch *branch, int32_t writers);

/* Blocks that are free or would be if all unpinned branches gave up theirs. */
int32_t rk_tree_available(const rk_tree *tree);

/* How many branches are busy, and all pins. */
void rk_tree_count(const rk_tree *tree, int32_t *n_busy, int32_t *n_pins);

/* The books of kv agree with the branches' block tables. O(blocks). */
rk_status rk_tree_check(const rk_tree *tree, rk_error *err);

#endif
