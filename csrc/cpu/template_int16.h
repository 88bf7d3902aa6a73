/* Products in 16-bit integers, written once for all instruction sets; see
 * int16.h for the arithmetic.
 *
 * A panel holds a block of VECTORS * LANES weight rows, side by side in lanes:
 * their integers as pairs of 16 bits, 0 or more, then scales and offsets. An
 * activation's pair meets LANES of them in one instruction, and no lanes are
 * added at the end. Rows become lanes while their bytes are still packed
 * (`turn`), so that nothing but masks and shifts follows.
 *
 * The including file defines LANES, VECTORS, COLUMNS (activation rows that are
 * computed together) and the vector vocabulary, and:
 *   vi, vu, vh          LANES 32-bit integers, the same unsigned, 2 * LANES
 *                       unsigned ones of 16 bits, as the compiler's own vectors
 *   vf_fused            multiply-add, rounded once
 *   vf_of_vi            nearest floats
 *   vf_half(x)          of the low 16 bits of each lane, as half precision
 *   vi_dot(acc, p, q)   acc + dot product of each lane's pairs
 *   turn(x, p, stride)  16 bytes of each of LANES rows, `stride` bytes apart:
 *                       x[j] holds the rows' j-th four bytes
 */
#ifndef RKSC_CPU_TEMPLATE_INT16_H
#define RKSC_CPU_TEMPLATE_INT16_H

#include "model/unpack.h"
#include "rounding.h"

#define ROWS (VECTORS * LANES)

/* ---- activations ------------------------------------------------------------
 */

#define SMALLEST 0x1p-110f /* a block below it counts as zero */

