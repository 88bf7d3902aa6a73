/* Blocks of the KV pool: who holds them, and which token histories they hold.
 *
 * A block is in one of four states, told by three facts about it:
 *
 *     untouched   block >= n_touched
 *     free        refs == 0, not indexed    on the LIFO list `freed`
 *     cached      refs == 0, indexed        on the list oldest .. newest
 *     used        refs > 0
 *
 * The index is a chained hash table of entries
 *
 *     (identity of the block before, this block's tokens) -> block
 *
 * where an identity is a number from a 64-bit counter that stands for one
 * whole token history. Equal identities therefore mean equal histories: the
 * first block's `before` is ROOT, and each further one compares all its tokens
 * and the identity of the one before. The hash only picks the chain.
 *
 * Blocks link to each other by block + 1, so that 0 is "none" and the zeroed
 * memory of calloc is a valid empty pool: a large one costs nothing until its
 * blocks are used.
 */
#include "kv.h"

#include <stdlib.h>
#include <string.h>

/* Identities that are no history. */
#define UNKNOWN UINT64_C(0) /* not published (yet) */
#define ROOT UINT64_C(1)    /* what comes before position 0 */
#define FIRST_HISTORY UINT64_C(2)
#define BARRED UINT64_MAX /* in use when the index was forgotten */

typedef struct block {
    uint64_t identity; /* of the history up to this block's end */
    uint64_t before;   /* of the history up to its start; where indexed */
    int32_t refs;
    int32_t next;         /* in its chain, or in `freed`; block + 1 */
    int32_t older, newer; /* neighbours among the cached; block + 1 */
    bool indexed;         /* owns an entry */
    bool marked;          /* the caller's business */
} block;

struct rk_kv {
    int32_t n_blocks, block_tokens;
    block *blocks;     /* (n_blocks,) */
    int32_t *tokens;   /* (n_blocks, block_tokens), where indexed */
    int32_t *chains;   /* (chain_mask + 1,) first entry; block + 1 */
    size_t chain_mask; /* a power of two, minus 1 */
    uint64_t hash_mask;
    uint64_t next_identity;
    int32_t n_touched;      /* blocks at and above were never handed out */
    int32_t freed;          /* block + 1 */
    int32_t oldest, newest; /* of the cached; block + 1 */
    int32_t n_used, n_cached, n_shared, peak_used;
    int64_t n_reclaimed;
};

/* ---- life ---------------------------------------------------------------- */

rk_status rk_kv_create(rk_kv **out, int32_t n_blocks, int32_t block_tokens,
                       int hash_bits, rk_error *err)
{
    *out = NULL;
    if (n_blocks < 1 || n_blocks == INT32_MAX) {
        return rk_fail(err, RK_EVALUE, "n_blocks: %d is not in 1 .. %d",
                       (int)n_blocks, (int)(INT32_MAX - 1));
    }
    if (block_tokens < 1) {
        return rk_fail(err, RK_EVALUE, "block_tokens: %d is less than 1",
                       (int)block_tokens);
    }
    if (hash_bits < 0 || hash_bits > 64) {
        return rk_fail(err, RK_EVALUE, "hash_bits: %d is not in 0 .. 64",
                       hash_bits);
    }
    rk_kv *kv = calloc(1, sizeof *kv);
    if (kv == NULL) {
        goto fail;
    }
    size_t n_chains = 1;
    while (n_chains < (size_t)n_blocks) {
        n_chains *= 2;
    }
    kv->n_blocks = n_blocks;
    kv->block_tokens = block_tokens;
    kv->chain_mask = n_chains - 1;
    kv->hash_mask =
        hash_bits == 64 ? UINT64_MAX : (UINT64_C(1) << hash_bits) - 1;
    kv->next_identity = FIRST_HISTORY;
    kv->blocks = calloc((size_t)n_blocks, sizeof *kv->blocks);
    kv->tokens =
        calloc((size_t)n_blocks, (size_t)block_tokens * sizeof *kv->tokens);
    kv->chains = calloc(n_chains, sizeof *kv->chains);
    if (kv->blocks == NULL || kv->tokens == NULL || kv->chains == NULL) {
        goto fail;
    }
    *out = kv;
    return RK_OK;

fail:
    rk_kv_free(kv);
    return rk_fail(err, RK_ENOMEM,
                   "kv_bytes: no memory for the books of %d KV blocks",
                   (int)n_blocks);
}

void rk_kv_free(rk_kv *kv)
{
    if (kv != NULL) {
        free(kv->chains);
        free(kv->tokens);
        free(kv->blocks);
        free(kv);
    }
}

