/* Attention by the plan of the batch.
 *
 * For a chunk of rows, one KV head and one tile of keys: scores of all (row,
 * head of the group) pairs, segment by segment, so that a block shared by many
 * rows is read once; softmax of each pair over the tile; weighted values in
 * the order of keys. This gives a partial (max, sum, acc) for each pair, and
 * partials are folded in the order of tiles:
 *
 *     m = max(m1, m2),  l = l1 e^(m1 - m) + l2 e^(m2 - m),  acc likewise.
 *
 * Either one unit of work walks all tiles of a chunk, or, when there are few
 * chunks, each tile is a unit of its own that stores its partial, and a second
 * round folds. Both do the same operations in the same order.
 */
#include <math.h>
#include <string.h>

#include "cpu.h"

typedef struct attention_job {
    const cpu_device *dev;
    char *out;
    const char *q;
    int32_t layer_id;
    int32_t window; /* 0: all */
    float scale;
    int64_t partial_bytes; /* of one tile of one KV head */
} attention_job;

/* Scratch of a unit. A pair is (row of the chunk) * group + head of the group.
 */
typedef struct workspace {
    float *scores;        /* (pairs, RK_TILE) */
    float *acc, *all_acc; /* (pairs, acc_stride) */
    cpu_partial *part, *all;
    char *q;      /* (pairs, query_bytes) */
    char *attend; /* of the kernel of this name */
} workspace;

/* Whether one kernel does all for runs of rows. */
static bool by_runs(const cpu_device *dev)
{
    return dev->attention->attend != NULL;
}

static int32_t max_pairs(const cpu_device *dev)
{
    return RK_CHUNK_ROWS * dev->group;
}

/* Whole tiles of pairs may be read and written behind the last pair. */
#define SPARE_PAIRS 16

static size_t carve(char **at, size_t bytes)
{
    *at += cpu_align(bytes);
    return cpu_align(bytes);
}

/* Lay the workspace out from `at`; returns its size. */
static size_t lay_out(const cpu_device *dev, char *at, workspace *ws)
{
    const size_t pairs = (size_t)max_pairs(dev) + SPARE_PAIRS;
    const size_t acc_bytes = pairs * (size_t)dev->acc_stride * sizeof(float);
    const size_t part_bytes = pairs * sizeof(cpu_partial);
    const size_t q_bytes =
        pairs * dev->attention->query_bytes(dev->config.head_dim);
    size_t size = 0;
    if (by_runs(dev)) {
        ws->attend = at;
        size += carve(&at, dev->attention->attend_bytes(dev->config.head_dim));
    } else {
        ws->scores = (float *)at;
        size += carve(&at, pairs * RK_TILE * sizeof(float));
    }
    ws->acc = (float *)at;
    size += carve(&at, acc_bytes);
    ws->all_acc = (float *)at;
    size += carve(&at, acc_bytes);
    ws->part = (cpu_partial *)at;
    size += carve(&at, part_bytes);
    ws->all = (cpu_partial *)at;
    size += carve(&at, part_bytes);
    ws->q = at;
    size += carve(&at, q_bytes);
    return size;
}

size_t cpu_attention_scratch(const cpu_device *dev)
{
    workspace ws;
    char start[1];
    return lay_out(dev, start, &ws);
}

static void no_keys(cpu_partial *part, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        part[i] = (cpu_partial){-INFINITY, 0.0f};
    }
}

/* ---- one tile ------------------------------------------------------------ */

/* Keys of [begin, end) that the row at `position` uses. */
static cpu_span row_keys(const attention_job *job, int32_t row, int32_t begin,
                         int32_t end)
{
    int32_t position = job->dev->batch.positions[row];
    cpu_span s = {begin, cpu_min(end, position + 1)};
    if (job->window > 0) {
        s.lo = cpu_max(begin, position + 1 - job->window);
    }
    return s;
}

/* The smallest span that holds the keys of rows [row, row_end) among the
 * segment's. */
static cpu_span rows_keys(const attention_job *job, const rk_segment *segment,
                          int32_t row, int32_t row_end)
{
    cpu_span all = {segment->key_end, segment->key_begin};
    for (; row < row_end; row++) {
        cpu_span s = row_keys(job, row, segment->key_begin, segment->key_end);
        if (s.lo < s.hi) {
            all.lo = cpu_min(all.lo, s.lo);
            all.hi = cpu_max(all.hi, s.hi);
        }
    }
    return all;
}

