/* A Tensor is a buffer, a type, a shape and an offset, checked once.
 *
 * It holds the exporter's Py_buffer for its whole life, so the memory (a
 * mapped file, bytes, an array) can neither move nor go. All checks are made
 * at creation with 64-bit arithmetic that cannot wrap; afterwards every byte
 * that shape and type name is known to lie inside the buffer.
 */
#include "tensor.h"

#include "lend.h"
#include "model/quant.h"
#include "py.h"

#include <stddef.h>
#include <structmember.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "weight files are little-endian and are used in place"
#endif

/* Elements converted between two looks at pending signals. */
#define CONVERT_STEP ((int64_t)1 << 24)

typedef struct tensor_object {
    PyObject_HEAD PyObject *weak_references;
    Py_buffer buffer; /* buffer.obj is NULL until the export is held */
    rk_tensor_view view;
    PyObject *name; /* exact str or NULL */
} tensor_object;

/* ---- creation ---------------------------------------------------------- */

/* A Python integer in 0 .. 2^63 - 1; `what` names it in the error. */
static int read_size(PyObject *value, const char *what, int64_t *size)
{
    PyObject *integer = PyNumber_Index(value);
    int overflow = 0;

    if (integer == NULL) {
        return -1;
    }
    *size = PyLong_AsLongLongAndOverflow(integer, &overflow);
    Py_DECREF(integer);
    if (*size < 0 || overflow != 0) {
        PyErr_Format(PyExc_ValueError,
                     "Tensor: %s is negative or above 2**63 - 1", what);
        return -1;
    }
    return 0;
}

static int read_shape(tensor_object *self, PyObject *shape)
{
    PyObject *items =
        PySequence_Fast(shape, "Tensor: shape must be a sequence of integers");
    Py_ssize_t n;

    if (items == NULL) {
        return -1;
    }
    n = PySequence_Fast_GET_SIZE(items);
    if (n > RK_TENSOR_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError,
                     "Tensor: shape has %zd dimensions, at most %d are "
                     "supported",
                     n, RK_TENSOR_MAX_DIMS);
        goto fail;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (read_size(PySequence_Fast_GET_ITEM(items, i), "a dimension",
                      &self->view.shape[i]) < 0) {
            goto fail;
        }
    }
    self->view.n_dims = (int)n;
    Py_DECREF(items);
    return 0;

fail:
    Py_DECREF(items);
    return -1;
}

/* Elements and bytes of the shape; every product is checked before it is made.
 */
static int measure(tensor_object *self)
{
    const rk_type_info *info = rk_type_get(self->view.type);
    int64_t last =
        self->view.n_dims > 0 ? self->view.shape[self->view.n_dims - 1] : 1;
    int64_t n = 1;

    if (last % info->block_elements != 0) {
        PyErr_Format(PyExc_ValueError,
                     "Tensor: a %s row has blocks of %d elements, the last "
                     "dimension is %lld",
                     info->name, (int)info->block_elements, (long long)last);
        return -1;
    }
    for (int i = 0; i < self->view.n_dims; i++) {
        if (self->view.shape[i] == 0) {
            n = 0;
        }
    }
    for (int i = 0; n > 0 && i < self->view.n_dims; i++) {
        if (self->view.shape[i] > INT64_MAX / 8 / n) {
            PyErr_SetString(PyExc_ValueError,
                            "Tensor: the shape's product does not fit 64 bits");
            return -1;
        }
        n *= self->view.shape[i];
    }
    self->view.n_elements = n;
    self->view.n_bytes = rk_type_bytes(self->view.type, n);
    return 0;
}

static int find_data(tensor_object *self, int64_t offset)
{
    const rk_type_info *info = rk_type_get(self->view.type);
    int64_t length = self->buffer.len;

    if (offset > length || self->view.n_bytes > length - offset) {
        PyErr_Format(PyExc_ValueError,
                     "Tensor: %lld bytes of %s at offset %lld reach past the "
                     "buffer's %lld bytes",
                     (long long)self->view.n_bytes, info->name,
                     (long long)offset, (long long)length);
        return -1;
    }
    self->view.data = (const char *)self->buffer.buf + offset;
    if (info->block_elements == 1 && self->view.n_elements > 0 &&
        (uintptr_t)self->view.data % (uintptr_t)info->block_bytes != 0) {
        PyErr_Format(PyExc_ValueError,
                     "Tensor: offset %lld leaves %s elements unaligned; copy "
                     "the bytes to an aligned buffer",
                     (long long)offset, info->name);
        return -1;
    }
    return 0;
}

