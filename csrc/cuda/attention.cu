/* Attention on tensor cores, for keys and values in bf16.
 *
 * Four warps take a unit (work.h) for one KV head. All its pairs, the queries
 * of one group of heads in several rows, form the rows of one matrix, so K and
 * V of a block come from memory once for all of them:
 *
 *     for each tile of keys:                    copied one tile ahead
 *         S = Q K^T                             mma m16n8k16
 *         m' = max(m, S),  P = 2^(S - m')       online softmax, base 2
 *         l = l 2^(m - m') + P 1,  O = O 2^(m - m') + P V
 *
 * A warp holds ROWS pairs. When the unit has fewer pairs than four warps can
 * hold, warps share the keys of a tile instead, and their results are merged
 * in the order of warps at the end. Rows of shared memory are 16-byte chunks
 * in the order chunk ^ (row % 8), which makes both the copies and ldmatrix
 * free of bank conflicts.
 *
 * Results are deterministic: who computes what and every order of addition
 * follow from the unit alone.
 */
#include "attention.cuh"

namespace {

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * RK_WARP;
constexpr int STAGES = 2;
typedef rk_bf16 element;

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LN_2 = 0.69314718055994531f;

/* Sizes of one instance: heads of at most DIM, TILES_OF_16 * 16 pairs in each
 * warp. */
template <int DIM, int TILES_OF_16> struct shape {
    static constexpr int ROWS = 16 * TILES_OF_16;    /* pairs of a warp */
    static constexpr int PAIRS = WARPS * ROWS;       /* at most, of a unit */
    static constexpr int STEP = 16 * TILES_OF_16;    /* keys at once */
    static constexpr int TILE = DIM > 128 ? 32 : 64; /* keys of a stage */
    static constexpr int CHUNKS = DIM / 8;           /* of a row */
    /* Blocks of threads that a processor can hold by their shared memory. */
    static constexpr int AT_ONCE = DIM > 64 ? 2 : TILES_OF_16 > 1 ? 3 : 4;
    static constexpr int MATRIX = TILE * DIM; /* elements of K or V */
    static constexpr int STAGE = 2 * MATRIX;
    static constexpr int SHARED =
        (STAGES * STAGE + PAIRS * DIM) * 2; /* bytes */
    /* After the last tile the stages hold float32 results of all warps. */
    static_assert(PAIRS * DIM * 4 <= STAGES * STAGE * 2, "results fit");
};

/* How the warps share a unit: pairs first, what is left over splits keys. */
struct layout {
    int pair_warps, key_warps; /* product: WARPS */
    int first_pair;            /* of this warp */
    int key_warp;              /* which share of the keys is this warp's */
};

template <class S> __device__ __forceinline__ layout layout_of(int n_pairs)
{
    layout l;
    const int warp = threadIdx.x / RK_WARP;
    l.key_warps = S::TILE / S::STEP < WARPS ? S::TILE / S::STEP : WARPS;
    while (WARPS / l.key_warps * S::ROWS < n_pairs) {
        l.key_warps /= 2;
    }
    l.pair_warps = WARPS / l.key_warps;
    l.first_pair = warp % l.pair_warps * S::ROWS;
    l.key_warp = warp / l.pair_warps;
    return l;
}

/* Element of a matrix in shared memory where a chunk begins. */
template <class S> __device__ __forceinline__ int chunk_at(int row, int chunk)
{
    return (row * S::CHUNKS + (chunk ^ (row % 8))) * 8;
}

/* ---- copies -------------------------------------------------------------- */

/* Chunks of a row that the products read; those beyond head_dim are zero. */
__device__ __forceinline__ int used_chunks(int head_dim)
{
    return (head_dim + 15) / 16 * 2;
}

template <class S>
__device__ __forceinline__ void copy_queries(const rk_cuda_attention &a,
                                             const rk_task &t, element *to)
{
    const element *q = static_cast<const element *>(a.q);
    const int n_pairs = t.unit.pair_end - t.unit.pair_begin;
    const int chunk = threadIdx.x % S::CHUNKS;
    for (int pair = threadIdx.x / S::CHUNKS; pair < S::PAIRS;
         pair += THREADS / S::CHUNKS) {
        const bool valid = pair < n_pairs && chunk * 8 < a.kv.head_dim;
        if (chunk < used_chunks(a.kv.head_dim)) {
            const element *from =
                valid ? q + rk_pair_at(a, t, pair) + chunk * 8 : q;
            rk_copy16(to + chunk_at<S>(pair, chunk), from, valid);
        }
    }
}

/* K and V of the keys [key, key + TILE); zeros from key_end on. */
template <class S>
__device__ __forceinline__ void
copy_tile(const rk_cuda_attention &a, const rk_task &t, int key, element *stage)
{
    const int row_bytes = a.kv.head_dim * (int)sizeof(element);
    const int64_t to_value = rk_value_offset(a, row_bytes);
    constexpr int ROWS = THREADS / S::CHUNKS; /* that a round copies */
    const int chunk = threadIdx.x % S::CHUNKS, row = threadIdx.x / S::CHUNKS;
    if (chunk >= used_chunks(a.kv.head_dim)) {
        return;
    }
    /* All blocks first: their loads need not wait for one another. */
    int blocks[S::TILE / ROWS];
#pragma unroll
    for (int i = 0; i < S::TILE / ROWS; i++) {
        const int at = key + i * ROWS + row;
        blocks[i] = at < t.key_end ? rk_block_of(a, t, at) : 0;
    }
#pragma unroll
    for (int i = 0; i < S::TILE / ROWS; i++) {
        const int at = key + i * ROWS + row;
        const bool valid = at < t.key_end && chunk * 8 < a.kv.head_dim;
        const unsigned char *from = a.kv.layer;
        if (valid) {
            from += rk_key_at(a, t, blocks[i], at, row_bytes) + chunk * 16;
        }
        element *to = stage + chunk_at<S>(i * ROWS + row, chunk);
        rk_copy16(to, from, valid);
        rk_copy16(to + S::MATRIX, from + to_value, valid);
    }
}

/* ---- one step: STEP keys for the pairs of a warp ------------------------- */

/* Of a warp's pairs: this thread has pairs lane / 4 + 8 i, i < 2 N. */
template <int N, int DIM> struct state {
    float out[N][DIM / 8][4];
    float max[2 * N]; /* of scores * scale * log2(e) */
    float sum[N][4];  /* like out, with a value of 1: all columns are equal */
};

template <class S, int N>
__device__ __forceinline__ void scores(float s[N][S::STEP / 8][4],
                                       const element *queries,
                                       const element *keys, int head_dim)
{
    const int lane = threadIdx.x % RK_WARP;
    const int matrix = lane / 8, row = lane % 8;
#pragma unroll
    for (int i = 0; i < N; i++) {
#pragma unroll
        for (int j = 0; j < S::STEP / 8; j++) {
            s[i][j][0] = s[i][j][1] = s[i][j][2] = s[i][j][3] = 0.0f;
        }
    }
#pragma unroll
    for (int k = 0; k < S::CHUNKS; k += 2) {
        if (k * 8 < head_dim) {
            uint32_t q[N][4];
#pragma unroll
            for (int i = 0; i < N; i++) {
                rk_ldmatrix(q[i], queries + chunk_at<S>(i * 16 + lane % 16,
                                                        k + lane / 16));
            }
#pragma unroll
            for (int j = 0; j < S::STEP / 16; j++) {
                uint32_t b[4]; /* two tiles of 8 keys, 16 of DIM each */
                rk_ldmatrix(b, keys + chunk_at<S>(j * 16 + matrix / 2 * 8 + row,
                                                  k + matrix % 2));
#pragma unroll
                for (int i = 0; i < N; i++) {
                    rk_mma(s[i][2 * j], q[i], b);
                    rk_mma(s[i][2 * j + 1], q[i], b + 2);
                }
            }
        }
    }
}

/* Take away the scores of keys that a pair does not use. */
template <class S, int N>
__device__ __forceinline__ void mask(float s[N][S::STEP / 8][4],
                                     const rk_keys *pairs, int key)
{
    const int lane = threadIdx.x % RK_WARP;
#pragma unroll
    for (int r = 0; r < 2 * N; r++) {
        const rk_keys use = pairs[lane / 4 + 8 * r];
#pragma unroll
        for (int j = 0; j < S::STEP / 8; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int at = key + j * 8 + lane % 4 * 2 + e;
                if (at < use.begin || at >= use.end) {
                    s[r / 2][j][r % 2 * 2 + e] = -INFINITY;
                }
            }
        }
    }
}