/* ---- the index ----------------------------------------------------------- */

static int32_t *tokens_of(const rk_kv *kv, int32_t id)
{
    return kv->tokens + (size_t)id * (size_t)kv->block_tokens;
}

/* The head of the chain that an entry belongs to. */
static int32_t *chain_of(const rk_kv *kv, uint64_t before,
                         const int32_t *tokens)
{
    uint64_t hash = before;
    for (int32_t i = 0; i < kv->block_tokens; i++) {
        hash = (hash ^ (uint32_t)tokens[i]) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 32;
    }
    return &kv->chains[(size_t)(hash & kv->hash_mask) & kv->chain_mask];
}

/* The block that holds this history, or -1. */
static int32_t find(const rk_kv *kv, uint64_t before, const int32_t *tokens)
{
    size_t bytes = (size_t)kv->block_tokens * sizeof *tokens;
    int32_t link = *chain_of(kv, before, tokens);
    while (link != 0) {
        const block *b = &kv->blocks[link - 1];
        if (b->before == before &&
            memcmp(tokens_of(kv, link - 1), tokens, bytes) == 0) {
            return link - 1;
        }
        link = b->next;
    }
    return -1;
}

static void index_add(rk_kv *kv, int32_t id, uint64_t before,
                      const int32_t *tokens)
{
    block *b = &kv->blocks[id];
    int32_t *head = chain_of(kv, before, tokens);
    memcpy(tokens_of(kv, id), tokens,
           (size_t)kv->block_tokens * sizeof *tokens);
    b->before = before;
    b->indexed = true;
    b->next = *head;
    *head = id + 1;
}

static void index_remove(rk_kv *kv, int32_t id)
{
    block *b = &kv->blocks[id];
    int32_t *link = chain_of(kv, b->before, tokens_of(kv, id));
    while (*link != id + 1) {
        link = &kv->blocks[*link - 1].next;
    }
    *link = b->next;
    b->indexed = false;
}

/* ---- the lists of free and cached blocks --------------------------------- */

static void freed_push(rk_kv *kv, int32_t id)
{
    kv->blocks[id].identity = UNKNOWN;
    kv->blocks[id].next = kv->freed;
    kv->freed = id + 1;
}

static void cached_push(rk_kv *kv, int32_t id)
{
    block *b = &kv->blocks[id];
    b->older = kv->newest;
    b->newer = 0;
    *(b->older ? &kv->blocks[b->older - 1].newer : &kv->oldest) = id + 1;
    kv->newest = id + 1;
    kv->n_cached++;
}

static void cached_remove(rk_kv *kv, int32_t id)
{
    block *b = &kv->blocks[id];
    *(b->older ? &kv->blocks[b->older - 1].newer : &kv->oldest) = b->newer;
    *(b->newer ? &kv->blocks[b->newer - 1].older : &kv->newest) = b->older;
    kv->n_cached--;
}

/* ---- references ---------------------------------------------------------- */

int32_t rk_kv_alloc(rk_kv *kv)
{
    int32_t id;
    if (kv->freed != 0) {
        id = kv->freed - 1;
        kv->freed = kv->blocks[id].next;
    } else if (kv->n_touched < kv->n_blocks) {
        id = kv->n_touched++;
    } else if (kv->oldest != 0) {
        id = kv->oldest - 1;
        cached_remove(kv, id);
        index_remove(kv, id);
        kv->n_reclaimed++;
    } else {
        return -1;
    }
    kv->blocks[id].identity = UNKNOWN;
    rk_kv_ref(kv, id);
    return id;
}

void rk_kv_ref(rk_kv *kv, int32_t id)
{
    block *b = &kv->blocks[id];
    if (b->refs == 0) {
        if (b->indexed) {
            cached_remove(kv, id);
        }
        kv->n_used++;
        if (kv->n_used > kv->peak_used) {
            kv->peak_used = kv->n_used;
        }
    } else if (b->refs == 1) {
        kv->n_shared++;
    }
    b->refs++;
}

void rk_kv_unref(rk_kv *kv, int32_t id)
{
    block *b = &kv->blocks[id];
    b->refs--;
    if (b->refs == 1) {
        kv->n_shared--;
    } else if (b->refs == 0) {
        kv->n_used--;
        if (b->indexed) {
            cached_push(kv, id);
        } else {
            freed_push(kv, id);
        }
    }
}

int32_t rk_kv_refs(const rk_kv *kv, int32_t id)
{
    return kv->blocks[id].refs;
}

