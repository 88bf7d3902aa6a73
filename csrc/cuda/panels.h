/* Panels: rectangles of rows and keys whose blocks all their rows share
 * (panels.c); work.c cuts them into units. */
#ifndef RKSC_CUDA_PANELS_H
#define RKSC_CUDA_PANELS_H

#include "backend.h"

typedef struct rk_panel {
    int32_t row_begin, row_end;
    int32_t key_begin, key_end;
    int32_t last_position; /* the largest of its rows */
    int32_t parent;        /* panel that ends where this begins; -1: none */
    bool gone;             /* became a part of others */
    const int32_t *blocks; /* of a row that uses all keys */
} rk_panel;

typedef struct rk_rank {
    int32_t key_begin, row_begin, id;
} rk_rank;

/* Zeroed at first; grows to the largest batch seen. */
typedef struct rk_panels {
    int32_t block_tokens;
    const rk_batch *batch; /* borrowed while it is cut */
    rk_panel *all;
    int32_t n, room;
    int32_t *open; /* (n_rows,) last panel of each row */
    int32_t open_room;
    rk_rank *ranks; /* (n_ranks,) those not gone, in the order of keys, so that
                     * those above come before those below, then of rows */
    int32_t n_ranks, rank_room;
} rk_panels;

/* Functions that return bool: false, when there is no memory. */

/* Put the batch's segments together. */
bool rk_panels_lay(rk_panels *panels, const rk_batch *batch);
/* List those that are not gone. */
bool rk_panels_rank(rk_panels *panels);
/* One more, of these rows; the rest like `like`. */
bool rk_panels_add(rk_panels *panels, int32_t row_begin, int32_t row_end,
                   const rk_panel *like);
void rk_panels_free(rk_panels *panels);

/* Make *array hold `wanted` items of item_bytes, and twice as many as before
 * when it grows. */
bool rk_reserve(void *array, int32_t *room, int64_t wanted, size_t item_bytes);

static inline int32_t rk_least(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static inline int32_t rk_most(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

#endif
