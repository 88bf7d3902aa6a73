/* From panels to units.
 *
 * Reading a shared panel once costs each of its rows a partial result more.
 * Where that does not pay, for few keys or few rows, the panel is dissolved
 * into those below it, which then read its keys themselves: the flat form. At
 * last panels are cut into units: rows by what a block of threads holds, keys
 * so that all of the device has work.
 */
#include "work.h"

#include "panels.h"

#include <stdlib.h>
#include <string.h>

struct rk_worker {
    rk_work_rule rule;
    int32_t group;

    const rk_batch *batch; /* being cut */
    int64_t share_keys;    /* the rule in force */
    bool split;            /* keys may be split */
    bool wide;
    int32_t pairs; /* of a unit */

    rk_panels panels;
    int32_t *first_child, *sibling; /* of panels, in the order of rows */
    int32_t child_room, sibling_room;

    rk_work_unit *units;
    int32_t *places, *tables, *rows_first;
    int32_t n_units, n_places, n_tables;
    int32_t unit_room, place_room, table_room, row_room;
};

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
    worker->panels.block_tokens = rule->block_tokens;
    worker->group = rule->n_heads / rule->n_kv_heads;
    *out = worker;
    return RK_OK;
}

void rk_worker_free(rk_worker *worker)
{
    if (worker != NULL) {
        rk_panels_free(&worker->panels);
        free(worker->first_child);
        free(worker->sibling);
        free(worker->units);
        free(worker->places);
        free(worker->tables);
        free(worker->rows_first);
        free(worker);
    }
}