bool rk_kv_mark(rk_kv *kv, int32_t id, bool mark)
{
    bool changed = kv->blocks[id].marked != mark;
    kv->blocks[id].marked = mark;
    return changed;
}

bool rk_kv_writable(const rk_kv *kv, int32_t id, int32_t holders)
{
    const block *b = &kv->blocks[id];
    return b->refs == holders &&
           (b->identity == UNKNOWN || b->identity == BARRED);
}

void rk_kv_withdraw(rk_kv *kv, int32_t id)
{
    if (kv->blocks[id].indexed) {
        index_remove(kv, id);
    }
    kv->blocks[id].identity = UNKNOWN;
}

/* ---- histories ----------------------------------------------------------- */

int32_t rk_kv_publish(rk_kv *kv, int32_t before, int32_t id,
                      const int32_t *tokens)
{
    block *b = &kv->blocks[id];
    uint64_t history = before < 0 ? ROOT : kv->blocks[before].identity;
    if (history == UNKNOWN || history == BARRED || b->identity != UNKNOWN) {
        return id;
    }
    int32_t twin = find(kv, history, tokens);
    if (twin < 0) {
        b->identity = kv->next_identity++;
        index_add(kv, id, history, tokens);
        return id;
    }
    b->identity = kv->blocks[twin].identity;
    if (kv->blocks[twin].refs > 0) {
        return twin;
    }
    /* Two copies and nobody reads the cached one: keep the one in use. */
    cached_remove(kv, twin);
    index_remove(kv, twin);
    freed_push(kv, twin);
    index_add(kv, id, history, tokens);
    return id;
}

/* The walk of match and lookup; blocks NULL: only count. */
static int32_t walk(rk_kv *kv, const int32_t *tokens, int32_t n_tokens,
                    int32_t *blocks, int32_t max_blocks)
{
    int32_t n = 0, limit = n_tokens / kv->block_tokens;
    if (limit > max_blocks) {
        limit = max_blocks;
    }
    for (uint64_t history = ROOT; n < limit; n++) {
        int32_t id =
            find(kv, history, tokens + (size_t)n * (size_t)kv->block_tokens);
        if (id < 0) {
            break;
        }
        if (blocks != NULL) {
            rk_kv_ref(kv, id);
            blocks[n] = id;
        }
        history = kv->blocks[id].identity;
    }
    return n;
}

int32_t rk_kv_match(rk_kv *kv, const int32_t *tokens, int32_t n_tokens,
                    int32_t *blocks, int32_t max_blocks)
{
    return walk(kv, tokens, n_tokens, blocks, max_blocks);
}

int32_t rk_kv_lookup(rk_kv *kv, const int32_t *tokens, int32_t n_tokens,
                     int32_t max_blocks)
{
    return walk(kv, tokens, n_tokens, NULL, max_blocks);
}

void rk_kv_forget(rk_kv *kv)
{
    for (int32_t id = 0; id < kv->n_touched; id++) {
        block *b = &kv->blocks[id];
        if (b->indexed) {
            /* Every entry goes, so whole chains may. */
            *chain_of(kv, b->before, tokens_of(kv, id)) = 0;
            b->indexed = false;
            if (b->refs == 0) {
                cached_remove(kv, id);
                freed_push(kv, id);
            }
        }
        if (b->refs > 0) {
            b->identity = BARRED;
        }
    }
}

/* ---- counts -------------------------------------------------------------- */

rk_kv_counts rk_kv_count(const rk_kv *kv)
{
    return (rk_kv_counts){
        .total = kv->n_blocks,
        .used = kv->n_used,
        .free = kv->n_blocks - kv->n_used,
        .cached = kv->n_cached,
        .shared = kv->n_shared,
        .peak_used = kv->peak_used,
        .reclaimed = kv->n_reclaimed,
    };
}

/* What a walk over everything finds; `seen` counts visits on the two lists of
 * blocks without references, `found` visits in the chains. */
typedef struct audit {
    const rk_kv *kv;
    uint8_t *seen, *found; /* (n_blocks,) */
    int32_t n_used, n_shared, n_cached, n_freed, n_indexed;
} audit;

/* A link must name a touched block that this walk meets for the first time. */
static bool visit(const audit *a, uint8_t *marks, int32_t link)
{
    return link >= 1 && link <= a->kv->n_touched && marks[link - 1]++ == 0;
}