static cpu_keys keys_of(const attention_job *job, const rk_segment *segment,
                        int32_t kv_head)
{
    const cpu_device *dev = job->dev;
    const char *layer = dev->kv + job->layer_id * dev->layer_bytes;
    return (cpu_keys){
        .k = layer + kv_head * dev->head_bytes,
        .v = layer + (dev->config.n_kv_heads + kv_head) * dev->head_bytes,
        .block_bytes = dev->block_bytes,
        .blocks = segment->blocks,
        .block_shift = dev->block_shift,
        .head_dim = dev->config.head_dim,
    };
}

/* Values for the pairs of rows [row, row + n): first each row's own head of
 * keys, then the keys common to all, then each row's own end. */
static void add_values(const attention_job *job, const workspace *ws,
                       const cpu_keys *keys, const rk_chunk *chunk,
                       const rk_segment *segment, int32_t row, int32_t n)
{
    const cpu_device *dev = job->dev;
    const int32_t group = dev->group;
    cpu_span own[RK_CHUNK_ROWS],
        common = {segment->key_begin, segment->key_end};
    for (int32_t i = 0; i < n; i++) {
        own[i] = row_keys(job, row + i, segment->key_begin, segment->key_end);
        common.lo = cpu_max(common.lo, own[i].lo);
        common.hi = cpu_min(common.hi, own[i].hi);
    }
    const int64_t first = (int64_t)(row - chunk->row_begin) * group;
    float *acc = ws->acc + first * dev->acc_stride;
    const float *p = ws->scores + first * RK_TILE;
    const bool any = common.lo < common.hi;
    for (int32_t i = 0; i < n; i++) {
        int32_t end = any ? common.lo : own[i].hi;
        if (own[i].lo < end) {
            dev->attention->values(acc + (int64_t)i * group * dev->acc_stride,
                                   p + (int64_t)i * group * RK_TILE, keys,
                                   own[i].lo, end, group);
        }
    }
    if (!any) {
        return;
    }
    dev->attention->values(acc, p, keys, common.lo, common.hi, n * group);
    for (int32_t i = 0; i < n; i++) {
        if (common.hi < own[i].hi) {
            dev->attention->values(acc + (int64_t)i * group * dev->acc_stride,
                                   p + (int64_t)i * group * RK_TILE, keys,
                                   common.hi, own[i].hi, group);
        }
    }
}

/* Rows whose values are added together: neighbours differ by few keys. */
#define VALUE_BATCH 4

static void add_segments(const attention_job *job, const workspace *ws,
                         const rk_chunk *chunk, const cpu_tile *tile,
                         int32_t kv_head)
{
    const cpu_device *dev = job->dev;
    const int32_t n_rows = chunk->row_end - chunk->row_begin;
    memset(ws->acc, 0,
           (size_t)(n_rows * dev->group) * (size_t)dev->acc_stride *
               sizeof(float));
    for (int32_t s = tile->segment_begin; s < tile->segment_end; s++) {
        const rk_segment *segment = &dev->batch.segments[s];
        cpu_keys keys = keys_of(job, segment, kv_head);
        for (int32_t row = segment->row_begin; row < segment->row_end;
             row += VALUE_BATCH) {
            add_values(job, ws, &keys, chunk, segment, row,
                       cpu_min(VALUE_BATCH, segment->row_end - row));
        }
    }
}

/* The other way: rows that have the same segments in this tile form a run,
 * for which one kernel does it all. */