/* |x| * (32767 / max) is below 32767.01 for all roundings, so q is in range. */
static void quantize_block(cpu_int16_block *out, const float *x, int n)
{
    const cpu_rounding rounding = cpu_rounding_of(x, n, 32767.0f, SMALLEST);
    int32_t sums[16] = {0};
    for (int g = 0; g < n / 16; g++) {
        int32_t q[16];
        for (int i = 0; i < 16; i++) {
            q[i] = cpu_round(x[16 * g + i], rounding);
            sums[g] += q[i];
        }
        for (int i = 0; i < 16; i += 4) {
            int16_t *to = out->q + 16 * g + i;
            to[0] = (int16_t)q[i];
            to[1] = (int16_t)q[i + 2];
            to[2] = (int16_t)q[i + 1];
            to[3] = (int16_t)q[i + 3];
        }
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

/* ---- weights ----------------------------------------------------------------
 */

/* A block of LANES rows. Quad 8 g + i: values 4 i .. 4 i + 3 of the g-th 32, of
 * which the even ones are a pair, and the odd ones the next. */
typedef struct panel {
    vu pairs[CPU_INT16_BLOCK / 2];
    vf scale[CPU_INT16_BLOCK / 16], offset[CPU_INT16_BLOCK / 16];
} panel;

INLINE vu bytes_of(uint32_t byte)
{
    return (vu){0} + byte * 0x01010101u;
}

INLINE void put_quad(panel *to, int quad, vu bytes)
{
    to->pairs[2 * quad] = bytes & 0x00ff00ffu;
    to->pairs[2 * quad + 1] = (vu)((vh)bytes >> 8);
}

/* Four bytes of each row. */
INLINE vu column(const uint8_t *p, int64_t stride)
{
    vu x;
    uint32_t all[LANES];
    for (int r = 0; r < LANES; r++) {
        memcpy(all + r, p + r * stride, sizeof *all);
    }
    memcpy(&x, all, sizeof x);
    return x;
}

INLINE vf vf_of_byte(vu x, int byte)
{
    return vf_of_vi((vi)((x >> (8 * byte)) & 255u));
}

/* 16 bytes: low nibbles are values 0..15, high ones 16..31 */
INLINE void put_nibbles(panel *to, int part, const uint8_t *b, int64_t stride,
                        const vu *fifth)
{
    vu x[4];
    turn(x, b, stride);
    for (int j = 0; j < 4; j++) {
        vu low = x[j] & 0x0f0f0f0fu, high = (x[j] >> 4) & 0x0f0f0f0fu;
        if (fifth != NULL) { /* bits 0..3 of a nibble go to bits 4, 12, ... */
            low |= ((*fifth >> (4 * j) & 15u) * 0x02040810u) & 0x10101010u;
            high |=
                ((*fifth >> (4 * j + 16) & 15u) * 0x02040810u) & 0x10101010u;
        }
        put_quad(to, 8 * part + j, low);
        put_quad(to, 8 * part + j + 4, high);
    }
}

/* Part i of n of what LANES rows' next blocks, side by side at p, have. */
INLINE void fetch(const uint8_t *p, int i, int n, int block_bytes)
{
    const int step = (LANES * block_bytes + n * 64 - 1) / (n * 64);
    for (int line = 0; line < step; line++) {
        __builtin_prefetch(p + (i * step + line) * 64, 0, 2);
    }
}

/* Types of blocks of 32: the part-th of the panel. */
INLINE void arrange_q4_0(panel *to, int part, const uint8_t *b, int64_t stride,
                         const uint8_t *ahead)
{
    (void)ahead;
    to->scale[part] = vf_half(column(b, stride));
    put_nibbles(to, part, b + 2, stride, NULL);
}

INLINE void arrange_q4_1(panel *to, int part, const uint8_t *b, int64_t stride,
                         const uint8_t *ahead)
{
    (void)ahead;
    const vu both = column(b, stride);
    to->scale[part] = vf_half(both);
    to->offset[part] = vf_half(both >> 16);
    put_nibbles(to, part, b + 4, stride, NULL);
}

INLINE void arrange_q5_0(panel *to, int part, const uint8_t *b, int64_t stride,
                         const uint8_t *ahead)
{
    (void)ahead;
    const vu fifth = column(b + 2, stride);
    to->scale[part] = vf_half(column(b, stride));
    put_nibbles(to, part, b + 6, stride, &fifth);
}

INLINE void arrange_q5_1(panel *to, int part, const uint8_t *b, int64_t stride,
                         const uint8_t *ahead)
{
    (void)ahead;
    const vu both = column(b, stride), fifth = column(b + 4, stride);
    to->scale[part] = vf_half(both);
    to->offset[part] = vf_half(both >> 16);
    put_nibbles(to, part, b + 8, stride, &fifth);
}

INLINE void arrange_q8_0(panel *to, int part, const uint8_t *b, int64_t stride,
                         const uint8_t *ahead)
{
    (void)ahead;
    vu x[8];
    to->scale[part] = vf_half(column(b, stride));
    turn(x, b + 2, stride);
    turn(x + 4, b + 18, stride);
    for (int j = 0; j < 8; j++) {
        put_quad(to, 8 * part + j, x[j] ^ 0x80808080u);
    }
}

/* Types of blocks of 256; unpack.h tells the layouts. */
INLINE void arrange_q2_k(panel *to, int part, const uint8_t *b, int64_t stride,
                         const uint8_t *ahead)
{
    vu s[4], x[4], halves;
    (void)part;
    turn(s, b + 68, stride);
    halves = s[3];
    const vf d = vf_half(halves);
    const vf less = vf_sub(vf_zero(), vf_half(halves >> 16));
    turn(s, b, stride);
    for (int g = 0; g < 16; g++) {
        const vu both = s[g / 4] >> (8 * (g % 4));
        to->scale[g] = vf_mul(d, vf_of_vi((vi)(both & 15u)));
        to->offset[g] = vf_mul(less, vf_of_vi((vi)(both >> 4 & 15u)));
    }
    for (int run = 0; run < 4; run++) {
        fetch(ahead, run, 4, 84);
        turn(x, b + 16 + 16 * run, stride);
        for (int j = 0; j < 4; j++) {
            for (int k = 0; k < 4; k++) {
                put_quad(to, run / 2 * 32 + 8 * k + run % 2 * 4 + j,
                         x[j] >> (2 * k) & 0x03030303u);
            }
        }
    }
}

INLINE void arrange_q3_k(panel *to, int part, const uint8_t *b, int64_t stride,
                         const uint8_t *ahead)
{
    vu s[4], x[4], third[8];
    (void)part;
    turn(s, b + 94, stride); /* two bytes early: a block ends at 110 */
    const vf d = vf_half(s[3] >> 16);
    for (int i = 0; i < 3; i++) {
        s[i] = s[i] >> 16 | s[i + 1] << 16;
    }
    for (int g = 0; g < 16; g++) {
        const vu low = s[g / 4 % 2] >> (8 * (g % 4) + g / 8 * 4) & 15u;
        const vu high = s[2] >> (8 * (g % 4) + g / 4 * 2) & 3u;
        to->scale[g] = vf_mul(d, vf_of_vi((vi)(low | high << 4) - 32));
    }
    turn(third, b, stride);
    turn(third + 4, b + 16, stride);
    for (int run = 0; run < 4; run++) {
        fetch(ahead, run, 4, 110);
        turn(x, b + 32 + 16 * run, stride);
        for (int j = 0; j < 4; j++) {
            const vu bits = third[run % 2 * 4 + j] >> (run / 2 * 4);
            for (int k = 0; k < 4; k++) {
                put_quad(to, run / 2 * 32 + 8 * k + run % 2 * 4 + j,
                         (x[j] >> (2 * k) & 0x03030303u) |
                             (bits >> k & 0x01010101u) << 2);
            }
        }
    }
}

/* d, dmin | 12 bytes of scales and minima */
INLINE void put_scales(panel *to, const uint8_t *b, int64_t stride)
{
    vu x[4];
    turn(x, b, stride);
    const vf d = vf_half(x[0]);
    const vf less = vf_sub(vf_zero(), vf_half(x[0] >> 16));
    for (int i = 0; i < 4; i++) {
        const vu s = x[1] >> (8 * i) & 255u, m = x[2] >> (8 * i) & 255u;
        const vu both = x[3] >> (8 * i) & 255u;
        to->scale[i] = vf_mul(d, vf_of_vi((vi)(s & 63u)));
        to->offset[i] = vf_mul(less, vf_of_vi((vi)(m & 63u)));
        to->scale[i + 4] =
            vf_mul(d, vf_of_vi((vi)((both & 15u) | s >> 6 << 4)));
        to->offset[i + 4] =
            vf_mul(less, vf_of_vi((vi)(both >> 4 | m >> 6 << 4)));
    }
}

INLINE void arrange_q4_k(panel *to, int part, const uint8_t *b, int64_t stride,
                         const uint8_t *ahead)
{
    vu x[4];
    (void)part;
    put_scales(to, b, stride);
    for (int run = 0; run < 8; run++) {
        fetch(ahead, run, 8, 144);
        turn(x, b + 16 + 16 * run, stride);
        for (int j = 0; j < 4; j++) {
            const int quad = run / 2 * 16 + run % 2 * 4 + j;
            put_quad(to, quad, x[j] & 0x0f0f0f0fu);
            put_quad(to, quad + 8, (x[j] >> 4) & 0x0f0f0f0fu);
        }
    }
}

INLINE void arrange_q5_k(panel *to, int part, const uint8_t *b, int64_t stride,
                         const uint8_t *ahead)
{
    vu x[4], fifth[8];
    (void)part;
    put_scales(to, b, stride);
    turn(fifth, b + 16, stride);
    turn(fifth + 4, b + 32, stride);
    for (int run = 0; run < 8; run++) {
        fetch(ahead, run, 8, 176);
        turn(x, b + 48 + 16 * run, stride);
        for (int j = 0; j < 4; j++) {
            const int quad = run / 2 * 16 + run % 2 * 4 + j;
            const vu bits = fifth[run % 2 * 4 + j] >> (run / 2 * 2);
            put_quad(to, quad,
                     (x[j] & 0x0f0f0f0fu) | (bits & 0x01010101u) << 4);
            put_quad(to, quad + 8,
                     (x[j] >> 4 & 0x0f0f0f0fu) | (bits & 0x02020202u) << 3);
        }
    }
}

INLINE void arrange_q6_k(panel *to, int part, const uint8_t *b, int64_t stride,
                         const uint8_t *ahead)
{
    vu s[4], even[4], odd[4], pairs[4];
    (void)part;
    turn(s, b + 194, stride); /* a block ends with d at 210 */
    const vf d = vf_half(s[3] >> 16);
    turn(s, b + 192, stride);
    for (int g = 0; g < 16; g++) {
        const vi scale = (vi)(s[g / 4] << (24 - 8 * (g % 4))) >> 24;
        to->scale[g] = vf_mul(d, vf_of_vi(scale));
    }
    for (int run = 0; run < 4; run++) {
        fetch(ahead, run, 4, 210);
        turn(even, b + run / 2 * 64 + run % 2 * 16, stride);
        turn(odd, b + run / 2 * 64 + run % 2 * 16 + 32, stride);
        turn(pairs, b + 128 + 16 * run, stride);
        for (int j = 0; j < 4; j++) {
            const int quad = run / 2 * 32 + run % 2 * 4 + j;
            put_quad(to, quad,
                     (even[j] & 0x0f0f0f0fu) | (pairs[j] & 0x03030303u) << 4);
            put_quad(to, quad + 8,
                     (odd[j] & 0x0f0f0f0fu) | (pairs[j] & 0x0c0c0c0cu) << 2);
            put_quad(to, quad + 16,
                     (even[j] >> 4 & 0x0f0f0f0fu) | (pairs[j] & 0x30303030u));
            put_quad(to, quad + 24,
                     (odd[j] >> 4 & 0x0f0f0f0fu) |
                         (pairs[j] >> 2 & 0x30303030u));
        }
    }
}

/* LANES rows of n values (<= 256) to a panel. */
#define DEFINE_ARRANGE(NAME, TYPE, BLOCK, GROUP, OFFSET)                       \
    static void panel_##TYPE(panel *to, const uint8_t *b, int64_t stride,      \
                             int32_t n, const uint8_t *ahead)                  \
    {                                                                          \
        const int64_t block_bytes = rk_type_get(RK_##NAME)->block_bytes;       \
        for (int part = 0; part < n / BLOCK; part++, b += block_bytes) {       \
            if (BLOCK == 32) {                                                 \
                fetch(ahead + part * LANES * block_bytes, 0, 1, block_bytes);  \
            }                                                                  \
            arrange_##TYPE(to, part, b, stride, ahead);                        \
        }                                                                      \
    }

RK_BLOCK_TYPES(DEFINE_ARRANGE)

/* ---- product ----------------------------------------------------------------
 */

/* What the panel's integers have too much: 2^ZERO, and -1 for nothing. */
#define ZERO_Q4_0 3
#define ZERO_Q4_1 -1
#define ZERO_Q5_0 4
#define ZERO_Q5_1 -1
#define ZERO_Q8_0 7
#define ZERO_Q2_K -1
#define ZERO_Q3_K 2
#define ZERO_Q4_K -1
#define ZERO_Q5_K -1
#define ZERO_Q6_K 5

/* sums of `columns` rows += one block of them, `stride` blocks apart, by
 * VECTORS panels. Few accumulators at a time become twice as many. */
INLINE void multiply(float *sums, const panel *w, const cpu_int16_block *a,
                     int64_t stride, int n_groups, int zero, int group,
                     bool offset, int columns)
{
    const int chains = columns * VECTORS <= 4 ? 2 : 1;
    const int first = group == 32 ? 0 : 8;
    const int pairs = group / 2;
    vf x[VECTORS][COLUMNS];
    UNROLL
    for (int c = 0; c < columns; c++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++) {
            x[v][c] = vf_zero();
        }
    }
    for (int g = 0; g < n_groups; g++) {
        vi acc[2][VECTORS][COLUMNS];
        UNROLL
        for (int c = 0; c < columns; c++) {
            vi less = {0};
            if (!offset) {
                less = (vi)((vu)vi_set1(a[c * stride].less[first + g]) << zero);
            }
            UNROLL
            for (int v = 0; v < VECTORS; v++) {
                acc[0][v][c] = less;
                acc[1][v][c] = (vi){0};
            }
        }
        UNROLL
        for (int p = 0; p < pairs; p++) {
            UNROLL
            for (int c = 0; c < columns; c++) {
                int32_t q;
                memcpy(&q, a[c * stride].q + 2 * (g * pairs + p), sizeof q);
                UNROLL
                for (int v = 0; v < VECTORS; v++) {
                    vi *sum = &acc[p % chains][v][c];
                    *sum =
                        vi_dot(*sum, (vi)w[v].pairs[g * pairs + p], vi_set1(q));
                }
            }
        }
        UNROLL
        for (int c = 0; c < columns; c++) {
            UNROLL
            for (int v = 0; v < VECTORS; v++) {
                const vi sum =
                    chains == 2 ? acc[0][v][c] + acc[1][v][c] : acc[0][v][c];
                x[v][c] = vf_fused(vf_of_vi(sum), w[v].scale[g], x[v][c]);
                if (offset) {
                    x[v][c] = vf_fused(w[v].offset[g],
                                       vf_set1(a[c * stride].sum[first + g]),
                                       x[v][c]);
                }
            }
        }
    }
    UNROLL
    for (int c = 0; c < columns; c++) {
        const vf scale = vf_set1(a[c * stride].scale);
        UNROLL
        for (int v = 0; v < VECTORS; v++) {
            float *sum = sums + c * ROWS + v * LANES;
            vf_store(sum, vf_fused(x[v][c], scale, vf_load(sum)));
        }
    }
}

typedef void multiply_rows(float *sums, const panel *w,
                           const cpu_int16_block *a, int64_t stride, int32_t m,
                           int n_groups, int zero);

#define MULTIPLY_CASE(GROUP, OFFSET, N)                                        \
    case N:                                                                    \
        multiply(sums, w, a, stride, n_groups, zero, GROUP, OFFSET, N);        \
        break;

/* m rows in passes of about the same number. */
#define DEFINE_ROWS(NAME, GROUP, OFFSET)                                       \
    static void rows_##NAME(float *sums, const panel *w,                       \
                            const cpu_int16_block *a, int64_t stride,          \
                            int32_t m, int n_groups, int zero)                 \
    {                                                                          \
        for (int32_t left = (m + COLUMNS - 1) / COLUMNS; left > 0; left--) {   \
            const int32_t columns = (m + left - 1) / left;                     \
            switch (columns) {                                                 \
                COLUMN_CASES(GROUP, OFFSET)                                    \
            }                                                                  \
            sums += columns * ROWS;                                            \
            a += columns * stride;                                             \
            m -= columns;                                                      \
        }                                                                      \
    }

