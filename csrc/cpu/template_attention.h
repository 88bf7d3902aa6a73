/* Attention over blocks of keys: scores, softmax of a tile, weighted values.
 *
 * Scores: keys lie in lanes, so each score is one lane's sum over head_dim in
 * its order, whatever stands beside it. Softmax: the RK_TILE slots of a tile
 * are added slot i to lane i % LANES, then by one tree; slots without a key
 * count as zero. Values: one lane per dimension, keys in their order. Hence
 * the result does not depend on block_tokens or on where segments are cut.
 * Slots that a row may not use are selected away or skipped, never multiplied:
 * memory behind them may hold anything.
 *
 * An accumulator row is head_dim floats padded to whole steps. In bf16 a step
 * is 2 * LANES dimensions, the even ones first: that is how a vector of bf16
 * pairs unpacks with one shift and one mask.
 *
 * The last chapter names the kernels of each KV type. What an instruction set
 * does its own way for bf16 it puts in the place of attention_bf16 and defines
 * OWN_ATTENTION_BF16 (amx_attention.h).
 */
#ifndef RKSC_CPU_TEMPLATE_ATTENTION_H
#define RKSC_CPU_TEMPLATE_ATTENTION_H

#include "template_rows.h"

#define BLOCK_KEYS(keys) (1 << (keys)->block_shift)

/* The first key of the block that holds `key`. */
static inline const char *block_of(const cpu_keys *keys, const char *base,
                                   int32_t key)
{
    return base + keys->blocks[key >> keys->block_shift] * keys->block_bytes;
}

static int32_t acc_stride_f32(int32_t head_dim)
{
    return (head_dim + LANES - 1) / LANES * LANES;
}

