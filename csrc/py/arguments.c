/* What rksc._core.Session is made with, and the branches that its methods are
 * called with, read and checked. */
#include "py.h"

#include <string.h>

static int read_isa(PyObject *object, rk_isa *isa)
{
    const char *name;

    if (object == Py_None) {
        *isa = rk_isa_best();
        return 0;
    }
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "isa must be a str or None, not %s",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    name = PyUnicode_AsUTF8(object);
    if (name == NULL) {
        return -1;
    }
    for (int i = 0; i < RK_N_ISAS; i++) {
        if (strcmp(name, rk_isa_name((rk_isa)i)) == 0 &&
            rk_isa_supported((rk_isa)i)) {
            *isa = (rk_isa)i;
            return 0;
        }
    }
    PyErr_Format(
        PyExc_ValueError,
        "isa %R is not one of this machine's: `rksc doctor` lists them",
        object);
    return -1;
}

/* RK_F32, RK_BF16, or -1 for None; -2 with an exception. */
static int read_dtype(PyObject *object)
{
    if (object == Py_None) {
        return -1;
    }
    if (PyUnicode_Check(object)) {
        if (PyUnicode_CompareWithASCIIString(object, "float32") == 0) {
            return RK_F32;
        }
        if (PyUnicode_CompareWithASCIIString(object, "bfloat16") == 0) {
            return RK_BF16;
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "dtype must be \"float32\", \"bfloat16\" or None, got %R",
                 object);
    return -2;
}

/* What to round to, -1: as the session chooses; -2 with an exception. */
static int read_activations(PyObject *object)
{
    static const char *const names[] = {[RK_ROUND_ACT] = "bfloat16",
                                        [RK_ROUND_INT16] = "int16",
                                        [RK_ROUND_INT8] = "int8"};

    if (object == Py_None) {
        return -1;
    }
    for (int i = 0; i < 3 && PyUnicode_Check(object); i++) {
        if (PyUnicode_CompareWithASCIIString(object, names[i]) == 0) {
            return i;
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "activations must be \"int8\", \"int16\", \"bfloat16\" or "
                 "None, got %R",
                 object);
    return -2;
}

/* "cpu": -1; "cuda" and "cuda:N": the GPU's number. */
static int read_device(PyObject *device, int *ordinal)
{
    const char *text = NULL;
    char *end;
    long n = 0;

    *ordinal = -1;
    if (device == NULL) {
        return 0;
    }
    if (PyUnicode_Check(device)) {
        text = PyUnicode_AsUTF8(device);
        if (text == NULL) {
            return -1;
        }
        if (strcmp(text, "cpu") == 0) {
            return 0;
        }
        if (strcmp(text, "cuda") == 0) {
            *ordinal = 0;
            return 0;
        }
        if (strncmp(text, "cuda:", 5) == 0 && text[5] >= '0' &&
            text[5] <= '9') {
            n = strtol(text + 5, &end, 10);
            if (*end == '\0' && n <= INT16_MAX) {
                *ordinal = (int)n;
                return 0;
            }
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "device must be \"cpu\", \"cuda\" or \"cuda:N\", got %R",
                 device);
    return -1;
}

typedef struct given {
    PyObject *weights, *config, *device, *dtype, *kv_bytes, *block_tokens;
    PyObject *n_threads, *isa, *step_tokens, *token_bytes, *hash_bits;
    PyObject *activations, *special_ids;
    int share, poison;
} given;

static int parse(given *a, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {
        "weights",     "config",       "device",      "dtype",
        "kv_bytes",    "block_tokens", "n_threads",   "isa",
        "step_tokens", "token_bytes",  "share",       "hash_bits",
        "poison",      "activations",  "special_ids", NULL};

    *a = (given){.dtype = Py_None,
                 .n_threads = Py_None,
                 .isa = Py_None,
                 .token_bytes = Py_None,
                 .activations = Py_None,
                 .special_ids = Py_None,
                 .share = 1};
    return PyArg_ParseTupleAndKeywords(
               args, kwargs, "OO|$OOOOOOOOpOpOO:Session", keywords, &a->weights,
               &a->config, &a->device, &a->dtype, &a->kv_bytes,
               &a->block_tokens, &a->n_threads, &a->isa, &a->step_tokens,
               &a->token_bytes, &a->share, &a->hash_bits, &a->poison,
               &a->activations, &a->special_ids)
               ? 0
               : -1;
}

static int read_kv_bytes(PyObject *object, int64_t *bytes)
{
    uint64_t value = 0;

    if (rk_uint64_read(&value, object, "kv_bytes") < 0) {
        return -1;
    }
    if (value < 1 || value > INT64_MAX) {
        PyErr_Format(PyExc_ValueError,
                     "kv_bytes must be in 1 .. 2**63 - 1, got %R", object);
        return -1;
    }
    *bytes = (int64_t)value;
    return 0;
}

static int read_options(const given *a, rk_options *o)
{
    int32_t hash_bits = 64;

    *o = (rk_options){.kv_bytes = (int64_t)2 << 30,
                      .block_tokens = 16,
                      .step_tokens = 512,
                      .n_threads = rk_cpu_default_threads(),
                      .share = a->share != 0,
                      .poison = a->poison != 0};
    if (read_isa(a->isa, &o->isa) < 0 ||
        (a->kv_bytes != NULL && read_kv_bytes(a->kv_bytes, &o->kv_bytes) < 0) ||
        (a->block_tokens != NULL &&
         rk_int_read(&o->block_tokens, a->block_tokens, "block_tokens", 1,
                     RK_TILE) < 0) ||
        (a->n_threads != Py_None &&
         rk_int_read(&o->n_threads, a->n_threads, "n_threads", 1, 1024) < 0) ||
        (a->step_tokens != NULL &&
         rk_int_read(&o->step_tokens, a->step_tokens, "step_tokens", 1,
                     1 << 16) < 0) ||
        (a->hash_bits != NULL &&
         rk_int_read(&hash_bits, a->hash_bits, "hash_bits", 0, 64) < 0)) {
        return -1;
    }
    o->hash_bits = hash_bits;
    return 0;
}

int rk_session_arguments_read(rk_session_arguments *out, PyObject *args,
                              PyObject *kwargs)
{
    given a;

    if (parse(&a, args, kwargs) < 0 || read_device(a.device, &out->gpu) < 0 ||
        read_options(&a, &out->options) < 0) {
        return -1;
    }
    out->compute = read_dtype(a.dtype);
    if (out->compute < -1) {
        return -1;
    }
    out->rounding = read_activations(a.activations);
    if (out->rounding < -1) {
        return -1;
    }
    if (out->rounding > RK_ROUND_ACT && out->gpu >= 0) {
        PyErr_Format(PyExc_ValueError,
                     "activations=%R is for device=\"cpu\" only",
                     a.activations);
        return -1;
    }
    out->weights = a.weights;
    out->config = a.config;
    out->token_bytes = a.token_bytes;
    out->special_ids = a.special_ids;
    return 0;
}

/* ---- branches ------------------------------------------------------------ */

branch_object *rk_branch_read(session_object *session, PyObject *object,
                              const char *what)
{
    branch_object *branch = (branch_object *)object;

    if ((PyObject *)Py_TYPE(object) != session->state->branch_type) {
        PyErr_Format(PyExc_TypeError, "%s must be a rksc.Branch, not %.200s",
                     what, Py_TYPE(object)->tp_name);
        return NULL;
    }
    if (branch->session != session) {
        PyErr_Format(PyExc_ValueError, "%s belongs to another session", what);
        return NULL;
    }
    return branch;
}

branch_object *const *rk_branches_of(PyObject *tuple)
{
    return (branch_object *const *)((PyTupleObject *)tuple)->ob_item;
}

PyObject *rk_branches_read(session_object *session, PyObject *sequence)
{
    PyObject *branches;

    if (!PySequence_Check(sequence)) {
        PyErr_Format(PyExc_TypeError,
                     "branches must be a sequence of rksc.Branch, not %.200s",
                     Py_TYPE(sequence)->tp_name);
        return NULL;
    }
    branches = PySequence_Tuple(sequence);
    if (branches == NULL) {
        return NULL;
    }
    if (PyTuple_GET_SIZE(branches) > INT32_MAX / 2) {
        PyErr_SetString(PyExc_ValueError, "branches: too many");
        Py_DECREF(branches);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(branches); i++) {
        char what[32];

        PyOS_snprintf(what, sizeof what, "branches[%zd]", i);
        if (rk_branch_read(session, PyTuple_GET_ITEM(branches, i), what) ==
            NULL) {
            Py_DECREF(branches);
            return NULL;
        }
    }
    return branches;
}
