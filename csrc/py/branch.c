/* rksc._core.Branch: one continuation. It keeps its session alive and reaches
 * the engine's branch through a handle, which the session clears when the
 * branch is dropped. */
#include "py.h"

#include <math.h>
#include <structmember.h>

/* More children of one fork than anybody can mean. */
#define MAX_CHILDREN (1 << 20)

/* ---- life ---------------------------------------------------------------- */

branch_object *rk_branch_new(session_object *session)
{
    PyTypeObject *type = (PyTypeObject *)session->state->branch_type;
    branch_object *self;

    if (type == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "rksc._core is going away");
        return NULL;
    }
    self = (branch_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    Py_INCREF(session);
    self->session = session;
    self->handle = PyMem_RawCalloc(1, sizeof *self->handle);
    if (self->handle == NULL) {
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    return self;
}

void rk_branch_bind(branch_object *self, rk_branch *branch)
{
    self->handle->branch = branch;
    self->id = rk_look(branch)->id;
    self->parent_id = rk_look(branch)->parent_id;
    self->depth = rk_look(branch)->depth;
}

static int branch_traverse(branch_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->session);
    Py_VISIT(self->gate);
    Py_VISIT(self->verdict.verdict);
    Py_VISIT(self->verdict.fields);
    Py_VISIT(self->prompt);
    return 0;
}

/* The session stays: whatever cycle leads through it, it breaks itself. */
static int branch_clear(branch_object *self)
{
    Py_CLEAR(self->gate);
    rk_kept_verdict_clear(&self->verdict);
    Py_CLEAR(self->prompt);
    return 0;
}

static void branch_dealloc(branch_object *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL) {
        PyObject_ClearWeakRefs((PyObject *)self);
    }
    if (self->handle != NULL) {
        rk_handle_drop(self->session, self->handle, true);
    }
    branch_clear(self);
    Py_XDECREF(self->session);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- methods ------------------------------------------------------------- */

/* n children's objects without a place yet; NULL with an exception. */
static PyObject *new_children(branch_object *self, int32_t n)
{
    PyObject *children = PyList_New(n);

    for (int32_t i = 0; children != NULL && i < n; i++) {
        branch_object *child = rk_branch_new(self->session);

        if (child == NULL) {
            Py_CLEAR(children);
            return NULL;
        }
        PyList_SET_ITEM(children, i, (PyObject *)child);
    }
    return children;
}

static PyObject *make_children(branch_object *self, int32_t n, int32_t at,
                               const rk_token_lists *suffixes)
{
    rk_branch **made = PyMem_RawCalloc((size_t)n, sizeof *made);
    PyObject *children = new_children(self, n);
    rk_status status;
    rk_call call;

    if (made == NULL) {
        PyErr_NoMemory();
    }
    if (made == NULL || children == NULL ||
        rk_call_enter(&call, self->session, &self, 1) < 0) {
        Py_CLEAR(children);
        goto done;
    }
    rk_call_begin(&call);
    status = rk_session_fork(
        call.engine, made, call.one, at, n,
        suffixes != NULL ? (const int32_t *const *)suffixes->ids : NULL,
        suffixes != NULL ? suffixes->lengths : NULL, &call.err);
    for (int32_t i = 0; i < n && status == RK_OK; i++) {
        rk_branch_bind((branch_object *)PyList_GET_ITEM(children, i), made[i]);
    }
    if (rk_call_leave(&call, status) < 0) {
        Py_CLEAR(children);
    }

done:
    PyMem_RawFree(made);
    return children;
}

