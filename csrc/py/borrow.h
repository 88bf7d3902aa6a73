/* A tensor that somebody lends us: by DLPack, or as a rksc.Tensor.
 *
 * All functions need the GIL.
 */
#ifndef RKSC_PY_BORROW_H
#define RKSC_PY_BORROW_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "backend.h"
#include "model/dense.h"
#include "tensor.h"

#include <dlpack/dlpack.h>

/* Valid until released; zeroed: nothing is lent. At most one of the last three
 * is set: who is told when we are done. */
typedef struct rk_borrowed {
    const void *data; /* the first element, byte_offset included */
    bool on_gpu;      /* `data` is an address of the session's GPU */
    rk_type type;
    int n_dims;
    int64_t shape[RK_TENSOR_MAX_DIMS];
    int64_t
        strides[RK_TENSOR_MAX_DIMS]; /* elements; of no use in block types */
    DLManagedTensorVersioned *versioned;
    DLManagedTensor *legacy;
    PyObject *tensor; /* strong */
} rk_borrowed;

/* Borrow what `producer` holds. 0, or -1 with an exception that says `name`:
 * TypeError (no tensor, or a dtype that is no weight's), BufferError (another
 * device, a producer that refuses or breaks its contract), ValueError.
 * tensor_type: rksc.Tensor. cuda: the session's GPU, whose memory is welcome
 * too and whose stream a producer on a GPU is given; NULL: none. */
int rk_borrowed_take(rk_borrowed *lent, PyObject *producer, PyObject *name,
                     PyObject *tensor_type, const rk_cuda *cuda);

/* Give it back: the deleter runs exactly once. Keeps the current exception. */
void rk_borrowed_release(rk_borrowed *lent);

/* The view of a matrix (2 dims) or a vector (1 dim: one row). */
rk_strided rk_borrowed_strided(const rk_borrowed *lent);

/* The names of a mapping from names to tensors, as a dict {name: name} in its
 * order; NULL with an exception. */
PyObject *rk_borrow_names(PyObject *mapping);

#endif
