/* What the two attention kernels share: where a unit's queries, keys and
 * results lie.
 *
 * A pair is (row, query head of the group); a unit's pairs read the same keys
 * of one KV head. For each pair a unit leaves a partial: maximum m of the
 * scaled scores, l = sum of e^(s - m), and acc = sum of e^(s - m) v. Where a
 * pair has no other unit the result acc / l goes out at once.
 */
#ifndef RKSC_CUDA_ATTENTION_CUH
#define RKSC_CUDA_ATTENTION_CUH

#include "block.cuh"
#include "kernels.h"

/* One unit for one KV head, and the keys that any of its pairs uses. */
struct rk_task {
    bool any; /* is there such a unit? If not, the rest means nothing */
    rk_work_unit unit;
    int kv_head, group, first_row;
    int key_begin, key_end;   /* some pair uses them */
    int full_begin, full_end; /* all pairs use them: no mask needed */
};

__device__ __forceinline__ rk_task rk_task_of(const rk_cuda_attention &a,
                                              unsigned block)
{
    rk_task t;
    const int unit = (int)block / a.kv.n_kv_heads;
    t.any = unit < *a.n_units;
    t.unit = a.units[unit]; /* the two loads are under way together */
    t.kv_head = (int)block % a.kv.n_kv_heads;
    t.group = a.n_heads / a.kv.n_kv_heads;
    t.first_row = t.unit.pair_begin / t.group;
    t.key_begin = t.unit.key_begin;
    t.key_end = t.unit.key_end;
    t.full_begin = t.unit.key_begin;
    t.full_end = min(t.unit.key_end, t.unit.first_position + 1);
    if (a.window > 0) {
        t.key_begin = max(t.key_begin, t.unit.first_position + 1 - a.window);
        t.full_begin = max(t.full_begin, t.unit.last_position + 1 - a.window);
    }
    return t;
}

/* Keys [begin, end) that a pair uses, of the unit's and those before. */
struct rk_keys {
    int begin, end;
};

/* A pair of the unit; one beyond its last has no keys. */
__device__ __forceinline__ rk_keys rk_pair_keys(const rk_cuda_attention &a,
                                                const rk_task &t, int pair)
{
    rk_keys keys = {0, 0};
    pair += t.unit.pair_begin;
    if (pair < t.unit.pair_end) {
        const int position = a.positions[pair / t.group];
        keys.begin = a.window > 0 ? max(0, position + 1 - a.window) : 0;
        keys.end = min(t.key_end, position + 1);
    }
    return keys;
}

/* Element of q or out where pair `pair` of the unit begins. */
__device__ __forceinline__ int64_t rk_pair_at(const rk_cuda_attention &a,
                                              const rk_task &t, int pair)
{
    pair += t.unit.pair_begin;
    const int row = pair / t.group, head = pair % t.group;
    return ((int64_t)row * a.n_heads + t.kv_head * t.group + head) *
           a.kv.head_dim;
}

/* The block that holds a key of the task. */
__device__ __forceinline__ int rk_block_of(const rk_cuda_attention &a,
                                           const rk_task &t, int key)
{
    return a.tables[t.unit.table + (key >> a.kv.block_shift)];
}

/* Byte of the layer where K of a key in this block begins; V is
 * rk_value_offset behind it. */
__device__ __forceinline__ int64_t rk_key_at(const rk_cuda_attention &a,
                                             const rk_task &t, int block,
                                             int key, int row_bytes)
{
    const int offset = key & ((1 << a.kv.block_shift) - 1);
    return block * a.kv.block_bytes +
           (((int64_t)t.kv_head << a.kv.block_shift) + offset) * row_bytes;
}

__device__ __forceinline__ int64_t rk_value_offset(const rk_cuda_attention &a,
                                                   int row_bytes)
{
    return ((int64_t)a.kv.n_kv_heads << a.kv.block_shift) * row_bytes;
}

/* Where a pair's result goes. */
struct rk_place {
    int partial;   /* or RK_WORK_OUT, RK_WORK_NONE */
    int64_t index; /* (partial, head) in sums; times head_dim in partials */
};

__device__ __forceinline__ rk_place rk_place_of(const rk_cuda_attention &a,
                                                const rk_task &t, int pair)
{
    rk_place p;
    pair += t.unit.pair_begin;
    const int row = pair / t.group, head = pair % t.group;
    p.partial = a.places[t.unit.place + row - t.first_row];
    p.index = (int64_t)p.partial * a.n_heads + t.kv_head * t.group + head;
    return p;
}

/* Elements of `out` from `at` on: one, */
__device__ __forceinline__ void rk_put(const rk_cuda_attention &a, int64_t at,
                                       float x)
{
    if (a.out_type == RK_F32) {
        rk_narrow(static_cast<float *>(a.out) + at, x);
    } else {
        rk_narrow(static_cast<rk_bf16 *>(a.out) + at, x);
    }
}

/* or eight, aligned. */
__device__ __forceinline__ void rk_put8(const rk_cuda_attention &a, int64_t at,
                                        const float x[8])
{
    if (a.out_type == RK_F32) {
        rk_store8(static_cast<float *>(a.out) + at, x);
    } else {
        rk_store8(static_cast<rk_bf16 *>(a.out) + at, x);
    }
}

/* e^(m - all) for a part whose maximum is m; 0 for one without keys. */
__device__ __forceinline__ float rk_part_weight(float m, float all)
{
    return m == -INFINITY ? 0.0f : exp2f(m - all);
}

/* The kernel for float32 and unusual sizes; the type is a.kv.type. */
cudaError_t rk_attend_plain(const rk_cuda_attention &a, cudaStream_t stream);

#define RK_PLAIN_PAIRS 16

#endif