#if !defined(OWN_ATTENTION_BF16)
static int32_t acc_stride_bf16(int32_t head_dim)
{
    return (head_dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
}
#endif

/* ---- a row into its block ------------------------------------------------ */

#define PART 64 /* elements that are converted at a time, whole vectors */

static void store_key_f32(void *block, int32_t offset, int32_t block_tokens,
                          const float *x, int32_t head_dim)
{
    float *to = (float *)block + offset;
    for (int32_t i = 0; i < head_dim; i++) {
        to[(int64_t)i * block_tokens] = x[i];
    }
}

static void store_key_bf16(void *block, int32_t offset, int32_t block_tokens,
                           const float *x, int32_t head_dim)
{
    uint32_t *to = (uint32_t *)block + offset;
    uint16_t part[PART];
    for (int32_t from = 0; from < head_dim; from += PART) {
        const int32_t n = head_dim - from < PART ? head_dim - from : PART;
        row_convert_bf16(part, x + from, n);
        for (int32_t i = 0; i < n / 2; i++, to += block_tokens) {
            memcpy(to, part + 2 * i, 4);
        }
    }
}

static void store_value_f32(void *block, int32_t offset, int32_t block_tokens,
                            const float *x, int32_t head_dim)
{
    (void)block_tokens;
    row_convert_f32((float *)block + (int64_t)offset * head_dim, x, head_dim);
}

#if !defined(OWN_ATTENTION_BF16)
static void store_value_bf16(void *block, int32_t offset, int32_t block_tokens,
                             const float *x, int32_t head_dim)
{
    (void)block_tokens;
    row_convert_bf16((uint16_t *)block + (int64_t)offset * head_dim, x,
                     head_dim);
}
#endif

/* ---- queries ------------------------------------------------------------- */

static size_t query_bytes_f32(int32_t head_dim)
{
    return (size_t)head_dim * sizeof(float);
}

static void load_query_f32(void *out, const void *q, int32_t head_dim)
{
    memcpy(out, q, query_bytes_f32(head_dim));
}

#if defined(OWN_ATTENTION_BF16)
#elif HAS_DOT
static size_t query_bytes_bf16(int32_t head_dim)
{
    return (size_t)head_dim * sizeof(uint16_t);
}

static void load_query_bf16(void *out, const void *q, int32_t head_dim)
{
    memcpy(out, q, query_bytes_bf16(head_dim));
}
#else
static size_t query_bytes_bf16(int32_t head_dim)
{
    return (size_t)head_dim * sizeof(float);
}

static void load_query_bf16(void *out, const void *q, int32_t head_dim)
{
    const int32_t n = head_dim;
    FOR_LANES(n)
    {
        STORE_f32(out, n_left >= LANES
                           ? vf_load_bf16((const uint16_t *)q + i)
                           : vf_load_bf16_n((const uint16_t *)q + i, n_left));
    }
}
#endif

/* ---- scores -------------------------------------------------------------- */

#define SCORE_ROWS 8
#define SCORE_VECTORS 2

/* Up to LANES keys of one block. */
typedef struct key_vector {
    const char *k;
    int32_t n, slot;
} key_vector;

/* Up to LANES keys of [key, end), from the block that holds `key`. */
static inline key_vector next_keys(const cpu_keys *keys, int32_t key,
                                   int32_t end)
{
    int32_t at = key & (BLOCK_KEYS(keys) - 1);
    int32_t n = BLOCK_KEYS(keys) - at;
    n = n < LANES ? n : LANES;
    n = n < end - key ? n : end - key;
    return (key_vector){block_of(keys, keys->k, key) + (size_t)at * 4, n,
                        key % RK_TILE};
}

/* A step is one dimension (float32) or a pair of them (bf16): one vector of K,
 * 4 bytes a key either way. */
static inline __attribute__((always_inline)) void
score_step_f32(vf acc[SCORE_ROWS][SCORE_VECTORS], const char *q, size_t q_bytes,
               const key_vector *at, size_t offset, int32_t step, int rows,
               int vectors, bool whole)
{
    vf k[SCORE_VECTORS];
    UNROLL
    for (int j = 0; j < vectors; j++) {
        const float *from = (const float *)(at[j].k + offset);
        k[j] = whole ? vf_load(from) : vf_load_n(from, at[j].n);
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        vf x = vf_set1(((const float *)(q + i * q_bytes))[step]);
        UNROLL
        for (int j = 0; j < vectors; j++) {
            acc[i][j] = vf_fma(x, k[j], acc[i][j]);
        }
    }
}

static inline __attribute__((always_inline)) void
score_step_bf16(vf acc[SCORE_ROWS][SCORE_VECTORS], const char *q,
                size_t q_bytes, const key_vector *at, size_t offset,
                int32_t step, int rows, int vectors, bool whole)
{
    vb k[SCORE_VECTORS];
    UNROLL
    for (int j = 0; j < vectors; j++) {
        const uint16_t *from = (const uint16_t *)(at[j].k + offset);
        k[j] = whole ? vb_load(from) : vb_load_n(from, 2 * at[j].n);
    }
#if HAS_DOT
    UNROLL
    for (int i = 0; i < rows; i++) {
        vb x = vb_set1(((const uint32_t *)(q + i * q_bytes))[step]);
        UNROLL
        for (int j = 0; j < vectors; j++) {
            acc[i][j] = vf_dot(acc[i][j], x, k[j]);
        }
    }
#else
    UNROLL
    for (int j = 0; j < vectors; j++) {
        vf even = vb_even(k[j]), odd = vb_odd(k[j]);
        UNROLL
        for (int i = 0; i < rows; i++) {
            const float *x = (const float *)(q + i * q_bytes) + 2 * step;
            acc[i][j] = vf_fma(vf_set1(x[0]), even, acc[i][j]);
            acc[i][j] = vf_fma(vf_set1(x[1]), odd, acc[i][j]);
        }
    }
#endif
}

#define DEFINE_SCORES(TYPE, STEPS)                                             \
    static inline __attribute__((always_inline)) void score_block_##TYPE(      \
        float *scores, const char *q, size_t q_bytes, const key_vector *at,    \
        const cpu_keys *keys, int rows, int vectors, bool whole)               \
    {                                                                          \
        vf acc[SCORE_ROWS][SCORE_VECTORS];                                     \
        UNROLL                                                                 \
        for (int i = 0; i < rows; i++) {                                       \
            UNROLL                                                             \
            for (int j = 0; j < vectors; j++) {                                \
                acc[i][j] = vf_zero();                                         \
            }                                                                  \
        }                                                                      \
        const size_t stride = (size_t)4 << keys->block_shift;                  \
        size_t offset = 0;                                                     \
        for (int32_t step = 0; step < (STEPS); step++, offset += stride) {     \
            score_step_##TYPE(acc, q, q_bytes, at, offset, step, rows,         \
                              vectors, whole);                                 \
        }                                                                      \
        UNROLL                                                                 \
        for (int i = 0; i < rows; i++) {                                       \
            UNROLL                                                             \
            for (int j = 0; j < vectors; j++) {                                \
                float *to = scores + i * RK_TILE + at[j].slot;                 \
                if (whole) {                                                   \
                    vf_store(to, acc[i][j]);                                   \
                } else {                                                       \
                    vf_store_n(to, acc[i][j], at[j].n);                        \
                }                                                              \
            }                                                                  \
        }                                                                      \
    }                                                                          \
    static void score_rows_##TYPE(float *scores, const char *q,                \
                                  size_t q_bytes, const key_vector *at,        \
                                  const cpu_keys *keys, int32_t n)             \
    {                                                                          \
        for (; n >= SCORE_ROWS; n -= SCORE_ROWS) {                             \
            score_block_##TYPE(scores, q, q_bytes, at, keys, SCORE_ROWS,       \
                               SCORE_VECTORS, true);                           \
            scores += SCORE_ROWS * RK_TILE;                                    \
            q += SCORE_ROWS * q_bytes;                                         \
        }                                                                      \
        switch (n) {                                                           \
        case 7:                                                                \
            SCORE_CASE(TYPE, 7);                                               \
        case 6:                                                                \
            SCORE_CASE(TYPE, 6);                                               \
        case 5:                                                                \
            SCORE_CASE(TYPE, 5);                                               \
        case 4:                                                                \
            SCORE_CASE(TYPE, 4);                                               \
        case 3:                                                                \
            SCORE_CASE(TYPE, 3);                                               \
        case 2:                                                                \
            SCORE_CASE(TYPE, 2);                                               \
        case 1:                                                                \
            SCORE_CASE(TYPE, 1);                                               \
        }                                                                      \
    }                                                                          \
    /* One vector of keys, which may be part of one. */                        \
    static void score_odd_##TYPE(float *scores, const char *q, size_t q_bytes, \
                                 const key_vector *at, const cpu_keys *keys,   \
                                 int32_t n)                                    \
    {                                                                          \
        for (; n >= 4; n -= 4) {                                               \
            score_block_##TYPE(scores, q, q_bytes, at, keys, 4, 1, false);     \
            scores += 4 * RK_TILE;                                             \
            q += 4 * q_bytes;                                                  \
        }                                                                      \
        for (; n > 0; n--) {                                                   \
            score_block_##TYPE(scores, q, q_bytes, at, keys, 1, 1, false);     \
            scores += RK_TILE;                                                 \
            q += q_bytes;                                                      \
        }                                                                      \
    }                                                                          \
    static void scores_##TYPE(float *scores, const void *q,                    \
                              const cpu_keys *keys, int32_t key_begin,         \
                              int32_t key_end, int32_t n)                      \
    {                                                                          \
        const size_t q_bytes = query_bytes_##TYPE(keys->head_dim);             \
        key_vector whole[SCORE_VECTORS];                                       \
        int n_whole = 0;                                                       \
        for (int32_t key = key_begin; key < key_end;) {                        \
            key_vector one = next_keys(keys, key, key_end);                    \
            key += one.n;                                                      \
            if (one.n < LANES) {                                               \
                score_odd_##TYPE(scores, q, q_bytes, &one, keys, n);           \
                continue;                                                      \
            }                                                                  \
            whole[n_whole++] = one;                                            \
            if (n_whole == SCORE_VECTORS) {                                    \
                score_rows_##TYPE(scores, q, q_bytes, whole, keys, n);         \
                n_whole = 0;                                                   \
            }                                                                  \
        }                                                                      \
        if (n_whole == 1) {                                                    \
            score_odd_##TYPE(scores, q, q_bytes, whole, keys, n);              \
        }                                                                      \
    }

