/* rksc.DeviceArray: a result in the memory of a GPU, for others to use there.
 *
 * The object owns its piece of memory; a capsule owns the object. So the piece
 * goes back when the object and all who took it by DLPack have let go, however
 * long the session is gone. It knows no Python object, hence no cycle.
 */
#include "py.h"

#include "lend.h"

#include <unistd.h>

typedef struct array_object {
    PyObject_HEAD rk_lent *lent;
    pid_t process; /* whose memory it is */
    int n_dims;
    int64_t shape[2];
} array_object;

PyObject *rk_device_array_new(const rk_state *state, rk_lent *lent,
                              const int64_t *shape, int n_dims)
{
    PyTypeObject *type = (PyTypeObject *)state->device_array_type;
    array_object *self = (array_object *)type->tp_alloc(type, 0);

    if (self == NULL) {
        lent->release(lent);
        return NULL;
    }
    self->lent = lent;
    self->process = getpid();
    self->n_dims = n_dims;
    for (int i = 0; i < n_dims; i++) {
        self->shape[i] = shape[i];
    }
    return (PyObject *)self;
}

static void array_dealloc(array_object *self)
{
    PyTypeObject *type = Py_TYPE(self);

    if (self->process == getpid()) { /* a forked child has no GPU to give to */
        /* The last one frees the pool, which waits for the GPU. */
        Py_BEGIN_ALLOW_THREADS self->lent->release(self->lent);
        Py_END_ALLOW_THREADS
    }
    type->tp_free(self);
    Py_DECREF(type);
}

/* The consumer's stream as the protocol numbers them: None is the legacy
 * default stream, -1 wants no order. 0, or -1 with an exception. */
static int hand_over(const array_object *self, PyObject *stream)
{
    const rk_state *state = rk_state_of(Py_TYPE(self));
    rk_error err = {0};
    rk_status status;
    long long number = 1;
    int beyond;

    if (stream != Py_None) {
        if (!PyLong_Check(stream)) {
            PyErr_Format(PyExc_TypeError,
                         "__dlpack__: stream must be an int or None, not %s",
                         Py_TYPE(stream)->tp_name);
            return -1;
        }
        number = PyLong_AsLongLongAndOverflow(stream, &beyond);
        if (number == -1 && beyond == 0) {
            return 0;
        }
        if (number <= 0 || beyond != 0) {
            PyErr_Format(PyExc_BufferError,
                         "__dlpack__: stream %R: 1 is the default stream, 2 "
                         "that of the thread, larger ones addresses",
                         stream);
            return -1;
        }
    }
    status = self->lent->await(self->lent, (uintptr_t)number, &err);
    if (status != RK_OK) {
        rk_raise(state, &err);
        return -1;
    }
    return 0;
}

static PyObject *array_lend(array_object *self, PyObject *args,
                            PyObject *kwargs)
{
    rk_lend_request request;
    int64_t strides[2] = {self->n_dims == 2 ? self->shape[1] : 1, 1};
    DLTensor dl = {
        .data = self->lent->data,
        .device = {kDLCUDA, self->lent->ordinal},
        .ndim = self->n_dims,
        .dtype = {kDLFloat, 32, 1},
        .shape = self->shape,
        .strides = strides,
    };

    if (rk_lend_read(&request, args, kwargs) < 0) {
        return NULL;
    }
    if (self->process != getpid()) {
        PyErr_SetString(PyExc_RuntimeError,
                        "__dlpack__: a DeviceArray cannot be used in a forked "
                        "process");
        return NULL;
    }
    if (request.copy ||
        (request.placed && (request.device != kDLCUDA ||
                            request.ordinal != self->lent->ordinal))) {
        PyErr_Format(PyExc_BufferError,
                     "__dlpack__: a DeviceArray is exported where it lies, "
                     "dl_device (2, %d), without a copy; branch.logits and "
                     "branch.hidden are NumPy arrays",
                     self->lent->ordinal);
        return NULL;
    }
    if (hand_over(self, request.stream) < 0) {
        return NULL;
    }
    return rk_lend_capsule((PyObject *)self, &dl, request.versioned, 0);
}

static PyObject *array_lend_device(array_object *self,
                                   PyObject *Py_UNUSED(unused))
{
    return Py_BuildValue("(ii)", (int)kDLCUDA, self->lent->ordinal);
}

/* NumPy would make an array of one object of it. */
static PyObject *array_refuse(array_object *self, PyObject *Py_UNUSED(args),
                              PyObject *Py_UNUSED(kwargs))
{
    return PyErr_Format(PyExc_TypeError,
                        "a DeviceArray on cuda:%d cannot become a NumPy array; "
                        "branch.logits and branch.hidden are",
                        self->lent->ordinal);
}

static PyObject *get_shape(array_object *self, void *Py_UNUSED(closure))
{
    return self->n_dims == 1 ? Py_BuildValue("(L)", (long long)self->shape[0])
                             : Py_BuildValue("(LL)", (long long)self->shape[0],
                                             (long long)self->shape[1]);
}

static PyObject *get_device(array_object *self, void *Py_UNUSED(closure))
{
    return PyUnicode_FromFormat("cuda:%d", self->lent->ordinal);
}

static PyObject *array_repr(array_object *self)
{
    PyObject *shape = get_shape(self, NULL), *text = NULL;

    if (shape != NULL) {
        text = PyUnicode_FromFormat("<rksc.DeviceArray float32 %R on cuda:%d>",
                                    shape, self->lent->ordinal);
    }
    Py_XDECREF(shape);
    return text;
}

static PyGetSetDef ATTRIBUTES[] = {
    {"shape", (getter)get_shape, NULL, "Row-major and dense.", NULL},
    {"device", (getter)get_device, NULL, "The GPU, such as \"cuda:0\".", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef METHODS[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))array_lend,
     METH_VARARGS | METH_KEYWORDS,
     "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, "
     "copy=None)\n--\n\n"
     "A capsule over the memory where it lies; `stream` is made to wait until "
     "the numbers are there."},
    {"__dlpack_device__", (PyCFunction)array_lend_device, METH_NOARGS,
     "__dlpack_device__($self, /)\n--\n\n(2, n): CUDA, the GPU's number."},
    {"__array__", (PyCFunction)(void (*)(void))array_refuse,
     METH_VARARGS | METH_KEYWORDS,
     "__array__($self, /, dtype=None, copy=None)\n--\n\n"
     "TypeError: the memory is the GPU's."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_dealloc, array_dealloc},
    {Py_tp_repr, array_repr},
    {Py_tp_methods, METHODS},
    {Py_tp_getset, ATTRIBUTES},
    {Py_tp_doc, "float32 numbers in a GPU's memory, for from_dlpack."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "rksc._core.DeviceArray",
    .basicsize = sizeof(array_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *rk_device_array_type_new(PyObject *module)
{
    return PyType_FromModuleAndSpec(module, &SPEC, NULL);
}