/* Multiply both rows of a fragment. */
__device__ __forceinline__ void scale_rows(float d[4], float upper, float lower)
{
    d[0] *= upper;
    d[1] *= upper;
    d[2] *= lower;
    d[3] *= lower;
}

/* Scores become weights; out, sum and max follow the new maximum. */
template <class S, int N, int DIM>
__device__ __forceinline__ void soften(float s[N][S::STEP / 8][4],
                                       state<N, DIM> &w, float scale)
{
    float shrink[2 * N];
    bool moved = false;
#pragma unroll
    for (int r = 0; r < 2 * N; r++) {
        float max = -INFINITY;
#pragma unroll
        for (int j = 0; j < S::STEP / 8; j++) {
            max = fmaxf(max, s[r / 2][j][r % 2 * 2]);
            max = fmaxf(max, s[r / 2][j][r % 2 * 2 + 1]);
        }
        max = fmaxf(max, __shfl_xor_sync(RK_ALL_LANES, max, 1));
        max = fmaxf(max, __shfl_xor_sync(RK_ALL_LANES, max, 2));
        max = fmaxf(w.max[r], max * scale);
        shrink[r] = rk_part_weight(w.max[r], max);
        moved = moved || max != w.max[r];
        w.max[r] = max;
        const float from = max == -INFINITY ? 0.0f : max;
#pragma unroll
        for (int j = 0; j < S::STEP / 8; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = s[r / 2][j][r % 2 * 2 + e];
                x = rk_exp2(fmaf(x, scale, -from));
            }
        }
    }
    if (__any_sync(RK_ALL_LANES, moved)) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            scale_rows(w.sum[i], shrink[2 * i], shrink[2 * i + 1]);
