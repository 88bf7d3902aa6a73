/* Branches: token histories over shared KV blocks.
 *
 * A branch's block table covers exactly its n_computed positions, except
 * between reserve and commit, when it covers what a running step writes. A
 * fork refers to the same blocks; whoever writes first into a half-filled
 * block that is not his alone (or that the index may hand out) takes a copy.
 *
 * Eviction frees tails: a block may go when every branch that refers to it is
 * unpinned and has it as its last one. What remains of a branch is then still
 * a prefix of its tokens, so a branch is never torn.
 */
#include "tree.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "policy/rsbcm.h"

struct rk_branch {
    rk_branch_facts facts;      /* first: rk_look */
    rk_branch *next, *previous; /* the tree's list of live branches */
    int32_t *tokens, *blocks;   /* owned; facts has them, too */
    int32_t tokens_capacity, blocks_capacity;
    int32_t n_published; /* leading blocks that the index knows */
    uint64_t last_use;   /* session's step counter */
    rk_probe_memory memory;
};

/* Grow *array of int32 to hold n entries, by doubling. */
static rk_status grow(int32_t **array, int32_t *capacity, int32_t n,
                      rk_error *err)
{
    if (n <= *capacity) {
        return RK_OK;
    }
    int64_t wanted = *capacity < 16 ? 16 : (int64_t)*capacity * 2;
    wanted = wanted < n ? n : wanted;
    wanted = wanted > INT32_MAX ? INT32_MAX : wanted;
    int32_t *grown = realloc(*array, (size_t)wanted * sizeof **array);
    if (grown == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for a branch of %lld tokens",
                       (long long)n);
    }
    *array = grown;
    *capacity = (int32_t)wanted;
    return RK_OK;
}

static rk_status grow_tokens(rk_branch *branch, int32_t n, rk_error *err)
{
    rk_status status = grow(&branch->tokens, &branch->tokens_capacity, n, err);
    branch->facts.tokens = branch->tokens;
    return status;
}

static rk_status grow_blocks(rk_branch *branch, int32_t n, rk_error *err)
{
    rk_status status = grow(&branch->blocks, &branch->blocks_capacity, n, err);
    branch->facts.blocks = branch->blocks;
    return status;
}

/* memcpy that takes NULL where there is nothing to copy. */
static void copy(int32_t *to, const int32_t *from, int32_t n)
{
    if (n > 0) {
        memcpy(to, from, (size_t)n * sizeof *to);
    }
}

/* splitmix64's finaliser: streams of siblings must not resemble each other. */
static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* ---- life ---------------------------------------------------------------- */

static void branch_free(rk_branch *branch)
{
    if (branch != NULL) {
        free(branch->tokens);
        free(branch->blocks);
        free(branch->memory.means);
        free(branch);
    }
}

static rk_branch *branch_new(int32_t n_tokens, int32_t n_blocks, rk_error *err)
{
    rk_branch *branch = calloc(1, sizeof *branch);
    if (branch == NULL) {
        rk_fail(err, RK_ENOMEM, "no memory for a branch");
        return NULL;
    }
    if (grow_tokens(branch, n_tokens, err) ||
        grow_blocks(branch, n_blocks, err)) {
        branch_free(branch);
        return NULL;
    }
    branch->facts.score = branch->facts.confidence = NAN;
    return branch;
}

static void tree_link(rk_tree *tree, rk_branch *branch)
{
    branch->facts.id = ++tree->next_id;
    branch->next = tree->first;
    if (tree->first != NULL) {
        tree->first->previous = branch;
    }
    tree->first = branch;
    tree->n_branches++;
}

/* Eviction must not allocate: its scratch grows with the tree. */
static rk_status tree_room(rk_tree *tree, rk_error *err)
{
    if (tree->n_branches < tree->tails_capacity) {
        return RK_OK;
    }
    if (tree->tail_of == NULL) {
        tree->tail_of =
            calloc((size_t)rk_kv_count(tree->kv).total, sizeof *tree->tail_of);
        if (tree->tail_of == NULL) {
            return rk_fail(err, RK_ENOMEM, "no memory for a branch");
        }
    }
    int32_t wanted = tree->tails_capacity < 32 ? 32 : tree->tails_capacity * 2;
    rk_tail *grown = realloc(tree->tails, (size_t)wanted * sizeof *grown);
    if (grown == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for another branch");
    }
    tree->tails = grown;
    tree->tails_capacity = wanted;
    return RK_OK;
}

