/* DLPack's consumer side, in the order that cannot leak: ask for the versioned
 * capsule, look at everything while the capsule still owns the tensor, and
 * only rename it (which makes the tensor ours) when nothing can fail any more.
 * A capsule that we refuse is dropped as it came; its own destructor calls the
 * deleter, whatever the major version.
 */
#include "borrow.h"

#include "lend.h"
#include "py.h"

/* ---- asking the producer ------------------------------------------------- */

/* Does the object say that autograd watches it? */
static bool requires_grad(PyObject *producer)
{
    PyObject *flag = PyObject_GetAttrString(producer, "requires_grad");
    int truth = flag != NULL ? PyObject_IsTrue(flag) : 0;

    Py_XDECREF(flag);
    PyErr_Clear();
    return truth > 0;
}

/* The producer raised: say which tensor, keep its exception as the cause. What
 * is no answer to our question (Ctrl-C, no memory) goes through as it is. */
static void explain(PyObject *producer, PyObject *name)
{
    PyObject *type, *cause, *traceback, *error;

    if (!PyErr_ExceptionMatches(PyExc_Exception) ||
        PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return;
    }
    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(cause, traceback);
    }
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    if (requires_grad(producer)) {
        PyErr_Format(PyExc_BufferError,
                     "%U requires gradients and cannot be lent as it is: pass "
                     "%U.detach() (or the model's state_dict())",
                     name, name);
    } else {
        PyErr_Format(PyExc_BufferError, "%U: %s.__dlpack__ failed: %S", name,
                     Py_TYPE(producer)->tp_name, cause);
    }
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (error != NULL && PyExceptionInstance_Check(error)) {
        PyException_SetCause(error, cause); /* takes the reference */
    } else {
        Py_XDECREF(cause);
    }
    PyErr_Restore(type, error, traceback);
}

/* Is the producer's memory a GPU's? Then it wants to know our stream. */
static bool on_gpu(PyObject *producer)
{
    PyObject *device = PyObject_CallMethod(producer, "__dlpack_device__", NULL);
    PyObject *type = device != NULL ? PySequence_GetItem(device, 0) : NULL;
    long kind = type != NULL ? PyLong_AsLong(type) : -1;

    Py_XDECREF(type);
    Py_XDECREF(device);
    PyErr_Clear(); /* the capsule will say where it is */
    return kind == kDLCUDA || kind == kDLCUDAManaged;
}

/* The keywords of __dlpack__; a producer from before DLPack 1.0 (`old`) knows
 * no version. */
static PyObject *keywords_for(PyObject *producer, const rk_cuda *cuda, bool old)
{
    PyObject *keywords =
        old ? PyDict_New()
            : Py_BuildValue("{s(ii)}", "max_version", DLPACK_MAJOR_VERSION,
                            DLPACK_MINOR_VERSION);
    PyObject *stream = NULL;

    if (keywords == NULL || cuda == NULL || !on_gpu(producer)) {
        return keywords;
    }
    stream = PyLong_FromUnsignedLongLong(
        (unsigned long long)cuda->calls->stream(cuda));
    if (stream == NULL ||
        PyDict_SetItemString(keywords, "stream", stream) < 0) {
        Py_CLEAR(keywords);
    }
    Py_XDECREF(stream);
    return keywords;
}

/* A capsule, versioned where the producer knows how; NULL with an exception.
 */
static PyObject *ask(PyObject *producer, PyObject *name, const rk_cuda *cuda)
{
    PyObject *method = PyObject_GetAttrString(producer, "__dlpack__");
    PyObject *none = NULL, *keywords = NULL, *capsule = NULL;

    if (method == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError,
                         "%U must be a tensor with __dlpack__ or a "
                         "rksc.Tensor, not %s",
                         name, Py_TYPE(producer)->tp_name);
        }
        return NULL;
    }
    none = PyTuple_New(0);
    keywords = keywords_for(producer, cuda, false);
    if (none != NULL && keywords != NULL) {
        capsule = PyObject_Call(method, none, keywords);
        if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            Py_DECREF(keywords);
            keywords = keywords_for(producer, cuda, true);
            capsule =
                keywords != NULL ? PyObject_Call(method, none, keywords) : NULL;
        }
    }
    Py_XDECREF(none);
    Py_XDECREF(keywords);
    Py_DECREF(method);
    if (capsule == NULL) {
        explain(producer, name);
    }
    return capsule;
}

/* ---- judging the tensor -------------------------------------------------- */