static PyObject *tensor_new(PyTypeObject *type, PyObject *args,
                            PyObject *kwargs)
{
    static char *keywords[] = {"buffer", "type", "shape", "offset", NULL};
    PyObject *exporter, *shape, *start = NULL;
    const char *type_name;
    int64_t offset = 0;
    const rk_type_info *info;
    tensor_object *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OsO|O:Tensor", keywords,
                                     &exporter, &type_name, &shape, &start)) {
        return NULL;
    }
    if (start != NULL && read_size(start, "offset", &offset) < 0) {
        return NULL;
    }
    info = rk_type_find(type_name);
    if (info == NULL) {
        return PyErr_Format(PyExc_ValueError, "Tensor: unknown type %.100s",
                            type_name);
    }
    self = (tensor_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->view.type = info->type;
    if (read_shape(self, shape) < 0 || measure(self) < 0 ||
        PyObject_GetBuffer(exporter, &self->buffer, PyBUF_SIMPLE) < 0 ||
        find_data(self, offset) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int tensor_traverse(tensor_object *self, visitproc visit, void *arg)
{
    /* Not buffer.obj: a memoryview that the collector clears while it is
     * exported complains, and nothing that exports memory holds a Tensor. */
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static void tensor_dealloc(tensor_object *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL) {
        PyObject_ClearWeakRefs((PyObject *)self);
    }
    PyBuffer_Release(&self->buffer);
    Py_CLEAR(self->name);
    type->tp_free(self);
    Py_DECREF(type);
}

const rk_tensor_view *rk_tensor_look(PyObject *tensor)
{
    return &((tensor_object *)tensor)->view;
}

/* ---- attributes -------------------------------------------------------- */

static PyObject *tensor_get_type(tensor_object *self, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(rk_type_get(self->view.type)->name);
}

static PyObject *tensor_get_shape(tensor_object *self, void *Py_UNUSED(closure))
{
    PyObject *shape = PyTuple_New(self->view.n_dims);

    if (shape == NULL) {
        return NULL;
    }
    for (int i = 0; i < self->view.n_dims; i++) {
        PyObject *dim = PyLong_FromLongLong(self->view.shape[i]);

        if (dim == NULL) {
            Py_DECREF(shape);
            return NULL;
        }
        PyTuple_SET_ITEM(shape, i, dim);
    }
    return shape;
}

static PyObject *tensor_get_name(tensor_object *self, void *Py_UNUSED(closure))
{
    PyObject *name = self->name != NULL ? self->name : Py_None;

    Py_INCREF(name);
    return name;
}

static int tensor_set_name(tensor_object *self, PyObject *value,
                           void *Py_UNUSED(closure))
{
    const char *text = NULL;

    if (value == NULL || value == Py_None) {
        value = NULL;
    } else if (!PyUnicode_CheckExact(value)) {
        PyErr_Format(PyExc_TypeError,
                     "Tensor.name must be a str or None, not %s",
                     Py_TYPE(value)->tp_name);
        return -1;
    } else {
        text = PyUnicode_AsUTF8(value); /* a str keeps it */
        if (text == NULL) {
            return -1;
        }
    }
    self->view.name = text;
    Py_XINCREF(value);
    Py_XSETREF(self->name, value);
    return 0;
}

static PyObject *tensor_repr(tensor_object *self)
{
    PyObject *shape = tensor_get_shape(self, NULL), *text;
    const char *name = self->view.name;

    if (shape == NULL) {
        return NULL;
    }
    text = PyUnicode_FromFormat(
        "<rksc.Tensor %s%s%s %R>", name != NULL ? name : "",
        name != NULL ? " " : "", rk_type_get(self->view.type)->name, shape);
    Py_DECREF(shape);
    return text;
}

/* ---- the buffer protocol and NumPy ------------------------------------- */

void rk_tensor_strides(int64_t *strides, const rk_tensor_view *view)
{
    int64_t stride = 1;

    /* An empty tensor's other dimensions may be so large that their product
     * wraps; it has no element to reach. */
    for (int i = view->n_dims - 1; i >= 0; i--) {
        strides[i] = stride;
        stride *= view->n_elements > 0 ? view->shape[i] : 1;
    }
}

/* Bytes for who asks for no more (PyBUF_SIMPLE: file.write). With format
 * or shape only the types that Python's buffer formats can say; the raw bytes
 * of the others would pass for numbers. */
static int tensor_getbuffer(tensor_object *self, Py_buffer *view, int flags)
{
    const rk_type_info *info = rk_type_get(self->view.type);
    int64_t strides[RK_TENSOR_MAX_DIMS];
    Py_ssize_t *dims;

    view->obj = NULL;
    if ((flags & (PyBUF_FORMAT | PyBUF_ND)) && self->view.type != RK_F32 &&
        self->view.type != RK_F16) {
        PyErr_Format(PyExc_BufferError,
                     "the buffer protocol has no %s; use Tensor.numpy() for "
                     "float32 values",
                     info->name);
        return -1;
    }
    if ((flags & PyBUF_WRITABLE) == PyBUF_WRITABLE && self->buffer.readonly) {
        PyErr_SetString(PyExc_BufferError, "the Tensor's memory is read-only");
        return -1;
    }
    if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS &&
        self->view.n_dims > 1) {
        PyErr_SetString(PyExc_BufferError, "a Tensor is row-major");
        return -1;
    }
    dims = PyMem_Malloc(2 * RK_TENSOR_MAX_DIMS * sizeof *dims);
    if (dims == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    rk_tensor_strides(strides, &self->view);
    for (int i = 0; i < self->view.n_dims; i++) {
        dims[i] = (Py_ssize_t)self->view.shape[i];
        dims[RK_TENSOR_MAX_DIMS + i] =
            (Py_ssize_t)strides[i] * info->block_bytes;
    }
    *view = (Py_buffer){
        .buf = (void *)self->view.data,
        .len = (Py_ssize_t)self->view.n_bytes,
        .itemsize = info->block_bytes,
        .readonly = self->buffer.readonly,
        .ndim = self->view.n_dims,
        .internal = dims,
    };
    if (flags & PyBUF_FORMAT) {
        view->format = self->view.type == RK_F32 ? "f" : "e";
    }
    if (flags & PyBUF_ND) {
        view->shape = dims;
    }
    if ((flags & PyBUF_STRIDES) == PyBUF_STRIDES) {
        view->strides = dims + RK_TENSOR_MAX_DIMS;
    }
    Py_INCREF(self);
    view->obj = (PyObject *)self;
    return 0;
}

static void tensor_releasebuffer(tensor_object *Py_UNUSED(self),
                                 Py_buffer *view)
{
    PyMem_Free(view->internal);
}

/* All elements to `out` as float32; the GIL is given up meanwhile. */
static int convert(tensor_object *self, float *out)
{
    const uint8_t *from = self->view.data;

    for (int64_t done = 0; done < self->view.n_elements;) {
        int64_t n = self->view.n_elements - done;
        PyThreadState *thread;

        n = n < CONVERT_STEP ? n : CONVERT_STEP;
        thread = PyEval_SaveThread();
        rk_dequantize(out + done, from, self->view.type, n);
        PyEval_RestoreThread(thread);
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
        done += n;
        from += rk_type_bytes(self->view.type, n);
    }
    return 0;
}

static PyObject *tensor_numpy(tensor_object *self, PyObject *Py_UNUSED(unused))
{
    PyObject *from, *with = NULL, *array = NULL;
    float *values;

    if (self->view.type == RK_F32) {
        from = PyMemoryView_FromObject((PyObject *)self);
        with = from != NULL ? PyImport_ImportModule("numpy") : NULL;
        if (with != NULL) {
            array = PyObject_CallMethod(with, "asarray", "O", from);
        }
    } else {
        from = rk_array_float32(self->view.n_elements, &values);
        with = from != NULL ? tensor_get_shape(self, NULL) : NULL;
        if (with != NULL && convert(self, values) == 0) {
            array = PyObject_CallMethod(from, "reshape", "(O)", with);
        }
    }
    Py_XDECREF(with);
    Py_XDECREF(from);
    return array;
}

/* NumPy's own protocol: np.asarray(tensor) is float32 for every type. */
static PyObject *tensor_array(tensor_object *self, PyObject *args,
                              PyObject *kwargs)
{
    static char *keywords[] = {"dtype", "copy", NULL};
    PyObject *dtype = Py_None, *copy = Py_None, *array, *cast;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO:__array__", keywords,
                                     &dtype, &copy)) {
        return NULL;
    }
    if (copy == Py_False && self->view.type != RK_F32) {
        return PyErr_Format(PyExc_ValueError,
                            "Tensor: %s cannot become float32 without a copy",
                            rk_type_get(self->view.type)->name);
    }
    array = tensor_numpy(self, NULL);
    if (array == NULL) {
        return NULL;
    }
    if (dtype == Py_None && (copy != Py_True || self->view.type != RK_F32)) {
        return array;
    }
    cast = dtype == Py_None ? PyObject_CallMethod(array, "copy", NULL)
                            : PyObject_CallMethod(array, "astype", "O", dtype);
    Py_DECREF(array);
    return cast;
}