void rk_tree_free(rk_tree *tree)
{
    while (tree->first != NULL) {
        rk_tree_drop(tree, tree->first);
    }
    free(tree->tails);
    free(tree->tail_of);
    tree->tails = NULL;
    tree->tail_of = NULL;
    tree->tails_capacity = 0;
}

rk_status rk_tree_add(rk_tree *tree, rk_branch **out, const int32_t *tokens,
                      int32_t n_tokens, int32_t *n_reused, rk_error *err)
{
    *out = NULL;
    rk_status status = tree_room(tree, err);
    if (status != RK_OK) {
        return status;
    }
    rk_branch *branch =
        branch_new(n_tokens, rk_tree_blocks_of(tree, n_tokens), err);
    if (branch == NULL) {
        return RK_ENOMEM;
    }
    copy(branch->tokens, tokens, n_tokens);
    branch->facts.n_tokens = branch->facts.n_prompt = n_tokens;
    tree_link(tree, branch);
    *n_reused = rk_tree_revive(tree, branch);
    *out = branch;
    return RK_OK;
}

rk_status rk_tree_fork(rk_tree *tree, rk_branch **out, rk_branch *parent,
                       int32_t at, const int32_t *suffix, int32_t n_suffix,
                       int32_t ordinal, rk_error *err)
{
    *out = NULL;
    rk_status status = tree_room(tree, err);
    if (status != RK_OK) {
        return status;
    }
    int32_t n_shared =
        at < parent->facts.n_computed ? at : parent->facts.n_computed;
    int32_t n_blocks = rk_tree_blocks_of(tree, n_shared);
    rk_branch *child = branch_new(at + n_suffix, n_blocks, err);
    if (child == NULL) {
        return RK_ENOMEM;
    }
    copy(child->tokens, parent->facts.tokens, at);
    copy(child->tokens + at, suffix, n_suffix);
    child->facts.n_tokens = child->facts.n_prompt = at + n_suffix;
    child->facts.n_computed = child->facts.n_ever = n_shared;
    for (int32_t i = 0; i < n_blocks; i++) {
        child->blocks[i] = parent->facts.blocks[i];
        rk_kv_ref(tree->kv, child->facts.blocks[i]);
    }
    int32_t n_full = n_shared / tree->block_tokens;
    child->facts.n_blocks = n_blocks;
    child->n_published =
        n_full < parent->n_published ? n_full : parent->n_published;
    child->facts.parent_id = parent->facts.id;
    child->facts.depth = parent->facts.depth + 1;
    child->facts.stream = mix(parent->facts.stream ^ mix((uint64_t)ordinal));
    child->facts.approximate = parent->facts.approximate;
    child->last_use = parent->last_use;
    tree_link(tree, child);
    *out = child;
    return RK_OK;
}

void rk_tree_drop(rk_tree *tree, rk_branch *branch)
{
    rk_tree_release(tree, branch, 0);
    if (branch->previous != NULL) {
        branch->previous->next = branch->next;
    } else {
        tree->first = branch->next;
    }
    if (branch->next != NULL) {
        branch->next->previous = branch->previous;
    }
    tree->n_branches--;
    branch_free(branch);
}

/* ---- tokens -------------------------------------------------------------- */

rk_status rk_branch_append(rk_branch *branch, const int32_t *tokens,
                           int32_t n_tokens, rk_error *err)
{
    if (n_tokens > INT32_MAX - branch->facts.n_tokens) {
        return rk_fail(err, RK_EVALUE, "tokens: too many for one branch");
    }
    rk_status status =
        grow_tokens(branch, branch->facts.n_tokens + n_tokens, err);
    if (status == RK_OK) {
        copy(branch->tokens + branch->facts.n_tokens, tokens, n_tokens);
        branch->facts.n_tokens += n_tokens;
    }
    return status;
}

void rk_tree_truncate(rk_tree *tree, rk_branch *branch, int32_t n_tokens)
{
    if (n_tokens >= branch->facts.n_tokens) {
        return; /* it is that short already */
    }
    if (n_tokens < branch->facts.n_computed) {
        rk_tree_release(tree, branch, n_tokens);
    }
    branch->facts.n_tokens = n_tokens;
    if (branch->facts.n_ever > n_tokens) {
        branch->facts.n_ever = n_tokens;
    }
    if (branch->memory.end > n_tokens) {
        rk_branch_remember(branch, (rk_probe_memory){0});
    }
}

int32_t rk_branch_end(rk_branch *branch, int32_t n_tokens)
{
    int32_t was = branch->facts.n_tokens;
    branch->facts.n_tokens = n_tokens;
    return was;
}

