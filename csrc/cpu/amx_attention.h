/* Attention in AMX tiles (included by kernels_amx.c).
 *
 * Scores: sixteen (row, head) pairs by sixteen keys; K lies in its block as a
 * tile wants it, (pairs of dimensions, keys, 2). Values: sixteen pairs by
 * sixteen dimensions over groups of 32 keys that start at multiples of 32, so
 * that a group is summed in the same way wherever segments are cut; V lies in
 * pairs of keys, (keys / 2, head_dim, 2), and the groups of a tile are copied
 * together first, zeros where a key belongs to nobody. Weights are split into
 * two bf16 numbers, p = high + low to 16 bits, so that they cost no accuracy.
 */
#define GROUP_KEYS 32
#define PAIR_BYTES (RK_TILE * 4) /* of a pair's scores; later high, low */
#define LOW_BYTES (RK_TILE * 2)  /* where the low halves start */

static int32_t round_up(int32_t n, int32_t to)
{
    return (n + to - 1) / to * to;
}

/* ---- scores
 * -------------------------------------------------------------------- */

/* A row of q, padded with zeros to whole steps of DEPTH. */
static size_t tile_query_bytes(int32_t head_dim)
{
    return (size_t)round_up(head_dim, DEPTH) * 2;
}

static void tile_query(void *out, const void *q, int32_t head_dim)
{
    memset(out, 0, tile_query_bytes(head_dim));
    memcpy(out, q, (size_t)head_dim * 2);
}

/* Sixteen keys as tiles: step s at k + s * SIDE * stride. */
typedef struct key_tile {
    const char *k;
    long stride;
    int32_t n, slot;
} key_tile;

/* Fewer than sixteen keys, or an odd head_dim: copied, zeros around. */
static key_tile copy_keys(char *to, const key_vector *from,
                          const cpu_keys *keys)
{
    const int32_t steps = round_up(keys->head_dim, DEPTH) / 2;
    const char *k = from->k;
    key_tile tile = {to, 64, from->n, from->slot};
    for (int32_t i = 0; i < steps; i++, to += 64) {
        vb x = _mm512_setzero_si512();
        if (i < keys->head_dim / 2) {
            x = vb_load_n((const uint16_t *)k, 2 * from->n);
            k += (size_t)4 << keys->block_shift;
        }
        vb_store((uint16_t *)to, x);
    }
    BARRIER();
    return tile;
}

/* Rows that do not fill a tile, or keys that do not, go through here. */
static void put_scores(float *scores, const float *sums, int32_t rows,
                       int32_t n)
{
    for (int32_t i = 0; i < rows; i++) {
        vf_store_n(scores + i * RK_TILE, vf_load(sums + i * SIDE), n);
    }
}

/* Two tiles of keys by two tiles of pairs; `n` pairs from q on. */
static void score_tiles(float *scores, const char *q, int32_t steps,
                        size_t q_bytes, const key_tile *a, const key_tile *b,
                        int32_t n)
{
    const bool two = n > SIDE;
    const char *q2 = two ? q + SIDE * q_bytes : q;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int32_t s = 0; s < steps; s++) {
        _tile_loadd(4, q + s * 64, (long)q_bytes);
        _tile_loadd(6, a->k + s * SIDE * a->stride, a->stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b->k + s * SIDE * b->stride, b->stride);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, q2 + s * 64, (long)q_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    if (a->n == SIDE && b->n == SIDE && n >= 2 * SIDE) {
        _tile_stored(0, scores + a->slot, PAIR_BYTES);
        _tile_stored(1, scores + b->slot, PAIR_BYTES);
        _tile_stored(2, scores + SIDE * RK_TILE + a->slot, PAIR_BYTES);
        _tile_stored(3, scores + SIDE * RK_TILE + b->slot, PAIR_BYTES);
        BARRIER();
        return;
    }
    _Alignas(64) float sums[4][SIDE * SIDE];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    BARRIER();
    const int32_t first = two ? SIDE : n, second = n - first;
    put_scores(scores + a->slot, sums[0], first, a->n);
    put_scores(scores + b->slot, sums[1], first, b->n);
    put_scores(scores + SIDE * RK_TILE + a->slot, sums[2], second, a->n);
    put_scores(scores + SIDE * RK_TILE + b->slot, sums[3], second, b->n);
}