#define SCORE_CASE(TYPE, ROWS_LEFT)                                            \
    score_block_##TYPE(scores, q, q_bytes, at, keys, ROWS_LEFT, SCORE_VECTORS, \
                       true);                                                  \
    break

DEFINE_SCORES(f32, keys->head_dim)
#if !defined(OWN_ATTENTION_BF16)
DEFINE_SCORES(bf16, keys->head_dim / 2)
#endif

/* ---- softmax of one row of a tile ---------------------------------------- */

static cpu_partial softmax_tile(float *scores, int32_t lo, int32_t hi,
                                float scale)
{
    const vf least = vf_set1(-INFINITY);
    const int32_t begin = lo / LANES * LANES;
    vf max = least;
    for (int32_t i = begin; i < hi; i += LANES) {
        vf s = vf_load(scores + i);
        if (i < lo || i + LANES > hi) { /* slots that the row may not use */
            s = vf_select_range(lo - i, hi - i, s, least);
            vf_store(scores + i, s);
        }
        max = vf_max(max, s);
    }
    cpu_partial part;
    part.max = vf_hmax(max) * scale;
    const vf by = vf_set1(scale), below = vf_set1(-part.max);
    vf sum = vf_zero();
    for (int32_t i = begin; i < hi; i += LANES) {
        vf p = vf_exp_below(vf_fma(vf_load(scores + i), by, below));
        vf_store(scores + i, p);
        sum = vf_add(sum, p);
    }
    part.sum = vf_sum(sum);
    return part;
}

