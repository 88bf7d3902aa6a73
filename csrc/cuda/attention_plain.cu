/* Attention without tensor cores: keys and values in float32, exact, and head
 * sizes that fit no fragment.
 *
 * The same units, partials and online softmax as attention.cu. Four warps take
 * PAIRS pairs, PAIRS / 4 each, over tiles of 32 keys: for the scores a lane is
 * a key, for the values it is a dimension. Heads longer than COLUMNS go
 * through shared memory in parts; results longer than OUT are shared out over
 * the second dimension of the grid, each part with scores of its own.
 */
#include "attention.cuh"

namespace {

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * RK_WARP;
constexpr int PAIRS = RK_PLAIN_PAIRS;
constexpr int MINE = PAIRS / WARPS; /* pairs of a warp */
constexpr int KEYS = RK_WARP;       /* of a tile */
constexpr int COLUMNS = 128;        /* dimensions in shared memory */
constexpr int STRIDE = COLUMNS + 4; /* lanes reading 16 bytes do not collide */
constexpr int PARTS = 2;
constexpr int OUT = PARTS * COLUMNS; /* dimensions of a block's result */
constexpr int LANES_OUT = COLUMNS / RK_WARP;

/* rows rows of `to` become dimensions [column, column + COLUMNS) of what
 * address(row) points to, zeros where that is NULL or the head ends. */
template <class T, class Address>
__device__ __forceinline__ void fetch(float *to, int rows, int column,
                                      int head_dim, Address address)
{
    const bool whole = sizeof(T) == 4 && head_dim % 4 == 0;
    for (int i = threadIdx.x; i < rows * (COLUMNS / 4); i += THREADS) {
        const int row = i / (COLUMNS / 4);
        const int at = i % (COLUMNS / 4) * 4;
        const int n = head_dim - column - at;
        const T *from = address(row);
        float *cell = to + row * STRIDE + at;
        if (from != nullptr && whole && n > 0) {
            rk_store16(cell, rk_load16(from + column + at));
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                cell[j] = from != nullptr && j < n
                              ? rk_wide(from[column + at + j])
                              : 0.0f;
            }
        }
    }
}

/* s[i] += the parts of q and k that are in shared memory. */
__device__ __forceinline__ void add_scores(float s[MINE], const float *queries,
                                           const float *keys, int n)
{
    const int warp = threadIdx.x / RK_WARP, lane = threadIdx.x % RK_WARP;
    for (int d = 0; d < n; d += 4) {
        float k[4], q[4];
        rk_load4(k, keys + lane * STRIDE + d);
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            rk_load4(q, queries + (warp * MINE + i) * STRIDE + d);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[i] += q[j] * k[j];
            }
        }
    }
}

/* Of a warp's pairs, this lane's share. */
struct state {
    float max[MINE], sum[MINE]; /* sum: of this lane's keys */
    float out[MINE][PARTS * LANES_OUT];
};

/* Scores of this lane's key become weights; the others follow the maximum. */
__device__ __forceinline__ void
soften(state &w, float p[MINE], const rk_keys use[MINE], int key, float scale)
{
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const bool used = key >= use[i].begin && key < use[i].end;
        const float s = used ? p[i] * scale : -INFINITY;
        const float top = fmaxf(w.max[i], rk_warp_max(s));
        const float by = w.max[i] == -INFINITY ? 0.0f : expf(w.max[i] - top);
        p[i] = s == -INFINITY ? 0.0f : expf(s - top);
        w.sum[i] = w.sum[i] * by + p[i];
        w.max[i] = top;
#pragma unroll
        for (int c = 0; c < PARTS * LANES_OUT; c++) {
            w.out[i][c] *= by;
        }
    }
}

/* out += weights values, for the dimensions that are in shared memory. */
__device__ __forceinline__ void add_values(state &w, int part,
                                           const float (*weights)[KEYS],
                                           const float *values, int n_keys)
{
    const int lane = threadIdx.x % RK_WARP;
    for (int key = 0; key < n_keys; key++) {
#pragma unroll
        for (int c = 0; c < LANES_OUT; c++) {
            const float v = values[key * STRIDE + c * RK_WARP + lane];
#pragma unroll
            for (int i = 0; i < MINE; i++) {
                w.out[i][part * LANES_OUT + c] += weights[i][key] * v;
            }
        }
    }
}

