/* From the batch's segments to units of attention work: integers only.
 *
 * A unit is what one block of threads does for one KV head: the keys
 * [key_begin, key_end) for some (row, head of the group) pairs that all read
 * them from the same blocks. Built once per step, on the host; every layer
 * uses it.
 */
#ifndef RKSC_CUDA_WORK_H
#define RKSC_CUDA_WORK_H

#include "backend.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rk_work_unit {
    int32_t pair_begin, pair_end; /* row * group + head of the group */
    int32_t key_begin, key_end;
    int32_t table; /* key p lies in block tables[table + p / block_tokens] */
    int32_t place; /* places[place + row - pair_begin / group]: the row's
                    * partial, or -1: the result itself goes out */
} rk_work_unit;

/* Valid until the next build. Row i's partials are rows_first[i] up to
 * rows_first[i + 1], in the order of keys; none: its unit writes out. */
typedef struct rk_work {
    int32_t n_units, n_places, n_tables, n_partials, n_rows;
    const rk_work_unit *units;
    const int32_t *places;
    const int32_t *rows_first; /* (n_rows + 1,) */
    const int32_t *tables;     /* block ids */
    bool wide; /* units have up to wide_pairs pairs, not narrow_pairs */
} rk_work;

/* How work is cut. */
typedef struct rk_work_rule {
    int32_t block_tokens;
    int32_t n_heads, n_kv_heads;
    int32_t narrow_pairs, wide_pairs; /* rk_cuda_attend_pairs */
    int32_t wanted_units;             /* units that fill the device */
    int32_t max_partials;             /* room on the device */
    int32_t share_keys; /* a prefix is read once for n rows when it saves at
                         * least this many reads of a key; 0: the default */
} rk_work_rule;

typedef struct rk_worker rk_worker;

rk_status rk_worker_create(rk_worker **out, const rk_work_rule *rule,
                           rk_error *err);
void rk_worker_free(rk_worker *worker); /* takes NULL */

/* Cut the batch. RK_ENOMEM: no host memory; the worker is as before. */
rk_status rk_worker_build(rk_worker *worker, const rk_batch *batch,
                          rk_work *work, rk_error *err);

#ifdef __cplusplus
}
#endif

#endif