static PyObject *branch_fork(branch_object *self, PyObject *args,
                             PyObject *kwargs)
{
    static char *keywords[] = {"what", "at", NULL};
    PyObject *what = NULL, *where = Py_None, *children;
    rk_token_lists suffixes;
    int32_t n = 1, at = -1;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O$O:fork", keywords, &what,
                                     &where)) {
        return NULL;
    }
    if (where != Py_None && rk_int_read(&at, where, "at", 1, INT32_MAX) < 0) {
        return NULL;
    }
    if (what == NULL || !PySequence_Check(what)) {
        if (what != NULL &&
            rk_int_read(&n, what, "what (the number of children)", 1,
                        MAX_CHILDREN) < 0) {
            return NULL;
        }
        return make_children(self, n, at, NULL);
    }
    if (PyUnicode_Check(what)) {
        PyErr_SetString(PyExc_TypeError,
                        "what must be the number of children, an int, or their "
                        "suffixes, sequences of token ids, got str "
                        "(session.encode makes ids of a text)");
        return NULL;
    }
    if (rk_token_lists_read(&suffixes, what, self->session->vocab_size,
                            "what") < 0) {
        return NULL;
    }
    if (suffixes.n < 1 || suffixes.n > MAX_CHILDREN) {
        PyErr_Format(
            PyExc_ValueError,
            "what (suffixes of children) must have 1 .. %d items, got %d",
            MAX_CHILDREN, (int)suffixes.n);
        rk_token_lists_free(&suffixes);
        return NULL;
    }
    children = make_children(self, suffixes.n, at, &suffixes);
    rk_token_lists_free(&suffixes);
    return children;
}

static PyObject *branch_extend(branch_object *self, PyObject *args,
                               PyObject *kwargs)
{
    static char *keywords[] = {"tokens", NULL};
    rk_branch *branch;
    rk_tokens tokens;
    rk_error err = {0};
    rk_status status;
    PyObject *object;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:extend", keywords,
                                     &object) ||
        rk_tokens_read(&tokens, object, self->session->vocab_size, "tokens") <
            0) {
        return NULL;
    }
    branch = rk_branch_enter(self);
    if (branch == NULL) {
        rk_tokens_free(&tokens);
        return NULL;
    }
    status = rk_session_extend(self->session->engine, branch, tokens.ids,
                               tokens.n, &err);
    rk_session_leave(self->session);
    rk_tokens_free(&tokens);
    if (status != RK_OK) {
        return rk_raise(self->session->state, &err);
    }
    Py_RETURN_NONE;
}

void rk_branch_drop(branch_object *self)
{
    if (!self->dropped) {
        self->dropped = true;
        rk_handle_drop(self->session, self->handle, false);
    }
}

static PyObject *branch_drop(branch_object *self, PyObject *Py_UNUSED(unused))
{
    rk_branch_drop(self);
    Py_RETURN_NONE;
}

/* ---- numbers ------------------------------------------------------------- */

typedef enum field {
    N_TOKENS,
    N_PROMPT,
    N_COMPUTED,
    RESIDENT,
    APPROXIMATE,
    STREAM,
    SCORE,
    CONFIDENCE,
} field;

static PyObject *branch_get(branch_object *self, void *closure)
{
    const rk_branch *b = rk_branch_enter(self);
    rk_branch_facts copy;

    if (b == NULL) {
        return NULL;
    }
    copy = *rk_look(b);
    rk_session_leave(self->session);
    switch ((field)(intptr_t)closure) {
    case N_TOKENS:
        return PyLong_FromLong(copy.n_tokens);
    case N_PROMPT:
        return PyLong_FromLong(copy.n_prompt);
    case N_COMPUTED:
        return PyLong_FromLong(copy.n_computed);
    case RESIDENT:
        return PyBool_FromLong(copy.n_computed >= copy.n_ever);
    case APPROXIMATE:
        return PyBool_FromLong(copy.approximate);
    case STREAM:
        return PyLong_FromUnsignedLongLong(copy.stream);
    case SCORE:
    case CONFIDENCE: {
        double value =
            (field)(intptr_t)closure == SCORE ? copy.score : copy.confidence;

        if (isnan(value)) {
            Py_RETURN_NONE;
        }
        return PyFloat_FromDouble(value);
    }
    }
    Py_UNREACHABLE();
}

static int refuse_delete(PyObject *value, const char *what)
{
    if (value != NULL) {
        return 0;
    }
    PyErr_Format(PyExc_AttributeError, "%s cannot be deleted", what);
    return -1;
}

