/* Products in 16-bit integers, written once for all instruction sets; see
 * int16.h for the arithmetic.
 *
 * LANES weight rows lie side by side in lanes, four values of each as bytes: a
 * quad. Rows become lanes while they are still packed (`turn`), so that nothing
 * but masks and shifts follows, and no lanes are added at the end. Few
 * activation rows meet the quads as soon as they are there (`few`); for more
 * they are kept in a panel of VECTORS * LANES rows.
 *
 * Where an instruction multiplies bytes, unsigned ones by signed ones, an
 * activation is q = 256 high + low: `high` is signed and meets the weight,
 * `low` is unsigned and the weight meets it. Else bytes become pairs of 16
 * bits.
 *
 * The including file defines LANES, VECTORS, COLUMNS (activation rows that are
 * computed together), FEW, the vector vocabulary, and:
 *   vi, vu, vh          LANES 32-bit integers, the same unsigned, 2 * LANES
 *                       unsigned ones of 16 bits, as the compiler's own vectors
 *   vf_fused            multiply-add, rounded once
 *   vf_of_vi            nearest floats
 *   vf_half(x)          of the low 16 bits of each lane, as half precision
 *   vi_dot_bytes(acc, p, q)   acc + dot product of each lane's four bytes,
 *                       those of p unsigned, those of q signed; or
 *   vi_dot(acc, p, q)   acc + dot product of each lane's pairs
 *   turn(x, p, stride)  16 bytes of each of LANES rows, `stride` bytes apart:
 *                       x[j] holds the rows' j-th four bytes
 */
#ifndef RKSC_CPU_TEMPLATE_INT16_H
#define RKSC_CPU_TEMPLATE_INT16_H

#include "rounding.h"
#include "template_quads.h"

#define ROWS (VECTORS * LANES)
#ifdef vi_dot_bytes
#define BY_BYTES true
#else
#define BY_BYTES false
#endif

/* ---- activations ------------------------------------------------------------
 */

#define SMALLEST 0x1p-110f /* a block below it counts as zero */

/* 16 of them from the i-th on. Returns the sum of `high`, 0 without bytes. */
INLINE int32_t put_activations(cpu_int16_block *to, int i, const int32_t *q)
{
    int32_t high = 0;
#ifdef vi_dot_bytes
    for (int j = 0; j < 16; j++) {
        to->high[i + j] = (int8_t)(q[j] >> 8);
        to->low[i + j] = (uint8_t)q[j];
        high += q[j] >> 8;
    }
#else
    for (int j = 0; j < 16; j += 4) {
        int16_t *four = to->q + i + j;
        four[0] = (int16_t)q[j];
        four[1] = (int16_t)q[j + 2];
        four[2] = (int16_t)q[j + 1];
        four[3] = (int16_t)q[j + 3];
    }
#endif
    return high;
}

/* |x| * (32767 / max) is below 32767.01 for all roundings, so q is in range. */
static void quantize_block(cpu_int16_block *out, const float *x, int n)
{
    const cpu_rounding rounding = cpu_rounding_of(x, n, 32767.0f, SMALLEST);
    int32_t sums[16] = {0}, highs[16] = {0};
    for (int g = 0; g < n / 16; g++) {
        int32_t q[16];
        for (int i = 0; i < 16; i++) {
            q[i] = cpu_round(x[16 * g + i], rounding);
            sums[g] += q[i];
        }
        highs[g] = put_activations(out, 16 * g, q);
    }
    for (int g = 0; g < 8; g++) {
        out->less_high[g] = -256 * (highs[2 * g] + highs[2 * g + 1]);
    }
    for (int g = 0; g < 24; g++) {
        const int32_t sum = g < 8 ? sums[2 * g] + sums[2 * g + 1] : sums[g - 8];
        out->less[g] = -sum;
        out->sum[g] = (float)sum;
    }
    out->scale = rounding.scale;
}

static void quantize(cpu_int16_block *out, const float *a, int32_t k)
{
    for (int32_t i = 0; i < k; i += CPU_INT16_BLOCK) {
        const int32_t left = k - i;
        quantize_block(out++, a + i,
                       left < CPU_INT16_BLOCK ? left : CPU_INT16_BLOCK);
    }
}