static void tile_scores(float *scores, const void *q, const cpu_keys *keys,
                        int32_t key_begin, int32_t key_end, int32_t n,
                        void *scratch)
{
    const size_t q_bytes = tile_query_bytes(keys->head_dim);
    const int32_t steps = round_up(keys->head_dim, DEPTH) / DEPTH;
    const size_t tile_bytes = (size_t)steps * TILE_BYTES;
    key_tile tiles[2];
    configure();
    for (int32_t key = key_begin; key < key_end;) {
        int n_tiles = 0;
        while (n_tiles < 2 && key < key_end) {
            key_vector one = next_keys(keys, key, key_end);
            key += one.n;
            if (one.n == SIDE && keys->head_dim % DEPTH == 0) {
                tiles[n_tiles] =
                    (key_tile){one.k, 4L << keys->block_shift, one.n, one.slot};
            } else {
                tiles[n_tiles] = copy_keys(
                    (char *)scratch + n_tiles * tile_bytes, &one, keys);
            }
            n_tiles++;
        }
        if (n_tiles == 1) {
            tiles[1] = tiles[0]; /* twice the same: nothing to treat apart */
        }
        for (int32_t i = 0; i < n; i += 2 * SIDE) {
            score_tiles(scores + i * RK_TILE,
                        (const char *)q + (size_t)i * q_bytes, steps, q_bytes,
                        &tiles[0], &tiles[1],
                        n - i < 2 * SIDE ? n - i : 2 * SIDE);
        }
    }
    _tile_release();
}

/* ---- softmax
 * ------------------------------------------------------------------- */

/* Two vectors of weights to high and low halves at slot `at`. High is cut, not
 * rounded: then low is exact before its own rounding. */
INLINE void put_weights(uint16_t *high, int32_t at, vf a, vf b)
{
    const vf mask = _mm512_castsi512_ps(_mm512_set1_epi32((int)0xffff0000));
    vf a_high = _mm512_and_ps(a, mask), b_high = _mm512_and_ps(b, mask);
    vb top = (vb)_mm512_cvtne2ps_pbh(b_high, a_high);
    vb rest = (vb)_mm512_cvtne2ps_pbh(vf_sub(b, b_high), vf_sub(a, a_high));
    vb_store(high + at, top);
    vb_store(high + RK_TILE + at, rest);
}

/* As softmax_tile, but leaves the weights as bf16: high halves of all RK_TILE
 * slots, then low halves, zero where the row has no key. Of the slots only the
 * first `vectors` are looked at; the others would add zeros. */
static inline __attribute__((always_inline)) cpu_partial softmax_of(
    float *scores, int32_t lo, int32_t hi, float scale, int vectors, bool whole)
{
    enum { N = RK_TILE / LANES };
    const vf least = vf_set1(-INFINITY);
    vf s[N], max = least;
    UNROLL
    for (int32_t i = 0; i < vectors; i++) {
        s[i] = vf_load(scores + i * LANES);
        if (!whole) {
            s[i] = vf_select_range(lo - i * LANES, hi - i * LANES, s[i], least);
        }
        max = vf_max(max, s[i]);
    }
    cpu_partial part;
    part.max = vf_hmax(max) * scale;
    const vf top = vf_set1(part.max), by = vf_set1(scale);
    vf even = vf_zero(), odd = vf_zero();
    UNROLL
    for (int32_t i = 0; i < vectors; i += 2) {
        vf a = vf_exp_below(_mm512_fmsub_ps(s[i], by, top));
        vf b = vf_exp_below(_mm512_fmsub_ps(s[i + 1], by, top));
        even = vf_add(even, a);
        odd = vf_add(odd, b);
        put_weights((uint16_t *)scores, i * LANES, a, b);
    }
    UNROLL
    for (int32_t i = vectors; i < N; i += 2) {
        put_weights((uint16_t *)scores, i * LANES, vf_zero(), vf_zero());
    }
    part.sum = vf_sum(vf_add(even, odd));
    return part;
}