static void attend_runs(const attention_job *job, const workspace *ws,
                        const rk_chunk *chunk, const cpu_tile *tile,
                        int32_t kv_head)
{
    const cpu_device *dev = job->dev;
    const rk_segment *segments = dev->batch.segments;
    const int32_t n_rows = chunk->row_end - chunk->row_begin;
    const int32_t tile_begin =
        segments[tile->segment_begin].key_begin / RK_TILE * RK_TILE;
    bool cut[RK_CHUNK_ROWS + 1] = {false};
    cpu_span slots[RK_CHUNK_ROWS];
    cpu_piece pieces[RK_TILE]; /* segments of a row do not overlap */
    for (int32_t s = tile->segment_begin; s < tile->segment_end; s++) {
        cut[segments[s].row_begin - chunk->row_begin] = true;
        cut[segments[s].row_end - chunk->row_begin] = true;
    }
    for (int32_t i = 0; i < n_rows; i++) {
        cpu_span use = row_keys(job, chunk->row_begin + i, tile_begin,
                                tile_begin + RK_TILE);
        slots[i] = (cpu_span){use.lo - tile_begin, use.hi - tile_begin};
    }
    for (int32_t i = 0, end; i < n_rows; i = end) {
        const int32_t row = chunk->row_begin + i;
        int32_t n = 0;
        for (end = i + 1; end < n_rows && !cut[end]; end++) {
        }
        for (int32_t s = tile->segment_begin; s < tile->segment_end; s++) {
            if (segments[s].row_begin <= row && row < segments[s].row_end) {
                cpu_span use =
                    rows_keys(job, &segments[s], row, chunk->row_begin + end);
                if (use.lo < use.hi) {
                    pieces[n++] = (cpu_piece){
                        keys_of(job, &segments[s], kv_head), use.lo, use.hi};
                }
            }
        }
        const int64_t pair = (int64_t)i * dev->group;
        const int32_t head_dim = dev->config.head_dim;
        const cpu_run run = {
            .acc = ws->acc + pair * dev->acc_stride,
            .part = ws->part + pair,
            .q = ws->q + pair * (int64_t)dev->attention->query_bytes(head_dim),
            .use = slots + i,
            .pieces = pieces,
            .n_pieces = n,
            .n_rows = end - i,
            .group = dev->group,
            .scale = job->scale,
            .scratch = ws->attend,
        };
        if (n > 0) {
            dev->attention->attend(&run);
        } else {
            no_keys(run.part, run.n_rows * run.group);
        }
    }
}

/* Partials of all pairs of the chunk over the segments of one tile. A pair
 * without keys has sum 0. */
static void attend_tile(const attention_job *job, const workspace *ws,
                        const cpu_tile *tile, int32_t kv_head)
{
    const cpu_device *dev = job->dev;
    const cpu_attention_kernels *kernels = dev->attention;
    const rk_chunk *chunk = &dev->batch.chunks[tile->chunk];
    if (by_runs(dev)) {
        attend_runs(job, ws, chunk, tile, kv_head);
        return;
    }
    const rk_segment *segments = dev->batch.segments;
    const int32_t group = dev->group, head_dim = dev->config.head_dim;
    const int32_t n_rows = chunk->row_end - chunk->row_begin;
    const size_t q_bytes = kernels->query_bytes(head_dim);
    const int32_t tile_begin =
        segments[tile->segment_begin].key_begin / RK_TILE * RK_TILE;
    for (int32_t s = tile->segment_begin; s < tile->segment_end; s++) {
        cpu_span use = rows_keys(job, &segments[s], segments[s].row_begin,
                                 segments[s].row_end);
        if (use.lo < use.hi) {
            int64_t pair =
                (int64_t)(segments[s].row_begin - chunk->row_begin) * group;
            cpu_keys keys = keys_of(job, &segments[s], kv_head);
            kernels->scores(
                ws->scores + pair * RK_TILE, ws->q + pair * (int64_t)q_bytes,
                &keys, use.lo, use.hi,
                (segments[s].row_end - segments[s].row_begin) * group);
        }
    }
    for (int32_t i = 0; i < n_rows; i++) {
        cpu_span s = row_keys(job, chunk->row_begin + i, tile_begin,
                              tile_begin + RK_TILE);
        no_keys(ws->part + i * group, group);
        for (int32_t j = i * group; j < (i + 1) * group; j++) {
            if (s.lo < s.hi) {
                ws->part[j] = kernels->softmax(
                    ws->scores + (int64_t)j * RK_TILE, s.lo - tile_begin,
                    s.hi - tile_begin, job->scale);
            }
        }
    }
    add_segments(job, ws, chunk, tile, kv_head);
}

/* ---- a chunk ------------------------------------------------------------- */

static void load_queries(const attention_job *job, const workspace *ws,
                         const rk_chunk *chunk, int32_t kv_head)
{
    const cpu_device *dev = job->dev;
    const int32_t head_dim = dev->config.head_dim, group = dev->group;
    const size_t head_bytes = (size_t)head_dim * dev->query->bytes;
    const size_t q_bytes = dev->attention->query_bytes(head_dim);
    char *to = ws->q;
    for (int32_t row = chunk->row_begin; row < chunk->row_end; row++) {
        for (int32_t j = 0; j < group; j++, to += q_bytes) {
            int64_t head =
                (int64_t)row * dev->config.n_heads + kv_head * group + j;
            dev->attention->load_query(to, job->q + head * (int64_t)head_bytes,
                                       head_dim);
        }
    }
}