/* ---- panels ----------------------------------------------------------------
 */

/* A block of LANES rows: values 4 i .. 4 i + 3 in quad i. */
typedef struct panel {
    vu quads[CPU_INT16_BLOCK / 4];
    scales scales;
} panel;

INLINE void arrange(kind of, panel *to, const rows *w)
{
    const int in_group = of.group / 4;
    for (int at = 0; at < blocks_of(of, w->n); at++) {
        const uint8_t *b = w->first + at * of.bytes;
        const uint8_t *ahead = w->ahead + at * LANES * of.bytes;
        vu quads[UNIT_QUADS], bits[8];
        open_block(of, &to->scales, at, bits, b, w->bytes);
        for (int u = 0; u < units_of(of); u++) {
            read_unit(of, quads, bits, b, w->bytes, u);
            UNROLL
            for (int h = 0; h < groups_of_unit(of); h++) {
                fetch(of, ahead, u, h);
                vu *group = to->quads + (at + group_of(of, u, h)) * in_group;
                UNROLL
                for (int i = 0; i < in_group; i++) {
                    group[i] = quads[h * in_group + i];
                }
            }
        }
    }
}

/* ---- product ----------------------------------------------------------------
 */

/* Four activations of a row, the i-th on, for all lanes. */
INLINE vi four_of(const void *activations, int i)
{
    int32_t four;
    memcpy(&four, (const char *)activations + i, sizeof four);
    return vi_set1(four);
}

/* What the g-th group's sum of a row begins with, of which integers have too
 * much taken away. Bytes of 128 too much are signed ones for `low`. */
INLINE vi first_of(const cpu_int16_block *a, int g, kind of)
{
    if (of.zero < 0) {
        return (vi){0};
    }
    const int32_t less = BY_BYTES && of.zero == 7
                             ? a->less_high[g]
                             : a->less[(of.group == 32 ? 0 : 8) + g];
    return (vi)((vu)vi_set1(less) << of.zero);
}

/* acc += 256 high */
INLINE void add_high(vi acc[VECTORS][COLUMNS], vi high[VECTORS][COLUMNS],
                     int vectors, int columns)
{
    UNROLL
    for (int c = 0; c < columns; c++) {
        UNROLL
        for (int v = 0; v < vectors; v++) {
            acc[v][c] += (vi)((vu)high[v][c] << 8);
        }
    }
}

/* acc += dot products of `columns` rows with a group, whose quads begin with
 * the `first` of a block; `apart` between those of `vectors` panels.
 *
 * Of few sums `high` and `low` are made side by side, else one after the other,
 * which takes half the registers. */
#ifdef vi_dot_bytes
INLINE void add_group(vi acc[VECTORS][COLUMNS], const vu *quads, int64_t apart,
                      int vectors, const cpu_int16_block *a, int64_t stride,
                      int first, kind of, int columns)
{
    const vu flip = bytes_of(of.zero == 7 ? 0x80 : 0);
    vi high[VECTORS][COLUMNS];
    UNROLL
    for (int c = 0; c < columns; c++) {
        UNROLL
        for (int v = 0; v < vectors; v++) {
            high[v][c] = (vi){0};
        }
    }
    UNROLL
    for (int i = 0; i < of.group / 4; i++) {
        UNROLL
        for (int c = 0; c < columns; c++) {
            const vi h = four_of(a[c * stride].high, 4 * (first + i));
            UNROLL
            for (int v = 0; v < vectors; v++) {
                high[v][c] = vi_dot_bytes(high[v][c], quads[v * apart + i], h);
            }
        }
    }
    if (columns * vectors > 4) {
        add_high(acc, high, vectors, columns);
    }
    UNROLL
    for (int i = 0; i < of.group / 4; i++) {
        UNROLL
        for (int c = 0; c < columns; c++) {
            const vu l = (vu)four_of(a[c * stride].low, 4 * (first + i));
            UNROLL
            for (int v = 0; v < vectors; v++) {
                acc[v][c] = vi_dot_bytes(acc[v][c], l,
                                         (vi)(quads[v * apart + i] ^ flip));
            }
        }
    }
    if (columns * vectors <= 4) {
        add_high(acc, high, vectors, columns);
    }
}
#else
INLINE void add_group(vi acc[VECTORS][COLUMNS], const vu *quads, int64_t apart,
                      int vectors, const cpu_int16_block *a, int64_t stride,
                      int first, kind of, int columns)
{
    (void)of;
    UNROLL
    for (int i = 0; i < of.group / 4; i++) {
        vi even[VECTORS], odd[VECTORS];
        UNROLL
        for (int v = 0; v < vectors; v++) {
            even[v] = (vi)(quads[v * apart + i] & 0x00ff00ffu);
            odd[v] = (vi)((vh)quads[v * apart + i] >> 8);
        }
        UNROLL
        for (int c = 0; c < columns; c++) {
            const vi x = four_of(a[c * stride].q, 8 * (first + i));
            const vi y = four_of(a[c * stride].q, 8 * (first + i) + 4);
            UNROLL
            for (int v = 0; v < vectors; v++) {
                acc[v][c] = vi_dot(acc[v][c], even[v], x);
                acc[v][c] = vi_dot(acc[v][c], odd[v], y);
            }
        }
    }
}
#endif