static cpu_partial tile_softmax(float *scores, int32_t lo, int32_t hi,
                                float scale)
{
    if (lo == 0 && hi == RK_TILE) {
        return softmax_of(scores, lo, hi, scale, RK_TILE / LANES, true);
    }
    switch ((hi - 1) / (RK_TILE / 4)) {
    case 0:
        return softmax_of(scores, lo, hi, scale, RK_TILE / LANES / 4, false);
    case 1:
        return softmax_of(scores, lo, hi, scale, RK_TILE / LANES / 2, false);
    case 2:
        return softmax_of(scores, lo, hi, scale, RK_TILE / LANES * 3 / 4,
                          false);
    default:
        return softmax_of(scores, lo, hi, scale, RK_TILE / LANES, false);
    }
}

/* ---- values
 * --------------------------------------------------------------------- */

static int32_t tile_acc_stride(int32_t head_dim)
{
    return round_up(head_dim, SIDE);
}

static size_t tile_value_bytes(int32_t head_dim)
{
    return (size_t)RK_TILE * (size_t)tile_acc_stride(head_dim) * 2;
}

/* One row of V into its block. */
static void tile_store_value(void *block, int32_t offset, int32_t block_tokens,
                             const void *act, int32_t head_dim)
{
    uint16_t *to = block;
    const uint16_t *from = act;
    if (block_tokens == 1) {
        memcpy(to, from, (size_t)head_dim * 2);
        return;
    }
    to += (offset & ~1) * head_dim + (offset & 1);
    for (int32_t d = 0; d < head_dim; d++) {
        to[2 * d] = from[d];
    }
}

/* One key's values to its half of a pair; `step`: between its elements. */
static void copy_half(uint16_t *to, const uint16_t *from, int32_t step,
                      int32_t head_dim)
{
    for (int32_t d = 0; d < head_dim; d++) {
        to[2 * d] = from[d * step];
    }
}

/* Keys [begin, end) of one sequence to their places in `to`: (RK_TILE / 2
 * pairs, stride, 2). */
static void copy_values(uint16_t *to, int32_t stride, const cpu_piece *piece)
{
    const cpu_keys *keys = &piece->keys;
    const int32_t head_dim = keys->head_dim, tokens = BLOCK_KEYS(keys);
    for (int32_t key = piece->begin; key < piece->end;) {
        const int32_t at = key & (tokens - 1), slot = key % RK_TILE;
        const uint16_t *v = (const uint16_t *)block_of(keys, keys->v, key);
        int32_t n = tokens - at;
        n = n < piece->end - key ? n : piece->end - key;
        uint16_t *pair = to + (int64_t)(slot & ~1) * stride;
        if (tokens == 1) {
            copy_half(pair + (slot & 1), v, 1, head_dim);
        } else if ((at & 1) != 0 || n == 1) {
            copy_half(pair + (slot & 1), v + (at & ~1) * head_dim + (at & 1), 2,
                      head_dim);
            n = 1;
        } else if (stride == head_dim) {
            n &= ~1;
            memcpy(pair, v + at * head_dim, (size_t)n * (size_t)head_dim * 2);
        } else {
            memcpy(pair, v + at * head_dim, (size_t)head_dim * 4);
            n = 2;
        }
        key += n;
    }
}

/* Up to SIDE pairs by up to four tiles of dimensions from `v` on: sums over
 * the groups [begin, end) of the tile. */
