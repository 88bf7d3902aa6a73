/* From token spans of several branches to the batch of one step.
 *
 * Spans are sorted by their block tables, word by word. Sequences that share a
 * prefix of blocks then stand side by side, and one number per neighbour pair,
 * how many leading keys they share, tells all there is to know:
 *
 *     spans i .. j read the same block at key p   <=>   shared[i+1 .. j] > p
 *
 * A chunk is cut into pieces, one per span in it. For each tile of keys, `cut`
 * takes the runs of pieces that share the block at the tile's start, lists
 * their keys once as far as all of them share, and goes on with the runs that
 * remain there. No block is looked at: a tile costs O(pieces + segments).
 */
#include "plan.h"

#include <stdlib.h>
#include <string.h>

/* A span in the order of rows. */
typedef struct place {
    const int32_t *blocks;
    int32_t n_blocks;
    int32_t span;   /* index in the caller's array */
    int32_t shared; /* leading keys in blocks of the place before, too */
} place;

/* The rows of one span inside one chunk. */
typedef struct piece {
    const int32_t *blocks;
    int32_t row_begin, row_end;
    int32_t position; /* of row_begin */
    int32_t n_keys;   /* position of the last row, plus 1 */
    int32_t shared;   /* leading keys shared with the piece before */
} piece;

struct rk_plan {
    int32_t block_tokens;

    int64_t span_room; /* entries that the arrays can hold */
    place *places, *spare;

    int64_t row_room;
    int32_t *tokens, *positions;
    int64_t *slots;
    rk_chunk *chunks;

    int64_t segment_room;
    rk_segment *segments;
    int32_t n_segments;

    piece pieces[RK_CHUNK_ROWS]; /* of the chunk being cut */
};

/* ---- life and memory ----------------------------------------------------- */

rk_status rk_plan_create(rk_plan **out, int32_t block_tokens, rk_error *err)
{
    *out = NULL;
    rk_status status = rk_check_block_tokens(block_tokens, err);
    if (status != RK_OK) {
        return status;
    }
    rk_plan *plan = calloc(1, sizeof *plan);
    if (plan == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for a batch planner");
    }
    plan->block_tokens = block_tokens;
    *out = plan;
    return RK_OK;
}

void rk_plan_free(rk_plan *plan)
{
    if (plan != NULL) {
        free(plan->places);
        free(plan->spare);
        free(plan->tokens);
        free(plan->positions);
        free(plan->slots);
        free(plan->chunks);
        free(plan->segments);
        free(plan);
    }
}

/* Make *array hold `room` items; what it held stays. */
static bool resize(void *array, int64_t room, size_t item_bytes)
{
    void *old, *moved;
    memcpy(&old, array, sizeof old);
    moved = realloc(old, (size_t)room * item_bytes);
    if (moved != NULL) {
        memcpy(array, &moved, sizeof moved);
    }
    return moved != NULL;
}

/* Twice as much as before, at least, so that growing is rare. */
static int64_t grown(int64_t room, int64_t wanted)
{
    return wanted > 2 * room ? wanted : 2 * room;
}

static rk_status reserve(rk_plan *plan, int64_t n_spans, int64_t n_rows,
                         rk_error *err)
{
    if (n_spans > plan->span_room) {
        int64_t room = grown(plan->span_room, n_spans);
        if (!resize(&plan->places, room, sizeof *plan->places) ||
            !resize(&plan->spare, room, sizeof *plan->spare)) {
            goto fail;
        }
        plan->span_room = room;
    }
    if (n_rows > plan->row_room) {
        int64_t room = grown(plan->row_room, n_rows);
        if (!resize(&plan->tokens, room, sizeof *plan->tokens) ||
            !resize(&plan->positions, room, sizeof *plan->positions) ||
            !resize(&plan->slots, room, sizeof *plan->slots) ||
            !resize(&plan->chunks, room / RK_CHUNK_ROWS + 1,
                    sizeof *plan->chunks)) {
            goto fail;
        }
        plan->row_room = room;
    }
    return RK_OK;

fail:
    return rk_fail(err, RK_ENOMEM, "no memory for a batch of %lld rows",
                   (long long)n_rows);
}

static rk_status reserve_segments(rk_plan *plan, int64_t wanted, rk_error *err)
{
    if (wanted > plan->segment_room) {
        int64_t room = grown(plan->segment_room, wanted);
        if (wanted > INT32_MAX ||
            !resize(&plan->segments, room, sizeof *plan->segments)) {
            return rk_fail(err, RK_ENOMEM, "no memory for %lld segments",
                           (long long)wanted);
        }
        plan->segment_room = room;
    }
    return RK_OK;
}

/* ---- the order of spans -------------------------------------------------- */

