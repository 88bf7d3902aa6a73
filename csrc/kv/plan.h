/* From token spans of several branches to the batch of one step.
 *
 * Rows are ordered so that sequences that share blocks stand side by side;
 * attention segments then name each shared block once for all rows that read
 * it (backend.h). Integers only. A plan owns its arrays and grows them to the
 * largest batch seen, so that a decode step allocates nothing.
 */
#ifndef RKSC_PLAN_H
#define RKSC_PLAN_H

#include "backend.h"

/* n_rows consecutive tokens of one branch at positions position, ... */
typedef struct rk_span {
    const int32_t *tokens; /* (n_rows,) */
    int32_t position;
    int32_t n_rows;
    const int32_t *blocks; /* block table, covers position + n_rows tokens */
    bool write;            /* false: K and V of these rows are there already */
} rk_span;

typedef struct rk_plan rk_plan;

rk_status rk_plan_create(rk_plan **out, int32_t block_tokens, rk_error *err);
void rk_plan_free(rk_plan *plan);

/* Build the batch; it points into the plan and the spans' block tables and is
 * valid until the next build. first_rows: (n_spans,) receives the batch row of
 * each span's first token (a span's rows are consecutive). */
rk_status rk_plan_build(rk_plan *plan, const rk_span *spans, int32_t n_spans,
                        rk_batch *batch, int32_t *first_rows, rk_error *err);

#endif
