/* Generation: `_generate`, and requests by `_submit`, `_step`, `_end`. */
#include "request.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

/* ---- arguments ----------------------------------------------------------- */

/* Requests of a sequence argument, as a tuple that keeps them alive. */
static PyObject *requests_read(session_object *self, PyObject *sequence)
{
    PyObject *requests = PySequence_Tuple(sequence);

    if (requests == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(requests); i++) {
        PyObject *item = PyTuple_GET_ITEM(requests, i);

        if (!PyObject_TypeCheck(item,
                                (PyTypeObject *)self->state->request_type)) {
            PyErr_Format(PyExc_TypeError,
                         "requests[%zd] must be a Request, not %.200s", i,
                         Py_TYPE(item)->tp_name);
            Py_DECREF(requests);
            return NULL;
        }
        if (((request_object *)item)->branch->session != self) {
            PyErr_Format(PyExc_ValueError,
                         "branches[%zd] belongs to another session", i);
            Py_DECREF(requests);
            return NULL;
        }
    }
    return requests;
}

static request_object *request_at(PyObject *requests, Py_ssize_t i)
{
    return (request_object *)PyTuple_GET_ITEM(requests, i);
}

static const char *finish_name(rk_finish finish)
{
    switch (finish) {
    case RK_FINISH_NONE:
        return NULL;
    case RK_FINISH_LENGTH:
        return "length";
    case RK_FINISH_EOS:
        return "eos";
    case RK_FINISH_STOP:
        return "stop";
    case RK_FINISH_EARLY:
        return "early";
    case RK_FINISH_CANCELLED:
        return "cancelled";
    }
    return NULL;
}

/* ---- _submit ------------------------------------------------------------- */

/* The session keeps it from now on. -1 with an exception. */
static int keep(rk_requests *all, request_object *request)
{
    if (request->number == NULL) {
        request->number = PyLong_FromUnsignedLongLong(request->id);
    }
    if (request->number == NULL ||
        PyDict_SetItem(all->kept, request->number, (PyObject *)request) < 0) {
        return -1;
    }
    request->kept = true;
    return 0;
}

/* Its end has been told, or nobody wants to hear of it. */
static void let_go(rk_requests *all, request_object *request)
{
    request->end_told = true;
    if (request->kept) {
        request->kept = false;
        PyDict_DelItem(all->kept, request->number);
    }
}

/* Whatever came of them, as if they had never been submitted. */
static void undo_all(session_object *self, PyObject *requests)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(requests); i++) {
        rk_request_undo(self, request_at(requests, i), 0);
    }
    rk_requests_sweep(self->requests);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(requests); i++) {
        let_go(self->requests, request_at(requests, i));
    }
}

/* Callers' groups are below it, ours above. */
#define OWN_GROUPS ((uint64_t)1 << 63)

static uint64_t new_group(rk_requests *all)
{
    return OWN_GROUPS | ++all->last_group;
}

/* All or none. */
static int submit(session_object *self, PyObject *requests,
                  const rk_settings *s, uint64_t group)
{
    rk_requests *all = self->requests;
    rk_status status = RK_OK;
    bool kept = true;
    rk_call call;

    if (rk_call_enter(&call, self, NULL, 0) < 0) {
        return -1;
    }
    group = group != 0 ? group : new_group(all);
    for (Py_ssize_t i = 0;
         i < PyTuple_GET_SIZE(requests) && status == RK_OK && kept; i++) {
        request_object *request = request_at(requests, i);

        status = rk_request_submit(self, request, &s->options, group, NULL,
                                   &call.err);
        kept = status != RK_OK || keep(all, request) == 0;
    }
    if (status != RK_OK || !kept) {
        RK_KEEP_EXCEPTION(undo_all(self, requests));
    }
    return rk_call_leave(&call, status) < 0 || !kept ? -1 : 0;
}