/* How many leading blocks two tables have in common. */
static int32_t common(const place *a, const place *b)
{
    enum { STRIDE = 64 }; /* compared at once */
    int32_t n = a->n_blocks < b->n_blocks ? a->n_blocks : b->n_blocks;
    int32_t i = 0;
    if (a->blocks == b->blocks) {
        return n;
    }
    while (n - i >= STRIDE && memcmp(a->blocks + i, b->blocks + i,
                                     STRIDE * sizeof *a->blocks) == 0) {
        i += STRIDE;
    }
    while (i < n && a->blocks[i] == b->blocks[i]) {
        i++;
    }
    return i;
}

/* Does b belong before a? A table stands before its own continuations. */
static bool after(const place *a, const place *b)
{
    int32_t i = common(a, b);
    if (i == a->n_blocks || i == b->n_blocks) {
        return a->n_blocks > b->n_blocks;
    }
    return a->blocks[i] > b->blocks[i];
}

/* Merge the sorted runs [begin, middle) and [middle, end), stably. */
static void merge(place *places, place *spare, int32_t begin, int32_t middle,
                  int32_t end)
{
    if (!after(&places[middle - 1], &places[middle])) {
        return; /* as in most steps: the order of the step before */
    }
    int32_t left = begin, right = middle;
    for (int32_t i = begin; i < end; i++) {
        bool from_right = left == middle ||
                          (right < end && after(&places[left], &places[right]));
        spare[i] = places[from_right ? right++ : left++];
    }
    memcpy(places + begin, spare + begin,
           (size_t)(end - begin) * sizeof *places);
}

static void sort_places(rk_plan *plan, int32_t n)
{
    for (int32_t run = 1; run<n; run = run> n / 2 ? n : run * 2) {
        for (int32_t begin = 0; n - begin > run;) {
            int32_t middle = begin + run;
            int32_t end = n - middle > run ? middle + run : n;
            merge(plan->places, plan->spare, begin, middle, end);
            begin = end;
        }
    }
    for (int32_t i = 0; i < n; i++) {
        plan->places[i].shared =
            i == 0 ? 0
                   : common(&plan->places[i - 1], &plan->places[i]) *
                         plan->block_tokens;
    }
}

/* ---- rows ---------------------------------------------------------------- */

static rk_status take_spans(rk_plan *plan, const rk_span *spans,
                            int32_t n_spans, int32_t *n_rows, rk_error *err)
{
    int64_t total = 0;
    if (n_spans < 1) {
        return rk_fail(err, RK_EVALUE, "a batch needs at least one span");
    }
    for (int32_t i = 0; i < n_spans; i++) {
        if (spans[i].n_rows < 1 || spans[i].position < 0 ||
            spans[i].position > INT32_MAX - RK_TILE - spans[i].n_rows) {
            return rk_fail(err, RK_EVALUE, "span %d: %d rows from position %d",
                           (int)i, (int)spans[i].n_rows,
                           (int)spans[i].position);
        }
        total += spans[i].n_rows;
    }
    if (total > INT32_MAX) {
        return rk_fail(err, RK_EVALUE, "%lld rows are too many for a batch",
                       (long long)total);
    }
    *n_rows = (int32_t)total;
    rk_status status = reserve(plan, n_spans, total, err);
    if (status != RK_OK) {
        return status;
    }
    for (int32_t i = 0; i < n_spans; i++) {
        int32_t last = spans[i].position + spans[i].n_rows - 1;
        plan->places[i] = (place){
            .blocks = spans[i].blocks,
            .n_blocks = last / plan->block_tokens + 1,
            .span = i,
        };
    }
    return RK_OK;
}

static void lay_rows(rk_plan *plan, const rk_span *spans, int32_t n_spans,
                     int32_t *first_rows)
{
    int32_t bt = plan->block_tokens, row = 0;
    for (int32_t i = 0; i < n_spans; i++) {
        int32_t span_id = plan->places[i].span;
        const rk_span *span = &spans[span_id];
        first_rows[span_id] = row;
        memcpy(plan->tokens + row, span->tokens,
               (size_t)span->n_rows * sizeof *span->tokens);
        for (int32_t j = 0; j < span->n_rows; j++, row++) {
            int32_t p = span->position + j;
            plan->positions[row] = p;
            plan->slots[row] =
                span->write ? (int64_t)span->blocks[p / bt] * bt + p % bt : -1;
        }
    }
}

/* ---- segments ------------------------------------------------------------ */

static void add_segment(rk_plan *plan, int32_t first, int32_t end,
                        int32_t key_begin, int32_t key_end)
{
    const piece *p = &plan->pieces[first];
    int32_t unready = key_begin - p->position; /* rows before the first key */
    plan->segments[plan->n_segments++] = (rk_segment){
        .key_begin = key_begin,
        .key_end = key_end,
        .row_begin = p->row_begin + (unready > 0 ? unready : 0),
        .row_end = plan->pieces[end - 1].row_end,
        .blocks = p->blocks,
    };
}

