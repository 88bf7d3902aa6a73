/* A step: tokens of some branches, once through the model.
 *
 * Items with the same history (the same blocks), the same tokens and so the
 * same numbers are computed once: the first of them leads, the others share its
 * rows and, at the close, its blocks. So n samples of one prompt cost one row
 * until the first draw that differs; copy-on-write parts them then.
 *
 * open    room -> private blocks (copy-on-write) -> batch -> embeddings
 * layers  one call a layer, a look at signals after each
 * close   the books: what was computed stays or goes
 *
 * Prefill, decode, scoring, verification and probes are all steps; they differ
 * in which rows they name and in what they do between layers.
 */
#include <string.h>

#include "step.h"

int32_t rk_step_pending(const rk_session *s, rk_branch *const *branches,
                        int32_t n, rk_item *items)
{
    int32_t n_items = 0, room = s->options.step_tokens;
    for (int32_t i = 0; i < n && room > 0; i++) {
        const rk_branch_facts *b = rk_look(branches[i]);
        int32_t left = b->n_tokens - b->n_computed;
        if (left > 0) {
            left = left < room ? left : room;
            items[n_items++] = (rk_item){branches[i], b->n_computed,
                                         b->n_computed + left, true};
            room -= left;
        }
    }
    return n_items;
}

static void pin(const rk_item *items, int32_t n_items)
{
    for (int32_t i = 0; i < n_items; i++) {
        rk_branch_pin(items[i].branch);
    }
}

static void unpin(const rk_item *items, int32_t n_items)
{
    for (int32_t i = 0; i < n_items; i++) {
        rk_branch_unpin(items[i].branch);
    }
}

static bool same_rows(const rk_item *a, const rk_item *b)
{
    const rk_branch_facts *x = rk_look(a->branch), *y = rk_look(b->branch);
    return a->begin == b->begin && a->end == b->end && a->write == b->write &&
           x->approximate == y->approximate && x->n_blocks == y->n_blocks &&
           (x->n_blocks == 0 ||
            (x->blocks[x->n_blocks - 1] == y->blocks[y->n_blocks - 1] &&
             memcmp(x->blocks, y->blocks,
                    (size_t)x->n_blocks * sizeof *x->blocks) == 0)) &&
           memcmp(x->tokens + a->begin, y->tokens + b->begin,
                  (size_t)(a->end - a->begin) * sizeof *x->tokens) == 0;
}

static void find_leaders(const rk_item *items, int32_t n_items, bool share,
                         int32_t *leaders)
{
    for (int32_t i = 0; i < n_items; i++) {
        int32_t j = share ? 0 : i;
        while (j < i && !(leaders[j] == j && same_rows(&items[i], &items[j]))) {
            j++;
        }
        leaders[i] = j;
    }
}

/* How many items share the rows of item `leader`, itself among them. */
static int32_t count_group(const int32_t *leaders, int32_t n_items,
                           int32_t leader)
{
    int32_t n = 0;
    for (int32_t i = leader; i < n_items; i++) {
        n += leaders[i] == leader;
    }
    return n;
}

rk_status rk_step_check_room(const rk_session *s, int64_t needed, rk_error *err)
{
    if (needed <= rk_kv_count(s->kv).free) {
        return RK_OK;
    }
    int32_t available = rk_tree_available(&s->tree);
    if (needed <= available) {
        return RK_OK;
    }
    return rk_fail(err, RK_ECAPACITY,
                   "kv_bytes: %lld more KV blocks of %d tokens are needed at "
                   "once, %d of %d are free or can be evicted",
                   (long long)needed, (int)s->options.block_tokens,
                   (int)available, (int)rk_kv_count(s->kv).total);
}

/* Refuse what cannot fit before anything is evicted for it. Copies of shared
 * tails are left out: some turn out to be unnecessary. */
static rk_status check_items(const rk_session *s, const rk_item *items,
                             int32_t n_items, rk_error *err)
{
    int64_t needed = 0;
    for (int32_t i = 0; i < n_items; i++) {
        if (items[i].write && s->step.leaders[i] == i) {
            int32_t more = rk_tree_blocks_of(&s->tree, items[i].end) -
                           rk_look(items[i].branch)->n_blocks;
            needed += more > 0 ? more : 0;
        }
    }
    return rk_step_check_room(s, needed, err);
}

static rk_status make_room(rk_session *s, const rk_item *item, int32_t writers,
                           rk_error *err)
{
    rk_tree *tree = &s->tree;
    if (rk_tree_evict(tree, rk_tree_blocks_needed(tree, item->branch, item->end,
                                                  writers))) {
        return RK_OK;
    }
    rk_tree_yield(tree, item->branch, writers);
    return rk_step_check_room(
        s, rk_tree_blocks_needed(tree, item->branch, item->end, writers), err);
}

