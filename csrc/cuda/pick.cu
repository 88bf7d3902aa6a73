/* From rows of logits to tokens and what is known about their distributions.
 *
 * Statistics: a block takes SLICE logits of a row and leaves their maximum
 * m_i, S_i = sum e^d and T_i = sum d e^d with d = x - m_i; the second kernel
 * folds them in float64:
 *
 *     S = sum S_i e^(m_i - m),  T = sum (T_i + (m_i - m) S_i) e^(m_i - m),
 *     log p(x) = x - m - log S,  entropy = log S - T / S.
 *
 * Sampling: weights are whole numbers, floor(2^40 e^((x - m) / temperature)).
 * Their sums are exact in any order, so threads may add as they please and
 * results still repeat. top_k and top_p both keep "the largest logits until an
 * amount is reached", counted in tokens or in weight: the bound is found bit
 * by bit over the order of the logits' bits. That is done among the few ids
 * whose weight is not tiny, where these are sure to hold what is kept, else
 * among all.
 */
#include "block.cuh"
#include "kernels.h"

namespace {

typedef unsigned long long amount; /* a whole number of weight, or a count */

/* ---- statistics ---------------------------------------------------------- */

constexpr int SLICE = 2048;
constexpr int SLICE_THREADS = 128;
constexpr int MINE = SLICE / SLICE_THREADS;
constexpr float FAR = -150.0f; /* e^FAR is 0 */

struct slice {
    float max, sum, dsum;
    int32_t index; /* of the first maximum; -1: nothing but -inf, or a NaN */
};

/* The larger one, the lower index on ties. */
__device__ __forceinline__ void take_larger(float &max, int &index, float x,
                                            int at)
{
    if (x > max || (x == max && at < index)) {
        max = x;
        index = at;
    }
}

__global__ void __launch_bounds__(SLICE_THREADS)
    statistics(slice *out, const float *logits, int vocab)
{
    RK_SHARED(float, maxima, [SLICE_THREADS / RK_WARP]);
    RK_SHARED(int, indexes, [SLICE_THREADS / RK_WARP]);
    RK_SHARED(float, sums, [2][SLICE_THREADS / RK_WARP]);
    const int begin = blockIdx.x * SLICE + threadIdx.x;
    const float *row = logits + (int64_t)blockIdx.y * vocab;
    float x[MINE], max = -INFINITY;
    int index = vocab;
    bool bad = false;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int at = begin + i * SLICE_THREADS;
        x[i] = at < vocab ? row[at] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        take_larger(max, index, x[i], begin + i * SLICE_THREADS);
        bad = bad || isnan(x[i]);
    }
#pragma unroll
    for (int step = RK_WARP / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(RK_ALL_LANES, max, step);
        const int at = __shfl_xor_sync(RK_ALL_LANES, index, step);
        take_larger(max, index, other, at);
    }
    if (threadIdx.x % RK_WARP == 0) {
        maxima[threadIdx.x / RK_WARP] = max;
        indexes[threadIdx.x / RK_WARP] = index;
    }
    bad = __syncthreads_or(bad); /* and the maxima of all warps are there */
    for (int i = 0; i < SLICE_THREADS / RK_WARP; i++) {
        take_larger(max, index, maxima[i], indexes[i]);
    }
    bad = bad || max == INFINITY;
    const bool some = !bad && max > -INFINITY;
    float sum = 0.0f, dsum = 0.0f;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const float d = some ? fmaxf(x[i] - max, FAR) : FAR;
        const float e = expf(d);
        sum += e;
        dsum += d * e;
    }
    sum = rk_block_sum(sum, sums[0]);
    dsum = rk_block_sum(dsum, sums[1]);
    if (threadIdx.x == 0) {
        slice s = {bad ? NAN : max, sum, dsum, some ? index : -1};
        out[(int64_t)blockIdx.y * gridDim.x + blockIdx.x] = s;
    }
}

/* ---- folding ------------------------------------------------------------- */

struct summary {
    double max, sum, dsum;
    int top; /* -1: a NaN, or no finite maximum */
};

/* By one warp; the same in all its lanes. */
__device__ __forceinline__ summary fold(const slice *slices, int n)
{
    const int lane = threadIdx.x % RK_WARP;
    float max = -INFINITY;
    int top = INT32_MAX;
    bool bad = false;
    for (int i = lane; i < n; i += RK_WARP) {
        bad = bad || isnan(slices[i].max);
        take_larger(max, top, slices[i].max, slices[i].index);
    }
#pragma unroll
    for (int step = RK_WARP / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(RK_ALL_LANES, max, step);
        const int at = __shfl_xor_sync(RK_ALL_LANES, top, step);
        take_larger(max, top, other, at);
    }
    bad = __any_sync(RK_ALL_LANES, bad) || max == -INFINITY;
    summary s = {(double)max, 0.0, 0.0, bad ? -1 : top};
    for (int i = lane; i < n && !bad; i += RK_WARP) {
        if (slices[i].index >= 0) {
            const double d = (double)slices[i].max - s.max, by = exp(d);
            const double sum = (double)slices[i].sum;
            s.sum += sum * by;
            /* Beside an enormous maximum a slice weighs nothing. */
            s.dsum += by > 0.0 ? ((double)slices[i].dsum + d * sum) * by : 0.0;
        }
    }
    s.sum = rk_warp_sum(s.sum);
    s.dsum = rk_warp_sum(s.dsum);
    return s;
}

