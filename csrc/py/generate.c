/* Generation: `_generate`, and requests by `_submit`, `_step`, `_cancel`. */
#include "collect.h"

#include <math.h>
#include <string.h>

/* ---- arguments ----------------------------------------------------------- */

/* What `_submit` and `_generate` have in common; owns what options point to. */
typedef struct settings {
    rk_generation_options options;
    rk_tokens stop_ids;
    PyObject *strings; /* tuple of bytes */
    const uint8_t **stop_strings;
    int32_t *stop_lengths;
} settings;

#define N_SETTINGS 11
#define SETTINGS_KEYWORDS                                                      \
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed",        \
        "stop_ids", "stop_strings", "stop_top", "stop_lead", "min_steps"
#define SETTINGS_REFERENCES(objects)                                           \
    &(objects)[0], &(objects)[1], &(objects)[2], &(objects)[3], &(objects)[4], \
        &(objects)[5], &(objects)[6], &(objects)[7], &(objects)[8],            \
        &(objects)[9], &(objects)[10]

static void settings_free(settings *s)
{
    rk_tokens_free(&s->stop_ids);
    Py_CLEAR(s->strings);
    PyMem_RawFree(s->stop_strings);
    PyMem_RawFree(s->stop_lengths);
    s->stop_strings = NULL;
    s->stop_lengths = NULL;
}

static int read_strings(settings *s, PyObject *object)
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

static int read_settings(settings *s, PyObject *const *objects,
                         const session_object *session)
{
    rk_generation_options *o = &s->options;
    double temperature, top_p, min_p;

    *s = (settings){0};
    if (rk_int_read(&o->max_new_tokens, objects[0], "max_new_tokens", 0,
                    INT32_MAX) < 0 ||
        read_float(&temperature, objects[1], "temperature", 0, 1e30) < 0 ||
        rk_int_read(&o->draw.top_k, objects[2], "top_k", 0, INT32_MAX) < 0 ||
        read_float(&top_p, objects[3], "top_p", 0, 1) < 0 ||
        read_float(&min_p, objects[4], "min_p", 0, 1) < 0 ||
        rk_uint64_read(&o->draw.seed, objects[5], "seed") < 0 ||
        rk_tokens_read(&s->stop_ids, objects[6], session->vocab_size,
                       "stop_ids") < 0 ||
        read_strings(s, objects[7]) < 0 ||
        read_float(&o->cgee.stop_top, objects[8], "stop_top", 0, INFINITY) <
            0 ||
        read_float(&o->cgee.stop_lead, objects[9], "stop_lead", 0, 1) < 0 ||
        rk_int_read(&o->cgee.min_steps, objects[10], "min_steps", 1,
                    INT32_MAX) < 0) {
        settings_free(s);
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
    if (session->generating->token_offsets != NULL) {
        o->token_bytes = session->generating->token_bytes;
        o->token_offsets = session->generating->token_offsets;
        o->special = session->generating->special;
    }
    return 0;
}

/* Callers' groups are below it, ours above. */
#define OWN_GROUPS ((uint64_t)1 << 63)

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

/* ---- _submit, _step, _cancel --------------------------------------------- */

static rk_status submit(session_object *self, rk_branch *branch,
                        const settings *s, uint64_t group, uint64_t *request,
                        rk_error *err)
{
    rk_status status = rk_session_submit(self->engine, branch, &s->options,
                                         group, request, err);

    if (status == RK_OK && !rk_submission_add(self->generating, *request)) {
        rk_session_abort(self->engine, *request);
        status = rk_fail(err, RK_ENOMEM, "no memory for a request");
    }
    return status;
}

PyObject *rk_session_py_submit(session_object *self, PyObject *args,
                               PyObject *kwargs)
{
    static char *keywords[] = {"branch", SETTINGS_KEYWORDS, "group", NULL};
    PyObject *object, *objects[N_SETTINGS], *group_object;
    branch_object *branch;
    rk_branch *place;
    settings s;
    uint64_t group, request = 0;
    rk_error err = {0};
    rk_status status;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOOOOOOOO:_submit", keywords, &object,
            SETTINGS_REFERENCES(objects), &group_object)) {
        return NULL;
    }
    branch = rk_branch_read(self, object, "branch");
    if (branch == NULL || rk_uint64_read(&group, group_object, "group") < 0) {
        return NULL;
    }
    if (group >= OWN_GROUPS) {
        PyErr_SetString(PyExc_ValueError, "group must be below 2**63");
        return NULL;
    }
    if (read_settings(&s, objects, self) < 0) {
        return NULL;
    }
    place = rk_branch_enter(branch);
    if (place == NULL) {
        settings_free(&s);
        return NULL;
    }
    status = submit(self, place, &s, group, &request, &err);
    rk_session_leave(self);
    settings_free(&s);
    if (status != RK_OK) {
        return rk_raise(self->state, &err);
    }
    return PyLong_FromUnsignedLongLong(request);
}

