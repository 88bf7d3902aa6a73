/* The contract between the transformer (forward.c) and a machine.
 *
 * A backend is a table of operations over opaque memory. The host never looks
 * into a device address. Order of business in a step: `begin` takes the facts
 * of the batch (the only place where integers cross over), operations follow
 * in program order, `download` waits and brings a few numbers per row back.
 * An operation never allocates and never waits: everything that can be refused
 * is refused when the device is created. A device that breaks keeps the first
 * reason: `check` tells it, and what it brings back from then on is no number.
 *
 * Reproducibility (CPU): the result of a row depends on that row's inputs
 * alone, bit for bit, never on n_rows, threads, chunk or block_tokens. Each
 * reduction has one written order per instruction set.
 *
 * A matrix (rk_matrix.type) is of the compute type, or of a block type that the
 * backend takes. How activations meet the latter is rk_extent.rounding.
 *
 * Types: "in" is an array of rk_device.input, what enters matrix products; "q"
 * one of rk_device.query, what attention takes queries in. Keys and values are
 * rk_extent.kv_type in the pool and nobody else's business. Everything else is
 * float32. Shapes are row-major and dense. Outputs come first.
 */
#ifndef RKSC_BACKEND_H
#define RKSC_BACKEND_H

#include "rksc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the batch of a step (built by plan.c, integers only) --------------- */

/* Keys [key_begin, key_end) of one tile, held by the same blocks for all rows
 * [row_begin, row_end): read once for all of them. `blocks` is the block table
 * of any of these rows' sequences: position p lives in blocks[p /
 * block_tokens] at offset p % block_tokens. A row at position p uses the keys
 * of the segment that are <= p (and inside the window, where there is one). */
typedef struct rk_segment {
    int32_t key_begin, key_end; /* both in one tile: p / RK_TILE is the same for
                                 * all p of them */
    int32_t row_begin, row_end;
    const int32_t *blocks;
} rk_segment;

/* At most RK_CHUNK_ROWS consecutive rows of the batch and their segments, in
 * the order of tiles, within a tile of key_begin, then row_begin. Every key
 * that a row may use is covered by exactly one segment. */
typedef struct rk_chunk {
    int32_t row_begin, row_end;
    int32_t segment_begin, segment_end; /* into rk_batch.segments */
} rk_chunk;

typedef struct rk_batch {
    int32_t n_rows;           /* 1 .. rk_extent.max_rows */
    const int32_t *tokens;    /* (n_rows,) */
    const int32_t *positions; /* (n_rows,) absolute */
    const int64_t *slots;     /* (n_rows,) block * block_tokens + offset where
                               * K and V go; -1: they are already there */
    int32_t n_chunks;
    const rk_chunk *chunks; /* cover [0, n_rows) in order */
    int32_t n_segments;
    const rk_segment *segments;
    bool roomy; /* the buffers of this step have room for rk_rows_room(n) rows
                 * where an operation has n; what is behind the n-th row is
                 * undefined after it. Lets a device pad and replay steps. */
} rk_batch;

/* Rows that a buffer of n rows has room for. */
static inline int32_t rk_rows_room(int32_t n)
{
    int32_t room = 1;
    if (n > 64) {
        return n;
    }
    while (room < n && room < 8) {
        room *= 2;
    }
    return n <= 8 ? room : (n + 7) / 8 * 8;
}

/* ---- sampling ----------------------------------------------------------- */

/* How one row picks its token. temperature 0: the largest logit, lowest id on
 * ties. Otherwise softmax(logits / temperature), then top_k (0: off), top_p
 * (1: off) and min_p (0: off) keep a set, in this order, and a uniform number
 * from a counter-based generator keyed by (seed, stream, position) picks from
 * it in the order of ids. `forced` >= 0 is taken as it is (scoring). */
typedef struct rk_draw {
    float temperature, top_p, min_p;
    int32_t top_k;
    int32_t forced;
    uint64_t seed, stream;
    int64_t position;
} rk_draw;

/* What a step brings back for a row; all of the raw distribution
 * softmax(logits), whatever the sampling. token -1: a logit was NaN. */