/* ---- random numbers
 * ---------------------------------------------------------- */

/* Philox4x32-10 (Salmon et al., 2011): counter (position, stream), key seed;
 * the first two words make a number of 53 bits in [0, 1), as on the CPU. */
__device__ double uniform(uint64_t seed, uint64_t stream, int64_t position)
{
    uint32_t c0 = (uint32_t)position;
    uint32_t c1 = (uint32_t)((uint64_t)position >> 32);
    uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)0xD2511F53u * c0;
        const uint64_t b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ key0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ key1;
        c3 = (uint32_t)a;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    const uint64_t bits = ((uint64_t)c1 << 32 | c0) >> 11;
    return (double)bits * 0x1p-53;
}

/* ---- sampling
 * ----------------------------------------------------------------- */

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / RK_WARP;
constexpr int RANGES = 512; /* a row is cut into, of whole numbers of ids */
constexpr int CANDIDATES = 4096; /* that fit into shared memory */

/* What the threads of a block share about a row. */
struct workspace {
    amount ranges[RANGES];
    amount sums[2][WARPS];
    float logits[CANDIDATES];
    int32_t ids[CANDIDATES];
    int32_t found;
};

/* Ids to choose from: all of a row (ids NULL), or some in rising order. */
struct view {
    const float *logits;
    const int32_t *ids;
    int n;
};

struct sampler {
    workspace *shared;
    float max, scale;
    float least;    /* weights below it are not kept */
    uint32_t bound; /* kept: order bits above it, */
    int last_tie;   /* or on it, up to this place of the view */
    int turn;       /* of the sums */
};

/* Unsigned order of these bits is the order of floats; -0 counts as 0. */
__device__ __forceinline__ uint32_t order_bits(float x)
{
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float weight(const sampler &s, float x)
{
    return expf((x - s.max) * s.scale);
}

__device__ __forceinline__ amount whole(float weight)
{
    return (amount)(weight * 0x1p40f);
}

__device__ __forceinline__ bool is_kept(const sampler &s, float x, int place)
{
    const uint32_t bits = order_bits(x);
    return bits > s.bound || (bits == s.bound && place <= s.last_tie);
}

/* Sum over the block of what(x, place) for all places of the view. */
template <class What>
__device__ amount total(sampler &s, const view &v, What what)
{
    amount sum = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < v.n; i += THREADS) {
        sum += what(v.logits[i], i);
    }
    /* Two arrays in turn: the barrier inside the next sum keeps the one after
     * it from overwriting what is still being read. */
    return rk_block_sum(sum, s.shared->sums[s.turn ^= 1]);
}

/* Ids of a range of n. */
__device__ __forceinline__ int range_ids(int n)
{
    return (n + RANGES - 1) / RANGES;
}

/* shared->ranges[r] becomes the sum of what(x, place) in all ranges before r;
 * returns the sum of all. A warp sums a range. Whoever reads the ranges passes
 * a barrier before the next call. */

template <class What>
__device__ amount sum_ranges(sampler &s, const view &v, What what)
{
    const int warp = threadIdx.x / RK_WARP, lane = threadIdx.x % RK_WARP;
    const int length = range_ids(v.n);
    for (int r = warp; r < RANGES; r += WARPS) {
        amount sum = 0;
        const int end = min(v.n, (r + 1) * length);
#pragma unroll 8
        for (int i = r * length + lane; i < end; i += RK_WARP) {
            sum += what(v.logits[i], i);
        }
        sum = rk_warp_sum(sum);
        if (lane == 0) {
            s.shared->ranges[r] = sum;
        }
    }
    __syncthreads(); /* the sums of all ranges are there */
    const int mine = RANGES / RK_WARP;
    amount before = 0;
    if (warp == 0) {
        for (int i = 0; i < mine; i++) {
            before += s.shared->ranges[lane * mine + i];
        }
        amount scan = before;
        for (int step = 1; step < RK_WARP; step *= 2) {
            const amount other = __shfl_up_sync(RK_ALL_LANES, scan, step);
            scan += lane >= step ? other : 0;
        }
        before = scan - before;
        for (int i = 0; i < mine; i++) {
            const amount sum = s.shared->ranges[lane * mine + i];
            s.shared->ranges[lane * mine + i] = before;
            before += sum;
        }
        if (lane == RK_WARP - 1) {
            s.shared->sums[0][0] = before;
        }
    }
    __syncthreads(); /* the running sums are there */
    const amount all = s.shared->sums[0][0];
    s.turn = 0; /* the next sum uses the other array */
    return all;
}