PyObject *rk_session_py_submit(session_object *self, PyObject *args,
                               PyObject *kwargs)
{
    static char *keywords[] = {"requests", RK_SETTINGS_KEYWORDS, "group", NULL};
    PyObject *object, *objects[RK_N_SETTINGS], *requests, *number = NULL;
    uint64_t group = 0;
    rk_settings s;
    int failed;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOOOOOOO|O:_submit", keywords, &object,
            RK_SETTINGS_REFERENCES(objects), &number) ||
        (number != NULL && rk_uint64_read(&group, number, "group") < 0)) {
        return NULL;
    }
    if (group >= OWN_GROUPS) {
        PyErr_SetString(PyExc_ValueError, "group must be below 2**63");
        return NULL;
    }
    requests = requests_read(self, object);
    if (requests == NULL) {
        return NULL;
    }
    if (rk_settings_read(&s, objects, &self->requests->table,
                         self->vocab_size) < 0) {
        Py_DECREF(requests);
        return NULL;
    }
    failed = submit(self, requests, &s, group);
    rk_settings_free(&s);
    Py_DECREF(requests);
    if (failed < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- _step --------------------------------------------------------------- */

static bool ended(const request_object *r)
{
    return r->id != 0 && r->end.finish != RK_FINISH_NONE;
}

static bool has_news(const request_object *r)
{
    return r->n_told < r->n || (ended(r) && !r->end_told);
}

/* (request, index of the token, token, logprob, top_prob, entropy, finish,
 * stop_bytes, stop_index, error); token -1: the end alone. */
static PyObject *event_tuple(request_object *r, int32_t i, PyObject *error)
{
    bool last = ended(r) && i == r->n - (r->end.token >= 0);
    const rk_token *end = last ? &r->end : &(const rk_token){.stop_index = -1};

    if (i < r->n) {
        return Py_BuildValue("(OiidddziiO)", r, (int)i, (int)r->tokens[i],
                             (double)r->logprobs[i], (double)r->top_probs[i],
                             (double)r->entropies[i], finish_name(end->finish),
                             (int)end->stop_bytes, (int)end->stop_index, error);
    }
    return Py_BuildValue("(OiidddziiO)", r, (int)i, -1, (double)end->logprob,
                         (double)end->top_prob, (double)end->entropy,
                         error != Py_None ? "failed" : finish_name(end->finish),
                         (int)end->stop_bytes, (int)end->stop_index, error);
}

/* Append the event of token i, or of an end without one, to the list. */
static int tell_event(session_object *self, request_object *r, int32_t i,
                      PyObject *events)
{
    PyObject *error = Py_None, *event;
    int failed;

    if (i == r->n && r->failure != NULL) {
        error = rk_exception(self->state, r->failure);
        if (error == NULL) {
            return -1;
        }
    } else {
        Py_INCREF(error);
    }
    event = event_tuple(r, i, error);
    Py_DECREF(error);
    if (event == NULL) {
        return -1;
    }
    failed = PyList_Append(events, event);
    Py_DECREF(event);
    return failed;
}

/* Append what is new of a request. What is in the list has been told. */
static int tell(session_object *self, request_object *r, PyObject *events)
{
    int32_t n = r->n + (ended(r) && !r->end_told && r->end.token < 0);

    for (int32_t i = r->n_told; i < n; i++) {
        if (tell_event(self, r, i, events) < 0) {
            return -1;
        }
        r->n_told = i < r->n ? i + 1 : r->n;
    }
    if (ended(r)) {
        let_go(self->requests, r);
    }
    return 0;
}

static int step(session_object *self, PyObject *requests, PyObject *events)
{
    rk_requests *all = self->requests;
    Py_ssize_t n = PyTuple_GET_SIZE(requests);
    bool news = false;
    rk_status status = RK_OK;
    int failed = 0;
    rk_call call;

    if (rk_call_enter(&call, self, NULL, 0) < 0) {
        return -1;
    }
    rk_requests_sweep(all);
    /* Others' steps may have brought some; without requests there is nothing
     * to do, whatever runs for somebody else. */
    for (Py_ssize_t i = 0; i < n && !news; i++) {
        news = has_news(request_at(requests, i));
    }
    if (!news && all->n_submitted > 0) {
        int32_t n_active = 0;

        rk_call_begin(&call);
        status = rk_requests_step(self, NULL, &n_active, &call.err);
        rk_call_end(&call);
    }
    for (Py_ssize_t i = 0; i < n && status == RK_OK && failed == 0; i++) {
        failed = tell(self, request_at(requests, i), events);
    }
    return rk_call_leave(&call, status) < 0 ? -1 : failed;
}

PyObject *rk_session_py_step(session_object *self, PyObject *args,
                             PyObject *kwargs)
{
    static char *keywords[] = {"requests", "events", NULL};
    PyObject *object, *events, *requests;
    int failed;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!:_step", keywords,
                                     &object, &PyList_Type, &events)) {
        return NULL;
    }
    requests = requests_read(self, object);
    if (requests == NULL) {
        return NULL;
    }
    failed = step(self, requests, events);
    Py_DECREF(requests);
    if (failed < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- _end ---------------------------------------------------------------- */

static bool are_events(const session_object *self, PyObject *events)
{
    PyTypeObject *type = (PyTypeObject *)self->state->request_type;

    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(events); i++) {
        PyObject *event = PyList_GET_ITEM(events, i);

        if (!PyTuple_Check(event) || PyTuple_GET_SIZE(event) < 2 ||
            !PyObject_TypeCheck(PyTuple_GET_ITEM(event, 0), type) ||
            !PyLong_Check(PyTuple_GET_ITEM(event, 1))) {
            PyErr_SetString(PyExc_TypeError, "events must be those of _step");
            return false;
        }
    }
    return true;
}

