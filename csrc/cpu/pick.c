/* From a row of logits to a token and what is known about the distribution.
 *
 * Statistics: a row is cut into slices of SLICE logits whatever the number of
 * threads. A slice gives its maximum m_i, S_i = sum e^d and T_i = sum d e^d
 * with d = x - m_i; slices are folded in their order in float64:
 *
 *     S = sum S_i e^(m_i - m),  T = sum (T_i + (m_i - m) S_i) e^(m_i - m),
 *     log p(x) = x - m - log S,  entropy = log S - T / S.
 *
 * Sampling: weights w = e^((x - m) / temperature). A set is kept as a lower
 * bound on the logit plus a number of ids that sit on the bound (lowest ids
 * first): top_k and top_p both are "the largest logits until a target is
 * reached", counted in tokens or in weight, and found by three passes of a
 * histogram over the bits of the logits instead of a sort.
 */
#include <math.h>
#include <string.h>

#include "cpu.h"

#define SLICE 4096
#define DIGIT 11 /* bits of a histogram pass: 11 + 11 + 10 = 32 */
#define BUCKETS (1 << DIGIT)
#define RUN 64 /* weights added in float32 before float64 takes over */

typedef struct cpu_slice {
    float max, sum, dsum;
    int32_t index; /* in the row; -1: no finite maximum */
} cpu_slice;

typedef struct pick_job {
    const cpu_device *dev;
    rk_pick *out;
    const float *logits;
    const rk_draw *draws;
    int32_t n_slices; /* of a row */
} pick_job;

static int32_t slices_of_row(const cpu_device *dev)
{
    return cpu_ceil_div(dev->config.vocab_size, SLICE);
}

/* ---- statistics
 * --------------------------------------------------------------- */

static void slice_unit(void *argument, int32_t unit, int32_t thread)
{
    const pick_job *job = argument;
    const cpu_device *dev = job->dev;
    const int32_t vocab = dev->config.vocab_size;
    const int32_t row = unit / job->n_slices;
    const int32_t begin = unit % job->n_slices * SLICE;
    cpu_slice *slice = &dev->slices[unit];
    (void)thread;
    dev->kernels->statistics(&slice->max, &slice->index, &slice->sum,
                             &slice->dsum,
                             job->logits + (int64_t)row * vocab + begin,
                             cpu_min(SLICE, vocab - begin));
    if (slice->index >= 0) {
        slice->index += begin;
    }
}

/* The whole row's maximum with its first index, S and T; false: a NaN, or no
 * finite maximum. */
static bool fold_slices(const cpu_slice *slices, int32_t n, double *max,
                        int32_t *top, double *sum, double *dsum)
{
    *max = -INFINITY;
    *top = -1;
    *sum = *dsum = 0.0;
    for (int32_t i = 0; i < n; i++) {
        if (isnan(slices[i].max)) {
            return false;
        }
        if ((double)slices[i].max > *max) {
            *max = (double)slices[i].max;
            *top = slices[i].index;
        }
    }
    if (!(*max > -INFINITY)) {
        return false;
    }
    for (int32_t i = 0; i < n; i++) {
        if (slices[i].index >= 0) {
            double d = (double)slices[i].max - *max, by = exp(d);
            double s = (double)slices[i].sum;
            *sum += s * by;
            /* Beside an enormous maximum a slice weighs nothing. */
            *dsum += by > 0.0 ? ((double)slices[i].dsum + d * s) * by : 0.0;
        }
    }
    return true;
}

/* ---- random numbers
 * ------------------------------------------------------------ */

/* Philox4x32-10 (Salmon et al., 2011): counter (position, stream), key seed.
 * The first two words of the block make a number of 53 bits in [0, 1). */
static double uniform(uint64_t seed, uint64_t stream, int64_t position)
{
    uint32_t c[4] = {(uint32_t)(uint64_t)position,
                     (uint32_t)((uint64_t)position >> 32), (uint32_t)stream,
                     (uint32_t)(stream >> 32)};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c[0];
        uint64_t b = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ key[0], (uint32_t)b,
                            (uint32_t)(a >> 32) ^ c[3] ^ key[1], (uint32_t)a};
        memcpy(c, next, sizeof c);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    uint64_t bits = ((uint64_t)c[1] << 32 | c[0]) >> 11;
    return (double)bits * 0x1p-53;
}

/* ---- sets of the largest logits
 * -------------------------------------------------- */