/* A row's sum x over the groups before the g-th, and that one. */
INLINE vf with_group(vf x, vi dot, const scales *w, const cpu_int16_block *a,
                     int g, kind of)
{
    x = vf_fused(vf_of_vi(dot), w->scale[g], x);
    return of.zero >= 0
               ? x
               : vf_fused(w->offset[g],
                          vf_set1(a->sum[(of.group == 32 ? 0 : 8) + g]), x);
}

INLINE void add_block(float *sum, vf x, const cpu_int16_block *a)
{
    vf_store(sum, vf_fused(x, vf_set1(a->scale), vf_load(sum)));
}

/* sums of `columns` rows += one block of them, `stride` blocks apart, by
 * VECTORS panels. */
INLINE void multiply(float *sums, const panel *w, const cpu_int16_block *a,
                     int64_t stride, int n_groups, kind of, int columns)
{
    const int quads = of.group / 4;
    vf x[VECTORS][COLUMNS];
    UNROLL
    for (int c = 0; c < columns; c++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++) {
            x[v][c] = vf_zero();
        }
    }
    for (int g = 0; g < n_groups; g++) {
        vi acc[VECTORS][COLUMNS];
        UNROLL
        for (int c = 0; c < columns; c++) {
            const vi first = first_of(a + c * stride, g, of);
            UNROLL
            for (int v = 0; v < VECTORS; v++) {
                acc[v][c] = first;
            }
        }
        add_group(acc, w->quads + g * quads, sizeof *w / sizeof(vu), VECTORS, a,
                  stride, g * quads, of, columns);
        UNROLL
        for (int c = 0; c < columns; c++) {
            UNROLL
            for (int v = 0; v < VECTORS; v++) {
                x[v][c] = with_group(x[v][c], acc[v][c], &w[v].scales,
                                     a + c * stride, g, of);
            }
        }
    }
    UNROLL
    for (int c = 0; c < columns; c++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++) {
            add_block(sums + c * ROWS + v * LANES, x[v][c], a + c * stride);
        }
    }
}

/* m rows in passes of about the same number. */
INLINE void multiply_all(float *sums, const panel *w, const cpu_int16_block *a,
                         int64_t stride, int32_t m, int n_groups, kind of)
{
    for (int32_t left = (m + COLUMNS - 1) / COLUMNS; left > 0; left--) {
        const int32_t columns = (m + left - 1) / left;
        switch (columns) {
#define MULTIPLY_CASE(N)                                                       \
    case N:                                                                    \
        multiply(sums, w, a, stride, n_groups, of, N);                         \
        break;
            COLUMN_CASES(MULTIPLY_CASE)
        default:
            break;
        }
        sums += columns * ROWS;
        a += columns * stride;
        m -= columns;
    }
}

/* What `multiply` does, by LANES rows of weights straight from where they lie.
 * Units do not have their groups in order, so sums wait until the block is
 * read. */