static int branch_set_number(branch_object *self, PyObject *value,
                             void *closure)
{
    bool is_score = (field)(intptr_t)closure == SCORE;
    const char *what = is_score ? "score" : "confidence";
    rk_branch *branch;
    double number = NAN;

    if (refuse_delete(value, what) < 0) {
        return -1;
    }
    if (value != Py_None) {
        number = PyFloat_AsDouble(value);
        if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError,
                         "%s must be a number or None, got %.200s", what,
                         Py_TYPE(value)->tp_name);
        }
        if (PyErr_Occurred()) {
            return -1;
        }
        if (!isfinite(number) || (!is_score && (number < 0 || number > 1))) {
            PyErr_Format(PyExc_ValueError, "%s must be %s or None, got %R",
                         what, is_score ? "a finite number" : "in [0, 1]",
                         value);
            return -1;
        }
    }
    branch = rk_branch_enter(self);
    if (branch == NULL) {
        return -1;
    }
    if (is_score) {
        rk_session_set_score(self->session->engine, branch, number);
    } else {
        rk_session_set_confidence(self->session->engine, branch, number);
    }
    rk_session_leave(self->session);
    return 0;
}

static int branch_set_stream(branch_object *self, PyObject *value,
                             void *Py_UNUSED(closure))
{
    rk_branch *branch;
    uint64_t stream;

    if (refuse_delete(value, "stream") < 0 ||
        rk_uint64_read(&stream, value, "stream") < 0) {
        return -1;
    }
    branch = rk_branch_enter(self);
    if (branch == NULL) {
        return -1;
    }
    rk_session_set_stream(self->session->engine, branch, stream);
    rk_session_leave(self->session);
    return 0;
}

/* ---- the verdict --------------------------------------------------------- */

int rk_kept_verdict_make(rk_kept_verdict *out, branch_object *branch,
                         PyObject *verdict)
{
    PyObject *all = PyObject_GetAttrString(verdict, "__dict__");

    *out = (rk_kept_verdict){.verdict = verdict};
    if (all == NULL) {
        PyErr_Clear();
    }
    if (all != NULL && PyDict_Check(all) &&
        PyDict_GetItemString(all, "branch") == (PyObject *)branch) {
        out->verdict = (PyObject *)Py_TYPE(verdict);
        out->fields = PyDict_Copy(all);
        if (out->fields == NULL ||
            PyDict_DelItemString(out->fields, "branch") < 0) {
            Py_CLEAR(out->fields);
            Py_DECREF(all);
            return -1;
        }
    }
    Py_XDECREF(all);
    Py_INCREF(out->verdict);
    return 0;
}

void rk_kept_verdict_swap(rk_kept_verdict *kept, branch_object *branch)
{
    rk_kept_verdict old = branch->verdict;

    branch->verdict = *kept;
    *kept = old;
}

void rk_kept_verdict_clear(rk_kept_verdict *kept)
{
    Py_CLEAR(kept->verdict);
    Py_CLEAR(kept->fields);
}

static int branch_set_verdict(branch_object *self, PyObject *value,
                              void *Py_UNUSED(closure))
{
    rk_kept_verdict kept;

    if (refuse_delete(value, "verdict") < 0 ||
        rk_kept_verdict_make(&kept, self, value) < 0) {
        return -1;
    }
    rk_kept_verdict_swap(&kept, self);
    rk_kept_verdict_clear(&kept);
    return 0;
}

static PyObject *branch_get_verdict(branch_object *self,
                                    void *Py_UNUSED(closure))
{
    PyObject *verdict = self->verdict.verdict, *fields = self->verdict.fields;
    PyObject *all = NULL, *made;

    verdict = verdict != NULL ? verdict : Py_None;
    Py_INCREF(verdict);
    if (fields == NULL) {
        return verdict;
    }
    Py_INCREF(fields);
    made = PyObject_CallMethod(verdict, "__new__", "O", verdict);
    all = made != NULL ? PyObject_GetAttrString(made, "__dict__") : NULL;
    if (all == NULL || PyDict_Update(all, fields) < 0 ||
        PyDict_SetItemString(all, "branch", (PyObject *)self) < 0) {
        Py_CLEAR(made);
    }
    Py_XDECREF(all);
    Py_DECREF(fields);
    Py_DECREF(verdict);
    return made;
}