#pragma unroll
            for (int j = 0; j < DIM / 8; j++) {
                scale_rows(w.out[i][j], shrink[2 * i], shrink[2 * i + 1]);
            }
        }
    }
}

/* out += weights values. The weights' fragments as results of mma are, in
 * 16-bit pairs, those that mma wants as its first operand. Their sums take the
 * rounded weights too, so what is rounded away moves results by no more than
 * values differ. */
template <class S, int N, int DIM>
__device__ __forceinline__ void add_values(state<N, DIM> &w,
                                           float s[N][S::STEP / 8][4],
                                           const element *values, int head_dim)
{
    const int lane = threadIdx.x % RK_WARP;
    const int matrix = lane / 8, row = lane % 8;
    const uint32_t one = rk_pack<element>(1.0f, 1.0f);
    const uint32_t ones[2] = {one, one};
#pragma unroll
    for (int j = 0; j < S::STEP / 16; j++) {
        uint32_t p[N][4];
#pragma unroll
        for (int i = 0; i < N; i++) {
            p[i][0] = rk_pack<element>(s[i][2 * j][0], s[i][2 * j][1]);
            p[i][1] = rk_pack<element>(s[i][2 * j][2], s[i][2 * j][3]);
            p[i][2] = rk_pack<element>(s[i][2 * j + 1][0], s[i][2 * j + 1][1]);
            p[i][3] = rk_pack<element>(s[i][2 * j + 1][2], s[i][2 * j + 1][3]);
            rk_mma(w.sum[i], p[i], ones);
        }
#pragma unroll
        for (int d = 0; d < S::CHUNKS; d += 2) {
            if (d * 8 < head_dim) {
                uint32_t b[4]; /* 16 keys of two tiles of 8 dimensions */
                rk_ldmatrix_trans(
                    b, values + chunk_at<S>(j * 16 + matrix % 2 * 8 + row,
                                            d + matrix / 2));
#pragma unroll
                for (int i = 0; i < N; i++) {
                    rk_mma(w.out[i][d], p[i], b);
                    rk_mma(w.out[i][d + 1], p[i], b + 2);
                }
            }
        }
    }
}

/* ---- results ------------------------------------------------------------- */