INLINE void direct(float *sums, const rows *w, const cpu_int16_block *a,
                   int64_t stride, kind of, int columns)
{
    const int in_group = of.group / 4;
    scales s;
    vi dots[CPU_INT16_BLOCK / 16][FEW];
    for (int at = 0; at < blocks_of(of, w->n); at++) {
        const uint8_t *b = w->first + at * of.bytes;
        const uint8_t *ahead = w->ahead + at * LANES * of.bytes;
        vu quads[UNIT_QUADS], bits[8];
        open_block(of, &s, at, bits, b, w->bytes);
        UNROLL
        for (int u = 0; u < units_of(of); u++) {
            read_unit(of, quads, bits, b, w->bytes, u);
            UNROLL
            for (int h = 0; h < groups_of_unit(of); h++) {
                const int g = at + group_of(of, u, h);
                fetch(of, ahead, u, h);
                vi acc[VECTORS][COLUMNS];
                UNROLL
                for (int c = 0; c < columns; c++) {
                    acc[0][c] = first_of(a + c * stride, g, of);
                }
                add_group(acc, quads + h * in_group, 0, 1, a, stride,
                          g * in_group, of, columns);
                UNROLL
                for (int c = 0; c < columns; c++) {
                    dots[g][c] = acc[0][c];
                }
            }
        }
    }
    UNROLL
    for (int c = 0; c < columns; c++) {
        vf x = vf_zero();
        const int n_groups = blocks_of(of, w->n) * (of.elements / of.group);
        for (int g = 0; g < n_groups; g++) {
            x = with_group(x, dots[g][c], &s, a + c * stride, g, of);
        }
        add_block(sums + c * ROWS, x, a + c * stride);
    }
}

/* How a type is computed; see `arrange`, `multiply_all`, `direct`. */
typedef struct way {
    void (*arrange)(panel *to, const rows *w);
    void (*multiply)(float *sums, const panel *w, const cpu_int16_block *a,
                     int64_t stride, int32_t m, int n_groups, int zero);
    void (*few)(float *sums, const rows *w, const cpu_int16_block *a,
                int64_t stride, int32_t m);
    kind of;
    int64_t bytes; /* of 256 values */
} way;

#define DEFINE_WAY(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET)                    \
    static void arrange_##TYPE(panel *to, const rows *w)                       \
    {                                                                          \
        arrange(KIND(NAME, TYPE, BLOCK, BYTES, GROUP), to, w);                 \
    }                                                                          \
    static void few_##TYPE(float *sums, const rows *w,                         \
                           const cpu_int16_block *a, int64_t stride,           \
                           int32_t m)                                          \
    {                                                                          \
        const kind of = KIND(NAME, TYPE, BLOCK, BYTES, GROUP);                 \
        switch (m) {                                                           \
            FEW_CASES(DIRECT_CASE)                                             \
        default:                                                               \
            break;                                                             \
        }                                                                      \
    }

#define DIRECT_CASE(N)                                                         \
    case N:                                                                    \
        direct(sums, w, a, stride, of, N);                                     \
        break;

RK_BLOCK_TYPES(DEFINE_WAY)

/* Panels differ by their groups alone. */
#define DEFINE_MULTIPLY(NAME, GROUP, ZERO)                                     \
    static void multiply_##NAME(float *sums, const panel *w,                   \
                                const cpu_int16_block *a, int64_t stride,      \
                                int32_t m, int n_groups, int zero)             \
    {                                                                          \
        const kind of = {.group = GROUP, .zero = ZERO};                        \
        (void)zero;                                                            \
        multiply_all(sums, w, a, stride, m, n_groups, of);                     \
    }

DEFINE_MULTIPLY(32, 32, zero)
DEFINE_MULTIPLY(32_centred, 32, 7)
DEFINE_MULTIPLY(32_offset, 32, -1)
DEFINE_MULTIPLY(16, 16, zero)
DEFINE_MULTIPLY(16_offset, 16, -1)