/* ---- values -------------------------------------------------------------- */

/* acc[i] += p[i][key] v[key] for `rows` rows and `parts` vectors of V; `left`:
 * elements of a last, partial vector (then parts is 1), 0: whole. */
static inline __attribute__((always_inline)) void
value_step_f32(vf acc[VALUE_ROWS][VALUE_VECTORS], const float *p, const char *v,
               int rows, int vectors, int left)
{
    vf x[VALUE_VECTORS];
    UNROLL
    for (int j = 0; j < vectors; j++) {
        const float *from = (const float *)v + j * LANES;
        x[j] = left ? vf_load_n(from, left) : vf_load(from);
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        vf y = vf_set1(p[i * RK_TILE]);
        UNROLL
        for (int j = 0; j < vectors; j++) {
            acc[i][j] = vf_fma(y, x[j], acc[i][j]);
        }
    }
}

static inline __attribute__((always_inline)) void
value_step_bf16(vf acc[VALUE_ROWS][VALUE_VECTORS], const float *p,
                const char *v, int rows, int vectors, int left)
{
    vf x[VALUE_VECTORS];
    UNROLL
    for (int j = 0; j < vectors; j += 2) {
        const uint16_t *from = (const uint16_t *)v + j * LANES;
        vb pairs = left ? vb_load_n(from, left) : vb_load(from);
        x[j] = vb_even(pairs);
        x[j + 1] = vb_odd(pairs);
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        vf y = vf_set1(p[i * RK_TILE]);
        UNROLL
        for (int j = 0; j < vectors; j++) {
            acc[i][j] = vf_fma(y, x[j], acc[i][j]);
        }
    }
}