/* Where the stages hold column chunk `chunk` of the result of a warp's pair;
 * `row` counts pairs through all warps that share keys. */
template <int DIM> __device__ __forceinline__ int result_at(int row, int chunk)
{
    return row * DIM + (chunk ^ (row % 8)) * 8;
}

template <class S, int N, int DIM>
__device__ __forceinline__ void leave(const state<N, DIM> &w, const layout &l,
                                      int head_dim, float *results,
                                      float (*ends)[2])
{
    const int lane = threadIdx.x % RK_WARP;
    const int first = l.key_warp * l.pair_warps * S::ROWS + l.first_pair;
#pragma unroll
    for (int r = 0; r < 2 * N; r++) {
        const int row = first + lane / 4 + 8 * r;
        if (lane % 4 == 0) {
            ends[row][0] = w.max[r];
            ends[row][1] = w.sum[r / 2][r % 2 * 2];
        }
#pragma unroll
        for (int j = 0; j < DIM / 8; j++) {
            if (j * 8 < head_dim) {
                float *to = results + result_at<DIM>(row, j) + lane % 4 * 2;
                to[0] = w.out[r / 2][j][r % 2 * 2];
                to[1] = w.out[r / 2][j][r % 2 * 2 + 1];
            }
        }
    }
}

/* Merge what the warps left, in their order, and send it where it belongs. */
template <class S, int DIM>
__device__ __forceinline__ void
send(const rk_cuda_attention &a, const rk_task &t, const layout &l,
     const float *results, const float (*ends)[2])
{
    const int n_pairs = t.unit.pair_end - t.unit.pair_begin;
    const int chunk = threadIdx.x % S::CHUNKS;
    if (chunk * 8 >= a.kv.head_dim) {
        return;
    }
    for (int pair = threadIdx.x / S::CHUNKS; pair < n_pairs;
         pair += THREADS / S::CHUNKS) {
        const rk_place place = rk_place_of(a, t, pair);
        if (place.partial == RK_WORK_NONE) {
            continue;
        }
        float max = -INFINITY, sum = 0.0f;
        for (int i = 0; i < l.key_warps; i++) {
            max = fmaxf(max, ends[i * l.pair_warps * S::ROWS + pair][0]);
        }
        float all[8] = {};
        for (int i = 0; i < l.key_warps; i++) {
            const int row = i * l.pair_warps * S::ROWS + pair;
            const float by = rk_part_weight(ends[row][0], max);
            float part[8];
            rk_load8(part, results + result_at<DIM>(row, chunk));
            sum += ends[row][1] * by;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                all[j] += part[j] * by;
            }
        }
        if (place.partial == RK_WORK_OUT) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                all[j] /= sum;
            }
            rk_put8(a, rk_pair_at(a, t, pair) + chunk * 8, all);
        } else {
            rk_store8(a.partials + place.index * a.kv.head_dim + chunk * 8,
                      all);
            if (chunk == 0) {
                a.sums[2 * place.index] = max * LN_2;
                a.sums[2 * place.index + 1] = sum;
            }
        }
    }
}

/* ---- the kernel ---------------------------------------------------------- */

