/* Kernels for AMX-BF16: bf16 products in tiles, the rest as AVX-512.
 *
 * A tile product adds sixteen rows of its first operand by sixteen columns of
 * its second over 32 elements of K; the second wants pairs of K in its rows, so
 * one side has to be turned. With few activation rows these are: for each group
 * of sixteen and each 32 elements of K one tile of 1 KiB, (16 pairs, 16 rows,
 * 2), zeros where there is no row or element; weights are read where they lie,
 * and sums leave turned. With many, weights are: two tiles of rows at a time,
 * used for all activations while they are in the cache, and sums leave as they
 * are. Either way K runs upwards in steps of 32 from 0 for every output and a
 * product of two numbers is the same in either order: one order of
 * accumulation.
 */
#if defined(__x86_64__)
#include "blocks_avx512.h"
#include "vector_avx512.h"

#define HAS_DOT 1
INLINE vb vb_set1(uint32_t pair)
{
    return _mm512_set1_epi32((int)pair);
}

INLINE vf vf_dot(vf acc, vb a, vb b)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}

#define OWN_PRODUCT_BF16
#define OWN_ATTENTION_BF16
#include "template_attention.h"
#include "template_dequant.h"
#include "template_product.h"

/* ---- tiles --------------------------------------------------------------- */

#define SIDE 16  /* rows of a tile, and 4-byte columns */
#define DEPTH 32 /* elements of K in a tile */
#define TILE_BYTES 1024
#define BARRIER() __asm__ volatile("" ::: "memory") /* tiles read memory */

/* Tiles 0 .. 3: sums, (weights 2, activations 2); 4, 5: weights; 6, 7:
 * activations. All are whole. */
static void configure(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } layout = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        layout.row_bytes[i] = 64;
        layout.rows[i] = SIDE;
    }
    BARRIER();
    __asm__ volatile("" ::"m"(layout));
    _tile_loadconfig(&layout);
}

/* Rows 4 q .. 4 q + 3 of `out`, for q < quarters (<= 4), become columns of the
 * SIDE rows of four-byte elements that lie `stride` bytes apart. Four rows a
 * lane are put together while they are loaded, which leaves half the shuffles.
 */
INLINE void turn(char *out, const char *from, int64_t stride, int quarters)
{
    UNROLL
    for (int q = 0; q < quarters; q++) {
        __m512 x[4], t[4];
        UNROLL
        for (int r = 0; r < 4; r++) {
            const char *at = from + r * stride + q * 16;
            x[r] = _mm512_castps128_ps512(_mm_loadu_ps((const float *)at));
            UNROLL
            for (int lane = 1; lane < 4; lane++) {
                x[r] = _mm512_mask_broadcast_f32x4(
                    x[r], (__mmask16)(0xf << 4 * lane),
                    _mm_loadu_ps((const float *)(at + 4 * lane * stride)));
            }
        }
        UNROLL
        for (int i = 0; i < 4; i += 2) {
            t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
            t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
        }
        UNROLL
        for (int i = 0; i < 2; i++) {
            __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 2]);
            _mm512_storeu_pd(out + (4 * q + 2 * i) * 64,
                             _mm512_unpacklo_pd(a, b));
            _mm512_storeu_pd(out + (4 * q + 2 * i + 1) * 64,
                             _mm512_unpackhi_pd(a, b));
        }
    }
}

/* One tile: `n` elements of `rows` rows of k, zeros around them; `turned`: as
 * second operand. */
INLINE void copy_tile(char *to, const uint16_t *from, int64_t k, int32_t rows,
                      int32_t n, bool turned)
{
    _Alignas(64) char padded[TILE_BYTES];
    const bool whole = rows >= SIDE && n >= DEPTH;
    if (turned && whole) {
        turn(to, (const char *)from, k * 2, 4);
        return;
    }
    vb x[SIDE];
    UNROLL
    for (int r = 0; r < SIDE; r++) {
        x[r] = whole       ? vb_load(from + r * k)
               : r >= rows ? _mm512_setzero_si512()
                           : vb_load_n(from + r * k, n < DEPTH ? n : DEPTH);
    }
    char *rows_to = turned ? padded : to;
    UNROLL
    for (int r = 0; r < SIDE; r++) {
        vb_store((uint16_t *)(rows_to + r * 64), x[r]);
    }
    if (turned) {
        turn(to, padded, 64, 4);
    }
}

/* ---- packing ------------------------------------------------------------- */

static size_t packed_bytes(int32_t k)
{
    return (size_t)((k + DEPTH - 1) / DEPTH) * TILE_BYTES;
}