/* The first place at which the running sum of what(x, place) passes `target`,
 * less than the sum of all; sum_ranges has been called. */
template <class What>
__device__ int find(sampler &s, const view &v, amount target, What what)
{
    const int lane = threadIdx.x % RK_WARP, length = range_ids(v.n);
    if (threadIdx.x < RK_WARP) {
        int range = 0; /* the last one that begins at or below the target */
        for (int r = lane; r < RANGES; r += RK_WARP) {
            if (s.shared->ranges[r] <= target) {
                range = r;
            }
        }
        for (int step = RK_WARP / 2; step > 0; step /= 2) {
            range = max(range, __shfl_xor_sync(RK_ALL_LANES, range, step));
        }
        amount sum = s.shared->ranges[range];
        for (int i = range * length;; i += RK_WARP) {
            const int at = i + lane;
            amount scan = at < v.n ? what(v.logits[at], at) : 0;
            for (int step = 1; step < RK_WARP; step *= 2) {
                const amount other = __shfl_up_sync(RK_ALL_LANES, scan, step);
                scan += lane >= step ? other : 0;
            }
            const unsigned passed =
                __ballot_sync(RK_ALL_LANES, sum + scan > target);
            if (passed != 0) {
                if (lane == 0) {
                    s.shared->found = i + __ffs(passed) - 1;
                }
                break;
            }
            sum += __shfl_sync(RK_ALL_LANES, scan, RK_WARP - 1);
        }
    }
    __syncthreads(); /* `found` is there */
    return s.shared->found;
}

/* Choose among few: ids whose weight is at least a bound, if these are sure to
 * hold what top_k or top_p keeps, and fit. */
__device__ view narrow(sampler &s, const view &all, const rk_draw &draw,
                       amount sum)
{
    const bool by_count = draw.top_k > 0 && draw.top_k < all.n;
    const double wanted = by_count
                              ? (double)draw.top_k
                              : (double)draw.top_p * (double)sum * (1.0 + 1e-5);
    for (float bound = 1e-1f; bound > 1e-8f; bound *= 1e-2f) {
        const amount found = total(s, all, [&](float x, int) {
            const float w = weight(s, x);
            return w < bound ? 0 : by_count ? 1 : whole(w);
        });
        if ((double)found < wanted) {
            continue;
        }
        const auto one = [&](float x, int) -> amount {
            return weight(s, x) >= bound;
        };
        const amount n = sum_ranges(s, all, one);
        if (n > CANDIDATES) {
            break;
        }
        const int warp = threadIdx.x / RK_WARP, lane = threadIdx.x % RK_WARP;
        const int length = range_ids(all.n);
        for (int r = warp; r < RANGES; r += WARPS) {
            int to = (int)s.shared->ranges[r];
            const int end = min(all.n, (r + 1) * length);
            for (int at = r * length; at < end; at += RK_WARP) {
                const bool in =
                    at + lane < end && one(all.logits[at + lane], at + lane);
                const unsigned lanes = __ballot_sync(RK_ALL_LANES, in);
                if (in) {
                    const int place = to + __popc(lanes & ((1u << lane) - 1));
                    s.shared->logits[place] = all.logits[at + lane];
                    s.shared->ids[place] = at + lane;
                }
                to += __popc(lanes);
            }
        }
        __syncthreads(); /* the candidates are there */
        return {s.shared->logits, s.shared->ids, (int)n};
    }
    return all;
}

/* Of what is kept, keep the fewest largest logits whose amount reaches
 * `target`; at least one. */
template <class What>
__device__ void keep_largest(sampler &s, const view &v, double target,
                             What what)
{
    const sampler old = s;
    uint32_t bound = 0;
    target = target < 1.0 ? 1.0 : target;
    for (int bit = 31; bit >= 0; bit--) {
        const uint32_t trial = bound | 1u << bit;
        const amount reached = total(s, v, [&](float x, int place) -> amount {
            return order_bits(x) >= trial && is_kept(old, x, place) ? what(x)
                                                                    : 0;
        });
        if ((double)reached >= target) {
            bound = trial;
        }
    }
    /* Ties on the bound: the first ones, as many as are wanted. */
    const auto tie = [&](float x, int place) -> amount {
        return order_bits(x) == bound && is_kept(old, x, place);
    };
    const amount above = total(s, v, [&](float x, int place) -> amount {
        return order_bits(x) > bound && is_kept(old, x, place) ? what(x) : 0;
    });
    const amount ties = total(
        s, v, [&](float x, int place) { return tie(x, place) ? what(x) : 0; });
    const amount n_ties = sum_ranges(s, v, tie);
    amount n_kept = n_ties;
    if (ties > 0 && (double)(above + ties) >= target) {
        const double each = (double)ties / (double)n_ties;
        const double wanted = ceil((target - (double)above) / each);
        n_kept = wanted < 1.0 ? 1 : (amount)wanted;
        n_kept = n_kept < n_ties ? n_kept : n_ties;
    }
    s.bound = bound;
    s.last_tie = n_kept < n_ties ? find(s, v, n_kept - 1, tie) : v.n;
}

