/* From segments to units.
 *
 * A panel is a rectangle of rows and keys whose blocks all its rows share;
 * every (row, key) that attention needs lies in one panel. The batch's
 * segments are put together into panels as large as can be:
 *
 *   join    a segment that goes on where its rows' panel ends makes it longer;
 *   merge   panels at the border of two chunks become one if they read the
 *           same blocks: whole prompts, and prefixes of many branches.
 *
 * The panels above a row's last one hold what it shares with others, so they
 * form a tree. Reading a shared panel once costs each of its rows a partial
 * result more. Where that does not pay, for few keys or few rows, the panel is
 * dissolved into those below it, which then read its keys themselves: the flat
 * form. At last panels are cut into units: rows by what a block of threads
 * holds, keys so that all of the device has work.
 */
#include "work.h"

#include <stdlib.h>
#include <string.h>

typedef struct panel {
    int32_t row_begin, row_end;
    int32_t key_begin, key_end;
    int32_t last_position; /* the largest of its rows */
    int32_t parent;        /* panel that ends where this begins; -1: none */
    bool gone;             /* merged or dissolved */
    const int32_t *blocks; /* of a row that uses all keys */
} panel;

/* Panels in the order of keys, so those above come before those below, then of
 * rows. */
typedef struct rank {
    int32_t key_begin, row_begin, id;
} rank;

struct rk_worker {
    rk_work_rule rule;
    int32_t group;

    const rk_batch *batch; /* being cut */
    int64_t share_keys;    /* the rule in force */
    bool split;            /* keys may be split */
    bool wide;
    int32_t pairs; /* of a unit */

    panel *panels;
    int32_t n_panels, panel_room;
    int32_t *open;        /* (n_rows,) last panel of each row */
    int32_t *first_child; /* (panel_room,) */
    int32_t *sibling;
    rank *ranks; /* (n_ranks,) of the panels that are not gone */
    int32_t n_ranks, rank_room;
    int32_t row_room; /* of open and rows_first */

    rk_work_unit *units;
    int32_t *places, *tables, *rows_first;
    int32_t n_units, n_places, n_tables;
    int32_t unit_room, place_room, table_room;
};

