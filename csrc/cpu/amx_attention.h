/* Attention in AMX tiles (included by kernels_amx.c).
 *
 * PASS_PAIRS (row, head) pairs at a time, so that their scores stay in the
 * first cache from one of three steps to the next. Scores: sixteen pairs by
 * sixteen keys; K lies in its block as a
 * tile wants it, (pairs of dimensions, keys, 2). Values: sixteen pairs by
 * sixteen dimensions over groups of 32 keys that start at multiples of 32, so
 * that a group is summed in the same way wherever segments are cut; V lies in
 * pairs of keys, (keys / 2, head_dim, 2), and the groups of a tile are copied
 * together first, zeros where a key belongs to nobody. Weights are split into
 * two bf16 numbers, p = high + low to 16 bits, so that they cost no accuracy.
 */
#define PASS_PAIRS (2 * SIDE)
#define GROUP_KEYS 32
#define PAIR_BYTES (RK_TILE * 4)     /* of a pair's scores */
#define GROUP_BYTES (GROUP_KEYS * 4) /* later: high halves of a group, low */
#define LOW_BYTES (GROUP_KEYS * 2)   /* where the low halves start */

static int32_t round_up(int32_t n, int32_t to)
{
    return (n + to - 1) / to * to;
}

/* ---- scores -------------------------------------------------------------- */

/* A row of q, padded with zeros to whole steps of DEPTH. */
static size_t tile_query_bytes(int32_t head_dim)
{
    return (size_t)round_up(head_dim, DEPTH) * 2;
}

static void tile_load_query(void *out, const void *q, int32_t head_dim)
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

/* A tile of scores to the pairs' slots. Where it starts at a multiple of
 * sixteen, slots behind its keys are still free. */
#define PUT_SCORES(tile, to, keys)                                             \
    do {                                                                       \
        if ((keys)->slot % SIDE == 0) {                                        \
            _tile_stored(tile, to, PAIR_BYTES);                                \
        } else {                                                               \
            _tile_stored(tile, sums, 64);                                      \
            BARRIER();                                                         \
            for (int32_t r = 0; r < SIDE; r++) {                               \
                vf_store_n((to) + r * RK_TILE, vf_load(sums + r * SIDE),       \
                           (keys)->n);                                         \
            }                                                                  \
        }                                                                      \
    } while (0)