/* ---- notes --------------------------------------------------------------- */

void rk_branch_pin(rk_branch *branch)
{
    branch->facts.pins++;
}

void rk_branch_unpin(rk_branch *branch)
{
    branch->facts.pins--;
}

void rk_branch_use(rk_branch *branch, uint64_t clock)
{
    branch->last_use = clock;
}

void rk_branch_submit(rk_branch *branch, uint64_t request)
{
    branch->facts.busy = true;
    branch->facts.request = request;
    branch->facts.n_requests++;
}

void rk_branch_retire(rk_branch *branch)
{
    branch->facts.busy = false;
}

void rk_branch_unname(rk_branch *branch)
{
    branch->facts.n_requests--;
}

void rk_branch_set_score(rk_branch *branch, double score)
{
    branch->facts.score = score;
}

void rk_branch_set_confidence(rk_branch *branch, double confidence)
{
    branch->facts.confidence = confidence;
}

void rk_branch_set_stream(rk_branch *branch, uint64_t stream)
{
    branch->facts.stream = stream;
}

void rk_branch_set_approximate(rk_branch *branch)
{
    branch->facts.approximate = true;
}

void rk_branch_set_prompt(rk_branch *branch)
{
    branch->facts.n_prompt = branch->facts.n_tokens;
}

void rk_branch_remember(rk_branch *branch, rk_probe_memory memory)
{
    free(branch->memory.means);
    branch->memory = memory;
}

const rk_probe_memory *rk_branch_memory(const rk_branch *branch)
{
    return &branch->memory;
}

/* ---- blocks -------------------------------------------------------------- */

void rk_branch_stage(rk_branch *branch, int32_t position)
{
    branch->facts.n_computed = position;
}

void rk_tree_forget(rk_tree *tree)
{
    for (rk_branch *b = tree->first; b != NULL; b = b->next) {
        rk_tree_release(tree, b, 0);
        rk_branch_remember(b, (rk_probe_memory){0});
    }
}

void rk_tree_release(rk_tree *tree, rk_branch *branch, int32_t n_computed)
{
    int32_t keep = rk_tree_blocks_of(tree, n_computed);
    while (branch->facts.n_blocks > keep) {
        rk_kv_unref(tree->kv, branch->facts.blocks[--branch->facts.n_blocks]);
    }
    if (branch->facts.n_computed > n_computed) {
        branch->facts.n_computed = n_computed;
    }
    int32_t n_full = branch->facts.n_computed / tree->block_tokens;
    if (branch->n_published > n_full) {
        branch->n_published = n_full;
    }
}

int32_t rk_tree_revive(rk_tree *tree, rk_branch *branch)
{
    /* The last token is always computed: its row gives the distribution. */
    int32_t limit = (branch->facts.n_tokens - 1) / tree->block_tokens;
    int32_t have = branch->facts.n_computed / tree->block_tokens;
    rk_error ignored;
    if (!tree->indexed || limit <= have ||
        grow_blocks(branch, limit, &ignored) != RK_OK) {
        return 0;
    }
    int32_t found = rk_kv_lookup(tree->kv, branch->facts.tokens,
                                 branch->facts.n_tokens, limit);
    if (found <= have) {
        return 0;
    }
    int32_t before = branch->facts.n_computed;
    rk_tree_release(tree, branch, 0);
    branch->facts.n_blocks =
        rk_kv_match(tree->kv, branch->facts.tokens, branch->facts.n_tokens,
                    branch->blocks, limit);
    branch->n_published = branch->facts.n_blocks;
    branch->facts.n_computed = branch->facts.n_blocks * tree->block_tokens;
    if (branch->facts.n_ever < branch->facts.n_computed) {
        branch->facts.n_ever = branch->facts.n_computed;
    }
    return branch->facts.n_computed - before;
}

/* The block that a write at n_computed falls into, when it is half-filled and
 * may not be overwritten for `writers` branches; else NULL. */
static int32_t *foreign_tail(const rk_tree *tree, const rk_branch *branch,
                             int32_t writers)
{
    if (branch->facts.n_computed % tree->block_tokens == 0) {
        return NULL;
    }
    int32_t *tail =
        &branch->blocks[branch->facts.n_computed / tree->block_tokens];
    return rk_kv_writable(tree->kv, *tail, writers) ? NULL : tail;
}