typedef struct rk_pick {
    int32_t token;     /* the chosen one */
    int32_t top;       /* argmax, lowest id on ties */
    float logprob;     /* natural log-probability of `token` */
    float top_prob;    /* probability of `top` */
    float entropy;     /* nats */
    float top_logprob; /* natural log-probability of `top` */
} rk_pick;

/* ---- device -------------------------------------------------------------- */

typedef struct rk_device rk_device;

/* What becomes of activations that meet a matrix of a block type in qkv, linear
 * and swiglu (embed and answer: float32, always). */
typedef enum rk_rounding {
    /* The compute type; the results are those of the matrix converted to it. */
    RK_ROUND_ACT = 0,
    /* The CPU's alone, from float32, and sums of products are exact integers:
     * to 16 bits, for each 256 of a row by max / 32767, */
    RK_ROUND_INT16,
    /* or to 8 bits, for each 32 by max / 127. */
    RK_ROUND_INT8
} rk_rounding;

/* Sizes known at creation; they bound all scratch memory. */
typedef struct rk_extent {
    rk_type compute;      /* what matrices that are not in blocks are of, and
                           * what enters products: RK_F32 or RK_BF16 */
    rk_type kv_type;      /* how keys and values are stored: rk_check_kv_type */
    int32_t block_tokens; /* power of two, 1 .. RK_TILE */
    int64_t n_blocks;     /* of the KV pool; committed as they are used */
    int32_t max_rows;     /* rows of a step */
    int32_t max_outputs;  /* rows of one `pick` */
    rk_rounding rounding;
} rk_extent;

/* Memory of a device on loan to others, who order their work behind ours. It
 * is there until `release`, whatever becomes of the device. Both calls may
 * come from any thread. */
typedef struct rk_lent rk_lent;
struct rk_lent {
    void *data;
    int ordinal; /* of the GPU */
    /* What `stream` (a cudaStream_t) is given from now on finds the contents.
     */
    rk_status (*await)(rk_lent *lent, uintptr_t stream, rk_error *err);
    /* Once; takes the lent with it. Work that others have queued on the memory
     * may still be under way. */
    void (*release)(rk_lent *lent);
};

