/* A step below the table of ops.
 *
 * Facts: `begin` lays tokens, positions, slots and units of attention side by
 * side into pinned memory; they go to the device in one copy. Small host
 * arrays of later ops (rows, draws) are laid behind them.
 *
 * Replay: the ops of a small step (decoding) are recorded and launched
 * together when somebody asks for a result. The same record a second time
 * becomes a CUDA graph, the third time the graph is launched. (A capture that
 * another thread's call spoils is no failure: the ops are launched one by one.)
 * All that differs from step to step is read from device memory; what ops are
 * launched with is made equal by rounding counts up: rows to rk_rows_room,
 * lists to powers of two. So a record with its rounded counts is the graph's
 * key.
 */
#include "cuda.h"

#include <stdlib.h>
#include <string.h>

#define RECORDED_ROWS 64 /* larger steps are launched op by op */
#define ALIGNMENT 256

static size_t align(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* ---- staging memory
 * ------------------------------------------------------------ */

static void staging_free(cuda_device *dev)
{
    cuda_staging *s = &dev->staging;
    for (int i = 0; i < 2; i++) {
        cudaFreeHost(s->host[i]);
        if (s->sent[i] != NULL) {
            cudaEventDestroy(s->sent[i]);
        }
    }
    cuda_pool_give(dev->context->pool, s->device);
    *s = (cuda_staging){0};
}

static rk_status staging_create(cuda_device *dev, size_t bytes, rk_error *err)
{
    cuda_staging *s = &dev->staging;
    rk_status status = cuda_error(
        cuda_pool_take(dev->context->pool, (void **)&s->device, bytes),
        "cudaMalloc", err);
    for (int i = 0; i < 2 && status == RK_OK; i++) {
        status = cuda_error(cudaMallocHost((void **)&s->host[i], bytes),
                            "cudaMallocHost", err);
        if (status == RK_OK) {
            status = cuda_error(
                cudaEventCreateWithFlags(&s->sent[i], cudaEventDisableTiming),
                "cudaEventCreateWithFlags", err);
        }
    }
    s->bytes = bytes;
    if (status != RK_OK) {
        staging_free(dev);
    }
    return status;
}

/* Send what has been laid down since the last time. */
static void send(cuda_device *dev)
{
    cuda_staging *s = &dev->staging;
    if (s->uploaded < s->end) {
        CUDA_TRY(dev, cudaMemcpyAsync, s->device + s->uploaded,
                 s->host[s->turn] + s->uploaded, s->end - s->uploaded,
                 cudaMemcpyHostToDevice, dev->context->stream);
        CUDA_TRY(dev, cudaEventRecord, s->sent[s->turn], dev->context->stream);
        s->uploaded = s->end;
    }
}

/* Go on in the other host buffer at `end`, once it has been read. */
static void turn(cuda_device *dev, size_t end)
{
    cuda_staging *s = &dev->staging;
    s->turn ^= 1;
    CUDA_TRY(dev, cudaEventSynchronize, s->sent[s->turn]);
    s->uploaded = s->end = end;
}

void *cuda_stage(cuda_device *dev, const void *host, size_t bytes, size_t room)
{
    cuda_staging *s = &dev->staging;
    if (dev->error.status != RK_OK) {
        return NULL; /* there may be no staging memory either */
    }
    if (s->end + align(room) > s->bytes) {
        int before = cuda_enter(dev->context);
        cuda_play(dev);
        send(dev);
        turn(dev, dev->facts.end);
        cuda_leave(before);
    }
    unsigned char *to = s->host[s->turn] + s->end;
    void *address = s->device + s->end;
    memcpy(to, host, bytes);
    memset(to + bytes, 0, room - bytes);
    s->end += align(room);
    return address;
}

/* ---- graphs
 * --------------------------------------------------------------------- */

static void graph_free(cuda_graph *graph)
{
    if (graph->exec != NULL) {
        cudaGraphExecDestroy(graph->exec);
    }
    free(graph->ops);
    *graph = (cuda_graph){0};
}

static void forget_graphs(cuda_device *dev)
{
    for (int i = 0; i < CUDA_N_GRAPHS; i++) {
        graph_free(&dev->graphs[i]);
    }
}

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t n_bytes)
{
    uint64_t word;
    for (const char *at = data; n_bytes >= sizeof word;
         at += sizeof word, n_bytes -= sizeof word) {
        memcpy(&word, at, sizeof word);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return hash;
}

_Static_assert(sizeof(cuda_op) % 8 == 0 && sizeof(cuda_facts) % 8 == 0,
               "hashed by words");

/* The entry of what is recorded: found, or a new one in the place of the one
 * that nobody has asked for the longest. NULL: no memory for it. */
static cuda_graph *find_graph(cuda_device *dev)
{
    size_t bytes = (size_t)dev->n_ops * sizeof *dev->ops;
    uint64_t hash = hash_bytes(1, &dev->facts, sizeof dev->facts);
    cuda_graph *oldest = &dev->graphs[0];
    hash = hash_bytes(hash, dev->ops, bytes);
    for (int i = 0; i < CUDA_N_GRAPHS; i++) {
        cuda_graph *g = &dev->graphs[i];
        if (g->hash == hash && g->n_ops == dev->n_ops &&
            memcmp(&g->facts, &dev->facts, sizeof g->facts) == 0 &&
            memcmp(g->ops, dev->ops, bytes) == 0) {
            return g;
        }
        oldest = g->used < oldest->used ? g : oldest;
    }
    if (oldest->exec != NULL) { /* it may be under way */
        CUDA_TRY(dev, cudaStreamSynchronize, dev->context->stream);
    }
    graph_free(oldest);
    oldest->ops = malloc(bytes);
    if (oldest->ops == NULL) {
        return NULL;
    }
    memcpy(oldest->ops, dev->ops, bytes);
    memcpy(&oldest->facts, &dev->facts, sizeof dev->facts);
    oldest->hash = hash;
    oldest->n_ops = dev->n_ops;
    return oldest;
}

static void issue_all(cuda_device *dev)
{
    for (int32_t i = 0; i < dev->n_ops; i++) {
        cuda_issue(dev, &dev->ops[i]);
    }
}

/* Launches go into a graph instead of the stream; the device is sound. Whatever
 * another thread does to the GPU meanwhile can spoil that: then nothing was
 * launched, no error stays, and the graph is left as it was. */
static void capture(cuda_device *dev, cuda_graph *graph)
{
    cudaStream_t stream = dev->context->stream;
    cudaGraph_t captured = NULL;
    cudaGraphExec_t exec = NULL;
    if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) ==
        cudaSuccess) {
        issue_all(dev);
        if (cudaStreamEndCapture(stream, &captured) == cudaSuccess &&
            dev->error.status == RK_OK &&
            cudaGraphInstantiate(&exec, captured, 0) == cudaSuccess) {
            graph->exec = exec;
        }
        if (captured != NULL) {
            cudaGraphDestroy(captured);
        }
    }
    if (graph->exec == NULL) {
        graph->n_spoiled++;
        dev->error = (rk_error){0};
        (void)cudaGetLastError();
    }
}

