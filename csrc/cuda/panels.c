/* From segments to panels as large as can be:
 *
 *   join    a segment that goes on where its rows' panel ends makes it longer;
 *   merge   panels at the border of two chunks become one if they read the
 *           same blocks: whole prompts, and prefixes of many branches.
 *
 * Every (row, key) that attention needs lies in one panel. The panels above a
 * row's last one hold what it shares with others, so they form a tree.
 */
#include "panels.h"

#include <stdlib.h>
#include <string.h>

/* ---- memory -------------------------------------------------------------- */

void rk_panels_free(rk_panels *panels)
{
    free(panels->all);
    free(panels->open);
    free(panels->ranks);
}

bool rk_reserve(void *array, int32_t *room, int64_t wanted, size_t item_bytes)
{
    if (wanted <= *room) {
        return true;
    }
    int64_t size = wanted > 2 * (int64_t)*room ? wanted : 2 * (int64_t)*room;
    void *old, *moved;
    memcpy(&old, array, sizeof old);
    if (size > INT32_MAX ||
        (moved = realloc(old, (size_t)size * item_bytes)) == NULL) {
        return false;
    }
    memcpy(array, &moved, sizeof moved);
    *room = (int32_t)size;
    return true;
}

/* ---- joining ------------------------------------------------------------- */

static int32_t last_position(const rk_panels *panels, int32_t begin,
                             int32_t end)
{
    int32_t last = 0;
    for (int32_t row = begin; row < end; row++) {
        last = rk_most(last, panels->batch->positions[row]);
    }
    return last;
}

bool rk_panels_add(rk_panels *panels, int32_t row_begin, int32_t row_end,
                   const rk_panel *like)
{
    if (!rk_reserve(&panels->all, &panels->room, (int64_t)panels->n + 1,
                    sizeof *panels->all)) {
        return false;
    }
    rk_panel *p = &panels->all[panels->n++];
    *p = *like;
    p->row_begin = row_begin;
    p->row_end = row_end;
    p->last_position = last_position(panels, row_begin, row_end);
    p->gone = false;
    return true;
}

/* The panel that all the segment's rows read up to the segment's keys, or -1.
 */
static int32_t panel_before(const rk_panels *panels, const rk_segment *s)
{
    int32_t id = panels->open[s->row_begin];
    for (int32_t row = s->row_begin + 1; row < s->row_end; row++) {
        if (panels->open[row] != id) {
            return -1;
        }
    }
    return id >= 0 && panels->all[id].key_end == s->key_begin ? id : -1;
}

/* Are the rows of [begin, end) through with their keys at `key`? */
static bool through(const rk_panels *panels, int32_t begin, int32_t end,
                    int32_t key)
{
    return begin >= end || last_position(panels, begin, end) < key;
}

static bool take_segment(rk_panels *panels, const rk_segment *s)
{
    if (s->row_begin >= s->row_end || s->key_begin >= s->key_end) {
        return true;
    }
    int32_t before = panel_before(panels, s);
    if (before >= 0) {
        rk_panel *p = &panels->all[before];
        if (through(panels, p->row_begin, s->row_begin, s->key_begin) &&
            through(panels, s->row_end, p->row_end, s->key_begin)) {
            p->key_end = s->key_end;
            p->blocks = s->blocks;
            return true;
        }
    }
    for (int32_t row = s->row_begin; row < s->row_end; row++) {
        panels->open[row] = panels->n;
    }
    rk_panel fresh = {.key_begin = s->key_begin,
                      .key_end = s->key_end,
                      .parent = before,
                      .blocks = s->blocks};
    return rk_panels_add(panels, s->row_begin, s->row_end, &fresh);
}

/* ---- merging ------------------------------------------------------------- */

static int32_t depth_of(const rk_panels *panels, int32_t id)
{
    int32_t depth = 0;
    for (; id >= 0; id = panels->all[id].parent) {
        depth++;
    }
    return depth;
}

/* The ancestor of panel `id` that is `up` panels above it. */
static int32_t above(const rk_panels *panels, int32_t id, int32_t up)
{
    for (; up > 0; up--) {
        id = panels->all[id].parent;
    }
    return id;
}

/* End of the keys that two panels read from the same blocks; both begin at the
 * same key. */
static int32_t common_end(const rk_panels *panels, const rk_panel *a,
                          const rk_panel *b)
{
    int32_t bt = panels->block_tokens, end = rk_least(a->key_end, b->key_end);
    int32_t block = a->key_begin / bt;
    if (a->blocks == b->blocks) {
        return end;
    }
    while ((int64_t)block * bt < end && a->blocks[block] == b->blocks[block]) {
        block++;
    }
    return rk_least(end, (int32_t)((int64_t)block * bt));
}

