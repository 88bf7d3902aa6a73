/* rksc.Tensor's __dlpack__ and __dlpack_device__; both need the GIL. */
#ifndef RKSC_PY_LEND_H
#define RKSC_PY_LEND_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* __dlpack__(*, stream, max_version, dl_device, copy) of a Tensor: a new
 * capsule, or NULL with BufferError (block types, another device or a stream,
 * read-only memory for a consumer that cannot be told) or TypeError. */
PyObject *rk_tensor_lend(PyObject *tensor, PyObject *args, PyObject *kwargs);

/* __dlpack_device__(): (1, 0), the CPU. */
PyObject *rk_tensor_lend_device(PyObject *tensor, PyObject *unused);

#endif
