/* The CPU backend's private vocabulary: device, threads, kernels.
 *
 * device.c owns memory and the ops table; threads.c runs units of work;
 * product.c, attention.c, rows.c and pick.c cut an op into units; a unit calls
 * kernels of one instruction set (kernels_*.c, all instances of template_*.h).
 * A unit never looks at which thread runs it except for scratch memory, and no
 * reduction crosses units in an order that depends on timing.
 */
#ifndef RKSC_CPU_H
#define RKSC_CPU_H

#include "backend.h"

/* Activation rows of a packed group. */
#define CPU_PACK_ROWS 16

/* Activation rows up to which reading the weights is what a product costs. */
#define CPU_FEW_ROWS 128

/* Activation rows of a kernel call at most, when they are more than that. */
#define CPU_PANEL_ROWS 512

/* ---- kernels: one table per instruction set ----------------------------- */

/* out[i * out_stride + j] = a_i . w_j + bias[j] (+ what was there), for
 * i < m, j < n; a: (m, k) and w: (n, k), dense, both of the compute type, or w
 * of a block type where the kernel takes it (cpu_kernels.block_rows). */
typedef struct cpu_product {
    float *out;
    int64_t out_stride;
    const void *a;
    const void *w;
    rk_type type;      /* of w */
    const float *bias; /* (n,) or NULL */
    int32_t m, n, k;
    bool accumulate;
    bool many;     /* as `a` was packed */
    void *scratch; /* product_scratch_bytes(k), where kernels want it */
} cpu_product;

/* The same where activations are integers and w of a block type: n rows of
 * blocks, row_bytes apart. */
typedef struct cpu_integer_product {
    float *out;
    int64_t out_stride;
    const void *a; /* cpu_int16_block or cpu_integers (m, blocks of k) */
    const char *w;
    int64_t row_bytes;
    rk_type type;
    const float *bias; /* (n,) or NULL */
    int32_t m, n, k;   /* m <= CPU_PANEL_ROWS; k: whole blocks of `type` */
    bool accumulate;
    void *scratch; /* scratch_bytes of the kernels */
} cpu_integer_product;

/* Keys of one KV head in a run of blocks. Key p lies in block blocks[p /
 * block_tokens]. How K and V lie inside a block is the kernels' business: in
 * float32 K is (head_dim, block_tokens), in bf16 (head_dim / 2, block_tokens,
 * 2), so that keys lie in lanes; V is (block_tokens, head_dim) but for AMX. */
typedef struct cpu_keys {
    const char *k, *v; /* this layer and head in block 0 */
    int64_t block_bytes;
    const int32_t *blocks;
    int32_t block_shift; /* log2(block_tokens) */
    int32_t head_dim;
} cpu_keys;

/* Keys [begin, end) of one tile, where they lie. */
typedef struct cpu_piece {
    cpu_keys keys;
    int32_t begin, end;
} cpu_piece;

/* Slots [lo, hi) of a tile or keys [lo, hi) of a sequence. */
typedef struct cpu_span {
    int32_t lo, hi;
} cpu_span;

/* One row's share of softmax(q k) v over one tile or the tiles so far:
 * maximum score, sum of exp(score - max), both in the accumulator's row. */
typedef struct cpu_partial {
    float max, sum;
} cpu_partial;

/* Rows that use the same pieces, in rising order and of one tile; pairs (row,
 * head of the group) i. part[i] is the softmax over the slots use[i / group] of
 * the tile, where there are any, and acc[i] = sum over keys of p[i][key]
 * v[key]. 15 rows behind acc may be written and as many behind q be read. */
typedef struct cpu_run {
    float *acc;
    cpu_partial *part;
    const void *q;
    const cpu_span *use; /* (n_rows,) */
    const cpu_piece *pieces;
    int32_t n_pieces, n_rows, group;
    float scale;
    void *scratch;
} cpu_run;

/* Kernels over activations, and weights, of one type. */
typedef struct cpu_type_kernels {
    size_t bytes; /* of an element */
    void (*product)(const cpu_product *job);
    /* NULL, or: products want `a` packed in groups of CPU_PACK_ROWS rows
     * of packed_bytes(k) each, the last one with fewer rows; `many`: more than
     * CPU_FEW_ROWS of them in all. */
    void (*pack)(void *out, const void *a, int32_t rows, int32_t k, bool many);
    size_t (*packed_bytes)(int32_t k);
    /* NULL, or bytes of cpu_product.scratch */
    size_t (*product_scratch_bytes)(int32_t k);
    /* products of at most so many rows take weights of block types */
    int32_t block_rows;
    /* n values of a block type, whole blocks: the bits of rk_dequantize, then
     * rk_to_bf16 (of NaN, any) */
    void (*dequant)(void *out, const void *blocks, rk_type type, int32_t n);
    /* a row of n values from float32 */
    void (*convert)(void *out, const float *x, int32_t n);
    void (*norm)(void *out, const float *x, const float *weight, float eps,
                 int32_t n);
    void (*swiglu)(void *out, const float *gate, const float *up, int32_t n);
} cpu_type_kernels;