typedef struct rk_ops {
    /* -- memory: may fail, may wait; not used inside a step except download */
    void *(*alloc)(rk_device *dev, size_t bytes); /* NULL: out of memory */
    void (*free)(rk_device *dev, void *memory);   /* takes NULL */
    void (*upload)(rk_device *dev, void *dst, const void *host, size_t bytes);
    void (*download)(rk_device *dev, void *host, const void *src, size_t bytes);
    void (*destroy)(rk_device *dev);
    /* RK_OK, or why what was computed since creation is not to be trusted. */
    rk_status (*check)(rk_device *dev, rk_error *err);
    /* Can the device read this address? (If not, weights are uploaded.) */
    bool (*holds)(rk_device *dev, const void *memory);
    /* Lend a copy of what the ops so far have put into `src`; does not wait
     * for them, unless lent memory that came back has to be waited for. NULL:
     * the device's memory is the host's. */
    rk_status (*lend)(rk_device *dev, rk_lent **out, const void *src,
                      size_t bytes, rk_error *err);

    /* -- KV pool: all layers of a block at once */
    void (*kv_copy)(rk_device *dev, int32_t dst_block, int32_t src_block);
    void (*kv_fill)(rk_device *dev, int32_t block, uint8_t byte);

    /* -- the step */
    /* Take the batch's facts and prepare RoPE angles for its rows. The batch
     * and all it points to stay valid until the next begin. */
    void (*begin)(rk_device *dev, const rk_batch *batch);
    /* out[i] = table[batch.tokens[i]] as float32. out: (n_rows, width) */
    void (*embed)(rk_device *dev, float *out, const rk_matrix *table);
    /* out[i] = x[i] / sqrt(mean(x[i]^2) + norm_eps) * weight. The sum of
     * squares is float32 or wider; x: (n, width), out: in (n, width).
     * weight NULL: out[i] = x[i], converted to `in` and nothing else. */
    void (*norm)(rk_device *dev, void *out, const float *x, const float *weight,
                 int32_t n);
    /* Project a: in (n_rows, width) by the layer's query, key, value (+bias);
     * rotate Q and K at the rows' positions; write K and V of rows with slot
     * >= 0 to the pool; out: q (n_rows, n_heads * head_dim) = rotated Q. */
    void (*qkv)(rk_device *dev, void *out, const void *a, const rk_layer *layer,
                int32_t layer_id);
    /* out: in (n_rows, n_heads * head_dim) = softmax(q k / sqrt(head_dim)) v
     * by the plan of the batch. q: as qkv left it. */
    void (*attention)(rk_device *dev, void *out, const void *q,
                      int32_t layer_id);
    /* out: float32 (n, w->rows) = a w^T + bias, or += when `accumulate`.
     * a: in (n, w->cols). */
    void (*linear)(rk_device *dev, float *out, const void *a,
                   const rk_matrix *w, int32_t n, bool accumulate);
    /* out: in (n, ffn) = silu(a gate^T) * (a up^T). a: in (n, width) */
    void (*swiglu)(rk_device *dev, void *out, const void *a,
                   const rk_matrix *gate, const rk_matrix *up, int32_t n);

    /* -- rows, statistics, lenses */
    /* dst[i] = src[rows[i]]; float32, `width` wide; `rows` is a host array.
     * dst == src is allowed when rows[i] >= i rises (compaction). */
    void (*gather)(rk_device *dev, float *dst, const float *src,
                   const int32_t *rows, int32_t n, int32_t width);
    /* out: (n,) on the device; logits: (n, vocab); draws: host array. */
    void (*pick)(rk_device *dev, rk_pick *out, const float *logits,
                 const rk_draw *draws, int32_t n);
    /* out: float32 (n, n_ids) = dot(norm(x[i]), head[ids[j]]), head rows and
     * accumulation in float32 whatever the head's type; `weight` is the final
     * norm's, NULL: x is used as it is. ids: host array. */
    void (*answer)(rk_device *dev, float *out, const float *x,
                   const float *weight, const rk_matrix *head,
                   const int32_t *ids, int32_t n, int32_t n_ids);
    /* out: float32 (width,) = mean over rows of x: (n, width), added in the
     * order of rows to `sum` (width,) float64 first; one call with n rows or
     * several with parts of them give the same bits when `sum` is carried. */
    void (*mean)(rk_device *dev, float *out, double *sum, const float *x,
                 int32_t n, int64_t n_total);
    /* out: (n,) = cos(a[i] - center, b - center), NULL center: zero; 0 norm or
     * NaN gives NaN. a: (n, width), b: (width,). */
    void (*cosine)(rk_device *dev, float *out, const float *a, const float *b,
                   const float *center, int32_t n);
} rk_ops;

/* Every device begins with its table: dev->ops->norm(dev, ...). */
struct rk_device {
    const rk_ops *ops;
    rk_type input; /* of what enters products: compute, or float32 where that
                    * is rounded to integers */
    rk_type query; /* of Q from qkv to attention */
};

/* Bytes of an element of `compute`, `input` or `query`. */
static inline size_t rk_act_bytes(rk_type type)
{
    return type == RK_BF16 ? 2 : 4;
}

/* Bytes of the key, or the value, of one head at one position. */
static inline size_t rk_kv_bytes(rk_type kv_type, int32_t head_dim)
{
    return (size_t)head_dim * (kv_type == RK_BF16 ? 2 : 4);
}

/* Bytes of one block: K and V of block_tokens positions in all layers. */
static inline size_t rk_block_bytes(const rk_config *config, rk_type kv_type,
                                    int32_t block_tokens)
{
    return (size_t)2 * (size_t)config->n_layers * (size_t)config->n_kv_heads *
           (size_t)block_tokens * rk_kv_bytes(kv_type, config->head_dim);
}

/* The one place that refuses a type that no backend stores KV in. */
static inline rk_status rk_check_kv_type(rk_type kv_type, rk_error *err)
{
    return kv_type == RK_F32 || kv_type == RK_BF16
               ? RK_OK
               : rk_fail(err, RK_EVALUE,
                         "kv_type: keys and values are stored as F32 or BF16, "
                         "not as type %d",
                         (int)kv_type);
}

