/* The module's state: its life, and the way to it from a type. What the module
 * offers is filled in by module.c, which knows the types; so they can ask here
 * without knowing the module. */
#include "py.h"

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    rk_state *state = PyModule_GetState(module);

    Py_VISIT(state->capacity_error);
    Py_VISIT(state->tensor_type);
    Py_VISIT(state->session_type);
    Py_VISIT(state->branch_type);
    Py_VISIT(state->request_type);
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
    Py_CLEAR(state->request_type);
    Py_CLEAR(state->device_array_type);
    return 0;
}

static void module_free(void *module)
{
    module_clear(module);
}

PyModuleDef rk_module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "rksc._core",
    .m_doc = "The C extension: sessions and branches over shared KV blocks.",
    .m_size = sizeof(rk_state),
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