static PyObject *event_tuple(const rk_token *e)
{
    return Py_BuildValue("(KidddziiO)", (unsigned long long)e->request,
                         (int)e->token, (double)e->logprob, (double)e->top_prob,
                         (double)e->entropy, finish_name(e->finish),
                         (int)e->stop_bytes, (int)e->stop_index, Py_None);
}

static PyObject *failure_tuple(const rk_state *state, const rk_submission *s)
{
    PyObject *error = rk_exception(state, &s->failure);

    return error == NULL
               ? NULL
               : Py_BuildValue("(KidddsiiN)", (unsigned long long)s->request,
                               -1, 0.0, 0.0, 0.0, "failed", 0, -1, error);
}

/* The queue's events and then failures, a list; both are empty afterwards. */
static PyObject *take_queue(const rk_state *state, rk_generating *g)
{
    PyObject *list = PyList_New(g->n_queue + g->n_failed);
    const rk_submission *failed = g->failed;

    for (int32_t i = 0; list != NULL && i < g->n_queue + g->n_failed; i++) {
        PyObject *event;

        if (i < g->n_queue) {
            event = event_tuple(&g->queue[i]);
        } else {
            event = failure_tuple(state, failed);
            failed = failed->next;
        }
        if (event == NULL) {
            Py_CLEAR(list);
            return NULL;
        }
        PyList_SET_ITEM(list, i, event);
    }
    if (list != NULL) {
        g->n_queue = 0;
        rk_failed_free(g);
    }
    return list;
}

PyObject *rk_session_py_step(session_object *self, PyObject *Py_UNUSED(unused))
{
    rk_generating *g = self->generating;
    rk_status status = RK_OK;
    rk_error err = {0};
    PyObject *events = NULL;
    int32_t n_left;

    if (rk_session_enter(self) < 0) {
        return NULL;
    }
    /* Others' steps may have brought some; without requests there is nothing
     * to do, whatever runs for somebody else. */
    if (g->n_queue + g->n_failed == 0 && g->n_submissions > 0) {
        rk_visitor visitor;
        int32_t n_active = 0;

        rk_long_begin(self, &visitor);
        status = rk_generating_step(self, NULL, &n_active, &err);
        rk_long_end(self, &visitor);
    }
    if (status == RK_OK) {
        events = take_queue(self->state, g);
    }
    n_left = g->n_submissions;
    rk_session_leave(self);
    if (status != RK_OK) {
        return rk_raise(self->state, &err);
    }
    return events != NULL ? Py_BuildValue("(Ni)", events, (int)n_left) : NULL;
}

PyObject *rk_session_py_cancel(session_object *self, PyObject *args,
                               PyObject *kwargs)
{
    static char *keywords[] = {"request", "undo", NULL};
    PyObject *object;
    uint64_t request;
    rk_submission **at;
    int undo = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p:_cancel", keywords,
                                     &object, &undo) ||
        rk_uint64_read(&request, object, "request") < 0 ||
        rk_session_enter(self) < 0) {
        return NULL;
    }
    at = rk_submission_find(self->generating, request);
    if (at != NULL) {
        rk_submission_remove(self->generating, at);
        if (!undo) {
            rk_session_cancel(self->engine, request);
        }
    }
    if (undo && !rk_generating_collects(self->generating, request)) {
        /* Also one that ended, while others of its group run. */
        rk_session_abort(self->engine, request);
    }
    rk_session_leave(self);
    Py_RETURN_NONE;
}

/* ---- _generate ----------------------------------------------------------- */

/* Submit all and step until all have ended; after a failure none of them has
 * left a trace. Lock held, no GIL. */
static rk_status run(session_object *self, rk_branch *const *branches,
                     int32_t n, const settings *s, rk_collector *c,
                     rk_error *err)
{
    rk_generating *g = self->generating;
    uint64_t group = OWN_GROUPS | ++g->next_group;
    rk_status status = RK_OK;

    rk_collector_link(g, c);
    while (c->n < n && status == RK_OK) {
        rk_series *next = &c->series[c->n];

        status = rk_session_submit(self->engine, branches[c->n], &s->options,
                                   group, &next->request, err);
        if (status == RK_OK) {
            next->branch = branches[c->n];
            next->n_before = branches[c->n]->n_tokens;
            next->confidence_before = branches[c->n]->confidence;
            c->n++;
            c->n_left++;
        }
    }
    while (c->n_left > 0 && status == RK_OK) {
        int32_t n_active = 0;

        status = rk_generating_step(self, c, &n_active, err);
        if (status == RK_OK && c->n_left > 0 && n_active == 0) {
            status = rk_fail(err, RK_ESTATE, "%d requests were lost",
                             (int)c->n_left);
        }
        if (status == RK_OK && c->n_left > 0 && !rk_long_pause(self)) {
            status = rk_fail(err, RK_EINTERRUPTED, "interrupted");
        }
        if (status == RK_OK && c->failure.status != RK_OK) {
            *err = c->failure; /* found while others had their turn */
            status = err->status;
        }
    }
    if (status != RK_OK) {
        rk_collector_undo(self, c);
    }
    rk_collector_unlink(g, c);
    return status;
}

