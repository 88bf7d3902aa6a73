/* Settings of a generation by position, and the table of token bytes. */
#include "settings.h"

#include <math.h>
#include <string.h>

/* ---- the table of token bytes -------------------------------------------- */

static int fill_table(rk_token_table *table, PyObject *items,
                      int32_t vocab_size)
{
    Py_ssize_t n = PyTuple_GET_SIZE(items);
    int64_t total = 0;

    /* What lies beyond the vocabulary can never be generated. */
    n = n < vocab_size ? n : vocab_size;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i);

        if (!PyBytes_Check(item)) {
            PyErr_Format(PyExc_TypeError,
                         "token_bytes[%zd] must be bytes, not %s", i,
                         Py_TYPE(item)->tp_name);
            return -1;
        }
        total += PyBytes_GET_SIZE(item);
    }
    table->bytes = PyMem_RawMalloc((size_t)total + 1);
    table->offsets =
        PyMem_RawCalloc((size_t)vocab_size + 1, sizeof *table->offsets);
    if (table->bytes == NULL || table->offsets == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    total = 0;
    for (Py_ssize_t i = 0; i < vocab_size; i++) {
        if (i < n) {
            PyObject *item = PyTuple_GET_ITEM(items, i);

            memcpy(table->bytes + total, PyBytes_AS_STRING(item),
                   (size_t)PyBytes_GET_SIZE(item));
            total += PyBytes_GET_SIZE(item);
        }
        table->offsets[i + 1] = total;
    }
    return 0;
}

static int fill_special(rk_token_table *table, PyObject *special_ids,
                        int32_t vocab_size)
{
    rk_tokens ids = {0};

    if (rk_tokens_read(&ids, special_ids, vocab_size, "special_ids") < 0) {
        return -1;
    }
    table->special = PyMem_RawCalloc((size_t)vocab_size, 1);
    if (table->special == NULL) {
        PyErr_NoMemory();
    } else {
        for (int32_t i = 0; i < ids.n; i++) {
            table->special[ids.ids[i]] = 1;
        }
    }
    rk_tokens_free(&ids);
    return table->special == NULL ? -1 : 0;
}

int rk_token_table_read(rk_token_table *table, PyObject *token_bytes,
                        PyObject *special_ids, int32_t vocab_size)
{
    PyObject *items;
    int failed;

    *table = (rk_token_table){0};
    if (token_bytes == Py_None) {
        return 0;
    }
    items = PySequence_Tuple(token_bytes);
    failed = items == NULL || fill_table(table, items, vocab_size) < 0 ||
             (special_ids != Py_None &&
              fill_special(table, special_ids, vocab_size) < 0);
    Py_XDECREF(items);
    if (failed) {
        rk_token_table_free(table);
        return -1;
    }
    return 0;
}

void rk_token_table_free(rk_token_table *table)
{
    PyMem_RawFree(table->bytes);
    PyMem_RawFree(table->offsets);
    PyMem_RawFree(table->special);
    *table = (rk_token_table){0};
}

/* ---- settings ------------------------------------------------------------ */

void rk_settings_free(rk_settings *s)
{
    rk_tokens_free(&s->stop_ids);
    Py_CLEAR(s->strings);
    PyMem_RawFree(s->stop_strings);
    PyMem_RawFree(s->stop_lengths);
    s->stop_strings = NULL;
    s->stop_lengths = NULL;
}

static int read_strings(rk_settings *s, PyObject *object)
{
    Py_ssize_t n;

    s->strings = PySequence_Tuple(object);
    if (s->strings == NULL) {
        return -1;
    }
    n = PyTuple_GET_SIZE(s->strings);
    if (n > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "stop_strings: too many");
        return -1;
    }
    s->stop_strings = PyMem_RawCalloc((size_t)n + 1, sizeof *s->stop_strings);
    s->stop_lengths = PyMem_RawCalloc((size_t)n + 1, sizeof *s->stop_lengths);
    if (s->stop_strings == NULL || s->stop_lengths == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyTuple_GET_ITEM(s->strings, i);

        if (!PyBytes_Check(item)) {
            PyErr_Format(PyExc_TypeError,
                         "stop_strings[%zd] must be bytes, not %s", i,
                         Py_TYPE(item)->tp_name);
            return -1;
        }
        if (PyBytes_GET_SIZE(item) < 1 || PyBytes_GET_SIZE(item) > 1 << 20) {
            PyErr_Format(PyExc_ValueError,
                         "stop_strings[%zd] has %zd bytes, not 1 .. %d", i,
                         PyBytes_GET_SIZE(item), 1 << 20);
            return -1;
        }
        s->stop_strings[i] = (const uint8_t *)PyBytes_AS_STRING(item);
        s->stop_lengths[i] = (int32_t)PyBytes_GET_SIZE(item);
    }
    return 0;
}

/* A float in [least, most]; NaN is in no interval. */
static int read_float(double *out, PyObject *object, const char *what,
                      double least, double most)
{
    *out = PyFloat_AsDouble(object);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (!(*out >= least && *out <= most)) {
        PyErr_Format(PyExc_ValueError, "%s is out of range: %R", what, object);
        return -1;
    }
    return 0;
}

int rk_settings_read(rk_settings *s, PyObject *const *objects,
                     const rk_token_table *table, int32_t vocab_size)
{
    rk_generation_options *o = &s->options;
    double temperature, top_p, min_p;

    *s = (rk_settings){0};
    if (rk_int_read(&o->max_new_tokens, objects[0], "max_new_tokens", 0,
                    INT32_MAX) < 0 ||
        read_float(&temperature, objects[1], "temperature", 0, 1e30) < 0 ||
        rk_int_read(&o->draw.top_k, objects[2], "top_k", 0, INT32_MAX) < 0 ||
        read_float(&top_p, objects[3], "top_p", 0, 1) < 0 ||
        read_float(&min_p, objects[4], "min_p", 0, 1) < 0 ||
        rk_uint64_read(&o->draw.seed, objects[5], "seed") < 0 ||
        rk_tokens_read(&s->stop_ids, objects[6], vocab_size, "stop_ids") < 0 ||
        read_strings(s, objects[7]) < 0 ||
        read_float(&o->cgee.stop_top, objects[8], "stop_top", 0, INFINITY) <
            0 ||
        read_float(&o->cgee.stop_lead, objects[9], "stop_lead", 0, 1) < 0 ||
        rk_int_read(&o->cgee.min_steps, objects[10], "min_steps", 1,
                    INT32_MAX) < 0) {
        rk_settings_free(s);
        return -1;
    }
    o->draw.temperature = (float)temperature;
    o->draw.top_p = (float)top_p;
    o->draw.min_p = (float)min_p;
    o->draw.forced = -1;
    o->stop_ids = s->stop_ids.ids;
    o->n_stop_ids = s->stop_ids.n;
    o->stop_strings = s->stop_strings;
    o->stop_lengths = s->stop_lengths;
    o->n_stop_strings = (int32_t)PyTuple_GET_SIZE(s->strings);
    if (table->offsets != NULL) {
        o->token_bytes = table->bytes;
        o->token_offsets = table->offsets;
        o->special = table->special;
    }
    return 0;
}
