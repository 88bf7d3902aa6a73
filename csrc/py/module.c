/* rksc._core: the module, its state and what belongs to no object. */
#include "py.h"

#include "tensor.h"

static PyObject *default_threads(PyObject *Py_UNUSED(module),
                                 PyObject *Py_UNUSED(unused))
{
    return PyLong_FromLong(rk_cpu_default_threads());
}

static PyMethodDef METHODS[] = {
    {"default_threads", default_threads, METH_NOARGS,
     "default_threads()\n--\n\n"
     "Threads that this process may use: CPU affinity, cgroup quota, "
     "RKSC_NUM_THREADS."},
    {NULL, NULL, 0, NULL},
};

static PyObject *supported_isas(void)
{
    PyObject *names = PyList_New(0), *tuple;

    for (int isa = 0; names != NULL && isa < RK_N_ISAS; isa++) {
        if (rk_isa_supported((rk_isa)isa)) {
            PyObject *name = PyUnicode_FromString(rk_isa_name((rk_isa)isa));

            if (name == NULL || PyList_Append(names, name) < 0) {
                Py_CLEAR(names);
            }
            Py_XDECREF(name);
        }
    }
    tuple = names != NULL ? PyList_AsTuple(names) : NULL;
    Py_XDECREF(names);
    return tuple;
}

/* Add a new reference (NULL: an exception is set) and keep it in *slot. */
static int add(PyObject *module, const char *name, PyObject **slot,
               PyObject *value)
{
    if (value == NULL || PyModule_AddObjectRef(module, name, value) < 0) {
        Py_XDECREF(value);
        return -1;
    }
    *slot = value;
    return 0;
}

static int module_exec(PyObject *module)
{
    rk_state *state = PyModule_GetState(module);
    PyObject *isas = NULL;

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
        add(module, "DeviceArray", &state->device_array_type,
            rk_device_array_type_new(module)) < 0 ||
        add(module, "Session", &state->session_type,
            rk_session_type_new(module)) < 0 ||
        add(module, "isas", &isas, supported_isas()) < 0) {
        return -1;
    }
    Py_DECREF(isas); /* the module keeps it */
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    rk_state *state = PyModule_GetState(module);

    Py_VISIT(state->capacity_error);
    Py_VISIT(state->tensor_type);
    Py_VISIT(state->session_type);
    Py_VISIT(state->branch_type);
    Py_VISIT(state->device_array_type);
    return 0;
}

static int module_clear(PyObject *module)
{
    rk_state *state = PyModule_GetState(module);

    Py_CLEAR(state->capacity_error);
    Py_CLEAR(state->tensor_type);
    Py_CLEAR(state->session_type);
    Py_CLEAR(state->branch_type);
    Py_CLEAR(state->device_array_type);
    return 0;
}

static void module_free(void *module)
{
    module_clear(module);
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

PyModuleDef rk_module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "rksc._core",
    .m_doc = "The C extension: sessions and branches over shared KV blocks.",
    .m_size = sizeof(rk_state),
    .m_methods = METHODS,
    .m_slots = SLOTS,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

rk_state *rk_state_of(PyTypeObject *type)
{
    for (; type != NULL; type = type->tp_base) {
        PyObject *module = type->tp_flags & Py_TPFLAGS_HEAPTYPE
                               ? ((PyHeapTypeObject *)type)->ht_module
                               : NULL;

        if (module != NULL && PyModule_GetDef(module) == &rk_module_def) {
            return PyModule_GetState(module);
        }
    }
    PyErr_SetString(PyExc_TypeError, "not a type of rksc._core");
    return NULL;
}

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&rk_module_def);
}
