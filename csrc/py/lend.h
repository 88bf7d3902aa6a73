/* DLPack's producer side; all functions need the GIL. */
#ifndef RKSC_PY_LEND_H
#define RKSC_PY_LEND_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlpack/dlpack.h>
#include <stdbool.h>

/* The most dimensions that a capsule has. */
#define RK_LEND_MAX_DIMS 8

/* What RK_F32, RK_F16 and RK_BF16, the first of rk_type, are to DLPack. */
enum { RK_LEND_N_TYPES = 3 };
extern const DLDataType rk_lend_types[RK_LEND_N_TYPES];

/* The keywords of __dlpack__. */
typedef struct rk_lend_request {
    PyObject *stream; /* borrowed; None where it was not given */
    bool versioned;   /* the consumer knows DLPack 1.0 */
    bool copy;
    bool placed; /* dl_device was given: */
    int device, ordinal;
} rk_lend_request;

/* 0, or -1 with TypeError. */
int rk_lend_read(rk_lend_request *out, PyObject *args, PyObject *kwargs);

/* A new capsule over memory that `owner` keeps; shape and strides are copied.
 * Its deleter gives the reference up, on any thread. `flags`: of a versioned
 * one. NULL with MemoryError. */
PyObject *rk_lend_capsule(PyObject *owner, const DLTensor *dl, bool versioned,
                          uint64_t flags);

#endif