/* Mean probability of the most likely token, of the end's step where no token
 * came; None when no step ran. */
static PyObject *series_confidence(const rk_series *s)
{
    double sum = 0;

    if (s->n == 0 && s->end.finish == RK_FINISH_EOS) {
        return PyFloat_FromDouble(s->end.top_prob);
    }
    if (s->n == 0) {
        Py_RETURN_NONE;
    }
    for (int32_t i = 0; i < s->n; i++) {
        sum += s->top_probs[i];
    }
    return PyFloat_FromDouble(sum / s->n);
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
static PyObject *series_column(const rk_series *s, int column)
{
    switch (column) {
    case 0:
        return token_array(s->tokens, s->n);
    case 1:
        return float_array(s->top_probs, s->n);
    case 2:
        return float_array(s->logprobs, s->n);
    case 3:
        return float_array(s->entropies, s->n);
    case 4:
        return series_confidence(s);
    case 5:
        return PyUnicode_FromString(finish_name(s->end.finish));
    case 6:
        return PyLong_FromLong(s->end.stop_bytes);
    default:
        return PyLong_FromLong(s->end.stop_index);
    }
}

static PyObject *series_tuple(const rk_series *s)
{
    PyObject *row = PyTuple_New(N_COLUMNS);

    for (int i = 0; row != NULL && i < N_COLUMNS; i++) {
        PyObject *item = series_column(s, i);

        if (item == NULL) {
            Py_CLEAR(row);
            return NULL;
        }
        PyTuple_SET_ITEM(row, i, item);
    }
    return row;
}

static PyObject *collector_list(const rk_collector *c)
{
    PyObject *list = PyList_New(c->n);

    for (int32_t i = 0; list != NULL && i < c->n; i++) {
        PyObject *row = series_tuple(&c->series[i]);

        if (row == NULL) {
            Py_CLEAR(list);
            return NULL;
        }
        PyList_SET_ITEM(list, i, row);
    }
    return list;
}

/* There is no memory for the rows: the branches are as they were. */
static void undo(session_object *self, const rk_collector *c)
{
    for (int32_t i = 0; i < c->n; i++) {
        const rk_series *s = &c->series[i];

        /* Another thread may have gone on with one that ended early. */
        if (s->branch != NULL && !s->branch->busy &&
            s->branch->n_tokens == s->n_before + s->n) {
            rk_session_undo(self->engine, s->branch, s->n_before);
            s->branch->confidence = s->confidence_before;
        }
    }
}

static PyObject *generate(session_object *self, PyObject *branches,
                          const settings *s)
{
    Py_ssize_t n = PyTuple_GET_SIZE(branches);
    rk_branch **places = PyMem_RawCalloc((size_t)n + 1, sizeof *places);
    rk_collector c = {.series =
                          PyMem_RawCalloc((size_t)n + 1, sizeof *c.series)};
    PyObject *rows = NULL;
    rk_visitor visitor;
    rk_error err = {0};
    rk_status status;

    if (places == NULL || c.series == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (rk_session_enter(self) < 0) {
        goto done;
    }
    if (rk_branches_resolve(branches, places) < 0) {
        rk_session_leave(self);
        goto done;
    }
    rk_long_begin(self, &visitor);
    status = run(self, places, (int32_t)n, s, &c, &err);
    rk_long_end(self, &visitor);
    if (status != RK_OK) {
        rk_raise(self->state, &err);
    } else {
        rows = collector_list(&c);
        if (rows == NULL) {
            undo(self, &c);
        }
    }
    rk_session_leave(self);

done:
    rk_collector_free(&c);
    PyMem_RawFree(places);
    return rows;
}

PyObject *rk_session_py_generate(session_object *self, PyObject *args,
                                 PyObject *kwargs)
{
    static char *keywords[] = {"branches", SETTINGS_KEYWORDS, NULL};
    PyObject *object, *objects[N_SETTINGS], *branches, *rows;
    settings s;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOOOOOOO:_generate",
                                     keywords, &object,
                                     SETTINGS_REFERENCES(objects))) {
        return NULL;
    }
    branches = rk_branches_read(self, object);
    if (branches == NULL) {
        return NULL;
    }
    if (read_settings(&s, objects, self) < 0) {
        Py_DECREF(branches);
        return NULL;
    }
    rows = generate(self, branches, &s);
    settings_free(&s);
    Py_DECREF(branches);
    return rows;
}