int32_t rk_tree_blocks_needed(const rk_tree *tree, const rk_branch *branch,
                              int32_t n_tokens, int32_t writers)
{
    if (n_tokens <= branch->facts.n_computed) {
        return 0;
    }
    int32_t more = rk_tree_blocks_of(tree, n_tokens) - branch->facts.n_blocks;
    return (more > 0 ? more : 0) +
           (foreign_tail(tree, branch, writers) != NULL ? 1 : 0);
}

rk_status rk_tree_reserve(rk_tree *tree, rk_branch *branch, int32_t n_tokens,
                          int32_t writers, int32_t *copy_from, int32_t *copy_to,
                          rk_error *err)
{
    *copy_from = *copy_to = -1;
    int32_t n_blocks = rk_tree_blocks_of(tree, n_tokens);
    rk_status status = grow_blocks(branch, n_blocks, err);
    if (status != RK_OK) {
        return status;
    }
    int32_t needed = rk_tree_blocks_needed(tree, branch, n_tokens, writers);
    if (rk_kv_count(tree->kv).free < needed) {
        return rk_fail(err, RK_ECAPACITY, "no free KV block");
    }
    int32_t *tail = needed > 0 ? foreign_tail(tree, branch, writers) : NULL;
    if (tail != NULL) {
        *copy_from = *tail;
        *copy_to = rk_kv_alloc(tree->kv);
        rk_kv_unref(tree->kv, *tail);
        *tail = *copy_to;
    }
    while (branch->facts.n_blocks < n_blocks) {
        branch->blocks[branch->facts.n_blocks++] = rk_kv_alloc(tree->kv);
    }
    return RK_OK;
}

void rk_tree_commit(rk_tree *tree, rk_branch *branch, int32_t n_computed)
{
    branch->facts.n_computed = n_computed;
    if (branch->facts.n_ever < n_computed) {
        branch->facts.n_ever = n_computed;
    }
    if (branch->facts.approximate || !tree->indexed) {
        return;
    }
    int32_t n_full = n_computed / tree->block_tokens;
    for (int32_t i = branch->n_published; i < n_full; i++) {
        int32_t *block = &branch->blocks[i];
        int32_t equal = rk_kv_publish(tree->kv, i > 0 ? block[-1] : -1, *block,
                                      branch->facts.tokens +
                                          (size_t)i * tree->block_tokens);
        if (equal != *block) { /* somebody computed the same beside us */
            rk_kv_ref(tree->kv, equal);
            rk_kv_unref(tree->kv, *block);
            *block = equal;
        }
    }
    branch->n_published = n_full;
}

void rk_tree_follow(rk_tree *tree, rk_branch *branch, const rk_branch *leader,
                    int32_t n_computed)
{
    int32_t n_blocks = rk_tree_blocks_of(tree, n_computed);
    rk_error ignored;
    if (grow_blocks(branch, n_blocks, &ignored) != RK_OK) {
        return; /* it computes its own when it is needed */
    }
    for (int32_t i = 0; i < n_blocks; i++) {
        rk_kv_ref(tree->kv, leader->facts.blocks[i]);
    }
    while (branch->facts.n_blocks > 0) {
        rk_kv_unref(tree->kv, branch->facts.blocks[--branch->facts.n_blocks]);
    }
    copy(branch->blocks, leader->facts.blocks, n_blocks);
    branch->facts.n_blocks = n_blocks;
    rk_tree_commit(tree, branch, n_computed);
}

/* ---- eviction ------------------------------------------------------------ */

static bool evictable(const rk_branch *branch)
{
    return branch->facts.pins == 0 && branch->facts.n_blocks > 0;
}

static int32_t tail_block(const rk_branch *branch)
{
    return branch->facts.blocks[branch->facts.n_blocks - 1];
}

/* The tails of all unpinned branches; a block is worth what its best branch
 * is worth. */
static int32_t tails_collect(rk_tree *tree)
{
    int32_t n = 0;
    for (rk_branch *b = tree->first; b != NULL; b = b->next) {
        if (!evictable(b)) {
            continue;
        }
        int32_t *place = &tree->tail_of[tail_block(b)];
        double omega =
            rk_rsbcm_omega(b->facts.score, b->facts.confidence, b->facts.depth);
        if (*place == 0) {
            rk_candidate rank = {
                .omega = omega, .last_use = b->last_use, .id = b->facts.id};
            tree->tails[n++] = (rk_tail){tail_block(b), 1, b, rank};
            *place = n;
            continue;
        }
        rk_tail *tail = &tree->tails[*place - 1];
        rk_candidate *rank = &tail->rank;
        tail->n_branches++;
        rank->omega = fmax(rank->omega, omega);
        rank->last_use =
            rank->last_use < b->last_use ? b->last_use : rank->last_use;
        rank->id = rank->id > b->facts.id ? b->facts.id : rank->id;
    }
    return n;
}