void cuda_play(cuda_device *dev)
{
    if (dev->n_ops == 0) {
        return;
    }
    int before = cuda_enter(dev->context);
    send(dev);
    cuda_graph *graph = find_graph(dev);
    bool seen = graph != NULL && graph->used > 0;
    bool sound = dev->error.status == RK_OK;
    if (graph != NULL) {
        graph->used = ++dev->n_plays;
    }
    if (seen && graph->exec == NULL && sound && graph->n_spoiled < 2) {
        capture(dev, graph);
    }
    if (graph != NULL && graph->exec != NULL && sound) {
        dev->n_replays++;
        CUDA_TRY(dev, cudaGraphLaunch, graph->exec, dev->context->stream);
    } else {
        issue_all(dev);
    }
    dev->n_ops = 0;
    cuda_leave(before);
}

/* ---- recording
 * -------------------------------------------------------------------- */

int32_t cuda_padded(const cuda_device *dev, int32_t n)
{
    return dev->roomy ? rk_rows_room(n) : n;
}

cuda_op *cuda_next(cuda_device *dev, cuda_kind kind, int32_t n)
{
    if (dev->n_ops == dev->ops_room) {
        int32_t room = 2 * dev->ops_room;
        cuda_op *more = realloc(dev->ops, (size_t)room * sizeof *more);
        if (more != NULL) {
            dev->ops = more;
            dev->ops_room = room;
        } else {
            cuda_play(dev); /* there is room again */
        }
    }
    cuda_op *op = &dev->ops[dev->n_ops];
    memset(op, 0, sizeof *op);
    op->kind = (int32_t)kind;
    op->n = n;
    return op;
}

void cuda_take(cuda_device *dev)
{
    if (dev->recording) {
        dev->n_ops++;
        return;
    }
    int before = cuda_enter(dev->context);
    send(dev);
    cuda_issue(dev, &dev->ops[dev->n_ops]);
    cuda_leave(before);
}

/* ---- the facts of a batch
 * ----------------------------------------------------------- */

static size_t round_up(const cuda_device *dev, int32_t n)
{
    size_t room = 8;
    while (dev->recording && room < (size_t)n) {
        room *= 2;
    }
    return room > (size_t)n ? room : (size_t)n;
}