/* ---- other attributes ---------------------------------------------------- */

static PyObject *get_session(branch_object *self, void *Py_UNUSED(closure))
{
    Py_INCREF(self->session);
    return (PyObject *)self->session;
}

static PyObject *get_id(branch_object *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(self->id);
}

static PyObject *get_parent_id(branch_object *self, void *Py_UNUSED(closure))
{
    if (self->parent_id == 0) {
        Py_RETURN_NONE;
    }
    return PyLong_FromUnsignedLongLong(self->parent_id);
}

static PyObject *get_dropped(branch_object *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->dropped);
}

static PyObject *get_tokens(branch_object *self, void *Py_UNUSED(closure))
{
    const rk_branch *branch = rk_branch_enter(self);
    PyObject *array;
    int32_t *tokens;

    if (branch == NULL) {
        return NULL;
    }
    array = rk_array_int32(rk_look(branch)->n_tokens, &tokens);
    if (array != NULL && rk_look(branch)->n_tokens > 0) {
        memcpy(tokens, rk_look(branch)->tokens,
               (size_t)rk_look(branch)->n_tokens * sizeof *tokens);
    }
    rk_session_leave(self->session);
    return array;
}

static PyObject *get_computed(branch_object *self, bool hidden)
{
    const rk_config *config;
    rk_status status = RK_OK;
    PyObject *array;
    rk_call call;
    float *out;

    if (rk_call_enter(&call, self->session, &self, 1) < 0) {
        return NULL;
    }
    config = &rk_session_model(call.engine)->config;
    array = hidden ? rk_array_float32_2d(config->n_layers, config->width, &out)
                   : rk_array_float32(config->vocab_size, &out);
    if (array != NULL) {
        rk_call_begin(&call);
        status = (hidden ? rk_session_hidden : rk_session_logits)(
            call.engine, call.one, out, &call.err);
    }
    if (rk_call_leave(&call, status) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

static PyObject *get_logits(branch_object *self, void *Py_UNUSED(closure))
{
    return get_computed(self, false);
}

static PyObject *get_hidden(branch_object *self, void *Py_UNUSED(closure))
{
    return get_computed(self, true);
}

/* The same where the session computes. */
static PyObject *get_lent(branch_object *self, bool hidden)
{
    const rk_config *config;
    rk_status status;
    rk_lent *lent;
    rk_call call;

    if (self->session->cuda == NULL) {
        return get_computed(self, hidden);
    }
    if (rk_call_enter(&call, self->session, &self, 1) < 0) {
        return NULL;
    }
    config = &rk_session_model(call.engine)->config;
    const int64_t shapes[2][2] = {{config->vocab_size, 0},
                                  {config->n_layers, config->width}};
    rk_call_begin(&call);
    status = rk_session_lend(call.engine, call.one, hidden, &lent, &call.err);
    if (rk_call_leave(&call, status) < 0) {
        return NULL;
    }
    return rk_device_array_new(self->session->state, lent, shapes[hidden],
                               hidden ? 2 : 1);
}

static PyObject *get_device_logits(branch_object *self,
                                   void *Py_UNUSED(closure))
{
    return get_lent(self, false);
}

static PyObject *get_device_hidden(branch_object *self,
                                   void *Py_UNUSED(closure))
{
    return get_lent(self, true);
}

static PyObject *branch_repr(branch_object *self)
{
    return PyUnicode_FromFormat("<rksc.Branch %llu%s>",
                                (unsigned long long)self->id,
                                self->dropped ? ", dropped" : "");
}

#define NUMBER(which) (void *)(intptr_t)(which)

static PyGetSetDef ATTRIBUTES[] = {
    {"session", (getter)get_session, NULL, "The session, kept alive.", NULL},
    {"id", (getter)get_id, NULL, "Never used twice in a session.", NULL},
    {"parent_id", (getter)get_parent_id, NULL, "Of the fork, or None.", NULL},
    {"dropped", (getter)get_dropped, NULL, "Whether drop() was called.", NULL},
    {"tokens", (getter)get_tokens, NULL,
     "A copy of the tokens that the KV holds or will hold, int32 (n,).", NULL},
    {"logits", (getter)get_logits, NULL,
     "Logits of the next token, float32 (vocabulary,); computed on each "
     "access.",
     NULL},
    {"hidden", (getter)get_hidden, NULL,
     "Residual stream of the last token after each layer, float32 (layers, "
     "width).",
     NULL},
    {"device_logits", (getter)get_device_logits, NULL,
     "The logits where the session computes: a rksc.DeviceArray on a GPU.",
     NULL},
    {"device_hidden", (getter)get_device_hidden, NULL,
     "The residual stream where the session computes.", NULL},
    {"n_tokens", (getter)branch_get, NULL, "len(tokens).", NUMBER(N_TOKENS)},
    {"n_prompt", (getter)branch_get, NULL,
     "Tokens it was born with; what follows was generated or appended.",
     NUMBER(N_PROMPT)},
    {"n_computed", (getter)branch_get, NULL,
     "Leading positions whose KV is resident.", NUMBER(N_COMPUTED)},
    {"resident", (getter)branch_get, NULL,
     "False when an eviction took KV that had been computed.",
     NUMBER(RESIDENT)},
    {"approximate", (getter)branch_get, NULL,
     "Whether it stands on KV of another wording.", NUMBER(APPROXIMATE)},
    {"verdict", (getter)branch_get_verdict, (setter)branch_set_verdict,
     "The last rksc.Verdict, or None.", NULL},
    {"stream", (getter)branch_get, (setter)branch_set_stream,
     "Key of its random numbers, uint64.", NUMBER(STREAM)},
    {"score", (getter)branch_get, (setter)branch_set_number,
     "The verifier's, or what was set; None until then.", NUMBER(SCORE)},
    {"confidence", (getter)branch_get, (setter)branch_set_number,
     "Mean probability of the most likely token; None before.",
     NUMBER(CONFIDENCE)},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef MEMBERS[] = {
    {"depth", T_INT, offsetof(branch_object, depth), READONLY,
     "Forks between a root and this branch."},
    {"gate", T_OBJECT, offsetof(branch_object, gate), 0, "rksc.Gate, or None."},
    {"prompt", T_OBJECT, offsetof(branch_object, prompt), 0,
     "Its own wording where it was given to ASKS, or None."},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(branch_object, weak_references),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef METHODS[] = {
    {"fork", (PyCFunction)(void (*)(void))branch_fork,
     METH_VARARGS | METH_KEYWORDS,
     "fork($self, /, what=1, *, at=None)\n--\n\n"
     "Children that share this branch's KV: `what` of them, or one for each "
     "suffix."},
    {"extend", (PyCFunction)(void (*)(void))branch_extend,
     METH_VARARGS | METH_KEYWORDS,
     "extend($self, /, tokens)\n--\n\n"
     "Append tokens; their KV is computed when it is needed."},
    {"drop", (PyCFunction)branch_drop, METH_NOARGS,
     "drop($self, /)\n--\n\n"
     "Release the KV now; never waits for a running step."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_dealloc, branch_dealloc},
    {Py_tp_traverse, branch_traverse},
    {Py_tp_clear, branch_clear},
    {Py_tp_repr, branch_repr},
    {Py_tp_methods, METHODS},
    {Py_tp_getset, ATTRIBUTES},
    {Py_tp_members, MEMBERS},
    {Py_tp_doc, "One continuation over KV blocks that it may share; made by "
                "Session._prefill and fork."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "rksc._core.Branch",
    .basicsize = sizeof(branch_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
             Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *rk_branch_type_new(PyObject *module)
{
    return PyType_FromModuleAndSpec(module, &SPEC, NULL);
}