#define DEFINE_VALUES(TYPE, BYTES, FEWEST)                                     \
    static inline __attribute__((always_inline)) void value_block_##TYPE(      \
        float *out, int32_t stride, const float *p, const cpu_keys *keys,      \
        int32_t from, int32_t begin, int32_t end, int rows, int vectors,       \
        int left)                                                              \
    {                                                                          \
        const size_t row_bytes = (size_t)keys->head_dim * (BYTES);             \
        vf acc[VALUE_ROWS][VALUE_VECTORS];                                     \
        UNROLL                                                                 \
        for (int i = 0; i < rows; i++) {                                       \
            UNROLL                                                             \
            for (int j = 0; j < vectors; j++) {                                \
                acc[i][j] = vf_load(out + i * stride + from + j * LANES);      \
            }                                                                  \
        }                                                                      \
        for (int32_t key = begin; key < end;) {                                \
            int32_t at = key & (BLOCK_KEYS(keys) - 1);                         \
            int32_t n = BLOCK_KEYS(keys) - at;                                 \
            n = n < end - key ? n : end - key;                                 \
            const char *v = block_of(keys, keys->v, key) + at * row_bytes +    \
                            (size_t)from * (BYTES);                            \
            const float *weight = p + key % RK_TILE;                           \
            for (int32_t t = 0; t < n; t++, v += row_bytes) {                  \
                value_step_##TYPE(acc, weight + t, v, rows, vectors, left);    \
            }                                                                  \
            key += n;                                                          \
        }                                                                      \
        UNROLL                                                                 \
        for (int i = 0; i < rows; i++) {                                       \
            UNROLL                                                             \
            for (int j = 0; j < vectors; j++) {                                \
                vf_store(out + i * stride + from + j * LANES, acc[i][j]);      \
            }                                                                  \
        }                                                                      \
    }                                                                          \
    static inline __attribute__((always_inline)) void value_rows_##TYPE(       \
        float *acc, const float *p, const cpu_keys *keys, int32_t begin,       \
        int32_t end, int rows)                                                 \
    {                                                                          \
        const int32_t stride = acc_stride_##TYPE(keys->head_dim);              \
        const int32_t n = keys->head_dim;                                      \
        int32_t from = 0;                                                      \
        for (; from + VALUE_VECTORS * LANES <= n;                              \
             from += VALUE_VECTORS * LANES) {                                  \
            value_block_##TYPE(acc, stride, p, keys, from, begin, end, rows,   \
                               VALUE_VECTORS, 0);                              \
        }                                                                      \
        for (; from + (FEWEST) * LANES <= n; from += (FEWEST) * LANES) {       \
            value_block_##TYPE(acc, stride, p, keys, from, begin, end, rows,   \
                               FEWEST, 0);                                     \
        }                                                                      \
        if (from < n) {                                                        \
            value_block_##TYPE(acc, stride, p, keys, from, begin, end, rows,   \
                               FEWEST, n - from);                              \
        }                                                                      \
    }                                                                          \
    static void values_##TYPE(float *acc, const float *p,                      \
                              const cpu_keys *keys, int32_t key_begin,         \
                              int32_t key_end, int32_t n)                      \
    {                                                                          \
        const int32_t stride = acc_stride_##TYPE(keys->head_dim);              \
        for (; n >= VALUE_ROWS; n -= VALUE_ROWS) {                             \
            value_rows_##TYPE(acc, p, keys, key_begin, key_end, VALUE_ROWS);   \
            acc += VALUE_ROWS * stride;                                        \
            p += VALUE_ROWS * RK_TILE;                                         \
        }                                                                      \
        for (; n >= VALUE_ROWS / 2; n -= VALUE_ROWS / 2) {                     \
            value_rows_##TYPE(acc, p, keys, key_begin, key_end,                \
                              VALUE_ROWS / 2);                                 \
            acc += VALUE_ROWS / 2 * stride;                                    \
            p += VALUE_ROWS / 2 * RK_TILE;                                     \
        }                                                                      \
        for (; n > 0; n--) {                                                   \
            value_rows_##TYPE(acc, p, keys, key_begin, key_end, 1);            \
            acc += stride;                                                     \
            p += RK_TILE;                                                      \
        }                                                                      \
    }