/* Free the tail block that leaves first; false when every block is needed. */
static bool evict_one(rk_tree *tree)
{
    int32_t n = tails_collect(tree);
    const rk_tail *best = NULL;
    for (int32_t i = 0; i < n; i++) {
        const rk_tail *tail = &tree->tails[i];
        bool whole = rk_kv_refs(tree->kv, tail->block) == tail->n_branches;
        if (whole &&
            (best == NULL || rk_rsbcm_before(&tail->rank, &best->rank))) {
            best = tail;
        }
        tree->tail_of[tail->block] = 0;
    }
    rk_branch *b = best != NULL ? best->first : NULL;
    for (int32_t left = best != NULL ? best->n_branches : 0; left > 0;
         b = b->next) {
        if (evictable(b) && tail_block(b) == best->block) {
            rk_tree_release(tree, b,
                            (b->facts.n_blocks - 1) * tree->block_tokens);
            left--;
        }
    }
    tree->evictions += best != NULL;
    return best != NULL;
}

bool rk_tree_evict(rk_tree *tree, int32_t n_blocks)
{
    while (rk_kv_count(tree->kv).free < n_blocks) {
        if (!evict_one(tree)) {
            return false;
        }
    }
    return true;
}

void rk_tree_yield(rk_tree *tree, const rk_branch *branch, int32_t writers)
{
    for (rk_branch *b = tree->first; b != NULL; b = b->next) {
        if (b->facts.pins == 0) {
            rk_tree_release(tree, b, 0);
        }
    }
    const int32_t *tail = foreign_tail(tree, branch, writers);
    if (tail != NULL && rk_kv_refs(tree->kv, *tail) == writers) {
        rk_kv_withdraw(tree->kv, *tail);
    }
}

/* (Un)mark the blocks of all pinned branches; how many blocks that changed. */
static int32_t mark_pinned(const rk_tree *tree, bool mark)
{
    int32_t n = 0;
    for (const rk_branch *b = tree->first; b != NULL; b = b->next) {
        for (int32_t i = 0; b->facts.pins > 0 && i < b->facts.n_blocks; i++) {
            n += rk_kv_mark(tree->kv, b->facts.blocks[i], mark);
        }
    }
    return n;
}

int32_t rk_tree_available(const rk_tree *tree)
{
    mark_pinned(tree, true);
    return rk_kv_count(tree->kv).total - mark_pinned(tree, false);
}

/* ---- books --------------------------------------------------------------- */

void rk_tree_count(const rk_tree *tree, int32_t *n_busy, int32_t *n_pins)
{
    *n_busy = *n_pins = 0;
    for (const rk_branch *b = tree->first; b != NULL; b = b->next) {
        *n_busy += b->facts.busy;
        *n_pins += b->facts.pins;
    }
}

rk_status rk_tree_check(const rk_tree *tree, rk_error *err)
{
    int32_t total = rk_kv_count(tree->kv).total;
    int32_t *refs = calloc((size_t)total, sizeof *refs);
    if (refs == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory to recount %d blocks",
                       (int)total);
    }
    rk_status status = RK_OK;
    int32_t n_branches = 0;
    for (const rk_branch *b = tree->first; b != NULL; b = b->next) {
        n_branches++;
        if (b->facts.n_blocks != rk_tree_blocks_of(tree, b->facts.n_computed) ||
            b->facts.n_computed > b->facts.n_tokens ||
            b->n_published > b->facts.n_computed / tree->block_tokens) {
            status = rk_fail(
                err, RK_ESTATE, "branch %llu: %d blocks for %d of %d tokens",
                (unsigned long long)b->facts.id, (int)b->facts.n_blocks,
                (int)b->facts.n_computed, (int)b->facts.n_tokens);
        }
        for (int32_t i = 0; i < b->facts.n_blocks; i++) {
            refs[b->facts.blocks[i]]++;
        }
    }
    if (status == RK_OK && n_branches != tree->n_branches) {
        status = rk_fail(err, RK_ESTATE, "%d branches are listed, %d counted",
                         (int)n_branches, (int)tree->n_branches);
    }
    if (status == RK_OK) {
        status = rk_kv_check(tree->kv, refs, err);
    }
    free(refs);
    return status;
}