static void lay_out(cuda_device *dev, const rk_work *work)
{
    cuda_facts *f = &dev->facts;
    memset(f, 0, sizeof *f);
    f->n_rows = cuda_padded(dev, work->n_rows);
    size_t rows = (size_t)f->n_rows, units = round_up(dev, work->n_units);
    f->n_blocks = (int32_t)units * dev->config.n_kv_heads;
    f->wide = work->wide;
    f->merge = work->n_partials > 0;
    f->n_units = 0;
    f->tokens = ALIGNMENT;
    f->positions = f->tokens + align(rows * sizeof(int32_t));
    f->slots = f->positions + align(rows * sizeof(int32_t));
    f->rows_first = f->slots + align(rows * sizeof(int64_t));
    f->units = f->rows_first + align((rows + 1) * sizeof(int32_t));
    f->places = f->units + align(units * sizeof(rk_work_unit));
    f->tables =
        f->places + align(round_up(dev, work->n_places) * sizeof(int32_t));
    f->end = f->tables + align(round_up(dev, work->n_tables) * sizeof(int32_t));
}

/* `n` items to their place; up to `room` follow that are all `rest`. */
static void lay_int32(unsigned char *to, const int32_t *from, int32_t n,
                      int32_t room, int32_t rest)
{
    int32_t *out = (int32_t *)(void *)to;
    if (n > 0) {
        memcpy(out, from, (size_t)n * sizeof *out);
    }
    for (int32_t i = n; i < room; i++) {
        out[i] = rest;
    }
}

static void lay_down(unsigned char *to, const cuda_facts *f,
                     const rk_batch *batch, const rk_work *work)
{
    int32_t n = batch->n_rows, rows = f->n_rows;
    int64_t *slots = (int64_t *)(void *)(to + f->slots);
    lay_int32(to + f->n_units, &work->n_units, 1, 1, 0);
    lay_int32(to + f->tokens, batch->tokens, n, rows, 0);
    lay_int32(to + f->positions, batch->positions, n, rows, 0);
    memcpy(slots, batch->slots, (size_t)n * sizeof *slots);
    for (int32_t i = n; i < rows; i++) {
        slots[i] = -1;
    }
    lay_int32(to + f->rows_first, work->rows_first, n + 1, rows + 1,
              work->rows_first[n]);
    memcpy(to + f->units, work->units,
           (size_t)work->n_units * sizeof *work->units);
    lay_int32(to + f->places, work->places, work->n_places, work->n_places, 0);
    lay_int32(to + f->tables, work->tables, work->n_tables, work->n_tables, 0);
}

/* Small host arrays of a step's ops, at least. */
static size_t extras(const cuda_device *dev)
{
    return align((size_t)rk_rows_room(dev->extent.max_rows) * 4) +
           align((size_t)rk_rows_room(dev->extent.max_outputs) *
                 (sizeof(rk_draw) + 4)) +
           16 * ALIGNMENT;
}

/* More memory for the facts of an unusually large step. */
static bool grow(cuda_device *dev, size_t bytes)
{
    if (bytes <= dev->staging.bytes) {
        return true;
    }
    CUDA_TRY(dev, cudaStreamSynchronize, dev->context->stream);
    forget_graphs(dev); /* they know the old address */
    staging_free(dev);
    rk_error err = {0};
    if (staging_create(dev, 2 * bytes, &err) != RK_OK) {
        if (dev->error.status == RK_OK) {
            dev->error = err;
        }
        return false;
    }
    return true;
}

void cuda_begin(rk_device *base, const rk_batch *batch)
{
    cuda_device *dev = cuda_of(base);
    int before = cuda_enter(dev->context);
    rk_error err = {0};
    cuda_play(dev);
    dev->n_rows = batch->n_rows;
    dev->roomy = batch->roomy;
    dev->recording = batch->roomy && batch->n_rows <= RECORDED_ROWS;
    if (rk_worker_build(dev->worker, batch, &dev->work, &err) != RK_OK) {
        if (dev->error.status == RK_OK) {
            dev->error = err;
        }
        dev->recording = false;
    } else {
        lay_out(dev, &dev->work);
        if (grow(dev, dev->facts.end + extras(dev))) {
            turn(dev, 0);
            lay_down(dev->staging.host[dev->staging.turn], &dev->facts, batch,
                     &dev->work);
            dev->staging.end = dev->facts.end;
            cuda_next(dev, CUDA_BEGIN, dev->facts.n_rows);
            cuda_take(dev);
        }
    }
    cuda_leave(before);
}

/* ---- life
 * -----------------------------------------------------------------------------
 */

rk_status cuda_step_create(cuda_device *dev, rk_error *err)
{
    dev->ops_room = 64;
    dev->ops = calloc((size_t)dev->ops_room, sizeof *dev->ops);
    if (dev->ops == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for a device");
    }
    return staging_create(dev, ((size_t)256 << 10) + extras(dev), err);
}

void cuda_step_free(cuda_device *dev)
{
    forget_graphs(dev);
    staging_free(dev);
    free(dev->ops);
}