template <int DIM, int N>
__global__ void __launch_bounds__(THREADS, (shape<DIM, N>::AT_ONCE))
    attend(const rk_cuda_attention a, float scale)
{
    using S = shape<DIM, N>;
    RK_SHARED_DYNAMIC(memory);
    RK_SHARED(float, ends, [S::PAIRS][2]);
    RK_SHARED(rk_keys, pairs, [S::PAIRS]);
    element *stages = reinterpret_cast<element *>(memory);
    element *queries = stages + STAGES * S::STAGE;
    const rk_task t = rk_task_of(a, blockIdx.x);
    if (!t.any) {
        return;
    }
    const layout l = layout_of<S>(t.unit.pair_end - t.unit.pair_begin);
    state<N, DIM> w = {};
#pragma unroll
    for (int r = 0; r < 2 * N; r++) {
        w.max[r] = -INFINITY;
    }
    copy_queries<S>(a, t, queries);
    if (t.key_begin < t.key_end) {
        copy_tile<S>(a, t, t.key_begin, stages);
    }
    rk_copy_commit();
    for (int i = threadIdx.x; i < S::PAIRS; i += THREADS) {
        pairs[i] = rk_pair_keys(a, t, i);
    }
    int stage = 0;
    for (int key = t.key_begin; key < t.key_end; key += S::TILE) {
        element *keys = stages + stage * S::STAGE;
        stage ^= 1;
        if (key + S::TILE < t.key_end) {
            copy_tile<S>(a, t, key + S::TILE, stages + stage * S::STAGE);
        }
        rk_copy_commit();
        rk_copy_wait<1>();
        /* The copies of all threads have arrived, and `pairs`. */
        __syncthreads();
        for (int i = l.key_warp * S::STEP; i < S::TILE && key + i < t.key_end;
             i += l.key_warps * S::STEP) {
            float s[N][S::STEP / 8][4];
            scores<S, N>(s, queries + l.first_pair * DIM, keys + i * DIM,
                         a.kv.head_dim);
            if (key + i < t.full_begin || key + i + S::STEP > t.full_end) {
                mask<S, N>(s, pairs + l.first_pair, key + i);
            }
            soften<S, N, DIM>(s, w, scale);
            add_values<S, N, DIM>(w, s, keys + S::MATRIX + i * DIM,
                                  a.kv.head_dim);
        }
        /* Nobody reads this stage while it is refilled. */
        __syncthreads();
    }
    rk_copy_wait<0>();
    float *results = reinterpret_cast<float *>(memory);
    leave<S, N, DIM>(w, l, a.kv.head_dim, results, ends);
    /* The results of all warps are there. */
    __syncthreads();
    send<S, DIM>(a, t, l, results, ends);
}

template <int DIM, int N>
void launch(const rk_cuda_attention &a, cudaStream_t stream)
{
    const float scale = (float)(1.0 / sqrt((double)a.kv.head_dim));
    RK_LAUNCH((attend<DIM, N>), (unsigned)a.n_blocks, THREADS,
              (shape<DIM, N>::SHARED), stream, a, scale * LOG2_E);
}

/* Heads of more than 128 have no room for two tiles of 16 pairs in a warp. */
void launch_any(const rk_cuda_attention &a, cudaStream_t stream)
{
    if (a.kv.head_dim > 128) {
        launch<256, 1>(a, stream);
    } else if (a.kv.head_dim > 64) {
        a.wide ? launch<128, 2>(a, stream) : launch<128, 1>(a, stream);
    } else {
        a.wide ? launch<64, 2>(a, stream) : launch<64, 1>(a, stream);
    }
}

/* ---- merging partials ---------------------------------------------------- */

/* A block merges N columns a lane of one head of one row:
 *     m = max m_i,  w_i = e^(m_i - m),  out = sum w_i acc_i / sum w_i l_i.
 * 32 partials at a time: in every warp each lane finds the weight of one; each
 * warp adds up eight, whose loads are all under way together. What takes time
 * is waiting for memory: twice until the maximum is known, once for each 32
 * partials, so loads must not wait for weights. */
constexpr int MERGE_LOADS = RK_WARP / WARPS;

/* N columns, aligned to their size, or zeros. */
__device__ __forceinline__ void load_columns(float (&out)[4], const float *from,
                                             bool there)
{
    const uint4 v = there ? rk_load16(from) : make_uint4(0, 0, 0, 0);
    out[0] = __uint_as_float(v.x);
    out[1] = __uint_as_float(v.y);
    out[2] = __uint_as_float(v.z);
    out[3] = __uint_as_float(v.w);
}

__device__ __forceinline__ void load_columns(float (&out)[1], const float *from,
                                             bool there)
{
    out[0] = there ? *from : 0.0f;
}