/* Events that were not handed out have not been told. -1: no memory. */
static int take_back(session_object *self, PyObject *events)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(events); i++) {
        PyObject *event = PyList_GET_ITEM(events, i);
        request_object *r = (request_object *)PyTuple_GET_ITEM(event, 0);
        long index = PyLong_AsLong(PyTuple_GET_ITEM(event, 1));

        r->n_told = index < r->n_told ? (int32_t)index : r->n_told;
        if (r->end_told && !r->undone) {
            r->end_told = false;
            if (keep(self->requests, r) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

static int end(session_object *self, PyObject *requests, PyObject *events,
               bool undo)
{
    Py_ssize_t n = PyTuple_GET_SIZE(requests);
    int failed;

    if (rk_session_enter_surely(self) < 0) {
        return -1;
    }
    failed = take_back(self, events);
    for (Py_ssize_t i = 0; i < n; i++) {
        request_object *r = request_at(requests, i);

        if (!r->end_told) {
            rk_request_undo(self, r, undo ? 0 : r->n_told);
        }
    }
    rk_requests_sweep(self->requests);
    for (Py_ssize_t i = 0; i < n; i++) {
        let_go(self->requests, request_at(requests, i));
    }
    rk_session_leave(self);
    return failed;
}

/* Nothing of them was submitted: there is nothing to wait for. */
static bool untouched(PyObject *requests, PyObject *events)
{
    bool any = PyList_GET_SIZE(events) > 0;

    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(requests) && !any; i++) {
        any = request_at(requests, i)->id != 0;
    }
    return !any;
}

PyObject *rk_session_py_end(session_object *self, PyObject *args,
                            PyObject *kwargs)
{
    static char *keywords[] = {"requests", "events", "undo", NULL};
    PyObject *object, *events, *requests;
    int failed = 0, undo = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!|p:_end", keywords,
                                     &object, &PyList_Type, &events, &undo) ||
        rk_session_check_process(self) < 0 || !are_events(self, events)) {
        return NULL;
    }
    requests = requests_read(self, object);
    if (requests == NULL) {
        return NULL;
    }
    if (!untouched(requests, events)) {
        failed = end(self, requests, events, undo != 0);
    }
    Py_DECREF(requests);
    if (failed < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- _generate ----------------------------------------------------------- */

static int32_t count_tokens(PyObject *requests)
{
    int32_t n = 0;

    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(requests); i++) {
        n += request_at(requests, i)->n;
    }
    return n;
}

/* Let others in between two steps; `progress` is told how many tokens are new.
 */
static rk_status between(rk_call *call, PyObject *progress, rk_wait *wait,
                         int32_t *n_told)
{
    bool goes_on = true;

    if (progress != Py_None) {
        int32_t n = count_tokens(wait->requests);

        goes_on = rk_call_tell(call, progress, n - *n_told);
        *n_told = n;
    } else if (wait->n_left > 0) {
        goes_on = rk_call_pause(call);
    }
    if (!goes_on) {
        return rk_fail(&call->err, RK_EINTERRUPTED, "interrupted");
    }
    if (wait->failure.status != RK_OK) { /* while others had their turn */
        call->err = wait->failure;
    }
    return wait->failure.status;
}

/* Submit all and step until all have ended; after a failure none of them has
 * left a trace. */
static rk_status run(rk_call *call, PyObject *requests, const rk_settings *s,
                     PyObject *progress)
{
    session_object *self = call->session;
    rk_wait wait = {.requests = requests};
    rk_status status = RK_OK;
    int32_t n_told = 0;
    uint64_t group = new_group(self->requests);

    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(requests) && status == RK_OK;
         i++) {
        status = rk_request_submit(self, request_at(requests, i), &s->options,
                                   group, &wait, &call->err);
    }
    while (wait.n_left > 0 && status == RK_OK) {
        int32_t n_active = 0;

        status = rk_requests_step(self, &wait, &n_active, &call->err);
        if (status == RK_OK && wait.n_left > 0 && n_active == 0) {
            status = rk_fail(&call->err, RK_ESTATE, "%d requests were lost",
                             (int)wait.n_left);
        }
        if (status == RK_OK) {
            status = between(call, progress, &wait, &n_told);
        }
    }
    if (status != RK_OK) {
        undo_all(self, requests);
    }
    rk_requests_sweep(self->requests);
    return status;
}