DEFINE_VALUES(f32, 4, 1)
#if !defined(OWN_ATTENTION_BF16)
DEFINE_VALUES(bf16, 2, 2)
#endif

/* ---- partial results ----------------------------------------------------- */

static void merge_tile(float *all_acc, cpu_partial *all, const float *part_acc,
                       const cpu_partial *part, int32_t acc_stride)
{
    const float max = part->max > all->max ? part->max : all->max;
    const float old = exp1(all->max - max), fresh = exp1(part->max - max);
    const vf by_old = vf_set1(old), by_fresh = vf_set1(fresh);
    for (int32_t i = 0; i < acc_stride; i += LANES) {
        vf x = vf_mul(vf_load(all_acc + i), by_old);
        vf_store(all_acc + i, vf_fma(vf_load(part_acc + i), by_fresh, x));
    }
    all->sum = all->sum * old + part->sum * fresh;
    all->max = max;
}

/* acc in the order of dimensions */
#define DEFINE_FINISH(TYPE)                                                    \
    static void finish_plain_##TYPE(void *out, const float *acc,               \
                                    const cpu_partial *all, int32_t head_dim)  \
    {                                                                          \
        const vf by = vf_set1(1.0f / all->sum);                                \
        const int32_t n = head_dim;                                            \
        FOR_LANES(n)                                                           \
        {                                                                      \
            STORE_##TYPE(out, vf_mul(LOAD(acc), by));                          \
        }                                                                      \
    }

DEFINE_FINISH(f32)
DEFINE_FINISH(bf16)

#if !defined(OWN_ATTENTION_BF16)
/* acc in the order of unpacked pairs */
static void finish_pairs_bf16(void *out, const float *acc,
                              const cpu_partial *all, int32_t head_dim)
{
    const vf by = vf_set1(1.0f / all->sum);
    for (int32_t i = 0; i < head_dim; i += 2 * LANES) {
        vf even = vf_mul(vf_load(acc + i), by);
        vf odd = vf_mul(vf_load(acc + i + LANES), by);
        vb pairs = vb_pack(even, odd);
        int32_t left = head_dim - i;
        if (left >= 2 * LANES) {
            vb_store((uint16_t *)out + i, pairs);
        } else {
            vb_store_n((uint16_t *)out + i, pairs, left);
        }
    }
}

static void finish_pairs_f32(void *out, const float *acc,
                             const cpu_partial *all, int32_t head_dim)
{
    const float by = 1.0f / all->sum;
    float *to = out;
    for (int32_t i = 0; i < head_dim; i++) {
        const int32_t step = i / (2 * LANES), at = i % (2 * LANES);
        to[i] = acc[step * 2 * LANES + at % 2 * LANES + at / 2] * by;
    }
}
#endif

/* ---- the kernels of a KV type -------------------------------------------- */

static const cpu_attention_kernels attention_f32 = {
    .query = RK_F32,
    .store_key = store_key_f32,
    .store_value = store_value_f32,
    .acc_stride = acc_stride_f32,
    .query_bytes = query_bytes_f32,
    .load_query = load_query_f32,
    .scores = scores_f32,
    .softmax = softmax_tile,
    .values = values_f32,
    .finish_f32 = finish_plain_f32,
    .finish_bf16 = finish_plain_bf16,
};

#if !defined(OWN_ATTENTION_BF16)
static const cpu_attention_kernels attention_bf16 = {
    .query = RK_BF16,
    .store_key = store_key_bf16,
    .store_value = store_value_bf16,
    .acc_stride = acc_stride_bf16,
    .query_bytes = query_bytes_bf16,
    .load_query = load_query_bf16,
    .scores = scores_bf16,
    .softmax = softmax_tile,
    .values = values_bf16,
    .finish_f32 = finish_pairs_f32,
    .finish_bf16 = finish_pairs_bf16,
};
#endif

#endif
