/* Values between Python and C: errors, token ids, integers, arrays. The only
 * file that includes NumPy's C API; its table of functions is one static
 * variable for the process, which is why the module refuses sub-interpreters.
 */
#include "py.h"

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define NPY_TARGET_VERSION NPY_1_23_API_VERSION
#include <numpy/arrayobject.h>

#include <string.h>

int rk_numpy_import(void)
{
    return PyArray_ImportNumPyAPI();
}

/* ---- errors ----------------------------------------------------------------
 */

PyObject *rk_exception(const rk_state *state, const rk_error *err)
{
    PyObject *type = NULL, *text, *exception;

    switch (err->status) {
    case RK_EVALUE:
        type = PyExc_ValueError;
        break;
    case RK_ETYPE:
        type = PyExc_TypeError;
        break;
    case RK_EBUFFER:
        type = PyExc_BufferError;
        break;
    case RK_ENOMEM:
        type = PyExc_MemoryError;
        break;
    case RK_ECAPACITY:
        type = state->capacity_error;
        break;
    case RK_ESTATE:
        type = PyExc_RuntimeError;
        break;
    case RK_EINTERRUPTED:
    case RK_OK:
        type = PyExc_SystemError; /* nothing that a call could mean */
        break;
    }
    if (type == NULL) { /* the module's state was cleared at exit */
        type = PyExc_RuntimeError;
    }
    /* A long name may have been cut in the middle of a character. */
    text = PyUnicode_DecodeUTF8(err->text, (Py_ssize_t)strlen(err->text),
                                "replace");
    if (text == NULL) {
        return NULL;
    }
    exception = PyObject_CallFunctionObjArgs(type, text, NULL);
    Py_DECREF(text);
    return exception;
}

PyObject *rk_raise(const rk_state *state, const rk_error *err)
{
    PyObject *exception;

    if (err->status == RK_EINTERRUPTED) {
        return NULL; /* the handler's exception is already there */
    }
    exception = rk_exception(state, err);
    if (exception != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
        Py_DECREF(exception);
    }
    return NULL;
}

/* ---- integers ------------------------------------------------------------ */

