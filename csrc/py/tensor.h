/* rksc.Tensor: a typed window on memory that somebody else owns.
 *
 * The only kind of tensor that can hold GGUF block types; F32, F16 and BF16
 * go out by DLPack. All functions need the GIL.
 */
#ifndef RKSC_PY_TENSOR_H
#define RKSC_PY_TENSOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "rksc.h"

/* More dimensions than any weight has; a shape beyond is a ValueError. */
#define RK_TENSOR_MAX_DIMS 8

/* What the engine reads of a Tensor; stays as it is as long as the object
 * lives, but for the name. */
typedef struct rk_tensor_view {
    /* First byte; aligned to the element for plain types, blocks have none. */
    const void *data;
    rk_type type;
    int n_dims;
    int64_t shape[RK_TENSOR_MAX_DIMS]; /* elements, row-major; the last one is a
                                          multiple of the type's block */
    int64_t n_elements, n_bytes;
    const char *name; /* UTF-8 or NULL */
} rk_tensor_view;

/* A new reference to the heap type, to be kept in the module's state and added
 * to the module as "Tensor"; NULL with an exception. */
PyObject *rk_tensor_type_new(PyObject *module);

/* Is `object` an instance of `type`, which came from rk_tensor_type_new? */
static inline bool rk_tensor_check(PyObject *object, PyObject *type)
{
    return Py_TYPE(object) == (PyTypeObject *)type;
}

/* Row-major strides in elements, (n_dims,), of what `view` shows. */
void rk_tensor_strides(int64_t *strides, const rk_tensor_view *view);

/* Look into `tensor`, for which rk_tensor_check must hold. */
const rk_tensor_view *rk_tensor_look(PyObject *tensor);

#endif
