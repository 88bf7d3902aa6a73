/* A rksc.ModelConfig in the engine's words. */
#include "py.h"

static int read_int(int32_t *out, PyObject *config, const char *field,
                    int32_t least)
{
    PyObject *value = PyObject_GetAttrString(config, field);
    int failed;

    if (value == NULL) {
        return -1;
    }
    failed = rk_int_read(out, value, field, least, INT32_MAX);
    Py_DECREF(value);
    return failed;
}

int rk_config_flag(PyObject *config, const char *field)
{
    PyObject *value = PyObject_GetAttrString(config, field);
    int truth = value != NULL ? PyObject_IsTrue(value) : -1;

    Py_XDECREF(value);
    return truth;
}

int rk_config_choice(rk_choice *out, PyObject *config, const char *field)
{
    PyObject *value = PyObject_GetAttrString(config, field);
    int truth = 0;

    if (value == NULL) {
        return -1;
    }
    if (value != Py_None) {
        truth = PyObject_IsTrue(value);
    }
    *out = value == Py_None ? RK_CHOICE_OPEN
                            : (truth ? RK_CHOICE_YES : RK_CHOICE_NO);
    Py_DECREF(value);
    return truth < 0 ? -1 : 0;
}

/* *frequencies becomes the owner of the array. */
static int read_frequencies(rk_config *c, double **frequencies,
                            PyObject *config)
{
    int32_t half = c->head_dim / 2;
    PyObject *value = PyObject_GetAttrString(config, "inv_freq"), *items;

    if (value == NULL) {
        return -1;
    }
    items = PySequence_Tuple(value);
    Py_DECREF(value);
    if (items == NULL) {
        return -1;
    }
    if (PyTuple_GET_SIZE(items) != half) {
        PyErr_Format(PyExc_ValueError, "inv_freq has %zd numbers, not %d",
                     PyTuple_GET_SIZE(items), (int)half);
        goto fail;
    }
    *frequencies = PyMem_RawCalloc((size_t)half + 1, sizeof **frequencies);
    if (*frequencies == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    for (int32_t i = 0; i < half; i++) {
        (*frequencies)[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(items, i));
        if (PyErr_Occurred()) {
            goto fail;
        }
    }
    c->inv_freq = *frequencies;
    Py_DECREF(items);
    return 0;

fail:
    Py_DECREF(items);
    return -1;
}

int rk_config_read(rk_config *c, double **frequencies, PyObject *config)
{
    PyObject *eps;
    int interleaved;

    if (read_int(&c->n_layers, config, "n_layers", 1) < 0 ||
        read_int(&c->width, config, "width", 1) < 0 ||
        read_int(&c->ffn_width, config, "ffn_width", 1) < 0 ||
        read_int(&c->n_heads, config, "n_heads", 1) < 0 ||
        read_int(&c->n_kv_heads, config, "n_kv_heads", 1) < 0 ||
        read_int(&c->head_dim, config, "head_dim", 2) < 0 ||
        read_int(&c->vocab_size, config, "vocab_size", 1) < 0 ||
        read_int(&c->max_positions, config, "max_positions", 1) < 0 ||
        read_int(&c->window, config, "window", 0) < 0 ||
        read_int(&c->window_from, config, "window_from", 0) < 0) {
        return -1;
    }
    interleaved = rk_config_flag(config, "rope_interleaved");
    if (interleaved < 0) {
        return -1;
    }
    eps = PyObject_GetAttrString(config, "norm_eps");
    if (eps == NULL) {
        return -1;
    }
    c->rope_interleaved = interleaved;
    c->norm_eps = (float)PyFloat_AsDouble(eps);
    Py_DECREF(eps);
    if (PyErr_Occurred()) {
        return -1;
    }
    if ((int64_t)c->n_heads * c->head_dim > INT32_MAX ||
        (int64_t)c->n_kv_heads * c->head_dim > INT32_MAX) {
        PyErr_Format(PyExc_ValueError,
                     "n_heads %d times head_dim %d is more than 2**31 - 1",
                     (int)c->n_heads, (int)c->head_dim);
        return -1;
    }
    return read_frequencies(c, frequencies, config);
}