/* Give all below panel `from` to `to`. */
static void hand_over(rk_panels *panels, int32_t from, int32_t to)
{
    for (int32_t id = 0; id < panels->n; id++) {
        if (panels->all[id].parent == from) {
            panels->all[id].parent = to;
        }
    }
    for (int32_t r = panels->all[from].row_begin; r < panels->all[from].row_end;
         r++) {
        if (panels->open[r] == from) {
            panels->open[r] = to;
        }
    }
}

/* Cut the keys from `key` on off the panel, into one below it. */
static bool split_panel(rk_panels *panels, int32_t id, int32_t key)
{
    const rk_panel whole = panels->all[id];
    if (!rk_panels_add(panels, whole.row_begin, whole.row_end, &whole)) {
        return false;
    }
    hand_over(panels, id, panels->n - 1);
    panels->all[panels->n - 1].key_begin = key;
    panels->all[panels->n - 1].parent = id;
    panels->all[id].key_end = key;
    return true;
}

/* Panel b, whose rows follow a's, becomes a part of a as far as both read the
 * same keys. *more: all of them, so those below may follow. False: no memory.
 */
static bool merge_panels(rk_panels *panels, int32_t a, int32_t b, bool *more)
{
    const rk_panel *to = &panels->all[a], *from = &panels->all[b];
    *more = false;
    if (to->row_end != from->row_begin || to->key_begin != from->key_begin ||
        to->parent != from->parent) {
        return true;
    }
    int32_t end = common_end(panels, to, from);
    if (end <= to->key_begin) {
        return true;
    }
    /* A panel may be longer than the other one, if the rows of that are
     * through there. */
    bool split_a = end < to->key_end && from->last_position >= end;
    bool split_b = end < from->key_end && to->last_position >= end;
    if ((split_a && !split_panel(panels, a, end)) ||
        (split_b && !split_panel(panels, b, end))) {
        return false;
    }
    rk_panel *p = &panels->all[a], *q = &panels->all[b];
    if (q->key_end > p->key_end) {
        p->key_end = q->key_end;
        p->blocks = q->blocks;
    }
    hand_over(panels, b, a);
    p->row_end = q->row_end;
    p->last_position = rk_most(p->last_position, q->last_position);
    q->gone = true;
    *more = !split_a && !split_b;
    return true;
}

/* Merge panels on both sides of the border before `row`, from the root down.
 */
static bool merge_border(rk_panels *panels, int32_t row)
{
    int32_t left = panels->open[row - 1], right = panels->open[row];
    int32_t n_left = depth_of(panels, left), n_right = depth_of(panels, right);
    bool more = true;
    for (int32_t i = 1; more && i <= rk_least(n_left, n_right); i++) {
        int32_t b = above(panels, right, n_right - i);
        if (!merge_panels(panels, above(panels, left, n_left - i), b, &more)) {
            return false;
        }
        right = panels->open[row];
    }
    return true;
}

bool rk_panels_lay(rk_panels *panels, const rk_batch *batch)
{
    if (!rk_reserve(&panels->open, &panels->open_room, batch->n_rows,
                    sizeof *panels->open)) {
        return false;
    }
    panels->batch = batch;
    panels->n = 0;
    for (int32_t i = 0; i < batch->n_chunks; i++) {
        const rk_chunk *chunk = &batch->chunks[i];
        for (int32_t row = chunk->row_begin; row < chunk->row_end; row++) {
            panels->open[row] = -1;
        }
        for (int32_t s = chunk->segment_begin; s < chunk->segment_end; s++) {
            if (!take_segment(panels, &batch->segments[s])) {
                return false;
            }
        }
        if (chunk->row_begin > 0 && !merge_border(panels, chunk->row_begin)) {
            return false;
        }
    }
    return true;
}

static int by_keys_and_rows(const void *a, const void *b)
{
    const rk_rank *x = a, *y = b;
    if (x->key_begin != y->key_begin) {
        return x->key_begin < y->key_begin ? -1 : 1;
    }
    return x->row_begin < y->row_begin ? -1 : x->row_begin > y->row_begin;
}

bool rk_panels_rank(rk_panels *panels)
{
    if (!rk_reserve(&panels->ranks, &panels->rank_room, panels->n,
                    sizeof *panels->ranks)) {
        return false;
    }
    panels->n_ranks = 0;
    for (int32_t id = 0; id < panels->n; id++) {
        if (!panels->all[id].gone) {
            panels->ranks[panels->n_ranks++] = (rk_rank){
                panels->all[id].key_begin, panels->all[id].row_begin, id};
        }
    }
    qsort(panels->ranks, (size_t)panels->n_ranks, sizeof *panels->ranks,
          by_keys_and_rows);
    return true;
}