/* Unsigned order of these bits is the order of floats; -0 counts as 0. */
static inline uint32_t order_bits(float x)
{
    uint32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Keep ids with order_bits > bound, and the first n_ties with == bound. */
typedef struct kept {
    uint32_t bound;
    int32_t n_ties;
} kept;

typedef struct row_view {
    const float *logits; /* (n,) */
    float *weights;      /* (n,) */
    int32_t n;
    double *histogram; /* (BUCKETS,) scratch */
} row_view;

static inline bool is_kept(const kept *set, uint32_t bits, int32_t *ties)
{
    return bits > set->bound || (bits == set->bound && ++*ties <= set->n_ties);
}

/* The largest bucket down to which the histogram holds `target` on top of
 * `above`, which becomes the amount above that bucket. */
static uint32_t find_bucket(const double *histogram, double target,
                            double *above)
{
    uint32_t bucket = BUCKETS, last = BUCKETS;
    double sum = *above;
    while (bucket-- > 0) {
        if (histogram[bucket] > 0.0) {
            last = bucket;
            *above = sum;
            sum += histogram[bucket];
            if (sum >= target) {
                break;
            }
        }
    }
    return last;
}

/* Of the ids in `set`: the fewest largest logits whose amount (1 each, or
 * their weight) reaches `target`; at least one. */
static kept keep_largest(const row_view *row, const kept *set, bool by_weight,
                         double target)
{
    static const int shifts[3] = {21, 10, 0};
    uint32_t prefix = 0, mask = 0;
    double above = 0.0;
    for (int pass = 0; pass < 3; pass++) {
        const uint32_t digits = pass == 2 ? 0x3ffu : 0x7ffu;
        int32_t ties = 0;
        memset(row->histogram, 0, BUCKETS * sizeof *row->histogram);
        for (int32_t i = 0; i < row->n; i++) {
            uint32_t bits = order_bits(row->logits[i]);
            if (is_kept(set, bits, &ties) && (bits & mask) == prefix) {
                row->histogram[bits >> shifts[pass] & digits] +=
                    by_weight ? (double)row->weights[i] : 1.0;
            }
        }
        prefix |= find_bucket(row->histogram, target, &above) << shifts[pass];
        mask |= digits << shifts[pass];
    }
    kept result = {prefix, 0};
    for (int32_t i = 0, ties = 0; i < row->n; i++) {
        uint32_t bits = order_bits(row->logits[i]);
        if (bits == prefix && is_kept(set, bits, &ties)) {
            result.n_ties++;
            above += by_weight ? (double)row->weights[i] : 1.0;
            if (above >= target) {
                break;
            }
        }
    }
    return result;
}

/* Sum of the weights in the set; all other weights become 0. */
static double apply_set(const row_view *row, float *weights, const kept *set)
{
    double sum = 0.0;
    for (int32_t i = 0, ties = 0; i < row->n; i++) {
        if (!is_kept(set, order_bits(row->logits[i]), &ties)) {
            weights[i] = 0.0f;
        }
        sum += (double)weights[i];
    }
    return sum;
}

/* ---- one row
 * -------------------------------------------------------------------- */

static double row_total(const cpu_kernels *kernels, const float *weights,
                        int32_t n)
{
    double total = 0.0;
    for (int32_t i = 0; i < n; i += RUN) {
        total += (double)kernels->sum(weights + i, cpu_min(RUN, n - i));
    }
    return total;
}

/* The id at which the running sum of weights passes u * total. */
static int32_t draw_id(const cpu_kernels *kernels, const float *weights,
                       int32_t n, double u)
{
    const double target = u * row_total(kernels, weights, n);
    double sum = 0.0;
    int32_t last = -1;
    for (int32_t i = 0; i < n; i += RUN) {
        const int32_t end = cpu_min(i + RUN, n);
        double run = (double)kernels->sum(weights + i, end - i);
        if (sum + run > target) {
            double within = sum;
            for (int32_t j = i; j < end; j++) {
                within += (double)weights[j];
                last = weights[j] > 0.0f ? j : last;
                if (weights[j] > 0.0f && within > target) {
                    return j;
                }
            }
            if (last >= i) {
                return last; /* rounding: the run's last candidate */
            }
        }
        sum += run;
    }
    return last;
}

/* Filters need the largest logits only: ids whose weight is at least a bound,
 * in their order, if they are sure to hold what top_k or top_p will keep. */
static bool narrow(const pick_job *job, const rk_draw *draw, row_view *row,
                   int32_t *ids, float *logits, float *weights, float bound,
                   double total)
{
    int32_t m = 0;
    for (int32_t i = 0; i < row->n; i++) {
        ids[m] = i;
        logits[m] = row->logits[i];
        weights[m] = row->weights[i];
        m += row->weights[i] >= bound;
    }
    bool enough =
        draw->top_k > 0 &&
        draw->top_k<row->n ? m >= draw->top_k
                           : row_total(job->dev->kernels, weights, m)>(double)
                draw->top_p *
            total * (1.0 + 1e-5);
    if (enough) {
        *row = (row_view){logits, weights, m, row->histogram};
    }
    return enough;
}

/* Weights of what top_k and top_p do not keep become 0. */
static void filter(const rk_draw *draw, const row_view *row, double total)
{
    kept set = {0, row->n};
    if (draw->top_k > 0 && draw->top_k < row->n) {
        set = keep_largest(row, &set, false, (double)draw->top_k);
        total = apply_set(row, row->weights, &set);
    }
    if (draw->top_p < 1.0f) {
        set = keep_largest(row, &set, true, (double)draw->top_p * total);
    }
    apply_set(row, row->weights, &set);
}

static int32_t sample(const pick_job *job, const rk_draw *draw,
                      const float *logits, float max, int32_t top,
                      void *scratch)
{
    const cpu_kernels *kernels = job->dev->kernels;
    const int32_t n = job->dev->config.vocab_size;
    double *histogram = scratch;
    float *weights = (float *)(histogram + BUCKETS);
    float *few_logits = weights + n, *few_weights = few_logits + n;
    int32_t *ids = (int32_t *)(few_weights + n);
    static const float bounds[4] = {1e-1f, 1e-3f, 1e-5f, 1e-7f};
    const float scale = 1.0f / draw->temperature;
    row_view row = {logits, weights, n, histogram};
    bool few = false;
    kernels->weights(weights, logits, max, scale < 1e30f ? scale : 1e30f, n);
    if ((draw->top_k > 0 && draw->top_k < n) || draw->top_p < 1.0f) {
        double total = row_total(kernels, weights, n);
        for (int i = 0; i < 4 && !few; i++) {
            few = narrow(job, draw, &row, ids, few_logits, few_weights,
                         bounds[i], total);
        }
        filter(draw, &row, total);
    }
    /* The largest weight is 1. */
    const float least = draw->min_p < 1.0f ? draw->min_p : 1.0f;
    for (int32_t i = 0; least > 0.0f && i < row.n; i++) {
        if (row.weights[i] < least) {
            row.weights[i] = 0.0f;
        }
    }
    int32_t id = draw_id(kernels, row.weights, row.n,
                         uniform(draw->seed, draw->stream, draw->position));
    return id < 0 ? top : few ? ids[id] : id;
}

static void row_unit(void *argument, int32_t unit, int32_t thread)
{
    const pick_job *job = argument;
    const rk_draw *draw = &job->draws[unit];
    const float *logits =
        job->logits + (int64_t)unit * job->dev->config.vocab_size;
    double max, sum, dsum;
    int32_t top;
    rk_pick *pick = &job->out[unit];
    if (!fold_slices(job->dev->slices + (int64_t)unit * job->n_slices,
                     job->n_slices, &max, &top, &sum, &dsum)) {
        *pick = (rk_pick){-1, -1, NAN, NAN, NAN, NAN};
        return;
    }
    const double log_sum = log(sum);
    pick->top = pick->token = top;
    if (draw->forced >= 0) {
        pick->token = draw->forced;
    } else if (draw->temperature > 0.0f) {
        pick->token = sample(job, draw, logits, (float)max, top,
                             cpu_scratch(job->dev, thread));
    }
    pick->top_prob = (float)(1.0 / sum);
    pick->top_logprob = (float)-log_sum;
    pick->logprob = (float)((double)logits[pick->token] - max - log_sum);
    double entropy = log_sum - dsum / sum;
    pick->entropy = (float)(entropy > 0.0 ? entropy : 0.0);
}

void cpu_pick(rk_device *base, rk_pick *out, const float *logits,
              const rk_draw *draws, int32_t n)
{
    cpu_device *dev = (cpu_device *)base;
    pick_job job = {dev, out, logits, draws, slices_of_row(dev)};
    bool drawn = false;
    cpu_pool_run(dev->pool, slice_unit, &job, n * job.n_slices);
    for (int32_t i = 0; i < n; i++) {
        drawn = drawn || (draws[i].forced < 0 && draws[i].temperature > 0.0f);
    }
    if (drawn) {
        cpu_pool_run(dev->pool, row_unit, &job, n);
    } else {
        for (int32_t i = 0; i < n; i++) {
            row_unit(&job, i, 0);
        }
    }
}

size_t cpu_pick_scratch(const cpu_device *dev)
{
    return BUCKETS * sizeof(double) +
           4 * (size_t)dev->config.vocab_size * sizeof(float);
}

size_t cpu_pick_slices_bytes(const cpu_device *dev)
{
    return (size_t)dev->extent.max_outputs * (size_t)slices_of_row(dev) *
           sizeof(cpu_slice);
}