/* The id that the draw takes, or -1 where no weight is left. */
__device__ int sample(sampler &s, const view &all, const rk_draw &draw)
{
    view v = all;
    const auto everything = [&](float x, int) { return whole(weight(s, x)); };
    const auto kept = [&](float x, int place) -> amount {
        const float w = weight(s, x);
        return is_kept(s, x, place) && w >= s.least ? whole(w) : 0;
    };
    const bool by_count = draw.top_k > 0 && draw.top_k < all.n;
    if (by_count || draw.top_p < 1.0f) {
        amount sum = total(s, all, everything);
        v = narrow(s, all, draw, sum);
        if (by_count) {
            keep_largest(s, v, (double)draw.top_k,
                         [](float) -> amount { return 1; });
            sum = total(s, v, [&](float x, int place) {
                return is_kept(s, x, place) ? whole(weight(s, x)) : 0;
            });
        }
        if (draw.top_p < 1.0f) {
            keep_largest(s, v, (double)draw.top_p * (double)sum,
                         [&](float x) { return whole(weight(s, x)); });
        }
    }
    s.least = draw.min_p < 1.0f ? draw.min_p : 1.0f;
    const amount sum = sum_ranges(s, v, kept);
    if (sum == 0) {
        return -1;
    }
    const double u = uniform(draw.seed, draw.stream, draw.position);
    amount target = (amount)(u * (double)sum);
    target = target < sum ? target : sum - 1;
    const int place = find(s, v, target, kept);
    return v.ids != nullptr ? v.ids[place] : place;
}

__global__ void __launch_bounds__(THREADS, 1)
    choose(rk_pick *out, const float *logits, const rk_draw *draws,
           const slice *slices, int n_slices, int vocab)
{
    RK_SHARED(workspace, shared, );
    const rk_draw draw = draws[blockIdx.x];
    const summary row = fold(slices + (int64_t)blockIdx.x * n_slices, n_slices);
    const float *own = logits + (int64_t)blockIdx.x * vocab;
    int token = row.top;
    if (row.top >= 0 && draw.forced >= 0) {
        token = draw.forced;
    } else if (row.top >= 0 && draw.temperature > 0.0f) {
        const float scale = 1.0f / draw.temperature;
        sampler s = {};
        s.shared = &shared;
        s.max = (float)row.max;
        s.scale = scale < 1e30f ? scale : 1e30f;
        s.last_tie = vocab;
        const view all = {own, nullptr, vocab};
        const int id = sample(s, all, draw);
        token = id < 0 ? row.top : id;
    }
    if (threadIdx.x != 0) {
        return;
    }
    rk_pick pick = {-1, -1, NAN, NAN, NAN, NAN};
    if (row.top >= 0) {
        const double log_sum = log(row.sum);
        const double entropy = log_sum - row.dsum / row.sum;
        pick.token = token;
        pick.top = row.top;
        pick.logprob = (float)((double)own[token] - row.max - log_sum);
        pick.top_prob = (float)(1.0 / row.sum);
        pick.entropy = (float)(entropy > 0.0 ? entropy : 0.0);
        pick.top_logprob = (float)-log_sum;
    }
    out[blockIdx.x] = pick;
}

int slices_of(int vocab)
{
    return (vocab + SLICE - 1) / SLICE;
}

} // namespace

size_t rk_cuda_pick_scratch(int32_t n, int32_t vocab)
{
    return (size_t)n * (size_t)slices_of(vocab) * sizeof(slice);
}

cudaError_t rk_cuda_pick(rk_pick *out, const float *logits,
                         const rk_draw *draws, void *scratch, int32_t n,
                         int32_t vocab, cudaStream_t stream)
{
    slice *slices = static_cast<slice *>(scratch);
    const int n_slices = slices_of(vocab);
    const dim3 grid((unsigned)n_slices, (unsigned)n);
    RK_LAUNCH((statistics), grid, SLICE_THREADS, 0, stream, slices, logits,
              vocab);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
        return error;
    }
    RK_LAUNCH((choose), (unsigned)n, THREADS, 0, stream, out, logits, draws,
              slices, n_slices, vocab);
    return cudaGetLastError();
}