/* Wide units where a panel has more pairs than a narrow one holds. */
static void choose_width(rk_worker *w)
{
    int64_t pairs = 0;
    for (int32_t id = 0; id < w->panels.n; id++) {
        const rk_panel *p = &w->panels.all[id];
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

/* Those below each panel, in the order of rows. False: no memory. */
static bool list_children(rk_worker *w)
{
    if (!rk_reserve(&w->first_child, &w->child_room, w->panels.n,
                    sizeof *w->first_child) ||
        !rk_reserve(&w->sibling, &w->sibling_room, w->panels.n,
                    sizeof *w->sibling)) {
        return false;
    }
    for (int32_t id = 0; id < w->panels.n; id++) {
        w->first_child[id] = -1;
    }
    for (int32_t i = w->panels.n_ranks - 1; i >= 0; i--) {
        int32_t id = w->panels.ranks[i].id, parent = w->panels.all[id].parent;
        if (parent >= 0) {
            w->sibling[id] = w->first_child[parent];
            w->first_child[parent] = id;
        }
    }
    return true;
}

/* Does it pay to read the panel's keys once for all its rows? */
static bool worth_sharing(const rk_worker *w, int32_t id)
{
    const rk_panel *p = &w->panels.all[id];
    int32_t row = p->row_begin;
    int64_t flat = 0; /* units that would read the keys otherwise */
    for (int32_t c = w->first_child[id]; c >= 0; c = w->sibling[c]) {
        flat += tiles_of(w, w->panels.all[c].row_begin - row);
        flat +=
            tiles_of(w, w->panels.all[c].row_end - w->panels.all[c].row_begin);
        row = w->panels.all[c].row_end;
    }
    flat += tiles_of(w, p->row_end - row);
    int64_t n_rows = p->row_end - p->row_begin;
    int64_t saved = (flat - tiles_of(w, (int32_t)n_rows)) *
                    (int64_t)(p->key_end - p->key_begin);
    /* A pair's partial is written and read, as many bytes as K and V of two
     * keys in bf16; merging counts as much again. */
    return saved >= w->share_keys + 4 * n_rows * w->group;
}

/* Hand the panel's keys down to those below it; rows that have none below get
 * panels of their own. */
static bool dissolve(rk_worker *w, int32_t id)
{
    int32_t row = w->panels.all[id].row_begin;
    for (int32_t c = w->first_child[id];; c = w->sibling[c]) {
        const rk_panel whole = w->panels.all[id];
        int32_t end = c >= 0 ? w->panels.all[c].row_begin : whole.row_end;
        if (row < end && !rk_panels_add(&w->panels, row, end, &whole)) {
            return false;
        }
        if (c < 0) {
            break;
        }
        w->panels.all[c].key_begin = whole.key_begin;
        w->panels.all[c].parent = whole.parent;
        row = w->panels.all[c].row_end;
    }
    w->panels.all[id].gone = true;
    return true;
}

static bool flatten(rk_worker *w)
{
    if (!rk_panels_rank(&w->panels) || !list_children(w)) {
        return false;
    }
    /* Those added on the way have nothing below them. */
    for (int32_t i = 0; i < w->panels.n_ranks; i++) {
        int32_t id = w->panels.ranks[i].id;
        if (w->first_child[id] >= 0 && !worth_sharing(w, id) &&
            !dissolve(w, id)) {
            return false;
        }
    }
    return rk_panels_rank(&w->panels);
}

/* ---- cutting into units -------------------------------------------------- */

#define STEP 64 /* keys of a tile: splits are whole ones */
#define MIN_SPLIT 128
#define SPLIT_PAIRS 2 /* keys of a split for each pair, at least */

/* Keys of a unit: what gives the device enough units, but not so few that
 * partial results cost more than they bring. */
static int32_t split_keys(const rk_worker *w)
{
    int64_t total = 0;
    for (int32_t id = 0; id < w->panels.n; id++) {
        const rk_panel *p = &w->panels.all[id];
        if (!p->gone) {
            total += (int64_t)tiles_of(w, p->row_end - p->row_begin) *
                     (p->key_end - p->key_begin);
        }
    }
    int64_t units =
        rk_most(1, ceil_div(w->rule.wanted_units, w->rule.n_kv_heads));
    int64_t keys = (total + units - 1) / units;
    keys = (keys + STEP - 1) / STEP * STEP;
    return keys < MIN_SPLIT
               ? MIN_SPLIT
               : (int32_t)(keys < INT32_MAX / 2 ? keys : INT32_MAX / 2);
}

/* Add the units of rows [begin, end), which one block of threads holds, or of
 * one row whose group needs several. */
static bool add_units(rk_worker *w, const rk_panel *p, int32_t begin,
                      int32_t end, int32_t table, int32_t keys)
{
    const int32_t n_rows = end - begin, n_pairs = n_rows * w->group;
    const int32_t per_unit = rk_least(n_pairs, w->pairs);
    int32_t first = INT32_MAX, last = 0;
    for (int32_t row = begin; row < end; row++) {
        first = rk_least(first, w->batch->positions[row]);
        last = rk_most(last, w->batch->positions[row]);
    }
    const int32_t key_end = rk_least(p->key_end, last + 1);
    const int32_t n_keys = key_end - p->key_begin;
    keys = rk_most(keys, ceil_div(SPLIT_PAIRS * per_unit, STEP) * STEP);
    const int32_t n_splits = w->split ? rk_most(1, ceil_div(n_keys, keys)) : 1;
    keys = ceil_div(ceil_div(n_keys, n_splits), STEP) * STEP;
    const int32_t n_units = n_splits * ceil_div(n_pairs, per_unit);
    if (!rk_reserve(&w->units, &w->unit_room, (int64_t)w->n_units + n_units,
                    sizeof *w->units) ||
        !rk_reserve(&w->places, &w->place_room,
                    (int64_t)w->n_places + (int64_t)n_splits * n_rows,
                    sizeof *w->places)) {
        return false;
    }
    for (int32_t key = p->key_begin; key < key_end; key += keys) {
        for (int32_t pair = 0; pair < n_pairs; pair += per_unit) {
            w->units[w->n_units++] = (rk_work_unit){
                .pair_begin = begin * w->group + pair,
                .pair_end =
                    begin * w->group + rk_least(n_pairs, pair + per_unit),
                .key_begin = key,
                .key_end = rk_least(key_end, key + keys),
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
static bool add_table(rk_worker *w, const rk_panel *p, int32_t *table)
{
    int32_t first = p->key_begin / w->rule.block_tokens;
    int32_t n = (p->key_end - 1) / w->rule.block_tokens - first + 1;
    if (!rk_reserve(&w->tables, &w->table_room, (int64_t)w->n_tables + n,
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
static bool cut_panel(rk_worker *w, const rk_panel *p, int32_t keys)
{
    const int32_t n_rows = p->row_end - p->row_begin;
    const int32_t n_groups = ceil_div(n_rows, rk_most(1, w->pairs / w->group));
    const int32_t step = ceil_div(n_rows, n_groups);
    int32_t table = 0;
    if (!add_table(w, p, &table)) {
        return false;
    }
    for (int32_t i = ceil_div(n_rows, step) - 1; i >= 0; i--) {
        int32_t begin = p->row_begin + i * step;
        if (!add_units(w, p, begin, rk_least(begin + step, p->row_end), table,
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
    if (!rk_panels_lay(&w->panels, w->batch)) {
        return false;
    }
    choose_width(w);
    if (!flatten(w)) {
        return false;
    }
    w->n_units = w->n_places = w->n_tables = 0;
    memset(w->rows_first, 0, ((size_t)n_rows + 1) * sizeof *w->rows_first);
    const int32_t keys = split_keys(w);
    for (int32_t i = 0; i < w->panels.n_ranks; i++) {
        if (!cut_panel(w, &w->panels.all[w->panels.ranks[i].id], keys)) {
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
        if (!rk_reserve(&worker->rows_first, &worker->row_room,
                        (int64_t)batch->n_rows + 1,
                        sizeof *worker->rows_first) ||
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
