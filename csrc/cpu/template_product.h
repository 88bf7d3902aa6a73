/* Matrix product, written once for all instruction sets.
 *
 * Lane i of one accumulator takes k = i, i + LANES, ... (bf16: the pairs 2i,
 * 2i + 1, then on by 2 * LANES), the tail of K is masked, and one fixed tree
 * adds the lanes. This is the order of every output whatever m and n, so a row
 * has the same bits alone and in a batch; a block of R weight rows by C
 * activation rows only decides which accumulators are alive together.
 *
 * The including file defines the vector vocabulary (see kernels_avx512.c) and
 * COLUMNS_F32, COLUMNS_BF16: activation rows of a block (4 weight rows).
 */
#define ROWS 4

/* acc[r][c] += one step of K. `tail` counts elements, 0: a whole step. */
static inline __attribute__((always_inline)) void
step_f32(vf acc[ROWS][COLUMNS_MAX], const float *a, const float *w, int64_t k,
         int rows, int columns, int tail)
{
    vf x[COLUMNS_MAX];
    UNROLL
    for (int c = 0; c < columns; c++) {
        x[c] = tail ? vf_load_n(a + c * k, tail) : vf_load(a + c * k);
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

#if !defined(OWN_PRODUCT_BF16)
static inline __attribute__((always_inline)) void
step_bf16(vf acc[ROWS][COLUMNS_MAX], const uint16_t *a, const uint16_t *w,
          int64_t k, int rows, int columns, int tail)
{
#if HAS_DOT
    vb x[COLUMNS_MAX];
    UNROLL
    for (int c = 0; c < columns; c++) {
        x[c] = tail ? vb_load_n(a + c * k, tail) : vb_load(a + c * k);
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        vb y = tail ? vb_load_n(w + r * k, tail) : vb_load(w + r * k);
        UNROLL
        for (int c = 0; c < columns; c++) {
            acc[r][c] = vf_dot(acc[r][c], x[c], y);
        }
    }
#else
    vf even[COLUMNS_MAX], odd[COLUMNS_MAX];
    UNROLL
    for (int c = 0; c < columns; c++) {
        vb x = tail ? vb_load_n(a + c * k, tail) : vb_load(a + c * k);
        even[c] = vb_even(x);
        odd[c] = vb_odd(x);
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        vb y = tail ? vb_load_n(w + r * k, tail) : vb_load(w + r * k);
        vf y_even = vb_even(y), y_odd = vb_odd(y);
        UNROLL
        for (int c = 0; c < columns; c++) {
            acc[r][c] = vf_fma(even[c], y_even, acc[r][c]);
        }
        UNROLL
        for (int c = 0; c < columns; c++) {
            acc[r][c] = vf_fma(odd[c], y_odd, acc[r][c]);
        }
    }
#endif
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

/* One block of `rows` x `columns` outputs; both are constants after inlining.
 */
#define DEFINE_BLOCK(TYPE, ELEMENT, STEP)                                     \
    static inline __attribute__((always_inline)) void block_##TYPE(           \
        const cpu_product *job, int32_t i, int32_t j, int rows, int columns)  \
    {                                                                         \
        const int64_t k = job->k;                                             \
        const ELEMENT *a = (const ELEMENT *)job->a + i * k;                   \
        const ELEMENT *w = (const ELEMENT *)job->w + j * k;                   \
        vf acc[ROWS][COLUMNS_MAX];                                            \
        UNROLL                                                                \
        for (int r = 0; r < rows; r++) {                                      \
            UNROLL                                                            \
            for (int c = 0; c < columns; c++) {                               \
                acc[r][c] = vf_zero();                                        \
            }                                                                 \
        }                                                                     \
        int64_t at = 0;                                                       \
        for (; at + (STEP) <= k; at += (STEP)) {                              \
            step_##TYPE(acc, a + at, w + at, k, rows, columns, 0);            \
        }                                                                     \
        if (at < k) {                                                         \
            step_##TYPE(acc, a + at, w + at, k, rows, columns,                \
                        (int)(k - at));                                       \
        }                                                                     \
        const float *bias = job->bias != NULL ? job->bias + j : NULL;         \
        float *out = job->out + i * job->out_stride + j;                      \
        UNROLL                                                                \
        for (int c = 0; c < columns; c++) {                                   \
            if (rows == ROWS) {                                               \
                put4(out + c * job->out_stride, acc, c, bias,                 \
                     job->accumulate);                                        \
            } else {                                                          \
                put1(out + c * job->out_stride, acc[0][c], bias,              \
                     job->accumulate);                                        \
            }                                                                 \
        }                                                                     \
    }                                                                         \
    static void columns_##TYPE(const cpu_product *job, int32_t i, int32_t j,  \
                               int32_t columns)                               \
    {                                                                         \
        switch (columns) {                                                    \
        case 1: block_##TYPE(job, i, j, ROWS, 1); break;                      \
        case 2: block_##TYPE(job, i, j, ROWS, 2); break;                      \
        CASES_##TYPE(TYPE)                                                    \
        }                                                                     \
    }                                                                         \
    static void product_##TYPE(const cpu_product *job)                        \
    {                                                                         \
        const int32_t most = COLUMNS_##TYPE;                                  \
        const int32_t passes = (job->m + most - 1) / most;                    \
        int32_t j = 0;                                                        \
        for (; j + ROWS <= job->n; j += ROWS) {                               \
            for (int32_t p = 0, i = 0; p < passes; p++) {                     \
                int32_t end = (int32_t)((int64_t)job->m * (p + 1) / passes);  \
                columns_##TYPE(job, i, j, end - i);                           \
                i = end;                                                      \
            }                                                                 \
        }                                                                     \
        for (; j < job->n; j++) {                                             \
            for (int32_t i = 0; i < job->m; i++) {                            \
                block_##TYPE(job, i, j, 1, 1);                                \
            }                                                                 \
        }                                                                     \
    }

#define CASES_3(TYPE)                                                         \
    case 3: block_##TYPE(job, i, j, ROWS, 3); break;
#define CASES_6(TYPE)                                                         \
    CASES_3(TYPE)                                                             \
    case 4: block_##TYPE(job, i, j, ROWS, 4); break;                          \
    case 5: block_##TYPE(job, i, j, ROWS, 5); break;                          \
    case 6: block_##TYPE(job, i, j, ROWS, 6); break;
#define CASES_2(TYPE)

DEFINE_BLOCK(f32, float, LANES)
#if !defined(OWN_PRODUCT_BF16)
DEFINE_BLOCK(bf16, uint16_t, 2 * LANES)
#endif