/* The sizes that every backend wants; `machine` is named where it matters. */
static inline rk_status rk_check_sizes(const char *machine, const rk_config *c,
                                       const rk_extent *e, rk_error *err)
{
    if (e->compute != RK_F32 && e->compute != RK_BF16) {
        return rk_fail(err, RK_EVALUE, "compute: %s takes F32 or BF16",
                       machine);
    }
    rk_status status = rk_check_kv_type(e->kv_type, err);
    if (status == RK_OK) {
        status = rk_check_block_tokens(e->block_tokens, err);
    }
    if (status != RK_OK) {
        return status;
    }
    if (e->n_blocks < 1 || e->n_blocks > INT32_MAX || e->max_rows < 1 ||
        e->max_outputs < 1) {
        return rk_fail(err, RK_EVALUE,
                       "n_blocks, max_rows and max_outputs must be positive");
    }
    if (c->n_layers < 1 || c->width < 1 || c->ffn_width < 1 ||
        c->n_kv_heads < 1 || c->n_heads < c->n_kv_heads ||
        c->n_heads % c->n_kv_heads != 0 || c->head_dim < 2 ||
        c->head_dim % 2 != 0 || c->vocab_size < 1 || c->inv_freq == NULL) {
        return rk_fail(err, RK_EVALUE, "config: a size is not usable");
    }
    return RK_OK;
}

/* ---- backends ------------------------------------------------------------ */

/* Instruction sets of the CPU backend, weakest first. */
typedef enum rk_isa {
    RK_ISA_PORTABLE = 0,
    RK_ISA_AVX2,
    RK_ISA_AVX512,
    RK_ISA_AVX512_BF16,
    RK_ISA_AMX,
    RK_N_ISAS
} rk_isa;

const char *rk_isa_name(rk_isa isa); /* "portable", "avx2", "avx512", ... */
bool rk_isa_supported(rk_isa isa);   /* by this machine and this build */
rk_isa rk_isa_best(void);

/* Does the CPU read matrices of this block type where they lie? What a backend
 * does not take the binder converts to the compute type beforehand. */
bool rk_cpu_takes(rk_type type);

/* n_threads >= 1. `isa` must be supported. The device copies `config` and
 * its inv_freq. Calls on one device are serialised by the caller. */
rk_status rk_cpu_create(rk_device **out, const rk_config *config,
                        const rk_extent *extent, rk_isa isa, int n_threads,
                        rk_error *err);

/* Threads that this process may really use: affinity and cgroup quota. */
int rk_cpu_default_threads(void);

/* The CUDA backend is a shared object of its own, opened on first use, so that
 * nothing else needs a driver. One GPU and one stream: */
typedef struct rk_cuda rk_cuda;

/* What the shared object exports as rk_cuda_library. */
typedef struct rk_cuda_calls {
    uint64_t abi; /* RK_ABI (abi.py): made with the headers of this rksc? */
    /* RK_ESTATE: no driver, no such GPU, one that is too old: the text says
     * what to do. */
    rk_status (*open)(rk_cuda **out, int ordinal, rk_error *err);
    void (*close)(rk_cuda *cuda); /* after its devices; takes NULL */
    uintptr_t (*stream)(const rk_cuda *cuda); /* the cudaStream_t */
    /* Copy from the GPU's memory when its stream comes to it; waits. */
    rk_status (*fetch)(rk_cuda *cuda, void *host, const void *src, size_t bytes,
                       rk_error *err);
    /* Wait for all that was queued on the GPU, by anybody. */
    rk_status (*settle)(rk_cuda *cuda, rk_error *err);
    /* Like rk_cpu_create; the device borrows `cuda`. */
    rk_status (*create)(rk_device **out, rk_cuda *cuda, const rk_config *config,
                        const rk_extent *extent, rk_error *err);
} rk_cuda_calls;

struct rk_cuda {
    const rk_cuda_calls *calls;
    int ordinal;
    int capability; /* such as 90 for 9.0 */
};

/* Open the shared object at `path` (it stays open) and GPU `ordinal`. */
rk_status rk_cuda_open(rk_cuda **out, const char *path, int ordinal,
                       rk_error *err);

/* A device of that GPU, or, `cuda` NULL, of the CPU with the two that follow.
 */
rk_status rk_device_create(rk_device **out, rk_cuda *cuda, rk_isa isa,
                           int n_threads, const rk_config *config,
                           const rk_extent *extent, rk_error *err);

#ifdef __cplusplus
}
#endif

#endif