static const char *device_name(DLDeviceType type)
{
    static const char *const names[] = {
        [kDLCUDA] = "CUDA",     [kDLCUDAManaged] = "CUDA managed memory",
        [kDLROCM] = "ROCm",     [kDLMetal] = "Metal",
        [kDLVulkan] = "Vulkan", [kDLOpenCL] = "OpenCL",
        [kDLOneAPI] = "oneAPI",
    };
    bool known =
        (size_t)type < sizeof names / sizeof *names && names[type] != NULL;

    return known ? names[type] : "another device";
}

static int judge_device(rk_borrowed *lent, const DLTensor *dl, PyObject *name,
                        const rk_cuda *cuda)
{
    DLDeviceType type = dl->device.device_type;

    if (type == kDLCPU || type == kDLCUDAHost || type == kDLROCMHost) {
        return 0;
    }
    if (cuda == NULL) {
        PyErr_Format(PyExc_BufferError,
                     "%U is in the memory of %s (DLPack device %d:%d); "
                     "device=\"cpu\" needs it on the CPU",
                     name, device_name(type), (int)type,
                     (int)dl->device.device_id);
        return -1;
    }
    if ((type == kDLCUDA && dl->device.device_id == cuda->ordinal) ||
        type == kDLCUDAManaged) {
        lent->on_gpu = true;
        return 0;
    }
    PyErr_Format(PyExc_BufferError,
                 "%U is in the memory of %s (DLPack device %d:%d); "
                 "device=\"cuda:%d\" needs it there or on the CPU",
                 name, device_name(type), (int)type, (int)dl->device.device_id,
                 cuda->ordinal);
    return -1;
}

static int judge_dtype(rk_borrowed *lent, const DLTensor *dl, PyObject *name)
{
    static const char *const kinds[] = {
        [kDLInt] = "int",       [kDLUInt] = "uint",
        [kDLFloat] = "float",   [kDLOpaqueHandle] = "opaque",
        [kDLBfloat] = "bfloat", [kDLComplex] = "complex",
        [kDLBool] = "bool",
    };
    DLDataType dtype = dl->dtype;

    for (int i = 0; i < RK_LEND_N_TYPES; i++) {
        if (memcmp(&dtype, &rk_lend_types[i], sizeof dtype) == 0) {
            lent->type = (rk_type)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_TypeError,
                 "%U has dtype %s%d%s; weights must be float32, bfloat16 or "
                 "float16",
                 name,
                 dtype.code <= kDLBool ? kinds[dtype.code] : "small float",
                 (int)dtype.bits, dtype.lanes == 1 ? "" : " in vectors");
    return -1;
}

static int judge_layout(rk_borrowed *lent, const DLTensor *dl, PyObject *name)
{
    int64_t stride = 1;
    bool empty = false;

    if (dl->ndim < 0 || (dl->ndim > 0 && dl->shape == NULL)) {
        PyErr_Format(PyExc_BufferError,
                     "%U: the producer's capsule has no shape", name);
        return -1;
    }
    if (dl->ndim > RK_TENSOR_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%U has %d dimensions", name,
                     (int)dl->ndim);
        return -1;
    }
    lent->n_dims = dl->ndim;
    for (int i = 0; i < dl->ndim; i++) {
        lent->shape[i] = dl->shape[i];
        empty = empty || dl->shape[i] == 0;
        if (dl->shape[i] < 0 || dl->shape[i] > INT64_MAX / 16) {
            PyErr_Format(PyExc_BufferError,
                         "%U: the producer's capsule has a dimension of %lld",
                         name, (long long)dl->shape[i]);
            return -1;
        }
    }
    for (int i = dl->ndim - 1; i >= 0; i--) {
        lent->strides[i] = dl->strides != NULL ? dl->strides[i] : stride;
        /* Without strides the memory is dense; an empty tensor has no element
         * that a wrapped product could miss. */
        stride =
            empty ? 1 : (int64_t)((uint64_t)stride * (uint64_t)dl->shape[i]);
    }
    if (dl->data == NULL && !empty) {
        PyErr_Format(PyExc_BufferError,
                     "%U: the producer's capsule has no data", name);
        return -1;
    }
    lent->data =
        (const char *)dl->data + (dl->data != NULL ? dl->byte_offset : 0);
    return 0;
}

static int judge(rk_borrowed *lent, const DLTensor *dl, PyObject *name,
                 const rk_cuda *cuda)
{
    /* The device first: of another one's memory nothing else matters. */
    return judge_device(lent, dl, name, cuda) < 0 ||
                   judge_dtype(lent, dl, name) < 0 ||
                   judge_layout(lent, dl, name) < 0
               ? -1
               : 0;
}

/* ---- taking it ----------------------------------------------------------- */

