/* DLPack's producer side: memory of an object as a capsule.
 *
 * An export is one allocation that owns a reference to the object. Whoever
 * holds the capsule under its first name owns the export; a consumer renames
 * it and calls the deleter when done, on any thread, with the GIL or without.
 */
#include "lend.h"

#include "rksc.h"

#include <dlpack/dlpack.h>

const DLDataType rk_lend_types[] = {
    [RK_F32] = {kDLFloat, 32, 1},
    [RK_F16] = {kDLFloat, 16, 1},
    [RK_BF16] = {kDLBfloat, 16, 1},
};
_Static_assert(sizeof(DLDataType) == 4, "compared by their bytes");

/* One allocation for an export; `versioned` and `legacy` are never both used.
 */
typedef struct export_block {
    union {
        DLManagedTensorVersioned versioned;
        DLManagedTensor legacy;
    } managed;
    int64_t shape[RK_LEND_MAX_DIMS], strides[RK_LEND_MAX_DIMS];
    PyObject *owner;
} export_block;

/* Consumers call deleters on any thread, with the GIL or without, and also
 * while the interpreter ends. Then, without the GIL, leaking is all that is
 * left: taking it would hang or kill the thread. */
static void free_export(export_block *block)
{
    if (!Py_IsInitialized()) {
        return;
    }
    if (PyGILState_Check()) {
        Py_DECREF(block->owner);
        PyMem_RawFree(block);
        return;
    }
#if PY_VERSION_HEX >= 0x030d0000
    if (Py_IsFinalizing()) {
        return;
    }
#else
    if (_Py_IsFinalizing()) {
        return;
    }
#endif
    PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(block->owner);
    PyGILState_Release(state);
    PyMem_RawFree(block);
}

static void versioned_deleter(DLManagedTensorVersioned *managed)
{
    free_export(managed->manager_ctx);
}

static void legacy_deleter(DLManagedTensor *managed)
{
    free_export(managed->manager_ctx);
}

/* A capsule that nobody consumed still owns the export. A consumer renames the
 * capsule, and then it is none of ours. */
static void versioned_capsule_free(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        DLManagedTensorVersioned *managed =
            PyCapsule_GetPointer(capsule, "dltensor_versioned");

        managed->deleter(managed);
    }
}

static void legacy_capsule_free(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        DLManagedTensor *managed = PyCapsule_GetPointer(capsule, "dltensor");

        managed->deleter(managed);
    }
}

static export_block *export_new(PyObject *owner, DLTensor *dl)
{
    export_block *block = PyMem_RawCalloc(1, sizeof *block);

    if (block == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (int i = 0; i < dl->ndim; i++) {
        block->shape[i] = dl->shape[i];
        block->strides[i] = dl->strides[i];
    }
    dl->shape = block->shape;
    dl->strides = block->strides;
    Py_INCREF(owner);
    block->owner = owner;
    return block;
}

static PyObject *export_versioned(PyObject *owner, DLTensor dl, uint64_t flags)
{
    export_block *block = export_new(owner, &dl);
    PyObject *capsule;

    if (block == NULL) {
        return NULL;
    }
    block->managed.versioned = (DLManagedTensorVersioned){
        .version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION},
        .manager_ctx = block,
        .deleter = versioned_deleter,
        .flags = flags,
        .dl_tensor = dl,
    };
    capsule = PyCapsule_New(&block->managed.versioned, "dltensor_versioned",
                            versioned_capsule_free);
    if (capsule == NULL) {
        free_export(block);
    }
    return capsule;
}

static PyObject *export_legacy(PyObject *owner, DLTensor dl)
{
    export_block *block = export_new(owner, &dl);
    PyObject *capsule;

    if (block == NULL) {
        return NULL;
    }
    block->managed.legacy = (DLManagedTensor){
        .dl_tensor = dl,
        .manager_ctx = block,
        .deleter = legacy_deleter,
    };
    capsule =
        PyCapsule_New(&block->managed.legacy, "dltensor", legacy_capsule_free);
    if (capsule == NULL) {
        free_export(block);
    }
    return capsule;
}

PyObject *rk_lend_capsule(PyObject *owner, const DLTensor *dl, bool versioned,
                          uint64_t flags)
{
    return versioned ? export_versioned(owner, *dl, flags)
                     : export_legacy(owner, *dl);
}

/* Is `version` None, or a pair whose first number says major >= 1? -1: error.
 */
static int wants_versioned(PyObject *version)
{
    int major, minor;

    if (version == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(version)) {
        PyErr_SetString(PyExc_TypeError,
                        "__dlpack__: max_version must be a tuple or None");
        return -1;
    }
    if (!PyArg_ParseTuple(version, "ii;max_version must be two integers",
                          &major, &minor)) {
        return -1;
    }
    return major >= 1;
}

int rk_lend_read(rk_lend_request *out, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"stream", "max_version", "dl_device", "copy",
                               NULL};
    PyObject *version = Py_None, *device = Py_None, *copy = Py_None;
    int versioned, copied;

    *out = (rk_lend_request){.stream = Py_None};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__",
                                     keywords, &out->stream, &version, &device,
                                     &copy)) {
        return -1;
    }
    versioned = wants_versioned(version);
    if (versioned < 0) {
        return -1;
    }
    copied = PyObject_IsTrue(copy); /* None and False: no */
    if (copied < 0) {
        return -1;
    }
    out->versioned = versioned;
    out->copy = copied;
    if (device == Py_None) {
        return 0;
    }
    out->placed = true;
    if (!PyTuple_Check(device)) {
        PyErr_SetString(PyExc_TypeError,
                        "__dlpack__: dl_device must be a tuple or None");
        return -1;
    }
    return PyArg_ParseTuple(device, "ii;dl_device must be two integers",
                            &out->device, &out->ordinal)
               ? 0
               : -1;
}