static inline __attribute__((always_inline)) void
value_tiles(float *out, int32_t stride, const char *p, const char *v,
            int32_t begin, int32_t end, int n_tiles)
{
    const long row = (long)stride * 4;
    p += begin * GROUP_KEYS * 2;
    v += (int64_t)begin * GROUP_KEYS / 2 * row;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int32_t g = begin; g < end; g++) {
        _tile_loadd(4, p, PAIR_BYTES);
        _tile_loadd(5, p + LOW_BYTES, PAIR_BYTES);
        _tile_loadd(6, v, row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(0, 5, 6);
        if (n_tiles > 1) {
            _tile_loadd(7, v + 64, row);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(1, 5, 7);
        }
        if (n_tiles > 2) {
            _tile_loadd(6, v + 128, row);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (n_tiles > 3) {
            _tile_loadd(7, v + 192, row);
            _tile_dpbf16ps(3, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        p += GROUP_KEYS * 2;
        v += GROUP_KEYS / 2 * row;
    }
    _tile_stored(0, out, row);
    if (n_tiles > 1) {
        _tile_stored(1, out + SIDE, row);
    }
    if (n_tiles > 2) {
        _tile_stored(2, out + 2 * SIDE, row);
    }
    if (n_tiles > 3) {
        _tile_stored(3, out + 3 * SIDE, row);
    }
    BARRIER();
}

/* acc rows are padded to a multiple of SIDE rows' memory by the caller, and
 * runs come in rising order, so what a partial tile writes behind its rows is
 * overwritten by the next run. */
static void tile_values(float *acc, const float *p, const cpu_piece *pieces,
                        int32_t n_pieces, int32_t n, void *scratch)
{
    const int32_t head_dim = pieces[0].keys.head_dim;
    const int32_t stride = tile_acc_stride(head_dim);
    const int32_t first = pieces[0].begin % RK_TILE;
    const int32_t last = (pieces[n_pieces - 1].end - 1) % RK_TILE;
    const int32_t begin = first / GROUP_KEYS, end = last / GROUP_KEYS + 1;
    const size_t group_bytes = (size_t)GROUP_KEYS * (size_t)stride * 2;
    bool dense = stride == head_dim;
    for (int32_t i = 1; i < n_pieces; i++) {
        dense = dense && pieces[i].begin == pieces[i - 1].end;
    }
    if (dense) { /* only the edges have places without a key */
        memset((char *)scratch + (size_t)begin * group_bytes, 0, group_bytes);
        memset((char *)scratch + (size_t)(end - 1) * group_bytes, 0,
               group_bytes);
    } else {
        memset((char *)scratch + (size_t)begin * group_bytes, 0,
               (size_t)(end - begin) * group_bytes);
    }
    for (int32_t i = 0; i < n_pieces; i++) {
        copy_values(scratch, stride, &pieces[i]);
    }
    configure();
    for (int32_t i = 0; i < n; i += SIDE) {
        const char *weights = (const char *)(p + i * RK_TILE);
        for (int32_t d = 0; d < stride; d += 4 * SIDE) {
            float *out = acc + (int64_t)i * stride + d;
            const char *v = (const char *)scratch + d * 4;
            switch ((stride - d) / SIDE) {
            case 1:
                value_tiles(out, stride, weights, v, begin, end, 1);
                break;
            case 2:
                value_tiles(out, stride, weights, v, begin, end, 2);
                break;
            case 3:
                value_tiles(out, stride, weights, v, begin, end, 3);
                break;
            default:
                value_tiles(out, stride, weights, v, begin, end, 4);
            }
        }
    }
    _tile_release();
}

static void tile_finish(void *out, const float *acc, const cpu_partial *all,
                        int32_t head_dim)
{
    const vf by = vf_set1(1.0f / all->sum);
    const int32_t n = head_dim;
    FOR_LANES(n)
    {
        STORE_bf16(out, vf_mul(LOAD(acc), by));
    }
}
