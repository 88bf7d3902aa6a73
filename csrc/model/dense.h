/* From any two-dimensional tensor to a dense one of another type. Pure C. */
#ifndef RKSC_DENSE_H
#define RKSC_DENSE_H

#include "rksc.h"

/* Borrowed memory: element (i, j) of a plain type lies at data + (i *
 * row_stride + j * col_stride) elements; strides may be negative or 0 and the
 * memory unaligned. Block types are dense and their strides are not looked at.
 */
typedef struct rk_strided {
    const void *data;
    rk_type type;
    int64_t rows, cols;
    int64_t row_stride, col_stride;
} rk_strided;

/* Can the memory serve as a dense (rows, cols) array of `type` as it is? */
bool rk_dense_fits(const rk_strided *from, rk_type type);

/* out: dense (rows, cols) of type `to`, RK_F32 (exact) or RK_BF16 (rounded to
 * nearest even). Works on up to n_threads threads; needs no GIL. */
void rk_dense_convert(void *out, rk_type to, const rk_strided *from,
                      int n_threads);

#endif
