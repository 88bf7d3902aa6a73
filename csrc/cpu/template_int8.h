/* Products in integers, written once for all instruction sets; see int8.h.
 *
 * LANES weight rows lie side by side in a panel: for each 32 elements eight
 * vectors of LANES quads of bytes, then a scale (and an offset) for each row.
 * An activation's quad meets all of them in one instruction, and no lanes are
 * added at the end.
 *
 * The including file defines LANES, COLUMNS (activation rows that are computed
 * together, a power of two), OFFSET_BYTES (what is added to r: 128 where the
 * dot product wants unsigned bytes, else 0), and:
 *   vf, vi              LANES floats, LANES 32-bit integers
 *   vf_zero vf_set1 vf_load vf_load_n vf_store_n vf_add vf_mul vf_fma
 *   vi_set1, vf_of_vi
 *   vi_dot(acc, p, q)   acc + dot product of each lane's quad at p with q's
 *   interleave(p, x, stride)  32 bytes of each of LANES rows, `stride` bytes
 *                       apart, to eight vectors of quads, + OFFSET_BYTES
 */
#ifndef RKSC_CPU_TEMPLATE_INT8_H
#define RKSC_CPU_TEMPLATE_INT8_H

#include "model/unpack.h"
#include "rounding.h"

/* ---- activations ------------------------------------------------------------
 */

#define SMALLEST 0x1p-100f /* below it a block counts as zero */

static void quantize_block(cpu_integers *out, const float *x)
{
    const cpu_rounding rounding =
        cpu_rounding_of(x, CPU_INT8_BLOCK, 127.0f, SMALLEST);
    int32_t q[CPU_INT8_BLOCK], half[2] = {0, 0};
    for (int i = 0; i < CPU_INT8_BLOCK; i++) {
        q[i] = cpu_round(x[i], rounding);
        out->q[i] = (int8_t)q[i];
    }
    for (int i = 0; i < CPU_INT8_BLOCK / 2; i++) {
        half[0] += q[i];
        half[1] += q[i + CPU_INT8_BLOCK / 2];
    }
    const int32_t sums[3] = {half[0] + half[1], half[0], half[1]};
    out->scale = rounding.scale;
    for (int i = 0; i < 3; i++) {
        out->sum[i] = out->scale * (float)sums[i];
        out->zero[i] = -128 * sums[i];
    }
    out->unused = 0;
}

static void quantize(cpu_integers *out, const float *a, int32_t k)
{
    for (int32_t i = 0; i < k; i += CPU_INT8_BLOCK) {
        quantize_block(out++, a + i);
    }
}

/* ---- weights ----------------------------------------------------------------
 */

/* A panel's part: LANES rows of 32 elements. `n_groups` scales and, where the
 * type has them, offsets follow the quads. */
#define QUADS_BYTES (CPU_INT8_BLOCK * LANES)
#define PART_BYTES(N_GROUPS, OFFSET)                                           \
    (QUADS_BYTES + (N_GROUPS) * ((OFFSET) ? 2 : 1) * LANES * (int)sizeof(float))

static size_t scratch_bytes(int32_t k)
{
    return (size_t)(k / CPU_INT8_BLOCK + 1) * PART_BYTES(2, true);
}

/* n (<= LANES) rows of blocks into a panel; the rows that lack count zero. */
#define DEFINE_ARRANGE(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET)                \
    static void arrange_##TYPE(char *panel, const char *w, int64_t row_bytes,  \
                               int32_t n, int32_t k)                           \
    {                                                                          \
        const int n_groups = CPU_INT8_BLOCK / GROUP;                           \
        const int64_t block_bytes = row_bytes / (k / BLOCK);                   \
        rk_unpacked x[LANES];                                                  \
        memset(x + n, 0, (size_t)(LANES - n) * sizeof *x);                     \
        for (int32_t at = 0; at < k; at += BLOCK, w += block_bytes) {          \
            for (int32_t r = 0; r < n; r++) {                                  \
                rk_unpack_##TYPE(&x[r],                                        \
                                 (const uint8_t *)w + (int64_t)r * row_bytes); \
            }                                                                  \
            for (int p = 0; p < BLOCK / CPU_INT8_BLOCK; p++) {                 \
                float *scales = (float *)(panel + QUADS_BYTES);                \
                interleave((uint8_t *)panel, x[0].q + p * CPU_INT8_BLOCK,      \
                           sizeof *x);                                         \
                for (int g = p * n_groups; g < (p + 1) * n_groups; g++) {      \
                    for (int r = 0; r < LANES; r++) {                          \
                        scales[r] = x[r].scale[g];                             \
                    }                                                          \
                    scales += LANES;                                           \
                    for (int r = 0; OFFSET && r < LANES; r++) {                \
                        scales[r] = x[r].offset[g];                            \
                    }                                                          \
                    scales += OFFSET ? LANES : 0;                              \
                }                                                              \
                panel += PART_BYTES(n_groups, OFFSET);                         \
            }                                                                  \
        }                                                                      \
    }

RK_BLOCK_TYPES(DEFINE_ARRANGE)

/* ---- product ----------------------------------------------------------------
 */