/* Kernels over keys and values that are stored as one type. Rows are (row,
 * head of the group) pairs, n of them. Scores lie at [row * RK_TILE + key -
 * tile]; acc rows have `acc_stride` floats in an order private to the kernels.
 */
typedef struct cpu_attention_kernels {
    rk_type query; /* rk_device.query */
    /* one row of K or V into its block (of one KV head) */
    void (*store_key)(void *block, int32_t offset, int32_t block_tokens,
                      const float *x, int32_t head_dim);
    void (*store_value)(void *block, int32_t offset, int32_t block_tokens,
                        const float *x, int32_t head_dim);

    int32_t (*acc_stride)(int32_t head_dim);
    size_t (*query_bytes)(int32_t head_dim);
    /* one row of q as `scores` wants it */
    void (*load_query)(void *out, const void *q, int32_t head_dim);
    void (*scores)(float *scores, const void *q, const cpu_keys *keys,
                   int32_t key_begin, int32_t key_end, int32_t n);
    /* scores[lo..hi) -> exp(scale * score - max), lo < hi <= RK_TILE; what
     * `values` takes as p */
    cpu_partial (*softmax)(float *scores, int32_t lo, int32_t hi, float scale);
    /* acc[i] += sum over keys, in order, of p[i][key] * v[key] */
    void (*values)(float *acc, const float *p, const cpu_keys *keys,
                   int32_t key_begin, int32_t key_end, int32_t n);
    /* NULL, or instead of these three: */
    void (*attend)(const cpu_run *run);
    size_t (*attend_bytes)(int32_t head_dim); /* of cpu_run.scratch */
    /* acc / sum as one type or the other: what `input` may be */
    void (*finish_f32)(void *out, const float *acc, const cpu_partial *all,
                       int32_t head_dim);
    void (*finish_bf16)(void *out, const float *acc, const cpu_partial *all,
                        int32_t head_dim);
} cpu_attention_kernels;

typedef struct cpu_kernels {
    cpu_type_kernels f32, bf16;
    const cpu_attention_kernels *kv_f32, *kv_bf16;

    /* x: (2 * half,) rotated in place by cos, sin: (half,) */
    void (*rope)(float *x, const float *cosine, const float *sine, int32_t half,
                 bool interleaved);
    /* fold `part` into `all`, which holds the earlier tiles */
    void (*merge)(float *all_acc, cpu_partial *all, const float *part_acc,
                  const cpu_partial *part, int32_t acc_stride);

    /* -- rows of logits */
    /* of n values: maximum, its first index, and over all i, with d = x_i -
     * max: sum of exp(d) and of d exp(d). max NaN, index -1: a value is NaN
     * or the maximum infinite; max -inf, index -1: all are -inf. */
    void (*statistics)(float *max, int32_t *index, float *sum, float *dsum,
                       const float *x, int32_t n);
    /* out[i] = exp((x[i] - max) * scale) */
    void (*weights)(float *out, const float *x, float max, float scale,
                    int32_t n);
    float (*sum)(const float *x, int32_t n);
    float (*dot)(const float *x, const float *y, int32_t n);
} cpu_kernels;

extern const cpu_kernels cpu_kernels_portable;
#if defined(__x86_64__)
extern const cpu_kernels cpu_kernels_avx2;
extern const cpu_kernels cpu_kernels_avx512;
extern const cpu_kernels cpu_kernels_avx512_bf16;
extern const cpu_kernels cpu_kernels_amx;
#endif

/* The table of a supported instruction set. */
const cpu_kernels *cpu_kernels_of(rk_isa isa);

/* Its kernels over activations of a type, */
static inline const cpu_type_kernels *cpu_kernels_over(const cpu_kernels *k,
                                                       rk_type type)
{
    return type == RK_BF16 ? &k->bf16 : &k->f32;
}

/* and over keys and values of a type that rk_check_kv_type takes. */
static inline const cpu_attention_kernels *
cpu_attention_over(const cpu_kernels *k, rk_type kv_type)
{
    return kv_type == RK_BF16 ? k->kv_bf16 : k->kv_f32;
}

/* ---- threads ------------------------------------------------------------- */

typedef struct cpu_pool cpu_pool;

/* Run one unit of `job`; `thread` < n_threads names the scratch to use. */
typedef void cpu_unit(void *job, int32_t unit, int32_t thread);

/* NULL: out of memory or threads. */
cpu_pool *cpu_pool_create(int n_threads);
void cpu_pool_free(cpu_pool *pool); /* takes NULL */
/* Run units 0 .. n_units - 1, each once, on all threads and the caller. */
void cpu_pool_run(cpu_pool *pool, cpu_unit *unit, void *job, int32_t n_units);

/* ---- device -------------------------------------------------------------- */