template <int N>
__global__ void __launch_bounds__(THREADS) merge(const rk_cuda_attention a)
{
    RK_SHARED(float, parts, [WARPS][RK_WARP * N]);
    const int warp = threadIdx.x / RK_WARP, lane = threadIdx.x % RK_WARP;
    const int row = blockIdx.x / a.n_heads, head = blockIdx.x % a.n_heads;
    const int head_dim = a.kv.head_dim, base = blockIdx.y * RK_WARP * N;
    const int first = a.rows_first[row], end = a.rows_first[row + 1];
    if (first == end) {
        return;
    }
    const float *sums = a.sums + 2 * head;
    const float *columns =
        a.partials + (int64_t)head * head_dim + base + lane * N;
    const int64_t step = (int64_t)a.n_heads * head_dim;
    const bool inside = base + lane * N < head_dim;
    float max = -INFINITY, sum = 0.0f, all[N] = {};
    for (int i = first + lane; i < end; i += RK_WARP) {
        max = fmaxf(max, sums[2 * (int64_t)i * a.n_heads]);
    }
    max = rk_warp_max(max);
    for (int chunk = first; chunk < end; chunk += RK_WARP) {
        float weight = 0.0f, part[MERGE_LOADS][N];
        const int mine = chunk + warp * MERGE_LOADS;
#pragma unroll
        for (int j = 0; j < MERGE_LOADS; j++) {
            load_columns(part[j], columns + (mine + j) * step,
                         inside && mine + j < end);
        }
        if (chunk + lane < end) {
            const float *of = sums + 2 * (int64_t)(chunk + lane) * a.n_heads;
            weight = rk_part_weight(of[0] * LOG2_E, max * LOG2_E);
            sum += of[1] * weight;
        }
#pragma unroll
        for (int j = 0; j < MERGE_LOADS; j++) {
            const float by =
                __shfl_sync(RK_ALL_LANES, weight, warp * MERGE_LOADS + j);
#pragma unroll
            for (int n = 0; n < N; n++) {
                all[n] += part[j][n] * by;
            }
        }
    }
    sum = rk_warp_sum(sum);
#pragma unroll
    for (int n = 0; n < N; n++) {
        parts[warp][lane * N + n] = all[n];
    }
    __syncthreads(); /* the parts of all warps are there */
    const int column = threadIdx.x;
    if (column < RK_WARP * N && base + column < head_dim) {
        float total = parts[0][column];
        for (int i = 1; i < WARPS; i++) {
            total += parts[i][column];
        }
        rk_put(a, (int64_t)blockIdx.x * head_dim + base + column, total / sum);
    }
}

template <int N>
void launch_merge(const rk_cuda_attention &a, cudaStream_t stream)
{
    const dim3 grid((unsigned)a.n_rows * (unsigned)a.n_heads,
                    rk_blocks(a.kv.head_dim, RK_WARP * N));
    RK_LAUNCH((merge<N>), grid, THREADS, 0, stream, a);
}

/* ---- which kernel -------------------------------------------------------- */

bool plain(rk_type kv_type, int head_dim)
{
    return kv_type == RK_F32 || head_dim % 8 != 0 || head_dim > 256;
}

template <int DIM, int N> cudaError_t allow_shared()
{
    return cudaFuncSetAttribute(attend<DIM, N>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                shape<DIM, N>::SHARED);
}

} // namespace

cudaError_t rk_cuda_attention_prepare(void)
{
    cudaError_t error = allow_shared<64, 1>();
    error = error != cudaSuccess ? error : allow_shared<64, 2>();
    error = error != cudaSuccess ? error : allow_shared<128, 1>();
    error = error != cudaSuccess ? error : allow_shared<128, 2>();
    return error != cudaSuccess ? error : allow_shared<256, 1>();
}

int32_t rk_cuda_attend_pairs(rk_type kv_type, int32_t head_dim, bool wide)
{
    if (plain(kv_type, head_dim)) {
        return RK_PLAIN_PAIRS;
    }
    return wide && head_dim <= 128 ? shape<128, 2>::PAIRS
                                   : shape<128, 1>::PAIRS;
}

cudaError_t rk_cuda_attend(const rk_cuda_attention *a, cudaStream_t stream)
{
    cudaError_t error = cudaSuccess;
    if (plain(a->kv.type, a->kv.head_dim)) {
        error = rk_attend_plain(*a, stream);
    } else {
        launch_any(*a, stream);
        error = cudaGetLastError();
    }
    if (error == cudaSuccess && a->merge) {
        a->kv.head_dim % 4 == 0 ? launch_merge<4>(*a, stream)
                                : launch_merge<1>(*a, stream);
        error = cudaGetLastError();
    }
    return error;
}
