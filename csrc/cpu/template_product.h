/* Matrix product, written once for all instruction sets.
 *
 * Lane i of one accumulator takes k = i, i + LANES, ... (bf16: the pairs 2i,
 * 2i + 1, then on by 2 * LANES), the tail of K is masked, and one fixed tree
 * adds the lanes. This is the order of every output whatever m and n, so a row
 * has the same bits alone and in a batch; a block of R weight rows by C
 * activation rows only decides which accumulators are alive together.
 *
 * While the first rows of a block meet four weight rows, the next four are
 * fetched: short rows end before the processor's own prefetching is awake.
 *
 * The including file defines the vector vocabulary (see kernels_avx512.c) and
 * COLUMNS_F32, COLUMNS_BF16: activation rows of a block (4 weight rows).
 */
#ifndef RKSC_CPU_TEMPLATE_PRODUCT_H
#define RKSC_CPU_TEMPLATE_PRODUCT_H

#define ROWS 4

/* acc[r][c] += one step of K. `tail` counts elements, 0: a whole step. */
static inline __attribute__((always_inline)) void
step_f32(vf acc[ROWS][COLUMNS_MAX], const float *a, const float *w,
         int64_t a_stride, int64_t k, int rows, int columns, int tail)
{
    vf x[COLUMNS_MAX];
    UNROLL
    for (int c = 0; c < columns; c++) {
        const float *from = a + c * a_stride;
        x[c] = tail ? vf_load_n(from, tail) : vf_load(from);
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        vf y = tail ? vf_load_n(w + r * k, tail) : vf_load(w + r * k);
        UNROLL
        for (int c = 0; c < columns; c++) {
            acc[r][c] = vf_fma(x[c], y, acc[r][c]);
        }
    }
}

#if defined(OWN_PRODUCT_BF16)
#elif HAS_DOT
static inline __attribute__((always_inline)) void
step_bf16(vf acc[ROWS][COLUMNS_MAX], const uint16_t *a, const uint16_t *w,
          int64_t a_stride, int64_t k, int rows, int columns, int tail)
{
    vb x[COLUMNS_MAX];
    UNROLL
    for (int c = 0; c < columns; c++) {
        const uint16_t *from = a + c * a_stride;
        x[c] = tail ? vb_load_n(from, tail) : vb_load(from);
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        vb y = tail ? vb_load_n(w + r * k, tail) : vb_load(w + r * k);
        UNROLL
        for (int c = 0; c < columns; c++) {
            acc[r][c] = vf_dot(acc[r][c], x[c], y);
        }
    }
}
#else
/* Activations were widened by split_rows: LANES even elements, LANES odd. */
static inline __attribute__((always_inline)) void
step_bf16(vf acc[ROWS][COLUMNS_MAX], const float *a, const uint16_t *w,
          int64_t a_stride, int64_t k, int rows, int columns, int tail)
{
    UNROLL
    for (int odd = 0; odd < 2; odd++) {
        vf x[COLUMNS_MAX];
        UNROLL
        for (int c = 0; c < columns; c++) {
            x[c] = vf_load(a + c * a_stride + odd * LANES);
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            vb pairs = tail ? vb_load_n(w + r * k, tail) : vb_load(w + r * k);
            vf y = odd ? vb_odd(pairs) : vb_even(pairs);
            UNROLL
            for (int c = 0; c < columns; c++) {
                acc[r][c] = vf_fma(x[c], y, acc[r][c]);
            }
        }
    }
}