static void clear_all(const attention_job *job, const workspace *ws,
                      int32_t n_pairs)
{
    memset(ws->all_acc, 0,
           (size_t)n_pairs * (size_t)job->dev->acc_stride * sizeof(float));
    no_keys(ws->all, n_pairs);
}

/* Fold a tile's partials, skipping pairs that had no key in it. */
static void fold(const attention_job *job, const workspace *ws,
                 const float *acc, const cpu_partial *part, int32_t n_pairs)
{
    const int64_t stride = job->dev->acc_stride;
    for (int32_t i = 0; i < n_pairs; i++) {
        if (part[i].sum == 0.0f) {
            continue;
        }
        if (ws->all[i].sum == 0.0f) { /* the first: 1 * part + 0 */
            ws->all[i] = part[i];
            memcpy(ws->all_acc + i * stride, acc + i * stride,
                   (size_t)stride * sizeof(float));
        } else {
            job->dev->kernels->merge(ws->all_acc + i * stride, &ws->all[i],
                                     acc + i * stride, &part[i],
                                     (int32_t)stride);
        }
    }
}

static void write_out(const attention_job *job, const workspace *ws,
                      const rk_chunk *chunk, int32_t kv_head)
{
    const cpu_device *dev = job->dev;
    const int32_t head_dim = dev->config.head_dim, group = dev->group;
    const size_t head_bytes = (size_t)head_dim * dev->input->bytes;
    int64_t i = 0;
    for (int32_t row = chunk->row_begin; row < chunk->row_end; row++) {
        for (int32_t j = 0; j < group; j++, i++) {
            int64_t head =
                (int64_t)row * dev->config.n_heads + kv_head * group + j;
            const float *acc = ws->all_acc + i * dev->acc_stride;
            char *out = job->out + head * (int64_t)head_bytes;
            if (dev->base.input == RK_BF16) {
                dev->attention->finish_bf16(out, acc, &ws->all[i], head_dim);
            } else {
                dev->attention->finish_f32(out, acc, &ws->all[i], head_dim);
            }
        }
    }
}

static void attention_unit(void *argument, int32_t unit, int32_t thread)
{
    const attention_job *job = argument;
    const cpu_device *dev = job->dev;
    const rk_segment *segments = dev->batch.segments;
    /* Chunks of one head follow each other, so that they find its keys in the
     * cache. The last ones have the most: begin with them. */
    const int32_t n_chunks = dev->batch.n_chunks;
    const int32_t chunk_id = n_chunks - 1 - unit % n_chunks;
    const int32_t kv_head = unit / n_chunks;
    const rk_chunk *chunk = &dev->batch.chunks[chunk_id];
    const int32_t n_pairs = (chunk->row_end - chunk->row_begin) * dev->group;
    workspace ws;
    lay_out(dev, cpu_scratch(dev, thread), &ws);
    load_queries(job, &ws, chunk, kv_head);
    clear_all(job, &ws, n_pairs);
    for (int32_t s = chunk->segment_begin; s < chunk->segment_end;) {
        cpu_tile tile = {chunk_id, s, s};
        int32_t id = segments[s].key_begin / RK_TILE;
        while (s < chunk->segment_end &&
               segments[s].key_begin / RK_TILE == id) {
            s++;
        }
        tile.segment_end = s;
        attend_tile(job, &ws, &tile, kv_head);
        fold(job, &ws, ws.acc, ws.part, n_pairs);
    }
    write_out(job, &ws, chunk, kv_head);
}

/* ---- few chunks: tiles are shared out ------------------------------------ */

static void stored_partial(const attention_job *job, int32_t tile,
                           int32_t kv_head, workspace *ws)
{
    const cpu_device *dev = job->dev;
    char *at =
        dev->partials +
        ((int64_t)tile * dev->config.n_kv_heads + kv_head) * job->partial_bytes;
    ws->part = (cpu_partial *)at;
    at +=
        cpu_align(((size_t)max_pairs(dev) + SPARE_PAIRS) * sizeof(cpu_partial));
    ws->acc = (float *)at;
}

static void tile_unit(void *argument, int32_t unit, int32_t thread)
{
    const attention_job *job = argument;
    const cpu_device *dev = job->dev;
    const int32_t n_kv = dev->config.n_kv_heads;
    const cpu_tile *tile = &dev->tiles[unit / n_kv];
    workspace ws;
    lay_out(dev, cpu_scratch(dev, thread), &ws);
    stored_partial(job, unit / n_kv, unit % n_kv, &ws);
    load_queries(job, &ws, &dev->batch.chunks[tile->chunk], unit % n_kv);
    attend_tile(job, &ws, tile, unit % n_kv);
}