DEFINE_ROWS(32, 32, false)
DEFINE_ROWS(32_offset, 32, true)
DEFINE_ROWS(16, 16, false)
DEFINE_ROWS(16_offset, 16, true)

/* How a type is computed. */
typedef struct way {
    void (*arrange)(panel *to, const uint8_t *b, int64_t stride, int32_t n,
                    const uint8_t *ahead);
    multiply_rows *rows;
    int32_t block_bytes, block, group, zero;
} way;

static way way_of(rk_type type)
{
    const rk_type_info *info = rk_type_get(type);
    way found = {.block_bytes = info->block_bytes,
                 .block = info->block_elements};
    switch (type) {
#define WAY_CASE(NAME, TYPE, BLOCK, GROUP, OFFSET)                             \
    case RK_##NAME:                                                            \
        found.arrange = panel_##TYPE;                                          \
        found.rows = GROUP == 32 ? (OFFSET ? rows_32_offset : rows_32)         \
                                 : (OFFSET ? rows_16_offset : rows_16);        \
        found.group = GROUP;                                                   \
        found.zero = ZERO_##NAME;                                              \
        break;
        RK_BLOCK_TYPES(WAY_CASE)
    default:
        break;
    }
    return found;
}

/* Rows that lack, of the n (< ROWS) that there are, count zero. */
static void arrange_some(const way *how, panel *to, const uint8_t *w,
                         int64_t row_bytes, int32_t n, int32_t k)
{
    uint8_t rows[ROWS][8 * 34]; /* no type has more bytes for 256 */
    const size_t bytes = (size_t)(k / how->block * how->block_bytes);
    for (int32_t r = 0; r < ROWS; r++) {
        if (r < n) {
            memcpy(rows[r], w + r * row_bytes, bytes);
        } else {
            memset(rows[r], 0, bytes);
        }
    }
    for (int v = 0; v < VECTORS; v++) {
        how->arrange(to + v, rows[v * LANES], sizeof *rows, k, w);
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

static void product(const cpu_integer_product *job)
{
    const way how = way_of(job->type);
    const int64_t n_blocks = cpu_int16_blocks(job->k);
    const int64_t block_bytes =
        CPU_INT16_BLOCK / how.block * (int64_t)how.block_bytes;
    scratch *s = job->scratch;
    for (int32_t j = 0; j < job->n; j += ROWS) {
        const int32_t n = cpu_min(job->n - j, ROWS);
        const uint8_t *w = (const uint8_t *)job->w + j * job->row_bytes;
        const uint8_t *next = w + ROWS * job->row_bytes;
        memset(s->sums, 0, (size_t)job->m * ROWS * sizeof *s->sums);
        for (int32_t b = 0; b < n_blocks; b++, w += block_bytes) {
            const int32_t k =
                cpu_min(job->k - b * CPU_INT16_BLOCK, CPU_INT16_BLOCK);
            if (n == ROWS) {
                for (int v = 0; v < VECTORS; v++) {
                    how.arrange(s->panels + v, w + v * LANES * job->row_bytes,
                                job->row_bytes, k,
                                next + (VECTORS * b + v) * LANES * block_bytes);
                }
            } else {
                arrange_some(&how, s->panels, w, job->row_bytes, n, k);
            }
            how.rows(s->sums, s->panels, (const cpu_int16_block *)job->a + b,
                     n_blocks, job->m, k / how.group, how.zero);
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