/* Dimensions from out_begin on of the warp's pairs, where they belong. */
__device__ __forceinline__ void send(const rk_cuda_attention &a,
                                     const rk_task &t, const state &w,
                                     int out_begin)
{
    const int warp = threadIdx.x / RK_WARP, lane = threadIdx.x % RK_WARP;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int pair = warp * MINE + i;
        const float sum = rk_warp_sum(w.sum[i]);
        if (t.unit.pair_begin + pair >= t.unit.pair_end) {
            continue;
        }
        const rk_place place = rk_place_of(a, t, pair);
        if (place.partial == RK_WORK_NONE) {
            continue;
        }
        const int64_t at = rk_pair_at(a, t, pair);
        float *partial = a.partials + place.index * a.kv.head_dim;
#pragma unroll
        for (int c = 0; c < PARTS * LANES_OUT; c++) {
            const int column = out_begin + c * RK_WARP + lane;
            if (column < a.kv.head_dim && place.partial == RK_WORK_OUT) {
                rk_put(a, at + column, w.out[i][c] / sum);
            } else if (column < a.kv.head_dim) {
                partial[column] = w.out[i][c];
            }
        }
        if (place.partial >= 0 && out_begin == 0 && lane == 0) {
            a.sums[2 * place.index] = w.max[i];
            a.sums[2 * place.index + 1] = sum;
        }
    }
}

template <class T>
__global__ void __launch_bounds__(THREADS, 2)
    attend(const rk_cuda_attention a, float scale)
{
    RK_SHARED(float, queries, [PAIRS * STRIDE]);
    RK_SHARED(float, cells, [KEYS * STRIDE]); /* of K, then of V */
    RK_SHARED(float, weights, [PAIRS][KEYS]);
    const rk_task t = rk_task_of(a, blockIdx.x);
    if (!t.any) {
        return;
    }
    const int warp = threadIdx.x / RK_WARP, lane = threadIdx.x % RK_WARP;
    const int head_dim = a.kv.head_dim, out_begin = blockIdx.y * OUT;
    const int row_bytes = head_dim * (int)sizeof(T);
    const int n_pairs = t.unit.pair_end - t.unit.pair_begin;
    state w = {};
    rk_keys use[MINE];
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        w.max[i] = -INFINITY;
        use[i] = rk_pair_keys(a, t, warp * MINE + i);
    }
    const auto query = [&](int pair) {
        return pair < n_pairs
                   ? static_cast<const T *>(a.q) + rk_pair_at(a, t, pair)
                   : nullptr;
    };
    for (int key = t.key_begin; key < t.key_end; key += KEYS) {
        const int n_keys = min(KEYS, t.key_end - key);
        const auto cell = [&](int row, int64_t offset) {
            return row < n_keys
                       ? reinterpret_cast<const T *>(
                             a.kv.layer +
                             rk_key_at(a, t, rk_block_of(a, t, key + row),
                                       key + row, row_bytes) +
                             offset)
                       : nullptr;
        };
        float p[MINE] = {};
        for (int d = 0; d < head_dim; d += COLUMNS) {
            /* What was in `queries` and `cells` has been read. */
            __syncthreads();
            if (key == t.key_begin || head_dim > COLUMNS) {
                fetch<T>(queries, PAIRS, d, head_dim, query);
            }
            fetch<T>(cells, KEYS, d, head_dim,
                     [&](int row) { return cell(row, 0); });
            /* Q and K are in shared memory. */
            __syncthreads();
            add_scores(p, queries, cells, min(COLUMNS, head_dim - d));
        }
        soften(w, p, use, key + lane, scale);
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            weights[warp * MINE + i][lane] = p[i];
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const int column = out_begin + part * COLUMNS;
            if (column < head_dim) {
                /* K, or the part of V before, has been read. */
                __syncthreads();
                fetch<T>(cells, KEYS, column, head_dim, [&](int row) {
                    return cell(row, rk_value_offset(a, row_bytes));
                });
                /* V is in shared memory, and so are the weights. */
                __syncthreads();
                add_values(w, part, weights + warp * MINE, cells, n_keys);
            }
        }
    }
    send(a, t, w, out_begin);
}

} // namespace

cudaError_t rk_attend_plain(const rk_cuda_attention &a, cudaStream_t stream)
{
    const dim3 grid((unsigned)a.n_blocks, rk_blocks(a.kv.head_dim, OUT));
    const float scale = (float)(1.0 / sqrt((double)a.kv.head_dim));
    rk_with_act(a.kv.type, [&](auto element) {
        using T = decltype(element);
        RK_LAUNCH((attend<T>), grid, THREADS, 0, stream, a, scale);
    });
    return cudaGetLastError();
}