static int32_t least(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static int32_t most(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

static int32_t ceil_div(int32_t a, int32_t b)
{
    return a / b + (a % b != 0);
}

/* ---- life and memory ----------------------------------------------------- */

rk_status rk_worker_create(rk_worker **out, const rk_work_rule *rule,
                           rk_error *err)
{
    *out = NULL;
    rk_worker *worker = calloc(1, sizeof *worker);
    if (worker == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for a list of work");
    }
    worker->rule = *rule;
    worker->group = rule->n_heads / rule->n_kv_heads;
    *out = worker;
    return RK_OK;
}

void rk_worker_free(rk_worker *worker)
{
    if (worker != NULL) {
        free(worker->panels);
        free(worker->open);
        free(worker->first_child);
        free(worker->sibling);
        free(worker->ranks);
        free(worker->units);
        free(worker->places);
        free(worker->tables);
        free(worker->rows_first);
        free(worker);
    }
}

/* Make *array hold `wanted` items, and twice as many as before when it grows.
 */
static bool reserve(void *array, int32_t *room, int64_t wanted,
                    size_t item_bytes)
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

static bool reserve_rows(rk_worker *w, int32_t n_rows)
{
    int32_t open = w->row_room, first = w->row_room;
    if (!reserve(&w->open, &open, (int64_t)n_rows + 1, sizeof *w->open) ||
        !reserve(&w->rows_first, &first, (int64_t)n_rows + 1,
                 sizeof *w->rows_first)) {
        return false;
    }
    w->row_room = open;
    return true;
}

static bool reserve_panels(rk_worker *w, int64_t wanted)
{
    int32_t child = w->panel_room, sibling = w->panel_room;
    return reserve(&w->first_child, &child, wanted, sizeof *w->first_child) &&
           reserve(&w->sibling, &sibling, wanted, sizeof *w->sibling) &&
           reserve(&w->panels, &w->panel_room, wanted, sizeof *w->panels);
}

/* ---- joining ------------------------------------------------------------- */

static int32_t last_position(const rk_worker *w, int32_t begin, int32_t end)
{
    int32_t last = 0;
    for (int32_t row = begin; row < end; row++) {
        last = most(last, w->batch->positions[row]);
    }
    return last;
}

static bool add_panel(rk_worker *w, int32_t row_begin, int32_t row_end,
                      const panel *like)
{
    if (!reserve_panels(w, (int64_t)w->n_panels + 1)) {
        return false;
    }
    panel *p = &w->panels[w->n_panels++];
    *p = *like;
    p->row_begin = row_begin;
    p->row_end = row_end;
    p->last_position = last_position(w, row_begin, row_end);
    p->gone = false;
    return true;
}

/* The panel that all the segment's rows read up to the segment's keys, or -1.
 */
static int32_t panel_before(const rk_worker *w, const rk_segment *s)
{
    int32_t id = w->open[s->row_begin];
    for (int32_t row = s->row_begin + 1; row < s->row_end; row++) {
        if (w->open[row] != id) {
            return -1;
        }
    }
    return id >= 0 && w->panels[id].key_end == s->key_begin ? id : -1;
}

/* Are the rows of [begin, end) through with their keys at `key`? */
static bool through(const rk_worker *w, int32_t begin, int32_t end, int32_t key)
{
    return begin >= end || last_position(w, begin, end) < key;
}

static bool take_segment(rk_worker *w, const rk_segment *s)
{
    if (s->row_begin >= s->row_end || s->key_begin >= s->key_end) {
        return true;
    }
    int32_t before = panel_before(w, s);
    if (before >= 0) {
        panel *p = &w->panels[before];
        if (through(w, p->row_begin, s->row_begin, s->key_begin) &&
            through(w, s->row_end, p->row_end, s->key_begin)) {
            p->key_end = s->key_end;
            p->blocks = s->blocks;
            return true;
        }
    }
    for (int32_t row = s->row_begin; row < s->row_end; row++) {
        w->open[row] = w->n_panels;
    }
    panel fresh = {.key_begin = s->key_begin,
                   .key_end = s->key_end,
                   .parent = before,
                   .blocks = s->blocks};
    return add_panel(w, s->row_begin, s->row_end, &fresh);
}

/* ---- merging ------------------------------------------------------------- */

static int32_t depth_of(const rk_worker *w, int32_t id)
{
    int32_t depth = 0;
    for (; id >= 0; id = w->panels[id].parent) {
        depth++;
    }
    return depth;
}

/* The ancestor of panel `id` that is `up` panels above it. */
static int32_t above(const rk_worker *w, int32_t id, int32_t up)
{
    for (; up > 0; up--) {
        id = w->panels[id].parent;
    }
    return id;
}

/* End of the keys that two panels read from the same blocks; both begin at the
 * same key. */
static int32_t common_end(const rk_worker *w, const panel *a, const panel *b)
{
    int32_t bt = w->rule.block_tokens, end = least(a->key_end, b->key_end);
    int32_t block = a->key_begin / bt;
    if (a->blocks == b->blocks) {
        return end;
    }
    while (block * bt < end && a->blocks[block] == b->blocks[block]) {
        block++;
    }
    return least(end, block * bt);
}

/* Give all below panel `from` to `to`. */
static void hand_over(rk_worker *w, int32_t from, int32_t to)
{
    for (int32_t id = 0; id < w->n_panels; id++) {
        if (w->panels[id].parent == from) {
            w->panels[id].parent = to;
        }
    }
    for (int32_t r = w->panels[from].row_begin; r < w->panels[from].row_end;
         r++) {
        if (w->open[r] == from) {
            w->open[r] = to;
        }
    }
}

/* Cut the keys from `key` on off the panel, into one below it. */
static bool split_panel(rk_worker *w, int32_t id, int32_t key)
{
    const panel whole = w->panels[id];
    if (!add_panel(w, whole.row_begin, whole.row_end, &whole)) {
        return false;
    }
    hand_over(w, id, w->n_panels - 1);
    w->panels[w->n_panels - 1].key_begin = key;
    w->panels[w->n_panels - 1].parent = id;
    w->panels[id].key_end = key;
    return true;
}

/* Panel b, whose rows follow a's, becomes a part of a as far as both read the
 * same keys. *more: all of them, so those below may follow. False: no memory.
 */
static bool merge_panels(rk_worker *w, int32_t a, int32_t b, bool *more)
{
    const panel *to = &w->panels[a], *from = &w->panels[b];
    *more = false;
    if (to->row_end != from->row_begin || to->key_begin != from->key_begin ||
        to->parent != from->parent) {
        return true;
    }
    int32_t end = common_end(w, to, from);
    if (end <= to->key_begin) {
        return true;
    }
    /* A panel may be longer than the other one, if the rows of that are
     * through there. */
    bool split_a = end < to->key_end && from->last_position >= end;
    bool split_b = end < from->key_end && to->last_position >= end;
    if ((split_a && !split_panel(w, a, end)) ||
        (split_b && !split_panel(w, b, end))) {
        return false;
    }
    panel *p = &w->panels[a], *q = &w->panels[b];
    if (q->key_end > p->key_end) {
        p->key_end = q->key_end;
        p->blocks = q->blocks;
    }
    hand_over(w, b, a);
    p->row_end = q->row_end;
    p->last_position = most(p->last_position, q->last_position);
    q->gone = true;
    *more = !split_a && !split_b;
    return true;
}

/* Merge panels on both sides of the border before `row`, from the root down.
 */
static bool merge_border(rk_worker *w, int32_t row)
{
    int32_t left = w->open[row - 1], right = w->open[row];
    int32_t n_left = depth_of(w, left), n_right = depth_of(w, right);
    bool more = true;
    for (int32_t i = 1; more && i <= least(n_left, n_right); i++) {
        int32_t b = above(w, right, n_right - i);
        if (!merge_panels(w, above(w, left, n_left - i), b, &more)) {
            return false;
        }
        right = w->open[row];
    }
    return true;
}

static bool lay_panels(rk_worker *w)
{
    const rk_batch *batch = w->batch;
    w->n_panels = 0;
    for (int32_t i = 0; i < batch->n_chunks; i++) {
        const rk_chunk *chunk = &batch->chunks[i];
        for (int32_t row = chunk->row_begin; row < chunk->row_end; row++) {
            w->open[row] = -1;
        }
        for (int32_t s = chunk->segment_begin; s < chunk->segment_end; s++) {
            if (!take_segment(w, &batch->segments[s])) {
                return false;
            }
        }
        if (chunk->row_begin > 0 && !merge_border(w, chunk->row_begin)) {
            return false;
        }
    }
    return true;
}

static int by_keys_and_rows(const void *a, const void *b)
{
    const rank *x = a, *y = b;
    if (x->key_begin != y->key_begin) {
        return x->key_begin < y->key_begin ? -1 : 1;
    }
    return x->row_begin < y->row_begin ? -1 : x->row_begin > y->row_begin;
}

static bool rank_panels(rk_worker *w)
{
    if (!reserve(&w->ranks, &w->rank_room, w->n_panels, sizeof *w->ranks)) {
        return false;
    }
    w->n_ranks = 0;
    for (int32_t id = 0; id < w->n_panels; id++) {
        if (!w->panels[id].gone) {
            w->ranks[w->n_ranks++] =
                (rank){w->panels[id].key_begin, w->panels[id].row_begin, id};
        }
    }
    qsort(w->ranks, (size_t)w->n_ranks, sizeof *w->ranks, by_keys_and_rows);
    return true;
}

/* Wide units where a panel has more pairs than a narrow one holds. */
static void choose_width(rk_worker *w)
{
    int64_t pairs = 0;
    for (int32_t id = 0; id < w->n_panels; id++) {
        const panel *p = &w->panels[id];
        int64_t n = (int64_t)(p->row_end - p->row_begin) * w->group;
        pairs = !p->gone && n > pairs ? n : pairs;
    }
    w->wide = pairs > w->rule.narrow_pairs &&
              w->rule.wide_pairs > w->rule.narrow_pairs;
    w->pairs = w->wide ? w->rule.wide_pairs : w->rule.narrow_pairs;
}

/* ---- dissolving ---------------------------------------------------------- */

/* Units that n rows take for a stretch of keys, but for splitting. */
static int32_t tiles_of(const rk_worker *w, int32_t n_rows)
{
    if (w->group > w->pairs) {
        return n_rows * ceil_div(w->group, w->pairs);
    }
    return ceil_div(n_rows, w->pairs / w->group);
}

/* Those below each panel, in the order of rows. */
static void list_children(rk_worker *w)
{
    for (int32_t id = 0; id < w->n_panels; id++) {
        w->first_child[id] = -1;
    }
    for (int32_t i = w->n_ranks - 1; i >= 0; i--) {
        int32_t id = w->ranks[i].id, parent = w->panels[id].parent;
        if (parent >= 0) {
            w->sibling[id] = w->first_child[parent];
            w->first_child[parent] = id;
        }
    }
}

/* Does it pay to read the panel's keys once for all its rows? */
static bool worth_sharing(const rk_worker *w, int32_t id)
{
    const panel *p = &w->panels[id];
    int32_t row = p->row_begin;
    int64_t flat = 0; /* units that would read the keys otherwise */
    for (int32_t c = w->first_child[id]; c >= 0; c = w->sibling[c]) {
        flat += tiles_of(w, w->panels[c].row_begin - row);
        flat += tiles_of(w, w->panels[c].row_end - w->panels[c].row_begin);
        row = w->panels[c].row_end;
    }
    flat += tiles_of(w, p->row_end - row);
    int64_t n_rows = p->row_end - p->row_begin;
    int64_t saved = (flat - tiles_of(w, (int32_t)n_rows)) *
                    (int64_t)(p->key_end - p->key_begin);
    /* A partial of a pair is written and read: as many bytes as K and V of
     * two keys in 16 bits, of four where they are float32 and as fast. */
    return saved >= w->share_keys + 4 * n_rows * w->group;
}

/* Hand the panel's keys down to those below it; rows that have none below get
 * panels of their own. */
static bool dissolve(rk_worker *w, int32_t id)
{
    int32_t row = w->panels[id].row_begin;
    for (int32_t c = w->first_child[id];; c = w->sibling[c]) {
        const panel whole = w->panels[id];
        int32_t end = c >= 0 ? w->panels[c].row_begin : whole.row_end;
        if (row < end && !add_panel(w, row, end, &whole)) {
            return false;
        }
        if (c < 0) {
            break;
        }
        w->panels[c].key_begin = whole.key_begin;
        w->panels[c].parent = whole.parent;
        row = w->panels[c].row_end;
    }
    w->panels[id].gone = true;
    return true;
}

static bool flatten(rk_worker *w)
{
    if (!rank_panels(w)) {
        return false;
    }
    list_children(w);
    /* Those added on the way have nothing below them. */
    for (int32_t i = 0; i < w->n_ranks; i++) {
        int32_t id = w->ranks[i].id;
        if (w->first_child[id] >= 0 && !worth_sharing(w, id) &&
            !dissolve(w, id)) {
            return false;
        }
    }
    return rank_panels(w);
}

/* ---- cutting into units -------------------------------------------------- */

#define STEP 64 /* keys of a tile: splits are whole ones */
#define MIN_SPLIT 128
#define SPLIT_PAIRS 4 /* keys of a split for each pair, at least */

/* Keys of a unit: what gives the device enough units, but not so few that
 * partial results cost more than they bring. */
static int32_t split_keys(const rk_worker *w)
{
    int64_t total = 0;
    for (int32_t id = 0; id < w->n_panels; id++) {
        const panel *p = &w->panels[id];
        if (!p->gone) {
            total += (int64_t)tiles_of(w, p->row_end - p->row_begin) *
                     (p->key_end - p->key_begin);
        }
    }
    int64_t units = most(1, ceil_div(w->rule.wanted_units, w->rule.n_kv_heads));
    int64_t keys = (total + units - 1) / units;
    keys = (keys + STEP - 1) / STEP * STEP;
    return keys < MIN_SPLIT
               ? MIN_SPLIT
               : (int32_t)(keys < INT32_MAX / 2 ? keys : INT32_MAX / 2);
}

/* Add the units of rows [begin, end), which one block of threads holds, or of
 * one row whose group needs several. */
static bool add_units(rk_worker *w, const panel *p, int32_t begin, int32_t end,
                      int32_t table, int32_t keys)
{
    const int32_t n_rows = end - begin, n_pairs = n_rows * w->group;
    const int32_t per_unit = least(n_pairs, w->pairs);
    int32_t first = INT32_MAX, last = 0;
    for (int32_t row = begin; row < end; row++) {
        first = least(first, w->batch->positions[row]);
        last = most(last, w->batch->positions[row]);
    }
    const int32_t key_end = least(p->key_end, last + 1);
    const int32_t n_keys = key_end - p->key_begin;
    keys = most(keys, ceil_div(SPLIT_PAIRS * per_unit, STEP) * STEP);
    const int32_t n_splits = w->split ? most(1, ceil_div(n_keys, keys)) : 1;
    keys = ceil_div(ceil_div(n_keys, n_splits), STEP) * STEP;
    const int32_t n_units = n_splits * ceil_div(n_pairs, per_unit);
    if (!reserve(&w->units, &w->unit_room, (int64_t)w->n_units + n_units,
                 sizeof *w->units) ||
        !reserve(&w->places, &w->place_room,
                 (int64_t)w->n_places + (int64_t)n_splits * n_rows,
                 sizeof *w->places)) {
        return false;
    }
    for (int32_t key = p->key_begin; key < key_end; key += keys) {
        for (int32_t pair = 0; pair < n_pairs; pair += per_unit) {
            w->units[w->n_units++] = (rk_work_unit){
                .pair_begin = begin * w->group + pair,
                .pair_end = begin * w->group + least(n_pairs, pair + per_unit),
                .key_begin = key,
                .key_end = least(key_end, key + keys),
                .table = table,
                .place = w->n_places,
                .first_position = first,
                .last_position = last,
            };
        }
        for (int32_t row = begin; row < end; row++) {
            bool uses = w->batch->positions[row] >= key;
            /* How many of the row's partials come before, or none. */
            w->places[w->n_places++] =
                uses ? w->rows_first[row + 1]++ : RK_WORK_NONE;
        }
    }
    return true;
}

/* The blocks of the panel's keys; *table: where block 0 would be. */
static bool add_table(rk_worker *w, const panel *p, int32_t *table)
{
    int32_t first = p->key_begin / w->rule.block_tokens;
    int32_t n = (p->key_end - 1) / w->rule.block_tokens - first + 1;
    if (!reserve(&w->tables, &w->table_room, (int64_t)w->n_tables + n,
                 sizeof *w->tables)) {
        return false;
    }
    memcpy(w->tables + w->n_tables, p->blocks + first,
           (size_t)n * sizeof *w->tables);
    *table = w->n_tables - first;
    w->n_tables += n;
    return true;
}

/* Rows from the last group on: it has the most keys in a prompt. */
static bool cut_panel(rk_worker *w, const panel *p, int32_t keys)
{
    const int32_t n_rows = p->row_end - p->row_begin;
    const int32_t n_groups = ceil_div(n_rows, most(1, w->pairs / w->group));
    const int32_t step = ceil_div(n_rows, n_groups);
    int32_t table = 0;
    if (!add_table(w, p, &table)) {
        return false;
    }
    for (int32_t i = ceil_div(n_rows, step) - 1; i >= 0; i--) {
        int32_t begin = p->row_begin + i * step;
        if (!add_units(w, p, begin, least(begin + step, p->row_end), table,
                       keys)) {
            return false;
        }
    }
    return true;
}

/* Rows' counts become sums, and places the numbers of partials. */
static int64_t number_partials(rk_worker *w)
{
    const int32_t n_rows = w->batch->n_rows;
    int64_t n = 0;
    for (int32_t row = 0; row < n_rows; row++) {
        int32_t count = w->rows_first[row + 1];
        n += count > 1 ? count : 0;
        if (n > w->rule.max_partials) {
            return n;
        }
        w->rows_first[row + 1] = (int32_t)n;
    }
    int32_t place = -1;
    for (int32_t i = 0; i < w->n_units; i++) {
        const rk_work_unit *u = &w->units[i];
        if (u->place == place) { /* the same rows, other heads */
            continue;
        }
        place = u->place;
        const int32_t first = u->pair_begin / w->group;
        const int32_t last = (u->pair_end - 1) / w->group;
        for (int32_t row = first; row <= last; row++) {
            int32_t *to = &w->places[u->place + row - first];
            if (*to != RK_WORK_NONE) {
                *to = w->rows_first[row] == w->rows_first[row + 1]
                          ? RK_WORK_OUT
                          : w->rows_first[row] + *to;
            }
        }
    }
    return n;
}

/* Cut by the rule in force; *n_partials tells how many that gives. */
static bool cut_batch(rk_worker *w, int64_t *n_partials)
{
    const int32_t n_rows = w->batch->n_rows;
    if (!lay_panels(w)) {
        return false;
    }
    choose_width(w);
    if (!flatten(w)) {
        return false;
    }
    w->n_units = w->n_places = w->n_tables = 0;
    memset(w->rows_first, 0, ((size_t)n_rows + 1) * sizeof *w->rows_first);
    const int32_t keys = split_keys(w);
    for (int32_t i = 0; i < w->n_ranks; i++) {
        if (!cut_panel(w, &w->panels[w->ranks[i].id], keys)) {
            return false;
        }
    }
    *n_partials = number_partials(w);
    return true;
}

rk_status rk_worker_build(rk_worker *worker, const rk_batch *batch,
                          rk_work *work, rk_error *err)
{
    /* As the rule says; without splits; nothing shared: no partials. */
    const rk_work_rule *rule = &worker->rule;
    const int64_t share_keys[3] = {rule->share_keys, rule->share_keys,
                                   INT64_MAX / 2};
    worker->batch = batch;
    for (int attempt = 0; attempt < 3; attempt++) {
        int64_t n_partials = 0;
        worker->share_keys = share_keys[attempt];
        worker->split = attempt == 0;
        if (!reserve_rows(worker, batch->n_rows) ||
            !cut_batch(worker, &n_partials)) {
            return rk_fail(err, RK_ENOMEM, "no memory for a batch of %d rows",
                           (int)batch->n_rows);
        }
        if (n_partials <= rule->max_partials) {
            *work = (rk_work){
                .n_units = worker->n_units,
                .n_places = worker->n_places,
                .n_tables = worker->n_tables,
                .n_partials = (int32_t)n_partials,
                .n_rows = batch->n_rows,
                .units = worker->units,
                .places = worker->places,
                .rows_first = worker->rows_first,
                .tables = worker->tables,
                .wide = worker->wide,
            };
            return RK_OK;
        }
    }
    return rk_fail(err, RK_ENOMEM,
                   "attention over %d rows needs more than %d partial results",
                   (int)batch->n_rows, (int)rule->max_partials);
}