/* Blocks for one item; the KV of a replaced tail is copied. */
static rk_status give_blocks(rk_session *s, const rk_item *item,
                             int32_t writers, rk_error *err)
{
    const rk_ops *ops = s->device->ops;
    rk_branch *branch = item->branch;
    int32_t had = rk_look(branch)->n_blocks, from, to;
    rk_status status = make_room(s, item, writers, err);
    if (status == RK_OK) {
        status = rk_tree_reserve(&s->tree, branch, item->end, writers, &from,
                                 &to, err);
    }
    if (status != RK_OK) {
        return status;
    }
    if (s->options.poison) {
        for (int32_t i = had; i < rk_look(branch)->n_blocks; i++) {
            ops->kv_fill(s->device, rk_look(branch)->blocks[i], 0xff);
        }
        if (to >= 0) {
            ops->kv_fill(s->device, to, 0xff);
        }
    }
    if (from >= 0) {
        ops->kv_copy(s->device, to, from);
    }
    return RK_OK;
}

static rk_status build(rk_session *s, rk_error *err)
{
    rk_step *step = &s->step;
    int32_t n_spans = 0;
    int64_t n_rows = 0;
    for (int32_t i = 0; i < step->n_items; i++) {
        const rk_item *item = &step->items[i];
        if (step->leaders[i] != i) {
            continue;
        }
        n_rows += item->end - item->begin;
        step->spans[n_spans++] = (rk_span){
            .tokens = rk_look(item->branch)->tokens + item->begin,
            .position = item->begin,
            .n_rows = item->end - item->begin,
            .blocks = rk_look(item->branch)->blocks,
            .write = item->write,
        };
    }
    if (n_rows > s->options.step_tokens) {
        return rk_fail(err, RK_ESTATE, "a step of %lld rows, %d at most",
                       (long long)n_rows, (int)s->options.step_tokens);
    }
    rk_status status = rk_plan_build(s->plan, step->spans, n_spans,
                                     &step->batch, step->starts, err);
    for (int32_t i = 0, span = 0; i < step->n_items && status == RK_OK; i++) {
        int32_t leader = step->leaders[i];
        step->first_rows[i] =
            leader == i ? step->starts[span++] : step->first_rows[leader];
    }
    return status;
}

/* Everything but the device's part. */
static rk_status open_items(rk_session *s, const rk_item *items,
                            int32_t n_items, rk_error *err)
{
    rk_step *step = &s->step;
    pin(items, n_items);
    find_leaders(items, n_items, s->options.share, step->leaders);
    rk_status status = check_items(s, items, n_items, err);
    step->n_items = 0;
    for (int32_t i = 0; i < n_items && status == RK_OK; i++) {
        if (items[i].write && step->leaders[i] == i) {
            int32_t writers = count_group(step->leaders, n_items, i);
            int64_t evictions = s->tree.evictions;
            status = give_blocks(s, &items[i], writers, err);
            if (status == RK_OK && s->tree.evictions > evictions) {
                status = rk_step_signal(s, err); /* many take a while */
            }
        }
        step->items[i] = items[i];
        step->n_items = i + 1;
    }
    if (status == RK_OK) {
        status = build(s, err);
    }
    if (status != RK_OK) {
        unpin(items + step->n_items, n_items - step->n_items);
        rk_step_close(s, false);
        return status;
    }
    s->clock++;
    s->stats.steps++;
    for (int32_t i = 0; i < n_items; i++) {
        rk_branch_use(items[i].branch, s->clock);
    }
    return RK_OK;
}

rk_status rk_step_open(rk_session *s, const rk_item *items, int32_t n_items,
                       float *x, rk_error *err)
{
    rk_status status = open_items(s, items, n_items, err);
    if (status == RK_OK) {
        s->step.batch.roomy = x == NULL; /* the forward's own buffers are */
        rk_forward_begin(&s->forward, &s->step.batch, x);
    }
    return status;
}

rk_status rk_step_reopen(rk_session *s, const rk_item *items, int32_t n_items,
                         rk_error *err)
{
    rk_status status = open_items(s, items, n_items, err);
    if (status == RK_OK) {
        s->step.batch.roomy = false;
        s->device->ops->begin(s->device, &s->step.batch);
    }
    return status;
}

rk_status rk_step_signal(const rk_session *s, rk_error *err)
{
    if (s->options.interrupted != NULL &&
        s->options.interrupted(s->options.context)) {
        return rk_fail(err, RK_EINTERRUPTED, "interrupted");
    }
    return s->device->ops->check(s->device, err);
}