/* Tiles of one batch that threads may share out (attention.c). */
#define CPU_MAX_TILES 2048

typedef struct cpu_tile {
    int32_t chunk;
    int32_t segment_begin, segment_end; /* all of one tile */
} cpu_tile;

typedef struct cpu_device {
    rk_device base;
    const cpu_kernels *kernels;
    const cpu_type_kernels *compute; /* of them, over rk_extent.compute, */
    const cpu_type_kernels *input;   /* over what enters products, */
    const cpu_type_kernels *query;   /* over Q on its way to attention, */
    const cpu_attention_kernels *attention; /* and over rk_extent.kv_type */
    cpu_pool *pool;
    int32_t n_threads;
    rk_config config;
    rk_extent extent;
    int32_t group;      /* query heads of a KV head */
    int32_t acc_stride; /* floats of one accumulator row */
    int32_t block_shift;

    char *kv; /* n_blocks * block_bytes, mapped, committed when touched */
    size_t kv_bytes;
    /* of one block, of one layer in it, and there of K or V of one head */
    int64_t block_bytes, layer_bytes, head_bytes;

    char *narrow; /* activations of one product as `compute`, where they come
                   * as another `input`; NULL: not wanted */
    char *packed; /* activations of one product; NULL: not wanted */
    char *panels; /* n_threads * panel_bytes: scratch of products */
    size_t panel_bytes;

    char *rows; /* n_threads * rows_bytes: rows of block types as
                 * `compute` */
    size_t rows_bytes;

    /* Where activations are rounded to integers, one of the two, and those of
     * one product: cpu_int16_block or cpu_integers (rows, blocks of k) */
    const struct cpu_int16_kernels *int16;
    const struct cpu_int8_kernels *int8;
    void *integers;

    char *scratch; /* n_threads * scratch_bytes */
    size_t scratch_bytes;

    rk_batch batch;
    float *cosine, *sine; /* (max_rows, head_dim / 2) of the batch's rows */
    int32_t n_tiles;      /* of the batch; 0: too many to list */
    cpu_tile *tiles;      /* (CPU_MAX_TILES,) */
    int32_t *chunk_tiles; /* (CPU_MAX_TILES + 1,) first tile of each chunk */
    char *partials;       /* partials_bytes: attention shared out by tiles */
    size_t partials_bytes;

    struct cpu_slice *slices; /* pick: (max_outputs, slices of a row) */
} cpu_device;

static inline void *cpu_scratch(const cpu_device *dev, int32_t thread)
{
    return dev->scratch + (size_t)thread * dev->scratch_bytes;
}

static inline int32_t cpu_min(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static inline int32_t cpu_max(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

static inline int32_t cpu_ceil_div(int32_t a, int32_t b)
{
    return (a + b - 1) / b;
}

/* Sizes rounded up so that neighbours never share a cache line. */
static inline size_t cpu_align(size_t bytes)
{
    return (bytes + 127) & ~(size_t)127;
}

/* ---- ops, by file; see rk_ops for what they do --------------------------- */

/* product.c */
void cpu_linear(rk_device *base, float *out, const void *a, const rk_matrix *w,
                int32_t n, bool accumulate);
void cpu_swiglu(rk_device *base, void *out, const void *a,
                const rk_matrix *gate, const rk_matrix *up, int32_t n);
void cpu_qkv(rk_device *base, void *out, const void *a, const rk_layer *layer,
             int32_t layer_id);
size_t cpu_product_scratch(const cpu_device *dev);
/* Memory for packed activations and products' own scratch; false: none. */
bool cpu_product_allocate(cpu_device *dev);

/* attention.c */
void cpu_attention(rk_device *base, void *out, const void *q, int32_t layer_id);
void cpu_attention_begin(cpu_device *dev);
size_t cpu_attention_scratch(const cpu_device *dev);

/* rows.c */
void cpu_begin(rk_device *base, const rk_batch *batch);
void cpu_embed(rk_device *base, float *out, const rk_matrix *table);
void cpu_norm(rk_device *base, void *out, const float *x, const float *weight,
              int32_t n);
void cpu_gather(rk_device *base, float *dst, const float *src,
                const int32_t *rows, int32_t n, int32_t width);
void cpu_answer(rk_device *base, float *out, const float *x,
                const float *weight, const rk_matrix *head, const int32_t *ids,
                int32_t n, int32_t n_ids);
void cpu_mean(rk_device *base, float *out, double *sum, const float *x,
              int32_t n, int64_t n_total);
void cpu_cosine(rk_device *base, float *out, const float *a, const float *b,
                const float *center, int32_t n);
size_t cpu_rows_scratch(const cpu_device *dev);

/* pick.c */
void cpu_pick(rk_device *base, rk_pick *out, const float *logits,
              const rk_draw *draws, int32_t n);
size_t cpu_pick_scratch(const cpu_device *dev);
size_t cpu_pick_slices_bytes(const cpu_device *dev);

#endif