static way way_of(rk_type type)
{
    way found = {0};
    switch (type) {
#define WAY_CASE(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET)                      \
    case RK_##NAME:                                                            \
        found.of = KIND(NAME, TYPE, BLOCK, BYTES, GROUP);                      \
        found.arrange = arrange_##TYPE;                                        \
        found.few = few_##TYPE;                                                \
        break;
        RK_BLOCK_TYPES(WAY_CASE)
    default:
        break;
    }
    found.bytes = CPU_INT16_BLOCK / found.of.elements * found.of.bytes;
    if (found.of.group == 32) {
        found.multiply = found.of.zero == 7   ? multiply_32_centred
                         : found.of.zero >= 0 ? multiply_32
                                              : multiply_32_offset;
    } else {
        found.multiply = found.of.zero >= 0 ? multiply_16 : multiply_16_offset;
    }
    return found;
}

/* Rows that lack, of the n (< ROWS) that there are, count zero. */
static void arrange_some(const way *how, panel *to, const rows *w, int32_t n)
{
    uint8_t copies[ROWS][8 * 34]; /* no type has more bytes for 256 */
    const size_t bytes = (size_t)(w->n / how->of.elements * how->of.bytes);
    rows some = *w;
    some.bytes = sizeof *copies;
    for (int32_t r = 0; r < ROWS; r++) {
        if (r < n) {
            memcpy(copies[r], w->first + r * w->bytes, bytes);
        } else {
            memset(copies[r], 0, bytes);
        }
    }
    for (int v = 0; v < VECTORS; v++) {
        some.first = copies[v * LANES];
        how->arrange(to + v, &some);
    }
}

/* n (<= ROWS) sums of each row to out, from column j. */
static void put_sums(const cpu_integer_product *job, const float *sums,
                     int32_t j, int32_t n)
{
    float *out = job->out + j;
    for (int32_t i = 0; i < job->m; i++, out += job->out_stride, sums += ROWS) {
        for (int32_t at = 0; at < n; at += LANES) {
            const int32_t left = n - at < LANES ? n - at : LANES;
            vf sum = vf_load(sums + at);
            if (job->bias != NULL) {
                sum = vf_add(sum, vf_load_n(job->bias + j + at, left));
            }
            if (job->accumulate) {
                sum = vf_add(vf_load_n(out + at, left), sum);
            }
            vf_store_n(out + at, sum, left);
        }
    }
}

typedef struct scratch {
    panel panels[VECTORS];
    float sums[CPU_PANEL_ROWS * ROWS];
} scratch;

/* One block of ROWS rows, or of the n that there are, to sums. */
static void add_blocks(const way *how, scratch *s,
                       const cpu_integer_product *job, const cpu_int16_block *a,
                       rows *w, int32_t n)
{
    const int64_t stride = cpu_int16_blocks(job->k);
    if (n < ROWS) {
        arrange_some(how, s->panels, w, n);
    }
    for (int v = 0; v < VECTORS && n == ROWS; v++) {
        if (job->m <= FEW) {
            how->few(s->sums + v * LANES, w, a, stride, job->m);
        } else {
            how->arrange(s->panels + v, w);
        }
        w->first += LANES * w->bytes;
        w->ahead += LANES * how->bytes;
    }
    if (n < ROWS || job->m > FEW) {
        how->multiply(s->sums, s->panels, a, stride, job->m,
                      w->n / how->of.group, how->of.zero);
    }
}

static void product(const cpu_integer_product *job)
{
    const way how = way_of(job->type);
    const int32_t n_blocks = cpu_int16_blocks(job->k);
    scratch *s = job->scratch;
    rows w = {.bytes = job->row_bytes};
    for (int32_t j = 0; j < job->n; j += ROWS) {
        const int32_t n = cpu_min(job->n - j, ROWS);
        const uint8_t *first = (const uint8_t *)job->w + j * job->row_bytes;
        w.ahead = first + ROWS * job->row_bytes;
        memset(s->sums, 0, (size_t)job->m * ROWS * sizeof *s->sums);
        for (int32_t b = 0; b < n_blocks; b++) {
            w.first = first + b * how.bytes;
            w.n = cpu_min(job->k - b * CPU_INT16_BLOCK, CPU_INT16_BLOCK);
            add_blocks(&how, s, job, (const cpu_int16_block *)job->a + b, &w,
                       n);
        }
        put_sums(job, s->sums, j, n);
    }
}

const cpu_int16_kernels TABLE = {
    .quantize = quantize,
    .product = product,
    .scratch_bytes = sizeof(scratch),
};

#endif