static rk_status check_lists(audit *a, rk_error *err)
{
    const rk_kv *kv = a->kv;
    for (int32_t link = kv->freed; link != 0;
         link = kv->blocks[link - 1].next) {
        if (!visit(a, a->seen, link)) {
            return rk_fail(err, RK_ESTATE, "KV block %d is free twice",
                           (int)link - 1);
        }
        const block *b = &kv->blocks[link - 1];
        if (b->refs != 0 || b->indexed || b->identity != UNKNOWN) {
            return rk_fail(
                err, RK_ESTATE, "KV block %d is free with %d references%s",
                (int)link - 1, (int)b->refs, b->indexed ? " and an entry" : "");
        }
        a->n_freed++;
    }
    int32_t last = 0;
    for (int32_t link = kv->oldest; link != 0;
         link = kv->blocks[link - 1].newer) {
        if (!visit(a, a->seen, link)) {
            return rk_fail(err, RK_ESTATE, "KV block %d is listed twice",
                           (int)link - 1);
        }
        const block *b = &kv->blocks[link - 1];
        if (b->refs != 0 || !b->indexed || b->older != last) {
            return rk_fail(err, RK_ESTATE,
                           "KV block %d is cached with %d references%s",
                           (int)link - 1, (int)b->refs,
                           b->indexed ? "" : " and without an entry");
        }
        last = link;
        a->n_cached++;
    }
    if (last != kv->newest) {
        return rk_fail(err, RK_ESTATE, "KV block %d is not the newest cached",
                       (int)kv->newest - 1);
    }
    return RK_OK;
}

static rk_status check_chains(audit *a, rk_error *err)
{
    const rk_kv *kv = a->kv;
    for (size_t i = 0; i <= kv->chain_mask; i++) {
        for (int32_t link = kv->chains[i]; link != 0;
             link = kv->blocks[link - 1].next) {
            if (!visit(a, a->found, link)) {
                return rk_fail(err, RK_ESTATE, "KV block %d has two entries",
                               (int)link - 1);
            }
            const block *b = &kv->blocks[link - 1];
            if (!b->indexed ||
                chain_of(kv, b->before, tokens_of(kv, link - 1)) !=
                    &kv->chains[i]) {
                return rk_fail(err, RK_ESTATE,
                               "KV block %d is in a wrong chain",
                               (int)link - 1);
            }
            a->n_indexed++;
        }
    }
    return RK_OK;
}

static rk_status check_blocks(audit *a, const int32_t *refs, rk_error *err)
{
    const rk_kv *kv = a->kv;
    for (int32_t id = 0; id < kv->n_blocks; id++) {
        const block *b = &kv->blocks[id];
        bool listed = a->seen[id] != 0, touched = id < kv->n_touched;
        if (refs != NULL && refs[id] != b->refs) {
            return rk_fail(err, RK_ESTATE,
                           "KV block %d has %d references, %d are held",
                           (int)id, (int)b->refs, (int)refs[id]);
        }
        if (b->refs < 0 || listed != (touched && b->refs == 0)) {
            return rk_fail(err, RK_ESTATE,
                           "KV block %d has %d references and is %s", (int)id,
                           (int)b->refs, listed ? "free" : "not free");
        }
        if (b->indexed != (a->found[id] != 0)) {
            return rk_fail(err, RK_ESTATE, "KV block %d has lost its entry",
                           (int)id);
        }
        a->n_used += b->refs > 0;
        a->n_shared += b->refs > 1;
    }
    return RK_OK;
}

rk_status rk_kv_check(const rk_kv *kv, const int32_t *refs, rk_error *err)
{
    audit a = {.kv = kv};
    rk_status status;
    a.seen = calloc((size_t)kv->n_blocks, 2);
    if (a.seen == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory to check %d KV blocks",
                       (int)kv->n_blocks);
    }
    a.found = a.seen + kv->n_blocks;
    status = check_lists(&a, err);
    if (status == RK_OK) {
        status = check_chains(&a, err);
    }
    if (status == RK_OK) {
        status = check_blocks(&a, refs, err);
    }
    free(a.seen);
    if (status == RK_OK &&
        (a.n_used != kv->n_used || a.n_shared != kv->n_shared ||
         a.n_cached != kv->n_cached || kv->n_used > kv->peak_used ||
         a.n_used + a.n_cached + a.n_freed != kv->n_touched)) {
        status = rk_fail(err, RK_ESTATE,
                         "KV blocks: counted %d used, %d shared, %d cached, "
                         "%d free; the books say %d, %d, %d of %d",
                         (int)a.n_used, (int)a.n_shared, (int)a.n_cached,
                         (int)a.n_freed, (int)kv->n_used, (int)kv->n_shared,
                         (int)kv->n_cached, (int)kv->n_touched);
    }
    return status;
}
