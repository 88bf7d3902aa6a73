/* Kernels for AMX-BF16: bf16 products in tiles, the rest as AVX-512.
 *
 * A tile product adds sixteen weight rows by sixteen activation rows over 32
 * elements of K. Weights are the first operand, straight from where they lie;
 * activations are the second and packed beforehand: for each group of sixteen
 * rows and each 32 elements of K one tile of 1 KiB, (16 pairs, 16 rows, 2),
 * zeros where there is no row or element. K runs upwards in steps of 32 from 0
 * for every output: that is the one order of accumulation. Results leave
 * transposed (weight rows are tile rows) and are turned in registers.
 */
#if defined(__x86_64__)
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

/* ---- tiles
 * ------------------------------------------------------------------- */

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

/* x[i][j] becomes x[j][i]. */
INLINE void transpose(__m512 x[SIDE])
{
    __m512 t[SIDE];
    UNROLL
    for (int i = 0; i < SIDE; i += 2) {
        t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    UNROLL
    for (int i = 0; i < SIDE; i += 4) {
        for (int j = 0; j < 2; j++) {
            __m512d a = _mm512_castps_pd(t[i + j]);
            __m512d b = _mm512_castps_pd(t[i + j + 2]);
            x[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            x[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xdd);
    }
    UNROLL
    for (int i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    }
}

/* ---- packing
 * ------------------------------------------------------------------ */

static size_t packed_bytes(int32_t k)
{
    return (size_t)((k + DEPTH - 1) / DEPTH) * TILE_BYTES;
}

/* One group of `rows` <= SIDE rows of a: (rows, k). */
static void pack_rows(void *out, const void *a, int32_t rows, int32_t k)
{
    char *to = out;
    for (int32_t at = 0; at < k; at += DEPTH, to += TILE_BYTES) {
        const int32_t n = k - at < DEPTH ? k - at : DEPTH;
        __m512 x[SIDE];
        UNROLL
        for (int i = 0; i < SIDE; i++) {
            const uint16_t *row = (const uint16_t *)a + (int64_t)i * k + at;
            x[i] = i >= rows    ? vf_zero()
                   : n == DEPTH ? _mm512_castsi512_ps(vb_load(row))
                                : _mm512_castsi512_ps(vb_load_n(row, n));
        }
        transpose(x);
        UNROLL
        for (int i = 0; i < SIDE; i++) {
            vf_store((float *)(to + i * 64), x[i]);
        }
    }
}

/* ---- product
 * ------------------------------------------------------------------- */

/* Turn a tile of sums (weights, activations) and put it where it belongs: n
 * weight rows from j, m activation rows from i. */
static void put_tile(const cpu_product *job, const float *sums, int32_t i,
                     int32_t j, int32_t m, int32_t n)
{
    __m512 x[SIDE];
    UNROLL
    for (int r = 0; r < SIDE; r++) {
        x[r] = vf_load(sums + r * SIDE);
    }
    transpose(x);
    float turned[SIDE * SIDE];
    UNROLL
    for (int r = 0; r < SIDE; r++) {
        vf_store(turned + r * SIDE, x[r]);
    }
    const vf bias = job->bias != NULL ? vf_load_n(job->bias + j, n) : vf_zero();
    float *out = job->out + i * job->out_stride + j;
    for (int32_t r = 0; r < m; r++, out += job->out_stride) {
        vf sum = vf_load(turned + r * SIDE);
        if (job->bias != NULL) {
            sum = vf_add(sum, bias);
        }
        if (job->accumulate) {
            sum = vf_add(vf_load_n(out, n), sum);
        }
        vf_store_n(out, sum, n);
    }
}

/* Where the tiles of some weight rows are read: step s of tile t at base +
 * s * step_bytes + t * tile_bytes, rows `stride` bytes apart. */
typedef struct weight_view {
    const char *base;
    size_t step_bytes, tile_bytes;
    long stride;
    bool ahead; /* fetch the next two tiles' rows meanwhile */
} weight_view;

/* Two tiles of rows that are worth fetching ahead: beyond this the processor's
 * own prefetching of long rows does better. */
#define AHEAD_BYTES 65536

/* n_rows (<= 2 * SIDE) rows of w: (., k) as whole tiles one after the other,
 * zeros where there is no row or element. */
static weight_view copy_weights(char *panel, const uint16_t *w, int32_t k,
                                int32_t n_rows)
{
    weight_view view = {panel, 2 * TILE_BYTES, TILE_BYTES, 64, false};
    for (int32_t at = 0; at < k; at += DEPTH, panel += 2 * TILE_BYTES) {
        const int32_t left = k - at;
        for (int32_t r = 0; r < 2 * SIDE; r++) {
            const uint16_t *from = w + (int64_t)r * k + at;
            vb x = r >= n_rows     ? _mm512_setzero_si512()
                   : left >= DEPTH ? vb_load(from)
                                   : vb_load_n(from, left);
            vb_store((uint16_t *)(panel + r * 64), x);
        }
    }
    BARRIER();
    return view;
}

/* Sums of n_tiles (1, 2) weight tiles by m_tiles (1, 2) activation tiles. */
static inline __attribute__((always_inline)) void
multiply_tiles(float sums[4][SIDE * SIDE], const weight_view *w, const char *a,
               size_t group_bytes, int n_tiles, int m_tiles)
{
    const char *end = a + group_bytes, *from = w->base;
    const size_t step = w->step_bytes, tile = w->tile_bytes;
    const long stride = w->stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (; a < end; a += TILE_BYTES, from += step) {
        if (w->ahead) {
            const char *next = from + 2 * tile;
            UNROLL
            for (int r = 0; r < n_tiles * SIDE; r++) {
                _mm_prefetch(next + r * stride, _MM_HINT_T1);
            }
        }
        _tile_loadd(6, a, 64);
        _tile_loadd(4, from, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (m_tiles == 2) {
            _tile_loadd(7, a + group_bytes, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (n_tiles == 2) {
            _tile_loadd(5, from + tile, stride);
            _tile_dpbf16ps(2, 5, 6);
            if (m_tiles == 2) {
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
    _tile_stored(0, sums[0], 64);
    if (m_tiles == 2) {
        _tile_stored(1, sums[1], 64);
    }
    if (n_tiles == 2) {
        _tile_stored(2, sums[2], 64);
        if (m_tiles == 2) {
            _tile_stored(3, sums[3], 64);
        }
    }
    BARRIER();
}

/* All activation rows by n_rows (<= 2 * SIDE) weight rows from j. */
static void weight_tiles(const cpu_product *job, const weight_view *w,
                         int32_t j, int32_t n_rows)
{
    const size_t group_bytes = packed_bytes(job->k);
    const int n_tiles = n_rows > SIDE ? 2 : 1;
    _Alignas(64) float sums[4][SIDE * SIDE];
    for (int32_t i = 0; i < job->m; i += 2 * SIDE) {
        const char *a = (const char *)job->a + (size_t)(i / SIDE) * group_bytes;
        const int m_tiles = job->m - i > SIDE ? 2 : 1;
        if (n_tiles == 2 && m_tiles == 2) {
            multiply_tiles(sums, w, a, group_bytes, 2, 2);
        } else if (n_tiles == 2) {
            multiply_tiles(sums, w, a, group_bytes, 2, 1);
        } else if (m_tiles == 2) {
            multiply_tiles(sums, w, a, group_bytes, 1, 2);
        } else {
            multiply_tiles(sums, w, a, group_bytes, 1, 1);
        }
        for (int32_t t = 0; t < n_tiles; t++) {
            for (int32_t g = 0; g < m_tiles; g++) {
                int32_t m = job->m - i - g * SIDE, n = n_rows - t * SIDE;
                put_tile(job, sums[2 * t + g], i + g * SIDE, j + t * SIDE,
                         m < SIDE ? m : SIDE, n < SIDE ? n : SIDE);
            }
        }
    }
}

/* With few activation rows weights are read where they lie: each is used once
 * or twice. With many, two tiles of rows are first copied into aligned tiles:
 * loading one whose rows cross cache lines takes six times as long. */
static void product_bf16(const cpu_product *job)
{
    const uint16_t *w = job->w;
    const bool whole = job->k % DEPTH == 0;
    configure();
    for (int32_t j = 0; j < job->n;) {
        int32_t n = job->n - j < 2 * SIDE ? job->n - j : 2 * SIDE;
        const uint16_t *rows = w + (int64_t)j * job->k;
        weight_view view = {(const char *)rows, DEPTH * 2,
                            (size_t)job->k * 2 * SIDE, (long)job->k * 2,
                            (int64_t)job->k * 4 * SIDE <= AHEAD_BYTES};
        if (whole && job->m <= 2 * SIDE && n >= SIDE) {
            n = n == 2 * SIDE ? n : SIDE;
        } else {
            view = copy_weights(job->scratch, rows, job->k, n);
        }
        weight_tiles(job, &view, j, n);
        j += n;
    }
    _tile_release();
}

/* Two weight tiles wide. */
static size_t product_scratch_bytes(int32_t k)
{
    return 2 * packed_bytes(k);
}

#include "amx_attention.h"

#define ACC_STRIDE tile_acc_stride
#define QUERY_BYTES tile_query_bytes
#define QUERY tile_query
#define SCORES tile_scores
#define SOFTMAX tile_softmax
#define VALUES NULL
#define RUN_VALUES tile_values
#define VALUE_BYTES tile_value_bytes
#define STORE_VALUE tile_store_value
#define FINISH tile_finish
#define TABLE cpu_kernels_amx
#define PACKED_BYTES packed_bytes
#define PACK_ROWS pack_rows
#define SCRATCH_BYTES product_scratch_bytes
#include "template_table.h"
#else
typedef int kernels_amx_is_empty;
#endif