static PyObject *tensor_equals(tensor_object *self, PyObject *with)
{
    const tensor_object *other = (tensor_object *)with;
    bool equal;

    if (Py_TYPE(with) != Py_TYPE(self)) {
        return PyErr_Format(PyExc_TypeError, "equals: %s is not a Tensor",
                            Py_TYPE(with)->tp_name);
    }
    equal = self->view.type == other->view.type &&
            self->view.n_dims == other->view.n_dims &&
            memcmp(self->view.shape, other->view.shape,
                   (size_t)self->view.n_dims * sizeof *self->view.shape) == 0;
    if (equal && self->view.n_bytes > 0) {
        Py_BEGIN_ALLOW_THREADS;
        equal = memcmp(self->view.data, other->view.data,
                       (size_t)self->view.n_bytes) == 0;
        Py_END_ALLOW_THREADS;
    }
    return PyBool_FromLong(equal);
}

/* ---- DLPack ------------------------------------------------------------- */

_Static_assert(RK_TENSOR_MAX_DIMS <= RK_LEND_MAX_DIMS, "a capsule holds them");

/* A Tensor's capsule; its shape and strides are copied. */
static PyObject *tensor_capsule(PyObject *tensor, bool versioned,
                                uint64_t flags)
{
    int64_t shape[RK_TENSOR_MAX_DIMS], strides[RK_TENSOR_MAX_DIMS];
    const rk_tensor_view *view = rk_tensor_look(tensor);

    memcpy(shape, view->shape, sizeof shape);
    rk_tensor_strides(strides, view);
    DLTensor dl = {
        .data = view->n_elements > 0 ? (void *)view->data : NULL,
        .device = {kDLCPU, 0},
        .ndim = view->n_dims,
        .dtype = rk_lend_types[view->type],
        .shape = shape,
        .strides = strides,
    };
    return rk_lend_capsule(tensor, &dl, versioned, flags);
}