/* List the keys [at, tile_end) of pieces [begin, end). A call inside goes on
 * where a run of pieces parts, so it has fewer pieces: the depth is less than
 * RK_CHUNK_ROWS, and n pieces give at most 2 n - 1 segments. */
static void cut(rk_plan *plan, int32_t begin, int32_t end, int32_t at,
                int32_t tile_end)
{
    const piece *pieces = plan->pieces;
    for (int32_t i = begin; i < end;) {
        if (pieces[i].n_keys <= at) {
            i++;
            continue;
        }
        int32_t together = tile_end, n_keys = pieces[i].n_keys, j = i + 1;
        while (j < end && pieces[j].shared > at && pieces[j].n_keys > at) {
            if (pieces[j].shared < together) {
                together = pieces[j].shared;
            }
            if (pieces[j].n_keys > n_keys) {
                n_keys = pieces[j].n_keys;
            }
            j++;
        }
        if (together > n_keys) {
            together = n_keys;
        }
        add_segment(plan, i, j, at, together);
        if (together < tile_end && j - i > 1) {
            cut(plan, i, j, together, tile_end);
        }
        i = j;
    }
}

/* Bring one tile's segments into the order of key_begin, then row_begin. */
static void order_tile(rk_segment *segments, int32_t n)
{
    for (int32_t i = 1; i < n; i++) {
        rk_segment s = segments[i];
        int32_t j = i;
        while (j > 0 && (segments[j - 1].key_begin > s.key_begin ||
                         (segments[j - 1].key_begin == s.key_begin &&
                          segments[j - 1].row_begin > s.row_begin))) {
            segments[j] = segments[j - 1];
            j--;
        }
        segments[j] = s;
    }
}

/* Segments of the chunk whose pieces are laid out. */
static rk_status cut_chunk(rk_plan *plan, int32_t n_pieces, rk_error *err)
{
    int32_t n_keys = 0;
    for (int32_t i = 0; i < n_pieces; i++) {
        if (plan->pieces[i].n_keys > n_keys) {
            n_keys = plan->pieces[i].n_keys;
        }
    }
    for (int32_t key = 0; key < n_keys; key += RK_TILE) {
        int32_t first = plan->n_segments;
        rk_status status =
            reserve_segments(plan, (int64_t)first + 2 * n_pieces, err);
        if (status != RK_OK) {
            return status;
        }
        cut(plan, 0, n_pieces, key, key + RK_TILE);
        order_tile(plan->segments + first, plan->n_segments - first);
    }
    return RK_OK;
}

static rk_status cut_rows(rk_plan *plan, const rk_span *spans, int32_t n_rows,
                          int32_t *n_chunks, rk_error *err)
{
    int32_t at = 0, done = 0; /* place, and its rows in chunks before */
    plan->n_segments = 0;
    for (int32_t row = 0; row < n_rows;) {
        rk_chunk *chunk = &plan->chunks[(*n_chunks)++];
        int32_t room = n_rows - row, n_pieces = 0;
        room = room < RK_CHUNK_ROWS ? room : RK_CHUNK_ROWS;
        chunk->row_begin = row;
        chunk->row_end = row + room;
        chunk->segment_begin = plan->n_segments;
        while (room > 0) {
            const place *from = &plan->places[at];
            const rk_span *span = &spans[from->span];
            int32_t left = span->n_rows - done;
            int32_t n = left < room ? left : room;
            plan->pieces[n_pieces++] = (piece){
                .blocks = from->blocks,
                .row_begin = row,
                .row_end = row + n,
                .position = span->position + done,
                .n_keys = span->position + done + n,
                .shared = from->shared,
            };
            row += n;
            room -= n;
            done += n;
            if (done == span->n_rows) {
                done = 0;
                at++;
            }
        }
        rk_status status = cut_chunk(plan, n_pieces, err);
        if (status != RK_OK) {
            return status;
        }
        chunk->segment_end = plan->n_segments;
    }
    return RK_OK;
}

rk_status rk_plan_build(rk_plan *plan, const rk_span *spans, int32_t n_spans,
                        rk_batch *batch, int32_t *first_rows, rk_error *err)
{
    int32_t n_rows = 0, n_chunks = 0;
    rk_status status = take_spans(plan, spans, n_spans, &n_rows, err);
    if (status != RK_OK) {
        return status;
    }
    sort_places(plan, n_spans);
    lay_rows(plan, spans, n_spans, first_rows);
    status = cut_rows(plan, spans, n_rows, &n_chunks, err);
    if (status != RK_OK) {
        return status;
    }
    *batch = (rk_batch){
        .n_rows = n_rows,
        .tokens = plan->tokens,
        .positions = plan->positions,
        .slots = plan->slots,
        .n_chunks = n_chunks,
        .chunks = plan->chunks,
        .n_segments = plan->n_segments,
        .segments = plan->segments,
    };
    return RK_OK;
}