int rk_int_read(int32_t *out, PyObject *object, const char *what, int32_t least,
                int32_t most)
{
    PyObject *integer = NULL;
    int overflow = 0;
    long long value = 0;

    if (!PyBool_Check(object) && PyIndex_Check(object)) {
        integer = PyNumber_Index(object);
        if (integer == NULL) {
            return -1;
        }
    } else {
        PyErr_Format(PyExc_TypeError, "%s must be an int, got %.200s", what,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    value = PyLong_AsLongLongAndOverflow(integer, &overflow);
    if (overflow != 0 || value < least || value > most) {
        if (most == INT32_MAX && overflow <= 0 && value < least) {
            PyErr_Format(PyExc_ValueError, "%s must be at least %d, got %S",
                         what, (int)least, integer);
        } else {
            PyErr_Format(PyExc_ValueError, "%s must be in %d .. %d, got %S",
                         what, (int)least, (int)most, integer);
        }
        Py_DECREF(integer);
        return -1;
    }
    Py_DECREF(integer);
    *out = (int32_t)value;
    return 0;
}

int rk_uint64_read(uint64_t *out, PyObject *object, const char *what)
{
    PyObject *integer;

    if (PyBool_Check(object) || !PyIndex_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be an int, got %.200s", what,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    integer = PyNumber_Index(object);
    if (integer == NULL) {
        return -1;
    }
    *out = PyLong_AsUnsignedLongLong(integer);
    if (PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "%s must be in 0 .. 2**64 - 1, got %S",
                     what, integer);
        Py_DECREF(integer);
        return -1;
    }
    Py_DECREF(integer);
    return 0;
}

/* ---- token ids ----------------------------------------------------------- */

void rk_tokens_free(rk_tokens *tokens)
{
    PyMem_RawFree(tokens->ids);
    *tokens = (rk_tokens){0};
}

static int tokens_alloc(rk_tokens *out, Py_ssize_t n, const char *what)
{
    *out = (rk_tokens){0};
    if (n > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: %zd tokens are too many", what, n);
        return -1;
    }
    out->ids = PyMem_RawMalloc((size_t)(n > 0 ? n : 1) * sizeof *out->ids);
    if (out->ids == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    out->n = (int32_t)n;
    return 0;
}

static int out_of_vocabulary(const char *what, Py_ssize_t at, PyObject *id,
                             int32_t vocab_size)
{
    PyErr_Format(PyExc_ValueError,
                 "%s: token %zd is %S, the vocabulary has ids 0 .. %d", what,
                 at, id, (int)vocab_size - 1);
    return -1;
}

static int read_array(rk_tokens *out, PyArrayObject *array, int32_t vocab_size,
                      const char *what)
{
    PyArrayObject *wide;
    const npy_int64 *ids;
    int failed = -1;

    if (PyArray_NDIM(array) != 1) {
        PyErr_Format(PyExc_ValueError,
                     "%s must have one dimension, got %d (of a batch take one "
                     "row)",
                     what, PyArray_NDIM(array));
        return -1;
    }
    if (!PyArray_ISINTEGER(array) && PyArray_SIZE(array) > 0) {
        PyErr_Format(PyExc_TypeError, "%s must be integers, got dtype %S", what,
                     (PyObject *)PyArray_DESCR(array));
        return -1;
    }
    /* A uint64 beyond int64 wraps to a negative number: refused as well. */
    wide = (PyArrayObject *)PyArray_FROMANY(
        (PyObject *)array, NPY_INT64, 1, 1,
        NPY_ARRAY_IN_ARRAY | NPY_ARRAY_FORCECAST | NPY_ARRAY_NOTSWAPPED);
    if (wide == NULL || tokens_alloc(out, PyArray_DIM(wide, 0), what) < 0) {
        goto done;
    }
    ids = PyArray_DATA(wide);
    for (int32_t i = 0; i < out->n; i++) {
        if (ids[i] < 0 || ids[i] >= vocab_size) {
            PyObject *id = PyArray_GETITEM(
                array, (char *)PyArray_DATA(array) +
                           (npy_intp)i * PyArray_STRIDE(array, 0));

            if (id != NULL) {
                out_of_vocabulary(what, i, id, vocab_size);
                Py_DECREF(id);
            }
            rk_tokens_free(out);
            goto done;
        }
        out->ids[i] = (int32_t)ids[i];
    }
    failed = 0;

done:
    Py_XDECREF(wide);
    return failed;
}

static int read_item(int32_t *out, PyObject *item, Py_ssize_t at,
                     int32_t vocab_size, const char *what)
{
    PyObject *integer;
    int overflow;
    long long id;

    if (PyBool_Check(item) || !PyIndex_Check(item)) {
        PyErr_Format(PyExc_TypeError,
                     "%s: token %zd must be an int, got %.200s", what, at,
                     Py_TYPE(item)->tp_name);
        return -1;
    }
    integer = PyNumber_Index(item);
    if (integer == NULL) {
        return -1;
    }
    id = PyLong_AsLongLongAndOverflow(integer, &overflow);
    if (overflow != 0 || id < 0 || id >= vocab_size) {
        out_of_vocabulary(what, at, integer, vocab_size);
        Py_DECREF(integer);
        return -1;
    }
    Py_DECREF(integer);
    *out = (int32_t)id;
    return 0;
}

/* What to do about a text where ids are wanted. */
static const char *text_hint(PyObject *object)
{
    return PyUnicode_Check(object) ? " (session.encode makes ids of a text)"
                                   : "";
}

static int read_sequence(rk_tokens *out, PyObject *object, int32_t vocab_size,
                         const char *what)
{
    PyObject *items;

    if (!PySequence_Check(object) || PyUnicode_Check(object) ||
        PyBytes_Check(object) || PyByteArray_Check(object)) {
        PyErr_Format(PyExc_TypeError,
                     "%s must be a sequence of token ids, got %.200s%s", what,
                     Py_TYPE(object)->tp_name, text_hint(object));
        return -1;
    }
    /* A tuple of our own: __index__ of an item may change a list. */
    items = PySequence_Tuple(object);
    if (items == NULL) {
        return -1;
    }
    if (tokens_alloc(out, PyTuple_GET_SIZE(items), what) < 0) {
        Py_DECREF(items);
        return -1;
    }
    for (int32_t i = 0; i < out->n; i++) {
        if (read_item(&out->ids[i], PyTuple_GET_ITEM(items, i), i, vocab_size,
                      what) < 0) {
            rk_tokens_free(out);
            Py_DECREF(items);
            return -1;
        }
    }
    Py_DECREF(items);
    return 0;
}

int rk_tokens_read(rk_tokens *out, PyObject *object, int32_t vocab_size,
                   const char *what)
{
    *out = (rk_tokens){0};
    if (PyArray_Check(object) && !PyArray_CheckExact(object) &&
        PyObject_HasAttrString(object, "mask")) {
        PyErr_Format(PyExc_TypeError,
                     "%s is a masked array, and a masked token is none: take "
                     "its .compressed() or .filled(id)",
                     what);
        return -1;
    }
    if (PyArray_Check(object)) {
        return read_array(out, (PyArrayObject *)object, vocab_size, what);
    }
    if (!PyList_Check(object) && !PyTuple_Check(object) &&
        PyObject_HasAttrString(object, "__array__")) {
        PyObject *array = PyArray_FROM_O(object);
        int failed;

        if (array == NULL) {
            return -1;
        }
        failed = read_array(out, (PyArrayObject *)array, vocab_size, what);
        Py_DECREF(array);
        return failed;
    }
    return read_sequence(out, object, vocab_size, what);
}

void rk_token_lists_free(rk_token_lists *lists)
{
    for (int32_t i = 0; i < lists->n; i++) {
        PyMem_RawFree(lists->ids[i]);
    }
    PyMem_RawFree(lists->ids);
    PyMem_RawFree(lists->lengths);
    *lists = (rk_token_lists){0};
}

int rk_token_lists_read(rk_token_lists *out, PyObject *object,
                        int32_t vocab_size, const char *what)
{
    PyObject *items;
    Py_ssize_t n;

    *out = (rk_token_lists){0};
    if (!PySequence_Check(object) || PyUnicode_Check(object) ||
        PyBytes_Check(object)) {
        PyErr_Format(PyExc_TypeError,
                     "%s must be a sequence of token sequences, got %.200s%s",
                     what, Py_TYPE(object)->tp_name, text_hint(object));
        return -1;
    }
    items = PySequence_Tuple(object);
    if (items == NULL) {
        return -1;
    }
    n = PyTuple_GET_SIZE(items);
    if (n > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: %zd are too many", what, n);
        goto fail;
    }
    out->ids = PyMem_RawCalloc((size_t)n + 1, sizeof *out->ids);
    out->lengths = PyMem_RawCalloc((size_t)n + 1, sizeof *out->lengths);
    if (out->ids == NULL || out->lengths == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        rk_tokens tokens;
        char name[64];

        PyOS_snprintf(name, sizeof name, "%s[%zd]", what, i);
        if (rk_tokens_read(&tokens, PyTuple_GET_ITEM(items, i), vocab_size,
                           name) < 0) {
            goto fail;
        }
        out->ids[i] = tokens.ids;
        out->lengths[i] = tokens.n;
        out->n++;
    }
    Py_DECREF(items);
    return 0;

fail:
    Py_DECREF(items);
    rk_token_lists_free(out);
    return -1;
}

/* ---- arrays -------------------------------------------------------------- */

static PyObject *new_array(int n_dims, const npy_intp *dims, int type,
                           void **data)
{
    PyObject *array = PyArray_SimpleNew(n_dims, (npy_intp *)dims, type);

    if (array != NULL) {
        *data = PyArray_DATA((PyArrayObject *)array);
    }
    return array;
}

PyObject *rk_array_int32(int64_t n, int32_t **data)
{
    const npy_intp dims[] = {(npy_intp)n};
    void *memory = NULL;
    PyObject *array = new_array(1, dims, NPY_INT32, &memory);

    *data = memory;
    return array;
}

PyObject *rk_array_float32(int64_t n, float **data)
{
    const npy_intp dims[] = {(npy_intp)n};
    void *memory = NULL;
    PyObject *array = new_array(1, dims, NPY_FLOAT32, &memory);

    *data = memory;
    return array;
}

PyObject *rk_array_float32_2d(int64_t rows, int64_t cols, float **data)
{
    const npy_intp dims[] = {(npy_intp)rows, (npy_intp)cols};
    void *memory = NULL;
    PyObject *array = new_array(2, dims, NPY_FLOAT32, &memory);

    *data = memory;
    return array;
}

PyObject *rk_array_read_2d(PyObject *object, int64_t least_rows, int64_t cols,
                           const char *what, const float **data)
{
    PyObject *array = PyArray_FROMANY(
        object, NPY_FLOAT32, 2, 2, NPY_ARRAY_IN_ARRAY | NPY_ARRAY_NOTSWAPPED);
    PyArrayObject *checked = (PyArrayObject *)array;

    if (array == NULL) {
        return NULL;
    }
    if (PyArray_DIM(checked, 0) < least_rows ||
        PyArray_DIM(checked, 1) != cols) {
        PyErr_Format(PyExc_ValueError,
                     "%s must have shape (%lld, %lld), got (%zd, %zd)", what,
                     (long long)least_rows, (long long)cols,
                     (Py_ssize_t)PyArray_DIM(checked, 0),
                     (Py_ssize_t)PyArray_DIM(checked, 1));
        Py_DECREF(array);
        return NULL;
    }
    *data = PyArray_DATA(checked);
    return array;
}