/* Two tiles of keys by the pairs of a pass, one tile of them or two. */
static void score_tiles(float *scores, const char *q, int32_t steps,
                        size_t q_bytes, const key_tile *a, const key_tile *b,
                        bool two)
{
    _Alignas(64) float sums[SIDE * SIDE];
    const char *q2 = q + SIDE * q_bytes;
    zero_tiles();
    for (int32_t s = 0; s < steps; s++) {
        _tile_loadd(4, q + s * 64, (long)q_bytes);
        _tile_stream_loadd(6, a->k + s * SIDE * a->stride, a->stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stream_loadd(7, b->k + s * SIDE * b->stride, b->stride);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, q2 + s * 64, (long)q_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    PUT_SCORES(0, scores + a->slot, a);
    PUT_SCORES(1, scores + b->slot, b);
    if (two) {
        PUT_SCORES(2, scores + SIDE * RK_TILE + a->slot, a);
        PUT_SCORES(3, scores + SIDE * RK_TILE + b->slot, b);
    }
    BARRIER();
}

/* Scores of a pass over the keys of one piece. copied: room for two tiles of
 * keys. */
static void tile_scores(float *scores, const char *q, const cpu_piece *piece,
                        bool two, char *copied)
{
    const cpu_keys *keys = &piece->keys;
    const size_t q_bytes = tile_query_bytes(keys->head_dim);
    const int32_t steps = round_up(keys->head_dim, DEPTH) / DEPTH;
    key_tile tiles[2];
    for (int32_t key = piece->begin; key < piece->end;) {
        int n_tiles = 0;
        while (n_tiles < 2 && key < piece->end) {
            key_vector one = next_keys(keys, key, piece->end);
            key += one.n;
            if (one.n == SIDE && keys->head_dim % DEPTH == 0) {
                tiles[n_tiles] =
                    (key_tile){one.k, 4L << keys->block_shift, one.n, one.slot};
            } else {
                tiles[n_tiles] = copy_keys(
                    copied + n_tiles * steps * TILE_BYTES, &one, keys);
            }
            n_tiles++;
        }
        if (n_tiles == 1) {
            tiles[1] = tiles[0]; /* twice the same: nothing to treat apart */
        }
        score_tiles(scores, q, steps, q_bytes, &tiles[0], &tiles[1], two);
    }
}

/* ---- softmax ------------------------------------------------------------- */

/* 2^x for x <= 0, or above it by a rounding error, with an error of 1.5e-7 of
 * it; 2^0 is 1. */
INLINE vf exp2_below(vf x)
{
    const vf r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF); /* x - floor x */
    vf p = vf_set1(0x1.e974fcp-10f);
    p = vf_fma(p, r, vf_set1(0x1.277854p-7f));
    p = vf_fma(p, r, vf_set1(0x1.c91ce6p-5f));
    p = vf_fma(p, r, vf_set1(0x1.ebdb56p-3f));
    p = vf_fma(p, r, vf_set1(0x1.62e4bap-1f));
    p = vf_fma(p, r, vf_set1(1.0f));
    return _mm512_scalef_ps(p, x); /* p 2^(floor x) */
}

/* The scores of a group, from its vector i on, where the row has slots [lo,
 * hi); -inf elsewhere. */
INLINE vf score_vector(const float *scores, int32_t i, cpu_span use, bool whole)
{
    vf s = vf_load(scores + i);
    return whole
               ? s
               : vf_select_range(use.lo - i, use.hi - i, s, vf_set1(-INFINITY));
}

static inline __attribute__((always_inline)) float
largest_score(const float *scores, cpu_span use, int32_t n, bool whole)
{
    vf max = score_vector(scores, 0, use, whole);
    for (int32_t i = LANES; i < n; i += LANES) {
        max = vf_max(max, score_vector(scores, i, use, whole));
    }
    return vf_hmax(max);
}

/* The first n slots, whole groups, from scores to weights e^(scale (s - max)),
 * in two halves. One multiply-add gives the exponent, so that all weights and
 * their sum share a factor of 1 + max scale 2^-24; scaled scores beyond 1e9,
 * where that fails, are far from any model's. High is cut, not rounded: then
 * low is exact before its own rounding. Returns their sum. */
static inline __attribute__((always_inline)) float
weigh_scores(float *scores, cpu_span use, int32_t n, float max, float scale,
             bool whole)
{
    const vf mask = _mm512_castsi512_ps(_mm512_set1_epi32((int)0xffff0000));
    const vf by = vf_set1(scale * 1.44269504088896341f);
    const vf top = vf_mul(vf_set1(-max), by);
    vf even = vf_zero(), odd = vf_zero();
    for (int32_t i = 0; i < n; i += GROUP_KEYS) {
        vf a = score_vector(scores, i, use, whole);
        vf b = score_vector(scores, i + LANES, use, whole);
        a = exp2_below(vf_fma(a, by, top));
        b = exp2_below(vf_fma(b, by, top));
        even = vf_add(even, a);
        odd = vf_add(odd, b);
        vf a_high = _mm512_and_ps(a, mask), b_high = _mm512_and_ps(b, mask);
        vb high = (vb)_mm512_cvtne2ps_pbh(b_high, a_high);
        vb low = (vb)_mm512_cvtne2ps_pbh(vf_sub(b, b_high), vf_sub(a, a_high));
        vb_store((uint16_t *)(scores + i), high);
        vb_store((uint16_t *)(scores + i + LANES), low);
    }
    return vf_sum(vf_add(even, odd));
}

/* As softmax_tile for the n pairs of a pass. Slots behind a row's last group of
 * keys become zero; they would add nothing. All maxima come first: one alone
 * would be waited for. */
static void tile_softmax(float *scores, cpu_partial *part, const cpu_span *use,
                         int32_t n, float scale)
{
    for (int32_t i = 0; i < n; i++) {
        const float *row = scores + i * RK_TILE;
        part[i].max = use[i].hi - use[i].lo == RK_TILE
                          ? largest_score(row, use[i], RK_TILE, true)
                          : largest_score(row, use[i], use[i].hi, false);
    }
    for (int32_t i = 0; i < n; i++) {
        float *row = scores + i * RK_TILE;
        const float max = part[i].max;
        if (use[i].hi - use[i].lo == RK_TILE) {
            part[i].sum = weigh_scores(row, use[i], RK_TILE, max, scale, true);
        } else if (use[i].lo < use[i].hi) {
            const int32_t end = round_up(use[i].hi, GROUP_KEYS);
            part[i].sum = weigh_scores(row, use[i], end, max, scale, false);
            memset(row + end, 0, (size_t)(RK_TILE - end) * sizeof *row);
        } else {
            part[i].sum = 0.0f;
        }
        part[i].max = max * scale;
    }
}

/* ---- values -------------------------------------------------------------- */

static int32_t tile_acc_stride(int32_t head_dim)
{
    return round_up(head_dim, SIDE);
}

/* One row of V into its block. */
static void tile_store_value(void *block, int32_t offset, int32_t block_tokens,
                             const float *x, int32_t head_dim)
{
    uint16_t *to = block, part[PART];
    if (block_tokens == 1) {
        row_convert_bf16(to, x, head_dim);
        return;
    }
    to += (offset & ~1) * head_dim + (offset & 1);
    for (int32_t from = 0; from < head_dim; from += PART) {
        const int32_t n = at_most(head_dim - from, PART);
        row_convert_bf16(part, x + from, n);
        for (int32_t i = 0; i < n; i++, to += 2) {
            *to = part[i];
        }
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

/* One or two tiles of pairs by one or two of dimensions: sums over `n` groups
 * of keys. */
static inline __attribute__((always_inline)) void
value_tiles(float *out, int32_t stride, const char *p, const char *v, int32_t n,
            bool two_pairs, bool two_dims)
{
    const long row = (long)stride * 4;
    zero_tiles();
    for (int32_t g = 0; g < n; g++) {
        _tile_stream_loadd(6, v, row);
        if (two_dims) {
            _tile_stream_loadd(7, v + 64, row);
        }
        UNROLL
        for (int half = 0; half < 2; half++) { /* high, low */
            _tile_loadd(4, p + half * LOW_BYTES, PAIR_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            if (two_dims) {
                _tile_dpbf16ps(1, 4, 7);
            }
            if (two_pairs) {
                _tile_loadd(5, p + SIDE * PAIR_BYTES + half * LOW_BYTES,
                            PAIR_BYTES);
                _tile_dpbf16ps(2, 5, 6);
                if (two_dims) {
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
        }
        p += GROUP_BYTES;
        v += GROUP_KEYS / 2 * row;
    }
    _tile_stored(0, out, row);
    if (two_dims) {
        _tile_stored(1, out + SIDE, row);
    }
    if (two_pairs) {
        _tile_stored(2, out + SIDE * stride, row);
        if (two_dims) {
            _tile_stored(3, out + SIDE * stride + SIDE, row);
        }
    }
}

/* Weighted values of a pass over the groups [begin, end) of the tile. */
static void tile_values(float *acc, int32_t stride, const float *scores,
                        const char *values, int32_t begin, int32_t end,
                        bool two)
{
    const char *p = (const char *)scores + begin * GROUP_BYTES;
    const char *v = values + (int64_t)begin * GROUP_KEYS * stride * 2;
    const int32_t n = end - begin;
    for (int32_t d = 0; d < stride; d += 2 * SIDE) {
        const bool two_dims = stride - d > SIDE;
        if (two && two_dims) {
            value_tiles(acc + d, stride, p, v + d * 4, n, true, true);
        } else if (two) {
            value_tiles(acc + d, stride, p, v + d * 4, n, true, false);
        } else if (two_dims) {
            value_tiles(acc + d, stride, p, v + d * 4, n, false, true);
        } else {
            value_tiles(acc + d, stride, p, v + d * 4, n, false, false);
        }
    }
    BARRIER();
}

/* The values of the groups [begin, end) that the pieces are in, zeros where a
 * key belongs to nobody. */
static void gather_values(char *values, int32_t stride, const cpu_run *run,
                          int32_t begin, int32_t end)
{
    const size_t group_bytes = (size_t)GROUP_KEYS * (size_t)stride * 2;
    bool dense = stride == run->pieces[0].keys.head_dim;
    for (int32_t i = 1; i < run->n_pieces; i++) {
        dense = dense && run->pieces[i].begin == run->pieces[i - 1].end;
    }
    if (dense) { /* only the edges have places without a key */
        memset(values + (size_t)begin * group_bytes, 0, group_bytes);
        memset(values + (size_t)(end - 1) * group_bytes, 0, group_bytes);
    } else {
        memset(values + (size_t)begin * group_bytes, 0,
               (size_t)(end - begin) * group_bytes);
    }
    for (int32_t i = 0; i < run->n_pieces; i++) {
        copy_values((uint16_t *)values, stride, &run->pieces[i]);
    }
    BARRIER();
}

/* ---- all of it ----------------------------------------------------------- */

#define SCORE_BYTES (PASS_PAIRS * PAIR_BYTES)

static size_t attend_value_bytes(int32_t head_dim)
{
    return (size_t)RK_TILE * (size_t)tile_acc_stride(head_dim) * 2;
}

/* Scores of a pass, values of a tile, two tiles of keys. */
static size_t tile_attend_bytes(int32_t head_dim)
{
    return SCORE_BYTES + attend_value_bytes(head_dim) +
           2 * SIDE * tile_query_bytes(head_dim);
}

static void tile_attend(const cpu_run *run)
{
    const cpu_piece *pieces = run->pieces;
    const int32_t head_dim = pieces[0].keys.head_dim;
    const int32_t stride = tile_acc_stride(head_dim);
    const size_t q_bytes = tile_query_bytes(head_dim);
    const int32_t first = pieces[0].begin % RK_TILE;
    const int32_t last = (pieces[run->n_pieces - 1].end - 1) % RK_TILE;
    const int32_t begin = first / GROUP_KEYS, end = last / GROUP_KEYS + 1;
    const int32_t n_pairs = run->n_rows * run->group;
    float *scores = run->scratch;
    char *values = (char *)run->scratch + SCORE_BYTES;
    char *copied = values + attend_value_bytes(head_dim);
    gather_values(values, stride, run, begin, end);
    configure();
    for (int32_t i = 0; i < n_pairs; i += PASS_PAIRS) {
        const int32_t n = at_most(n_pairs - i, PASS_PAIRS);
        const bool two = n > SIDE;
        for (int32_t j = 0; j < run->n_pieces; j++) {
            tile_scores(scores, (const char *)run->q + (size_t)i * q_bytes,
                        &pieces[j], two, copied);
        }
        cpu_span use[PASS_PAIRS];
        for (int32_t j = 0; j < n; j++) {
            use[j] = run->use[(i + j) / run->group];
        }
        tile_softmax(scores, run->part + i, use, n, run->scale);
        BARRIER();
        tile_values(run->acc + (int64_t)i * stride, stride, scores, values,
                    begin, end, two);
    }
    _tile_release();
}

static const cpu_attention_kernels attention_bf16 = {
    .query = RK_BF16,
    .store_key = store_key_bf16,
    .store_value = tile_store_value,
    .acc_stride = tile_acc_stride,
    .query_bytes = tile_query_bytes,
    .load_query = tile_load_query,
    .attend = tile_attend,
    .attend_bytes = tile_attend_bytes,
    .finish_f32 = finish_plain_f32,
    .finish_bf16 = finish_plain_bf16,
};