/* One group of `rows` <= SIDE rows of a: (rows, k). */
static void pack_rows(void *out, const void *a, int32_t rows, int32_t k,
                      bool many)
{
    const uint16_t *from = a;
    char *to = out;
    for (int32_t at = 0; at < k; at += DEPTH, to += TILE_BYTES) {
        copy_tile(to, from + at, k, rows, k - at, !many);
    }
}

/* The first `depth` elements of n_rows (<= 2 * SIDE) rows of w: (., k) as
 * tiles, two for each step of K. */
static void copy_weights(char *panel, const uint16_t *w, int32_t k,
                         int32_t depth, int32_t n_rows, bool turned)
{
    for (int32_t at = 0; at < depth; at += DEPTH, panel += 2 * TILE_BYTES) {
        copy_tile(panel, w + at, k, n_rows, depth - at, turned);
        copy_tile(panel + TILE_BYTES, w + at + SIDE * (int64_t)k, k,
                  n_rows - SIDE, depth - at, turned);
    }
    BARRIER();
}

/* ---- sums ---------------------------------------------------------------- */

/* Where the tiles of one operand are read: step s of tile t at base + s *
 * step_bytes + t * tile_bytes, rows `stride` bytes apart. */
typedef struct tile_view {
    const char *base;
    size_t step_bytes, tile_bytes;
    long stride;
    bool ahead; /* fetch the next two tiles' rows meanwhile */
} tile_view;

/* Two tiles of rows that are worth fetching ahead: beyond this the processor's
 * own prefetching of long rows does better. */
#define AHEAD_BYTES 65536

/* Tiles 2 t + u += sums over `steps` of K of tile t < n_a of the first operand
 * by tile u < n_b of the second. `stream`: the first operand passes by the
 * first cache, the second stays in it. */