/* The same tensor over fresh, writable memory; a new reference. */
static PyObject *copied(PyObject *tensor)
{
    PyObject *bytes, *shape, *copy = NULL;
    const rk_tensor_view *view = rk_tensor_look(tensor);

    bytes =
        PyByteArray_FromStringAndSize(view->data, (Py_ssize_t)view->n_bytes);
    shape = PyObject_GetAttrString(tensor, "shape");
    if (bytes != NULL && shape != NULL) {
        copy = PyObject_CallFunction((PyObject *)Py_TYPE(tensor), "OsO", bytes,
                                     rk_type_get(view->type)->name, shape);
    }
    Py_XDECREF(bytes);
    Py_XDECREF(shape);
    return copy;
}

/* A new capsule, or NULL with BufferError (block types, another device or a
 * stream, read-only memory for a consumer that cannot be told) or TypeError. */
static PyObject *tensor_lend(PyObject *tensor, PyObject *args, PyObject *kwargs)
{
    rk_lend_request request;
    const rk_tensor_view *view = rk_tensor_look(tensor);
    uint64_t flags = 0;
    PyObject *capsule = NULL;

    if (rk_lend_read(&request, args, kwargs) < 0) {
        return NULL;
    }
    if (request.stream != Py_None) {
        PyErr_SetString(PyExc_BufferError,
                        "__dlpack__: a Tensor lies in CPU memory, stream must "
                        "be None");
        return NULL;
    }
    if (request.placed && (request.device != kDLCPU || request.ordinal != 0)) {
        PyErr_SetString(PyExc_BufferError,
                        "__dlpack__: a Tensor can only be exported to the CPU, "
                        "dl_device (1, 0)");
        return NULL;
    }
    if (rk_type_get(view->type)->block_elements > 1) {
        return PyErr_Format(PyExc_BufferError,
                            "__dlpack__: DLPack has no type for %s blocks; use "
                            "Tensor.numpy() for float32 values",
                            rk_type_get(view->type)->name);
    }
    if (request.copy) {
        tensor = copied(tensor);
        flags |= DLPACK_FLAG_BITMASK_IS_COPIED;
    } else {
        Py_INCREF(tensor);
        flags |= ((tensor_object *)tensor)->buffer.readonly
                     ? DLPACK_FLAG_BITMASK_READ_ONLY
                     : 0;
    }
    if (tensor == NULL) {
        return NULL;
    }
    if (!request.versioned && (flags & DLPACK_FLAG_BITMASK_READ_ONLY)) {
        PyErr_SetString(PyExc_BufferError,
                        "__dlpack__: read-only memory needs a consumer of "
                        "DLPack 1.0 (max_version=(1, 0)), or copy=True");
    } else {
        capsule = tensor_capsule(tensor, request.versioned, flags);
    }
    Py_DECREF(tensor);
    return capsule;
}