static int64_t split_stride(int32_t k)
{
    return (k + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
}

static size_t split_bytes(int32_t k)
{
    return CPU_PACK_ROWS * (size_t)split_stride(k) * sizeof(float);
}

/* bf16 rows to float32, each step of 2 * LANES as its even elements, then its
 * odd ones, zeros behind the end. */
static void split_rows(void *out, const void *a, int32_t rows, int32_t k,
                       bool many)
{
    float *to = out;
    (void)many;
    for (int32_t i = 0; i < rows; i++) {
        const uint16_t *from = (const uint16_t *)a + (int64_t)i * k;
        for (int32_t at = 0; at < k; at += 2 * LANES, to += 2 * LANES) {
            int left = k - at;
            vb x = left < 2 * LANES ? vb_load_n(from + at, left)
                                    : vb_load(from + at);
            vf_store(to, vb_even(x));
            vf_store(to + LANES, vb_odd(x));
        }
    }
}
#endif

/* Sums of 4 weight rows and one activation row to out[0..3]. */
static inline void put4(float *out, const vf acc[ROWS][COLUMNS_MAX], int c,
                        const float *bias, bool accumulate)
{
    v4 sum = vf_sum4(acc[0][c], acc[1][c], acc[2][c], acc[3][c]);
    if (bias != NULL) {
        sum += v4_load(bias);
    }
    if (accumulate) {
        sum = v4_load(out) + sum;
    }
    v4_store(out, sum);
}

static inline void put1(float *out, vf acc, const float *bias, bool accumulate)
{
    float sum = vf_sum(acc);
    if (bias != NULL) {
        sum += *bias;
    }
    *out = accumulate ? *out + sum : sum;
}

/* Bytes of activations that stay in the first cache, and of weights that stay
 * in the second while all activations meet them. */
#define NEAR_BYTES 24576
#define FAR_BYTES 131072

/* One block of `rows` x `columns` outputs; both are constants after inlining.
 */
#define DEFINE_PRODUCT(TYPE, ELEMENT, A_ELEMENT, A_STRIDE, STEP)               \
    static inline __attribute__((always_inline)) void block_##TYPE(            \
        const cpu_product *job, int32_t i, int32_t j, int rows, int columns,   \
        bool ahead)                                                            \
    {                                                                          \
        const int64_t k = job->k, a_stride = A_STRIDE(job->k);                 \
        const A_ELEMENT *a = (const A_ELEMENT *)job->a + i * a_stride;         \
        const ELEMENT *w = (const ELEMENT *)job->w + j * k;                    \
        vf acc[ROWS][COLUMNS_MAX];                                             \
        UNROLL                                                                 \
        for (int r = 0; r < rows; r++) {                                       \
            UNROLL                                                             \
            for (int c = 0; c < columns; c++) {                                \
                acc[r][c] = vf_zero();                                         \
            }                                                                  \
        }                                                                      \
        int64_t at = 0;                                                        \
        for (; at + (STEP) <= k; at += (STEP)) {                               \
            UNROLL                                                             \
            for (int r = 0; ahead && r < rows; r++) {                          \
                __builtin_prefetch(w + at + (r + rows) * k, 0, 2);             \
            }                                                                  \
            step_##TYPE(acc, a + at, w + at, a_stride, k, rows, columns, 0);   \
        }                                                                      \
        if (at < k) {                                                          \
            step_##TYPE(acc, a + at, w + at, a_stride, k, rows, columns,       \
                        (int)(k - at));                                        \
        }                                                                      \
        const float *bias = job->bias != NULL ? job->bias + j : NULL;          \
        float *out = job->out + i * job->out_stride + j;                       \
        UNROLL                                                                 \
        for (int c = 0; c < columns; c++) {                                    \
            if (rows == ROWS) {                                                \
                put4(out + c * job->out_stride, acc, c, bias,                  \
                     job->accumulate);                                         \
            } else {                                                           \
                put1(out + c * job->out_stride, acc[0][c], bias,               \
                     job->accumulate);                                         \
            }                                                                  \
        }                                                                      \
    }                                                                          \
    static void columns_##TYPE(const cpu_product *job, int32_t i, int32_t j,   \
                               int32_t columns, bool ahead)                    \
    {                                                                          \
        switch (columns) {                                                     \
            CASE(TYPE, 1)                                                      \
            CASE(TYPE, 2)                                                      \
            CASES_##TYPE(TYPE)                                                 \
        }                                                                      \
    }                                                                          \
    /* Rows [i, i_end) by weights [j, j_end), weights outermost. */            \
    static void area_##TYPE(const cpu_product *job, int32_t i, int32_t i_end,  \
                            int32_t j, int32_t j_end)                          \
    {                                                                          \
        const int32_t m = i_end - i, most = COLUMNS_##TYPE;                    \
        const int32_t passes = (m + most - 1) / most;                          \
        for (; j + ROWS <= j_end; j += ROWS) {                                 \
            for (int32_t p = 0, at = 0; p < passes; p++) {                     \
                int32_t end = (int32_t)((int64_t)m * (p + 1) / passes);        \
                columns_##TYPE(job, i + at, j, end - at, p == 0);              \
                at = end;                                                      \
            }                                                                  \
        }                                                                      \
        for (; j < j_end; j++) {                                               \
            for (int32_t at = i; at < i_end; at++) {                           \
                block_##TYPE(job, at, j, 1, 1, false);                         \
            }                                                                  \
        }                                                                      \
    }                                                                          \
    static void product_##TYPE(const cpu_product *job)                         \
    {                                                                          \
        const int64_t a_bytes = A_STRIDE(job->k) * (int64_t)sizeof(A_ELEMENT); \
        const int32_t m_step = step_of(NEAR_BYTES, a_bytes, COLUMNS_##TYPE);   \
        const int32_t n_step =                                                 \
            step_of(FAR_BYTES, job->k * (int64_t)sizeof(ELEMENT), ROWS);       \
        for (int32_t j = 0; j < job->n; j += n_step) {                         \
            int32_t j_end = job->n - j < n_step ? job->n : j + n_step;         \
            for (int32_t i = 0; i < job->m; i += m_step) {                     \
                int32_t i_end = job->m - i < m_step ? job->m : i + m_step;     \
                area_##TYPE(job, i, i_end, j, j_end);                          \
            }                                                                  \
        }                                                                      \
    }

/* Rows of row_bytes that fit into `bytes`, a multiple of `by`, at least it. */
static int32_t step_of(int64_t bytes, int64_t row_bytes, int32_t by)
{
    int64_t n = bytes / row_bytes / by * by;
    return n < by ? by : n > 4096 ? 4096 / by * by : (int32_t)n;
}

#define SAME_STRIDE(k) ((int64_t)(k))
#define CASE(TYPE, COLUMNS)                                                    \
    case COLUMNS:                                                              \
        if (ahead) {                                                           \
            block_##TYPE(job, i, j, ROWS, COLUMNS, true);                      \
        } else {                                                               \
            block_##TYPE(job, i, j, ROWS, COLUMNS, false);                     \
        }                                                                      \
        break;
#define CASES_3(TYPE) CASE(TYPE, 3)
#define CASES_6(TYPE) CASE(TYPE, 3) CASE(TYPE, 4) CASE(TYPE, 5) CASE(TYPE, 6)
#define CASES_2(TYPE)

DEFINE_PRODUCT(f32, float, float, SAME_STRIDE, LANES)
#if defined(OWN_PRODUCT_BF16)
#elif HAS_DOT
DEFINE_PRODUCT(bf16, uint16_t, uint16_t, SAME_STRIDE, 2 * LANES)
#else
DEFINE_PRODUCT(bf16, uint16_t, float, split_stride, 2 * LANES)
#endif

#endif