static inline __attribute__((always_inline)) void
multiply_tiles(const tile_view *a, const tile_view *b, int32_t steps, int n_a,
               int n_b, bool stream)
{
    const char *x = a->base, *y = b->base;
    for (int32_t s = 0; s < steps; s++) {
        if (a->ahead) {
            const char *next = x + 2 * a->tile_bytes;
            UNROLL
            for (int r = 0; r < n_a * SIDE; r++) {
                _mm_prefetch(next + r * a->stride, _MM_HINT_T1);
            }
        }
        _tile_loadd(6, y, b->stride);
        if (stream) {
            _tile_stream_loadd(4, x, a->stride);
        } else {
            _tile_loadd(4, x, a->stride);
        }
        _tile_dpbf16ps(0, 4, 6);
        if (n_b == 2) {
            _tile_loadd(7, y + b->tile_bytes, b->stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (n_a == 2) {
            if (stream) {
                _tile_stream_loadd(5, x + a->tile_bytes, a->stride);
            } else {
                _tile_loadd(5, x + a->tile_bytes, a->stride);
            }
            _tile_dpbf16ps(2, 5, 6);
            if (n_b == 2) {
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        x += a->step_bytes;
        y += b->step_bytes;
    }
}

static void add_tiles(const tile_view *a, const tile_view *b, int32_t steps,
                      int n_a, int n_b, bool stream)
{
    if (n_a == 2 && n_b == 2 && stream) {
        multiply_tiles(a, b, steps, 2, 2, true);
    } else if (n_a == 2 && n_b == 2) {
        multiply_tiles(a, b, steps, 2, 2, false);
    } else if (n_a == 2) {
        multiply_tiles(a, b, steps, 2, 1, false);
    } else if (n_b == 2) {
        multiply_tiles(a, b, steps, 1, 2, false);
    } else {
        multiply_tiles(a, b, steps, 1, 1, false);
    }
}

static void zero_tiles(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

#define SUMS_BYTES (4 * TILE_BYTES)

static void load_tiles(const char *from)
{
    _tile_loadd(0, from, 64);
    _tile_loadd(1, from + TILE_BYTES, 64);
    _tile_loadd(2, from + 2 * TILE_BYTES, 64);
    _tile_loadd(3, from + 3 * TILE_BYTES, 64);
}

static void store_tiles(char *to)
{
    _tile_stored(0, to, 64);
    _tile_stored(1, to + TILE_BYTES, 64);
    _tile_stored(2, to + 2 * TILE_BYTES, 64);
    _tile_stored(3, to + 3 * TILE_BYTES, 64);
}

/* A tile of sums to out rows [i, i + m), columns [j, j + n), m and n <= SIDE;
 * `turned`: its rows are columns. */
static void put_tile(const cpu_product *job, const char *sums, int32_t i,
                     int32_t j, int32_t m, int32_t n, bool turned)
{
    _Alignas(64) char rows[TILE_BYTES];
    float *out = job->out + i * job->out_stride + j;
    if (turned) {
        if (m <= SIDE / 2) {
            turn(rows, sums, 64, 2);
        } else {
            turn(rows, sums, 64, 4);
        }
        sums = rows;
    }
    const vf bias = job->bias != NULL ? vf_load_n(job->bias + j, n) : vf_zero();
    for (int32_t r = 0; r < m; r++, out += job->out_stride) {
        vf sum = vf_load((const float *)(sums + r * 64));
        if (job->bias != NULL) {
            sum = vf_add(sum, bias);
        }
        if (job->accumulate) {
            sum = vf_add(vf_load_n(out, n), sum);
        }
        vf_store_n(out, sum, n);
    }
}

static int32_t at_most(int32_t n, int32_t most)
{
    return n < most ? n : most;
}

/* The four tiles to out: activation rows from i, n_w weight rows from j. */
static void put_tiles(const cpu_product *job, int32_t i, int32_t j, int32_t n_w)
{
    const int32_t m = at_most(job->m - i, 2 * SIDE);
    if (job->many && m == 2 * SIDE && n_w == 2 * SIDE && job->bias == NULL &&
        !job->accumulate) {
        const long stride = (long)(job->out_stride * 4);
        float *out = job->out + i * job->out_stride + j;
        _tile_stored(0, out, stride);
        _tile_stored(1, out + SIDE, stride);
        out += SIDE * job->out_stride;
        _tile_stored(2, out, stride);
        _tile_stored(3, out + SIDE, stride);
        return;
    }
    _Alignas(64) char sums[SUMS_BYTES];
    store_tiles(sums);
    BARRIER();
    for (int32_t t = 0; t * SIDE < m; t++) {
        for (int32_t u = 0; u * SIDE < n_w; u++) {
            const int32_t tile = job->many ? 2 * t + u : 2 * u + t;
            put_tile(job, sums + tile * TILE_BYTES, i + t * SIDE, j + u * SIDE,
                     at_most(m - t * SIDE, SIDE), at_most(n_w - u * SIDE, SIDE),
                     !job->many);
        }
    }
}

/* ---- product ------------------------------------------------------------- */

static const char *activation_tiles(const cpu_product *job, int32_t i)
{
    return (const char *)job->a + (size_t)(i / SIDE) * packed_bytes(job->k);
}

#define BLOCK_ROWS (2 * SIDE)

/* Weights are read where they lie when each is used once or twice, or when
 * their tiles' rows are cache lines; a row that crosses two costs six times as
 * much. */
static void few_rows(const cpu_product *job)
{
    const size_t group_bytes = packed_bytes(job->k);
    const int32_t steps = (job->k + DEPTH - 1) / DEPTH;
    const bool lines = ((uintptr_t)job->w | (size_t)job->k * 2) % 64 == 0;
    const bool in_place = job->k % DEPTH == 0 && (lines || job->m <= 2 * SIDE);
    for (int32_t j = 0; j < job->n;) {
        int32_t n = at_most(job->n - j, 2 * SIDE);
        const uint16_t *rows = (const uint16_t *)job->w + (int64_t)j * job->k;
        tile_view w = {job->scratch, 2 * TILE_BYTES, TILE_BYTES, 64, false};
        if (in_place && n >= SIDE) {
            n = n == 2 * SIDE ? n : SIDE;
            w = (tile_view){(const char *)rows, DEPTH * 2,
                            (size_t)job->k * 2 * SIDE, (long)job->k * 2,
                            (int64_t)job->k * 4 * SIDE <= AHEAD_BYTES};
        } else {
            copy_weights(job->scratch, rows, job->k, job->k, n, false);
        }
        for (int32_t i = 0; i < job->m; i += 2 * SIDE) {
            const tile_view a = {activation_tiles(job, i), TILE_BYTES,
                                 group_bytes, 64, false};
            zero_tiles();
            add_tiles(&w, &a, steps, n > SIDE ? 2 : 1,
                      job->m - i > SIDE ? 2 : 1, false);
            put_tiles(job, i, j, n);
        }
        j += n;
    }
}

/* Blocks of two tiles of rows become tiles while those before them are
 * multiplied: neither waits for the other, and no tile leaves the first cache.
 * The next rows' blocks, which lie side by side, are fetched meanwhile. */
static void few_rows_of_blocks(const cpu_product *job)
{
    const rk_type_info *info = rk_type_get(job->type);
    const size_t group_bytes = packed_bytes(job->k);
    const int32_t n_blocks = job->k / info->block_elements;
    const int32_t steps = info->block_elements / DEPTH;
    const int64_t row_bytes = rk_type_bytes(job->type, job->k);
    const int32_t panel_bytes = steps * 2 * TILE_BYTES;
    for (int32_t j = 0; j < job->n; j += 2 * SIDE) {
        const uint8_t *rows = (const uint8_t *)job->w + j * row_bytes;
        const uint8_t *next = rows + 2 * SIDE * row_bytes;
        const int32_t n = at_most(job->n - j, 2 * SIDE);
        zero_tiles();
        for (int32_t b = 0; b <= n_blocks; b++) {
            char *panels = job->scratch;
            if (b < n_blocks) {
                const block_walk walk = {
                    .from = rows + b * info->block_bytes,
                    .step = row_bytes,
                    .to = DEPTH,
                    .run = 2 * SIDE * DEPTH,
                    .n = n,
                    .later = j + n < job->n ? next + b * n * info->block_bytes
                                            : NULL};
                blocks_bf16((uint16_t *)(panels + b % 2 * panel_bytes),
                            job->type, &walk);
                BARRIER();
            }
            if (b > 0) {
                const tile_view w = {panels + (b - 1) % 2 * panel_bytes,
                                     2 * TILE_BYTES, TILE_BYTES, 64, false};
                const tile_view a = {activation_tiles(job, 0) +
                                         (int64_t)(b - 1) * steps * TILE_BYTES,
                                     TILE_BYTES, group_bytes, 64, false};
                add_tiles(&w, &a, steps, n > SIDE ? 2 : 1,
                          job->m > SIDE ? 2 : 1, false);
                BARRIER(); /* the block after the next goes where this was */
            }
        }
        put_tiles(job, 0, j, n);
    }
}

/* Steps of K whose weight tiles stay in the first cache while activations
 * stream past it from the second. Sums of earlier steps wait in memory. */
#define SLAB_STEPS 18
#define SLAB_BYTES (SLAB_STEPS * 2 * TILE_BYTES)

static void many_rows(const cpu_product *job)
{
    const size_t group_bytes = packed_bytes(job->k);
    char *panel = job->scratch, *sums = panel + SLAB_BYTES;
    const tile_view w = {panel, 2 * TILE_BYTES, TILE_BYTES, 64, false};
    for (int32_t j = 0; j < job->n; j += 2 * SIDE) {
        const int32_t n = at_most(job->n - j, 2 * SIDE);
        const uint16_t *rows = (const uint16_t *)job->w + (int64_t)j * job->k;
        for (int32_t k = 0; k < job->k; k += SLAB_STEPS * DEPTH) {
            const int32_t depth = at_most(job->k - k, SLAB_STEPS * DEPTH);
            const int32_t steps = (depth + DEPTH - 1) / DEPTH;
            copy_weights(panel, rows + k, job->k, depth, n, true);
            for (int32_t i = 0; i < job->m; i += 2 * SIDE) {
                char *waiting = sums + (int64_t)(i / (2 * SIDE)) * SUMS_BYTES;
                const tile_view a = {activation_tiles(job, i) +
                                         (int64_t)(k / DEPTH) * TILE_BYTES,
                                     TILE_BYTES, group_bytes, 64, false};
                if (k == 0) {
                    zero_tiles();
                } else {
                    load_tiles(waiting);
                }
                add_tiles(&a, &w, steps, job->m - i > SIDE ? 2 : 1,
                          n > SIDE ? 2 : 1, true);
                if (k + depth < job->k) {
                    store_tiles(waiting);
                    BARRIER();
                } else {
                    put_tiles(job, i, j, n);
                }
            }
        }
    }
}

static void product_bf16(const cpu_product *job)
{
    configure();
    if (job->many) {
        many_rows(job);
    } else if (rk_type_get(job->type)->block_elements > 1) {
        few_rows_of_blocks(job);
    } else {
        few_rows(job);
    }
    _tile_release();
}

/* Two weight tiles wide: whole rows for few activations, or two blocks; a slab
 * and the sums that wait for the next one for many. */
static size_t product_scratch_bytes(int32_t k)
{
    const size_t few = 2 * packed_bytes(k);
    const size_t many =
        SLAB_BYTES + (size_t)(CPU_PANEL_ROWS / (2 * SIDE)) * SUMS_BYTES;
    return few > many ? few : many;
}

#include "amx_attention.h"

#define TABLE cpu_kernels_amx
#define PACKED_BYTES packed_bytes
#define PACK_ROWS pack_rows
#define SCRATCH_BYTES product_scratch_bytes
#include "template_table.h"
#else
typedef int kernels_amx_is_empty;
#endif
