/* Blocks of the KV pool: reference counts and the exact-prefix index.
 *
 * Integers only: this file never sees a float or a device. A block holds
 * `block_tokens` positions of one token history. It is *used* while a branch
 * refers to it, *cached* when nobody does but the index still finds it, else
 * *free*; cached blocks count as free and are reclaimed, least recently
 * released first, when a free one is wanted. used + free == total, always.
 *
 * The index maps (identity of the block before, this block's tokens) to a
 * block. Identities are never reused and all tokens are compared, so a match
 * means an equal history by induction; the hash only finds candidates.
 * Not thread-safe: the session's lock covers it.
 */
#ifndef RKSC_KV_H
#define RKSC_KV_H

#include "rksc.h"

typedef struct rk_kv rk_kv;

typedef struct rk_kv_counts {
    int32_t total, used, free; /* free includes cached */
    int32_t cached;
    int32_t shared; /* used by two branches or more */
    int32_t peak_used;
    int64_t reclaimed; /* cached blocks given up, since creation */
} rk_kv_counts;

/* hash_bits 0 makes every hash equal (for tests); 64 is the normal value. */
rk_status rk_kv_create(rk_kv **out, int32_t n_blocks, int32_t block_tokens,
                       int hash_bits, rk_error *err);
void rk_kv_free(rk_kv *kv);

/* A block with one reference and unknown content; -1 when none is free.
 * Prefers blocks that were used before to untouched ones (the pool commits
 * memory as it is used), and both to reclaiming a cached one. */
int32_t rk_kv_alloc(rk_kv *kv);
void rk_kv_ref(rk_kv *kv, int32_t block);
/* The last reference makes it cached (if the index knows it) or free. Release
 * a branch's blocks from the last to the first, so that leaves age first. */
void rk_kv_unref(rk_kv *kv, int32_t block);
int32_t rk_kv_refs(const rk_kv *kv, int32_t block);
/* Set or clear a mark of the caller's; was it other than that before? */
bool rk_kv_mark(rk_kv *kv, int32_t block, bool mark);
/* May `holders` branches, which all write the same into it, overwrite it? Not
 * when others hold it, nor when it was published: a branch that was forked or
 * truncated inside a published block has to go on in a copy, even when it is
 * the last one that holds it. */
bool rk_kv_writable(const rk_kv *kv, int32_t block, int32_t holders);
/* Take a block in use out of the index, so that its holders may overwrite it.
 * What was published after it is not found any more. */
void rk_kv_withdraw(rk_kv *kv, int32_t block);

/* Enter a full block into the index. `before` is the preceding block of the
 * same branch (-1 at position 0) and must have been published, else this does
 * nothing. When an equal history is already indexed, the block takes over its
 * identity (its successors are found) without an entry of its own; only where
 * the equal one is cached, the block gets its entry and the cached one becomes
 * free. Returns the equal one in use, else `block`: who refers to that one
 * instead keeps a single copy. */
int32_t rk_kv_publish(rk_kv *kv, int32_t before, int32_t block,
                      const int32_t *tokens);

/* The longest indexed prefix of tokens[0 .. n_tokens), whole blocks, at most
 * max_blocks. Takes a reference on each block found; returns how many. */
int32_t rk_kv_match(rk_kv *kv, const int32_t *tokens, int32_t n_tokens,
                    int32_t *blocks, int32_t max_blocks);

/* How many blocks rk_kv_match would find; takes no reference. */
int32_t rk_kv_lookup(rk_kv *kv, const int32_t *tokens, int32_t n_tokens,
                     int32_t max_blocks);

/* Forget every entry (weights changed): cached blocks become free, and blocks
 * in use now are not indexed any more, nor what follows them. */
void rk_kv_forget(rk_kv *kv);

rk_kv_counts rk_kv_count(const rk_kv *kv);

/* Compare the books with an independent count; refs[block] is what the caller
 * believes (NULL: skip). RK_ESTATE with the first disagreement. O(n_blocks). */
rk_status rk_kv_check(const rk_kv *kv, const int32_t *refs, rk_error *err);

#endif