static PyObject *tensor_lend_device(PyObject *Py_UNUSED(tensor),
                                    PyObject *Py_UNUSED(unused))
{
    return Py_BuildValue("(ii)", (int)kDLCPU, 0);
}

/* ---- the type ---------------------------------------------------------- */

static PyMethodDef METHODS[] = {
    {"numpy", (PyCFunction)tensor_numpy, METH_NOARGS,
     "numpy()\n--\n\n"
     "The values as a float32 array: a view of F32 memory, for other types a "
     "converted copy."},
    {"equals", (PyCFunction)tensor_equals, METH_O,
     "equals(other)\n--\n\nAre type, shape and all bytes the same?"},
    {"__array__", (PyCFunction)(void (*)(void))tensor_array,
     METH_VARARGS | METH_KEYWORDS,
     "__array__(dtype=None, copy=None)\n--\n\nnumpy(), cast to dtype."},
    {"__dlpack__", (PyCFunction)(void (*)(void))tensor_lend,
     METH_VARARGS | METH_KEYWORDS,
     "__dlpack__(*, stream=None, max_version=None, dl_device=None, "
     "copy=None)\n--\n\n"
     "F32, F16 or BF16 memory as a DLPack capsule, without a copy unless asked "
     "for."},
    {"__dlpack_device__", tensor_lend_device, METH_NOARGS,
     "__dlpack_device__()\n--\n\n(1, 0): the CPU."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef ATTRIBUTES[] = {
    {"type", (getter)tensor_get_type, NULL,
     "The element type's name, such as \"BF16\" or \"Q4_K\".", NULL},
    {"shape", (getter)tensor_get_shape, NULL,
     "The number of elements along each dimension, row-major.", NULL},
    {"name", (getter)tensor_get_name, (setter)tensor_set_name,
     "What messages call the tensor: a str or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* Python 3.10 has no flag for weak references: the offset does it there too.
 */
static PyMemberDef MEMBERS[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(tensor_object, weak_references),
     READONLY, NULL},
    {"nbytes", T_LONGLONG, offsetof(tensor_object, view.n_bytes), READONLY,
     "Bytes of the stored form."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, tensor_new},
    {Py_tp_dealloc, tensor_dealloc},
    {Py_tp_traverse, tensor_traverse},
    {Py_tp_repr, tensor_repr},
    {Py_tp_methods, METHODS},
    {Py_tp_getset, ATTRIBUTES},
    {Py_tp_members, MEMBERS},
    {Py_bf_getbuffer, tensor_getbuffer},
    {Py_bf_releasebuffer, tensor_releasebuffer},
    {Py_tp_doc,
     "Tensor(buffer, type, shape, offset=0)\n--\n\n"
     "A typed, row-major window on the bytes of `buffer` (a mapped file, "
     "bytes, "
     "a contiguous array), which it keeps alive and does not copy.\n\n"
     "type: \"F32\", \"F16\", \"BF16\" or a GGUF block type \"Q4_0\" ... "
     "\"Q6_K\". shape: logical elements. ValueError names what does not fit."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "rksc._core.Tensor",
    .basicsize = sizeof(tensor_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *rk_tensor_type_new(PyObject *module)
{
    return PyType_FromModuleAndSpec(module, &SPEC, NULL);
}