/* Rows of a chunk that one unit folds, and such units of a chunk. */
#define FOLD_ROWS 8
#define FOLDS (RK_CHUNK_ROWS / FOLD_ROWS)

static void fold_unit(void *argument, int32_t unit, int32_t thread)
{
    const attention_job *job = argument;
    const cpu_device *dev = job->dev;
    const int32_t n_kv = dev->config.n_kv_heads;
    const int32_t chunk_id = unit / (n_kv * FOLDS), kv_head = unit % n_kv;
    const int32_t skip = unit / n_kv % FOLDS * FOLD_ROWS;
    rk_chunk rows = dev->batch.chunks[chunk_id];
    rows.row_begin += skip;
    rows.row_end = cpu_min(rows.row_end, rows.row_begin + FOLD_ROWS);
    if (rows.row_begin >= rows.row_end) {
        return;
    }
    const int32_t n_pairs = (rows.row_end - rows.row_begin) * dev->group;
    const int64_t pair = (int64_t)skip * dev->group;
    workspace ws, stored;
    lay_out(dev, cpu_scratch(dev, thread), &ws);
    clear_all(job, &ws, n_pairs);
    for (int32_t t = dev->chunk_tiles[chunk_id];
         t < dev->chunk_tiles[chunk_id + 1]; t++) {
        stored_partial(job, t, kv_head, &stored);
        fold(job, &ws, stored.acc + pair * dev->acc_stride, stored.part + pair,
             n_pairs);
    }
    write_out(job, &ws, &rows, kv_head);
}

/* List the batch's tiles, or none when they are too many to share out. */
void cpu_attention_begin(cpu_device *dev)
{
    const rk_batch *batch = &dev->batch;
    dev->n_tiles = 0;
    if (batch->n_chunks > CPU_MAX_TILES) {
        return;
    }
    int32_t n = 0;
    for (int32_t c = 0; c < batch->n_chunks; c++) {
        dev->chunk_tiles[c] = n;
        for (int32_t s = batch->chunks[c].segment_begin;
             s < batch->chunks[c].segment_end; s++) {
            bool same = n > dev->chunk_tiles[c] &&
                        batch->segments[s].key_begin / RK_TILE ==
                            batch->segments[s - 1].key_begin / RK_TILE;
            if (!same) {
                if (n == CPU_MAX_TILES) {
                    return;
                }
                dev->tiles[n++] = (cpu_tile){c, s, s};
            }
            dev->tiles[n - 1].segment_end = s + 1;
        }
    }
    dev->chunk_tiles[batch->n_chunks] = n;
    dev->n_tiles = n;
}

/* Units per thread above which chunks alone balance well. */
#define ENOUGH_UNITS 8

void cpu_attention(rk_device *base, void *out, const void *q, int32_t layer_id)
{
    cpu_device *dev = (cpu_device *)base;
    const rk_config *config = &dev->config;
    const int32_t n_units = dev->batch.n_chunks * config->n_kv_heads;
    const size_t pairs = (size_t)max_pairs(dev) + SPARE_PAIRS;
    attention_job job = {
        .dev = dev,
        .out = out,
        .q = q,
        .layer_id = layer_id,
        .window = layer_id >= config->window_from ? config->window : 0,
        .scale = (float)(1.0 / sqrt((double)config->head_dim)),
        .partial_bytes = (int64_t)(cpu_align(pairs * sizeof(cpu_partial)) +
                                   cpu_align(pairs * (size_t)dev->acc_stride *
                                             sizeof(float))),
    };
    bool share_tiles =
        dev->n_threads > 1 && n_units < ENOUGH_UNITS * dev->n_threads &&
        dev->n_tiles > dev->batch.n_chunks &&
        (size_t)(dev->n_tiles * config->n_kv_heads * job.partial_bytes) <=
            dev->partials_bytes;
    if (share_tiles) {
        cpu_pool_run(dev->pool, tile_unit, &job,
                     dev->n_tiles * config->n_kv_heads);
        cpu_pool_run(dev->pool, fold_unit, &job, n_units * FOLDS);
    } else {
        cpu_pool_run(dev->pool, attention_unit, &job, n_units);
    }
}