rk_status rk_step_layers(rk_session *s, int32_t from, int32_t to, float *x,
                         rk_error *err)
{
    for (int32_t layer = from; layer < to; layer++) {
        rk_forward_layer(&s->forward, layer, x != NULL ? x : s->forward.x,
                         s->step.batch.n_rows);
        rk_status status = rk_step_signal(s, err);
        if (status != RK_OK) {
            return status;
        }
    }
    return RK_OK;
}

static void close_item(rk_session *s, int32_t i, bool commit)
{
    const rk_item *item = &s->step.items[i];
    int32_t leader = s->step.leaders[i];
    rk_branch *branch = item->branch;
    rk_branch_unpin(branch);
    if (!item->write) {
        s->stats.tokens_recomputed +=
            commit && leader == i ? item->end - item->begin : 0;
        return;
    }
    if (!commit) {
        rk_tree_release(&s->tree, branch, rk_look(branch)->n_computed);
        return;
    }
    if (leader != i) {
        s->stats.tokens_reused += item->end - item->begin;
        rk_tree_follow(&s->tree, branch, s->step.items[leader].branch,
                       item->end);
        return;
    }
    int32_t again = rk_look(branch)->n_ever - item->begin;
    again = again < 0 ? 0 : again;
    again = again > item->end - item->begin ? item->end - item->begin : again;
    s->stats.tokens_recomputed += again;
    s->stats.tokens_computed += item->end - item->begin - again;
    rk_tree_commit(&s->tree, branch, item->end);
}

rk_status rk_step_shrink(rk_session *s, const int32_t *keep, int32_t n,
                         rk_error *err)
{
    rk_step *step = &s->step;
    int32_t kept = 0;
    for (int32_t i = 0; i < step->n_items; i++) {
        if (kept < n && keep[kept] == i) {
            kept++;
        } else {
            close_item(s, i, false);
            step->items[i].branch = NULL;
        }
    }
    /* Which row of the old batch each remaining item begins at. Equal rows
     * give equal numbers, so leaders and followers stay or go together. */
    for (int32_t i = 0; i < n; i++) {
        step->items[i] = step->items[keep[i]];
        step->rows[i] = step->first_rows[keep[i]];
        step->leaders[i] = step->leaders[keep[i]];
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t j = 0;
        while (keep[j] != step->leaders[i]) {
            j++;
        }
        step->leaders[i] = j;
    }
    step->n_items = n;
    if (n == 0) {
        return RK_OK;
    }
    rk_status status = build(s, err);
    if (status != RK_OK) {
        return status;
    }
    int32_t *from = s->step.source; /* old row of each new row; they rise */
    for (int32_t i = 0; i < n; i++) {
        int32_t rows = step->items[i].end - step->items[i].begin;
        for (int32_t j = 0; j < rows; j++) {
            from[step->first_rows[i] + j] = step->rows[i] + j;
        }
    }
    step->batch.roomy = true; /* the rows are in the forward's buffers */
    s->device->ops->begin(s->device, &step->batch);
    s->device->ops->gather(s->device, s->forward.x, s->forward.x, from,
                           step->batch.n_rows, s->model.config.width);
    return RK_OK;
}

void rk_step_close(rk_session *s, bool commit)
{
    for (int32_t i = 0; i < s->step.n_items; i++) {
        close_item(s, i, commit);
    }
    s->step.n_items = 0;
}

void rk_step_suspend(rk_session *s)
{
    unpin(s->step.items, s->step.n_items);
    s->step.n_items = 0;
}

rk_status rk_step_run(rk_session *s, const rk_item *items, int32_t n_items,
                      const int32_t *output_items, const int32_t *back,
                      const rk_draw *draws, int32_t n_outputs, rk_pick *picks,
                      rk_error *err)
{
    rk_status status = rk_step_open(s, items, n_items, NULL, err);
    if (status != RK_OK) {
        return status;
    }
    status = rk_step_layers(s, 0, s->model.config.n_layers, NULL, err);
    if (status == RK_OK && n_outputs > 0) {
        const rk_step *step = &s->step;
        for (int32_t i = 0; i < n_outputs; i++) {
            const rk_item *item = &items[output_items[i]];
            step->rows[i] = step->first_rows[output_items[i]] + item->end -
                            item->begin - 1 - (back != NULL ? back[i] : 0);
        }
        status = rk_forward_pick(&s->forward, step->rows, draws, n_outputs,
                                 true, picks, err);
    }
    rk_step_close(s, status == RK_OK);
    return status;
}