/* sums[c] of `columns` activation rows from a, k / 32 blocks apart, by the
 * panel. */
static inline __attribute__((always_inline)) void
multiply_panel(vf sums[COLUMNS], const char *panel, const cpu_integers *a,
               int32_t n_parts, int columns, int n_groups, bool offset)
{
    UNROLL
    for (int c = 0; c < columns; c++) {
        sums[c] = vf_zero();
    }
    for (int32_t p = 0; p < n_parts; p++, a++) {
        const uint8_t *quads = (const uint8_t *)panel;
        const float *scales = (const float *)(panel + QUADS_BYTES);
        UNROLL
        for (int g = 0; g < n_groups; g++) {
            const int which = n_groups == 1 ? 0 : g + 1;
            vi acc[COLUMNS];
            UNROLL
            for (int c = 0; c < columns; c++) {
                const cpu_integers *row = a + (int64_t)c * n_parts;
                acc[c] = vi_set1(OFFSET_BYTES ? row->zero[which] : 0);
            }
            UNROLL
            for (int quad = 0; quad < 8 / n_groups; quad++) {
                const int at = g * (8 / n_groups) + quad;
                UNROLL
                for (int c = 0; c < columns; c++) {
                    int32_t q;
                    memcpy(&q, a[(int64_t)c * n_parts].q + 4 * at, sizeof q);
                    acc[c] = vi_dot(acc[c], quads + at * 4 * LANES, q);
                }
            }
            const vf scale = vf_load(scales);
            scales += LANES;
            UNROLL
            for (int c = 0; c < columns; c++) {
                const cpu_integers *row = a + (int64_t)c * n_parts;
                const vf both = vf_mul(scale, vf_set1(row->scale));
                sums[c] = vf_fma(both, vf_of_vi(acc[c]), sums[c]);
            }
            if (offset) {
                const vf add = vf_load(scales);
                scales += LANES;
                UNROLL
                for (int c = 0; c < columns; c++) {
                    const cpu_integers *row = a + (int64_t)c * n_parts;
                    sums[c] = vf_fma(add, vf_set1(row->sum[which]), sums[c]);
                }
            }
        }
        panel += PART_BYTES(n_groups, offset);
    }
}

/* LANES weight rows from j by activation rows [i, i + columns). */
static inline __attribute__((always_inline)) void
put_columns(const cpu_integer_product *job, int32_t i, int32_t j, int columns,
            int n_groups, bool offset)
{
    const int32_t n_parts = job->k / CPU_INT8_BLOCK;
    const int32_t n = job->n - j < LANES ? job->n - j : LANES;
    vf sums[COLUMNS];
    multiply_panel(sums, job->scratch,
                   (const cpu_integers *)job->a + (int64_t)i * n_parts, n_parts,
                   columns, n_groups, offset);
    float *out = job->out + i * job->out_stride + j;
    for (int c = 0; c < columns; c++, out += job->out_stride) {
        vf sum = sums[c];
        if (job->bias != NULL) {
            sum = vf_add(sum, vf_load_n(job->bias + j, n));
        }
        if (job->accumulate) {
            sum = vf_add(vf_load_n(out, n), sum);
        }
        vf_store_n(out, sum, n);
    }
}

#define DEFINE_ROWS(NAME, N_GROUPS, OFFSET)                                    \
    static void rows_##NAME(const cpu_integer_product *job, int32_t j)         \
    {                                                                          \
        int32_t i = 0;                                                         \
        for (; i + COLUMNS <= job->m; i += COLUMNS) {                          \
            put_columns(job, i, j, COLUMNS, N_GROUPS, OFFSET);                 \
        }                                                                      \
        for (; i + COLUMNS / 2 <= job->m; i += COLUMNS / 2) {                  \
            put_columns(job, i, j, COLUMNS / 2, N_GROUPS, OFFSET);             \
        }                                                                      \
        for (; i < job->m; i++) {                                              \
            put_columns(job, i, j, 1, N_GROUPS, OFFSET);                       \
        }                                                                      \
    }

DEFINE_ROWS(32, 1, false)
DEFINE_ROWS(32_offset, 1, true)
DEFINE_ROWS(16, 2, false)
DEFINE_ROWS(16_offset, 2, true)

static void product(const cpu_integer_product *job)
{
    for (int32_t j = 0; j < job->n; j += LANES) {
        const char *w = job->w + j * job->row_bytes;
        const int32_t n = job->n - j < LANES ? job->n - j : LANES;
        void (*rows)(const cpu_integer_product *, int32_t);
        switch (job->type) {
#define PRODUCT_CASE(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET)                  \
    case RK_##NAME:                                                            \
        arrange_##TYPE(job->scratch, w, job->row_bytes, n, job->k);            \
        rows = GROUP == 32 ? (OFFSET ? rows_32_offset : rows_32)               \
                           : (OFFSET ? rows_16_offset : rows_16);              \
        break;
            RK_BLOCK_TYPES(PRODUCT_CASE)
        default:
            return;
        }
        rows(job, j);
    }
}

const cpu_int8_kernels TABLE = {
    .quantize = quantize,
    .product = product,
    .scratch_bytes = scratch_bytes,
};

#endif