static int take_versioned(rk_borrowed *lent, PyObject *capsule, PyObject *name,
                          const rk_cuda *cuda)
{
    DLManagedTensorVersioned *managed =
        PyCapsule_GetPointer(capsule, "dltensor_versioned");

    if (managed == NULL) {
        return -1;
    }
    if (managed->version.major > DLPACK_MAJOR_VERSION) {
        /* Beyond the version and the deleter nothing may be read. */
        PyErr_Format(PyExc_BufferError,
                     "%U comes as DLPack %u.%u, at most %d.x is understood",
                     name, (unsigned)managed->version.major,
                     (unsigned)managed->version.minor, DLPACK_MAJOR_VERSION);
        return -1;
    }
    if (judge(lent, &managed->dl_tensor, name, cuda) < 0 ||
        PyCapsule_SetName(capsule, "used_dltensor_versioned") < 0) {
        return -1;
    }
    lent->versioned = managed;
    return 0;
}

static int take_legacy(rk_borrowed *lent, PyObject *capsule, PyObject *name,
                       const rk_cuda *cuda)
{
    DLManagedTensor *managed = PyCapsule_GetPointer(capsule, "dltensor");

    if (managed == NULL || judge(lent, &managed->dl_tensor, name, cuda) < 0 ||
        PyCapsule_SetName(capsule, "used_dltensor") < 0) {
        return -1;
    }
    lent->legacy = managed;
    return 0;
}

static int take_tensor(rk_borrowed *lent, PyObject *tensor)
{
    const rk_tensor_view *view = rk_tensor_look(tensor);

    lent->data = view->data;
    lent->type = view->type;
    lent->n_dims = view->n_dims;
    memcpy(lent->shape, view->shape, sizeof lent->shape);
    rk_tensor_strides(lent->strides, view);
    Py_INCREF(tensor);
    lent->tensor = tensor;
    return 0;
}

int rk_borrowed_take(rk_borrowed *lent, PyObject *producer, PyObject *name,
                     PyObject *tensor_type, const rk_cuda *cuda)
{
    PyObject *capsule;
    int failed = -1;

    *lent = (rk_borrowed){0};
    if (rk_tensor_check(producer, tensor_type)) {
        return take_tensor(lent, producer);
    }
    capsule = ask(producer, name, cuda);
    if (capsule == NULL) {
        return -1;
    }
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        failed = take_versioned(lent, capsule, name, cuda);
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        failed = take_legacy(lent, capsule, name, cuda);
    } else {
        PyErr_Format(PyExc_BufferError,
                     "%U: __dlpack__ gave %s, not an unused DLPack capsule",
                     name, Py_TYPE(capsule)->tp_name);
    }
    if (failed) {
        *lent = (rk_borrowed){0};
    }
    RK_KEEP_EXCEPTION(Py_DECREF(capsule));
    return failed;
}

void rk_borrowed_release(rk_borrowed *lent)
{
    rk_borrowed old = *lent;

    *lent = (rk_borrowed){0};
    if (old.versioned != NULL && old.versioned->deleter != NULL) {
        RK_KEEP_EXCEPTION(old.versioned->deleter(old.versioned));
    }
    if (old.legacy != NULL && old.legacy->deleter != NULL) {
        RK_KEEP_EXCEPTION(old.legacy->deleter(old.legacy));
    }
    if (old.tensor != NULL) {
        RK_KEEP_EXCEPTION(Py_DECREF(old.tensor));
    }
}

rk_strided rk_borrowed_strided(const rk_borrowed *lent)
{
    int last = lent->n_dims - 1;

    return (rk_strided){
        .data = lent->data,
        .type = lent->type,
        .rows = last == 0 ? 1 : lent->shape[0],
        .cols = lent->shape[last],
        .row_stride = last == 0 ? lent->shape[0] : lent->strides[0],
        .col_stride = lent->strides[last],
    };
}

PyObject *rk_borrow_names(PyObject *mapping)
{
    PyObject *keys = NULL, *names = PyDict_New();

    if (names == NULL) {
        return NULL;
    }
    if (PyMapping_Check(mapping)) {
        keys = PyMapping_Keys(mapping);
    }
    if (keys == NULL) {
        if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError,
                         "weights must be a mapping from names to tensors, not "
                         "%s (of a torch module take its state_dict())",
                         Py_TYPE(mapping)->tp_name);
        }
        goto fail;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys); i++) {
        PyObject *key = PyList_GET_ITEM(keys, i);

        if (!PyUnicode_Check(key)) {
            PyErr_Format(PyExc_TypeError, "weights: a name is %s, not str",
                         Py_TYPE(key)->tp_name);
            goto fail;
        }
        if (PyDict_SetItem(names, key, key) < 0) {
            goto fail;
        }
    }
    Py_DECREF(keys);
    return names;

fail:
    Py_XDECREF(keys);
    Py_DECREF(names);
    return NULL;
}