static PyObject *confidence_of(const request_object *r)
{
    double confidence = rk_request_confidence(r);

    if (isnan(confidence)) {
        Py_RETURN_NONE;
    }
    return PyFloat_FromDouble(confidence);
}

/* A copy of (n,) numbers as an array; NULL with an exception. */
static PyObject *float_array(const float *values, int32_t n)
{
    float *data;
    PyObject *array = rk_array_float32(n, &data);

    if (array != NULL && n > 0) {
        memcpy(data, values, (size_t)n * sizeof *values);
    }
    return array;
}

static PyObject *token_array(const int32_t *tokens, int32_t n)
{
    int32_t *data;
    PyObject *array = rk_array_int32(n, &data);

    if (array != NULL && n > 0) {
        memcpy(data, tokens, (size_t)n * sizeof *tokens);
    }
    return array;
}

#define N_COLUMNS 8

/* One branch's row of the result, a column at a time. */
static PyObject *column(const request_object *r, int i)
{
    switch (i) {
    case 0:
        return token_array(r->tokens, r->n);
    case 1:
        return float_array(r->top_probs, r->n);
    case 2:
        return float_array(r->logprobs, r->n);
    case 3:
        return float_array(r->entropies, r->n);
    case 4:
        return confidence_of(r);
    case 5:
        return PyUnicode_FromString(finish_name(r->end.finish));
    case 6:
        return PyLong_FromLong(r->end.stop_bytes);
    default:
        return PyLong_FromLong(r->end.stop_index);
    }
}

static PyObject *row_tuple(const request_object *r)
{
    PyObject *row = PyTuple_New(N_COLUMNS);

    for (int i = 0; row != NULL && i < N_COLUMNS; i++) {
        PyObject *item = column(r, i);

        if (item == NULL) {
            Py_CLEAR(row);
            return NULL;
        }
        PyTuple_SET_ITEM(row, i, item);
    }
    return row;
}

static PyObject *row_list(PyObject *requests)
{
    Py_ssize_t n = PyTuple_GET_SIZE(requests);
    PyObject *list = PyList_New(n);

    for (Py_ssize_t i = 0; list != NULL && i < n; i++) {
        PyObject *row = row_tuple(request_at(requests, i));

        if (row == NULL) {
            Py_CLEAR(list);
            return NULL;
        }
        PyList_SET_ITEM(list, i, row);
    }
    return list;
}

static PyObject *generate(session_object *self, PyObject *requests,
                          const rk_settings *s, PyObject *progress)
{
    PyObject *rows = NULL;
    rk_status status;
    rk_call call;

    if (rk_call_enter(&call, self, NULL, 0) < 0) {
        return NULL;
    }
    rk_call_begin(&call);
    status = run(&call, requests, s, progress);
    rk_call_end(&call);
    if (status == RK_OK) {
        rows = row_list(requests);
        if (rows == NULL) { /* no memory */
            undo_all(self, requests);
        }
    }
    return rk_call_leave(&call, status) < 0 ? NULL : rows;
}

PyObject *rk_session_py_generate(session_object *self, PyObject *args,
                                 PyObject *kwargs)
{
    static char *keywords[] = {"requests", RK_SETTINGS_KEYWORDS, "progress",
                               NULL};
    PyObject *object, *objects[RK_N_SETTINGS], *requests, *rows;
    PyObject *progress = Py_None;
    rk_settings s;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOOOOOOO|O:_generate", keywords, &object,
            RK_SETTINGS_REFERENCES(objects), &progress)) {
        return NULL;
    }
    requests = requests_read(self, object);
    if (requests == NULL) {
        return NULL;
    }
    if (rk_settings_read(&s, objects, &self->requests->table,
                         self->vocab_size) < 0) {
        Py_DECREF(requests);
        return NULL;
    }
    rows = generate(self, requests, &s, progress);
    rk_settings_free(&s);
    Py_DECREF(requests);
    return rows;
}
