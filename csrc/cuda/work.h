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
    int32_t key_begin, key_end;   /* key_end <= last_position + 1 */
    int32_t table; /* key p lies in block tables[table + p / block_tokens] */
    int32_t place; /* places[place + row - pair_begin / group] */
    int32_t first_position, last_position; /* least and largest of its rows */
} rk_work_unit;

/* What rk_work.places says of a unit's row, when it is no partial's number. */
#define RK_WORK_OUT (-1)  /* the row has no other unit: its result goes out */
#define RK_WORK_NONE (-2) /* the row uses none of the unit's keys */

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

#define RK_WORK_SHARE_KEYS 256

/* How work is cut. */
typedef struct rk_work_rule {
    int32_t block_tokens;
    int32_t n_heads, n_kv_heads;
    int32_t narrow_pairs, wide_pairs; /* rk_cuda_attend_pairs */
    int32_t wanted_units; /* (unit, KV head) pairs that fill the device */
    int32_t max_partials; /* room on the device */
    int32_t share_keys;   /* reads of a key that a shared prefix must save to
                           * be worth a unit of its own; RK_WORK_SHARE_KEYS */
} rk_work_rule;

typedef struct rk_worker rk_worker;

rk_status rk_worker_create(rk_worker **out, const rk_work_rule *rule,
                           rk_error *err);
void rk_worker_free(rk_worker *worker); /* takes NULL */

/* Cut the batch. RK_ENOMEM: no memory on the host, or more partials than the
 * device has room for even when nothing is shared. */
rk_status rk_worker_build(rk_worker *worker, const rk_batch *batch,
                          rk_work *work, rk_error *err);

#ifdef __cplusplus
}
#endif

#endif
