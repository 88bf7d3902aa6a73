/* rksc._core: what is in the module, and what belongs to no object. Its state
 * is in state.c. */
#include "model/layout.h"
#include "model/quant.h"
#include "py.h"
#include "tensor.h"

static PyObject *default_threads(PyObject *Py_UNUSED(module),
                                 PyObject *Py_UNUSED(unused))
{
    return PyLong_FromLong(rk_cpu_default_threads());
}

static PyObject *check_weights(PyObject *module, PyObject *args,
                               PyObject *kwargs)
{
    static char *keywords[] = {"weights", "config", NULL};
    const rk_state *state = PyModule_GetState(module);
    PyObject *weights, *config;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:check_weights", keywords,
                                     &weights, &config) ||
        rk_weights_check(weights, config, state->tensor_type) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"check_weights", (PyCFunction)(void (*)(void))check_weights,
     METH_VARARGS | METH_KEYWORDS,
     "check_weights(weights, config)\n--\n\n"
     "ValueError unless names and shapes are those that the configuration "
     "wants."},
    {"default_threads", default_threads, METH_NOARGS,
     "default_threads()\n--\n\n"
     "Threads that this process may use: CPU affinity, cgroup quota, "
     "RKSC_NUM_THREADS."},
    {NULL, NULL, 0, NULL},
};

static PyObject *tuple_of(const char *const *texts, Py_ssize_t n)
{
    PyObject *tuple = PyTuple_New(n);

    for (Py_ssize_t i = 0; tuple != NULL && i < n; i++) {
        PyObject *text = PyUnicode_FromString(texts[i]);

        if (text == NULL) {
            Py_CLEAR(tuple);
        } else {
            PyTuple_SET_ITEM(tuple, i, text);
        }
    }
    return tuple;
}

static PyObject *supported_isas(void)
{
    const char *names[RK_N_ISAS];
    Py_ssize_t n = 0;

    for (int isa = 0; isa < RK_N_ISAS; isa++) {
        if (rk_isa_supported((rk_isa)isa)) {
            names[n++] = rk_isa_name((rk_isa)isa);
        }
    }
    return tuple_of(names, n);
}

static PyObject *derived_names(void)
{
    Py_ssize_t n = 0;

    while (rk_layout_derived[n] != NULL) {
        n++;
    }
    return tuple_of(rk_layout_derived, n);
}

/* Put a new reference (NULL: an exception is set) into a dict, which is given
 * up after a failure. */
static void put(PyObject **dict, const char *key, PyObject *value)
{
    if (value == NULL || PyDict_SetItemString(*dict, key, value) < 0) {
        Py_CLEAR(*dict);
    }
    Py_XDECREF(value);
}

/* {name: (elements, bytes) of a block} */
static PyObject *tensor_types(void)
{
    PyObject *types = PyDict_New();

    for (int i = 0; types != NULL && i < RK_N_TYPES; i++) {
        const rk_type_info *info = rk_type_get((rk_type)i);

        put(&types, info->name,
            Py_BuildValue("(ii)", (int)info->block_elements,
                          (int)info->block_bytes));
    }
    return types;
}

/* {GGUF's: Hugging Face's} of a model of one layer. */
static PyObject *gguf_names(void)
{
    PyObject *names = PyDict_New();

    for (size_t i = 0; names != NULL && i < rk_layout_count(1); i++) {
        char from[RK_LAYOUT_NAME], to[RK_LAYOUT_NAME];

        rk_layout_gguf_name(from, i);
        rk_layout_name(to, i);
        put(&names, from, PyUnicode_FromString(to));
    }
    return names;
}

/* Add a new reference (NULL: an exception is set) and keep it in *slot, where
 * there is one. */
static int add(PyObject *module, const char *name, PyObject **slot,
               PyObject *value)
{
    if (value == NULL || PyModule_AddObjectRef(module, name, value) < 0) {
        Py_XDECREF(value);
        return -1;
    }
    if (slot != NULL) {
        *slot = value;
    } else {
        Py_DECREF(value);
    }
    return 0;
}

static int module_exec(PyObject *module)
{
    rk_state *state = PyModule_GetState(module);

    if (rk_numpy_import() < 0 ||
        add(module, "CapacityError", &state->capacity_error,
            PyErr_NewExceptionWithDoc(
                "rksc._core.CapacityError",
                "The KV budget cannot hold what one call needs at once; "
                "nothing was changed.",
                PyExc_RuntimeError, NULL)) < 0 ||
        add(module, "Tensor", &state->tensor_type, rk_tensor_type_new(module)) <
            0 ||
        add(module, "Branch", &state->branch_type, rk_branch_type_new(module)) <
            0 ||
        add(module, "Request", &state->request_type,
            rk_request_type_new(module)) < 0 ||
        add(module, "DeviceArray", &state->device_array_type,
            rk_device_array_type_new(module)) < 0 ||
        add(module, "Session", &state->session_type,
            rk_session_type_new(module)) < 0 ||
        add(module, "isas", NULL, supported_isas()) < 0 ||
        add(module, "tensor_types", NULL, tensor_types()) < 0 ||
        add(module, "gguf_names", NULL, gguf_names()) < 0 ||
        add(module, "derived_names", NULL, derived_names()) < 0) {
        return -1;
    }
    return 0;
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
    /* NumPy's C API is one static table for the process. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    /* Objects are guarded by the GIL; a free-threaded Python switches it on. */
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

PyMODINIT_FUNC PyInit__core(void)
{
    rk_module_def.m_methods = METHODS;
    rk_module_def.m_slots = SLOTS;
    return PyModuleDef_Init(&rk_module_def);
}
