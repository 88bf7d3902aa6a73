/* The Session's calls that judge: verification, scoring, ASKS and its means. */
#include "py.h"

#include <math.h>
#include <string.h>

/* ---- verification -------------------------------------------------------- */

#define OFF 2.0 /* a confidence never reaches it */

/* shortcuts[name] as a double; None: `none`, NaN where None is not allowed. */
static int get_double(PyObject *shortcuts, const char *name, double none,
                      double *out)
{
    PyObject *value = PyMapping_GetItemString(shortcuts, name);

    if (value == NULL) {
        return -1;
    }
    *out = value == Py_None && !isnan(none) ? none : PyFloat_AsDouble(value);
    Py_DECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

static int get_int(PyObject *shortcuts, const char *name, int32_t *out)
{
    PyObject *value = PyMapping_GetItemString(shortcuts, name);
    int failed;

    if (value == NULL) {
        return -1;
    }
    failed = rk_int_read(out, value, name, 1, INT32_MAX);
    Py_DECREF(value);
    return failed;
}

static int get_lens(PyObject *shortcuts, rk_verification *v)
{
    PyObject *lens = PyMapping_GetItemString(shortcuts, "lens");
    PyObject *norm = NULL;
    int truth, failed = -1;

    if (lens != NULL) {
        norm = PyMapping_GetItemString(shortcuts, "norm");
    }
    truth = norm != NULL ? PyObject_IsTrue(norm) : -1;
    if (truth < 0) {
        goto done;
    }
    v->lens_norm = truth != 0;
    failed = 0;
    if (lens == Py_None) {
        v->lens = RK_LENS_NONE;
    } else if (PyUnicode_Check(lens) &&
               PyUnicode_CompareWithASCIIString(lens, "answer") == 0) {
        v->lens = RK_LENS_ANSWER;
    } else if (PyUnicode_Check(lens) &&
               PyUnicode_CompareWithASCIIString(lens, "full") == 0) {
        v->lens = RK_LENS_FULL;
    } else {
        PyErr_Format(PyExc_ValueError,
                     "lens must be \"answer\", \"full\" or None, got %R", lens);
        failed = -1;
    }

done:
    Py_XDECREF(lens);
    Py_XDECREF(norm);
    return failed;
}

static int read_shortcuts(PyObject *shortcuts, rk_verification *v)
{
    rk_cgee *c = &v->cgee;

    *c = (rk_cgee){.stop_top = OFF,
                   .skip_top = OFF,
                   .skip_top_relative = OFF,
                   .min_steps = 1,
                   .verify_batch = 1,
                   .min_layer = 1,
                   .lens_every = 1};
    if (shortcuts == Py_None) {
        return 0;
    }
    v->shortcuts = true;
    return get_double(shortcuts, "kappa", NAN, &c->kappa) < 0 ||
                   get_int(shortcuts, "verify_batch", &c->verify_batch) < 0 ||
                   get_double(shortcuts, "skip_top", OFF, &c->skip_top) < 0 ||
                   get_double(shortcuts, "skip_lead", NAN, &c->skip_lead) < 0 ||
                   get_double(shortcuts, "skip_top_relative", OFF,
                              &c->skip_top_relative) < 0 ||
                   get_double(shortcuts, "skip_lead_relative", NAN,
                              &c->skip_lead_relative) < 0 ||
                   get_lens(shortcuts, v) < 0 ||
                   get_double(shortcuts, "theta", NAN, &c->theta) < 0 ||
                   get_double(shortcuts, "epsilon", NAN, &c->epsilon) < 0 ||
                   get_int(shortcuts, "min_layer", &c->min_layer) < 0 ||
                   get_int(shortcuts, "lens_every", &c->lens_every) < 0
               ? -1
               : 0;
}

static const char *outcome_name(rk_outcome outcome)
{
    switch (outcome) {
    case RK_VERIFIED:
        return "verified";
    case RK_NOT_CONTENDER:
        return "not a contender";
    case RK_BOUND:
        return "bound";
    case RK_SKIPPED_LEAD:
        return "skipped: lead";
    case RK_SKIPPED_RELATIVE_LEAD:
        return "skipped: relative lead";
    case RK_SKIPPED_ONE_CONTENDER:
        return "skipped: one contender";
    }
    return NULL;
}

/* A float, or None for NaN. */
static PyObject *float_or_none(double value)
{
    if (isnan(value)) {
        Py_RETURN_NONE;
    }
    return PyFloat_FromDouble(value);
}

static PyObject *verdict_list(const rk_verdict *verdicts, Py_ssize_t n)
{
    PyObject *list = PyList_New(n);

    for (Py_ssize_t i = 0; list != NULL && i < n; i++) {
        const rk_verdict *v = &verdicts[i];
        PyObject *row = Py_BuildValue(
            "(sNNNNi)", outcome_name(v->outcome), float_or_none(v->score),
            float_or_none(v->mass), float_or_none(v->yes_logit),
            float_or_none(v->no_logit), (int)v->layers);

        if (row == NULL) {
            Py_CLEAR(list);
            return NULL;
        }
        PyList_SET_ITEM(list, i, row);
    }
    return list;
}

static PyObject *verify(session_object *self, PyObject *branches,
                        const rk_verification *v)
{
    Py_ssize_t n = PyTuple_GET_SIZE(branches);
    rk_verdict *verdicts = PyMem_RawCalloc((size_t)n + 1, sizeof *verdicts);
    PyObject *rows = NULL;
    rk_status status;
    rk_call call;

    if (verdicts == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    if (rk_call_enter(&call, self, rk_branches_of(branches), n) == 0) {
        rk_call_begin(&call);
        status = rk_session_verify(call.engine, call.branches, call.n, v,
                                   verdicts, &call.err);
        if (rk_call_leave(&call, status) == 0) {
            rows = verdict_list(verdicts, n);
        }
    }
    PyMem_RawFree(verdicts);
    return rows;
}

PyObject *rk_session_py_verify(session_object *self, PyObject *args,
                               PyObject *kwargs)
{
    static char *keywords[] = {"branches", "prompt",    "yes",
                               "no",       "shortcuts", NULL};
    PyObject *object, *prompt, *yes, *no, *shortcuts, *branches, *rows;
    rk_verification v = {0};
    rk_tokens tokens;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO:_verify", keywords,
                                     &object, &prompt, &yes, &no, &shortcuts) ||
        read_shortcuts(shortcuts, &v) < 0 ||
        rk_int_read(&v.yes, yes, "yes", 0, self->vocab_size - 1) < 0 ||
        rk_int_read(&v.no, no, "no", 0, self->vocab_size - 1) < 0) {
        return NULL;
    }
    branches = rk_branches_read(self, object);
    if (branches == NULL) {
        return NULL;
    }
    if (rk_tokens_read(&tokens, prompt, self->vocab_size, "prompt") < 0) {
        Py_DECREF(branches);
        return NULL;
    }
    v.prompt = tokens.ids;
    v.n_prompt = tokens.n;
    rows = verify(self, branches, &v);
    rk_tokens_free(&tokens);
    Py_DECREF(branches);
    return rows;
}

/* ---- verdicts become the branches' --------------------------------------- */

/* One of them, ready to be set. */
typedef struct settled {
    PyObject *branch;
    rk_kept_verdict kept;
    double score; /* NaN: None */
} settled;

static int settled_read(settled *out, session_object *self, PyObject *verdict)
{
    PyObject *score = NULL;
    int failed = -1;

    out->branch = PyObject_GetAttrString(verdict, "branch");
    if (out->branch != NULL &&
        rk_branch_read(self, out->branch, "branch") != NULL &&
        rk_kept_verdict_make(&out->kept, (branch_object *)out->branch,
                             verdict) == 0) {
        score = PyObject_GetAttrString(verdict, "score");
    }
    if (score != NULL) {
        out->score = score == Py_None ? NAN : PyFloat_AsDouble(score);
        failed = PyErr_Occurred() ? -1 : 0;
    }
    Py_XDECREF(score);
    return failed;
}

/* Their branches get them, and the scores. Nothing here calls Python. */
static void settle(session_object *session, settled *all, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        branch_object *branch = (branch_object *)all[i].branch;

        if (branch->handle->branch != NULL) {
            rk_session_set_score(session->engine, branch->handle->branch,
                                 all[i].score);
        }
        rk_kept_verdict_swap(&all[i].kept, branch);
    }
}

/* An attribute, because Python looks for signals when a call returns and not
 * when something has been assigned: so a verification ends with this. */
int rk_session_py_set_verified(session_object *self, PyObject *verdicts,
                               void *Py_UNUSED(closure))
{
    PyObject *list = verdicts != NULL ? PySequence_Tuple(verdicts) : NULL;
    Py_ssize_t n = list != NULL ? PyTuple_GET_SIZE(list) : 0;
    settled *all = PyMem_RawCalloc((size_t)n + 1, sizeof *all);
    int failed = list == NULL || all == NULL ? -1 : 0;

    if (verdicts == NULL) {
        PyErr_SetString(PyExc_AttributeError, "_verified cannot be deleted");
    } else if (all == NULL) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < n && failed == 0; i++) {
        failed = settled_read(&all[i], self, PyTuple_GET_ITEM(list, i));
    }
    if (failed == 0) {
        failed = rk_session_enter(self);
    }
    if (failed == 0) {
        settle(self, all, n);
        rk_session_leave(self);
    }
    for (Py_ssize_t i = 0; i < n && all != NULL; i++) { /* or what was there */
        RK_KEEP_EXCEPTION(Py_XDECREF(all[i].branch);
                          rk_kept_verdict_clear(&all[i].kept));
    }
    PyMem_RawFree(all);
    Py_XDECREF(list);
    return failed;
}

/* ---- scoring ------------------------------------------------------------- */

static void picks_free(rk_pick **picks, int32_t n)
{
    for (int32_t i = 0; picks != NULL && i < n; i++) {
        PyMem_RawFree(picks[i]);
    }
    PyMem_RawFree(picks);
}

/* (n_lists,) arrays of picks, one for each token; NULL with an exception. */
static rk_pick **picks_new(const rk_token_lists *lists)
{
    rk_pick **picks = PyMem_RawCalloc((size_t)lists->n + 1, sizeof *picks);
    bool failed = picks == NULL;

    for (int32_t i = 0; i < lists->n && !failed; i++) {
        picks[i] =
            PyMem_RawCalloc((size_t)lists->lengths[i] + 1, sizeof **picks);
        failed = picks[i] == NULL;
    }
    if (failed) {
        picks_free(picks, lists->n);
        PyErr_NoMemory();
        return NULL;
    }
    return picks;
}

/* (logprobs, tops) of one continuation. */
static PyObject *picks_tuple(const rk_pick *picks, int32_t n)
{
    float *logprobs;
    int32_t *tops;
    PyObject *first = rk_array_float32(n, &logprobs);
    PyObject *second = first != NULL ? rk_array_int32(n, &tops) : NULL;

    if (second == NULL) {
        Py_XDECREF(first);
        return NULL;
    }
    for (int32_t i = 0; i < n; i++) {
        logprobs[i] = picks[i].logprob;
        tops[i] = picks[i].top;
    }
    return Py_BuildValue("(NN)", first, second);
}

static PyObject *picks_list(rk_pick *const *picks, const rk_token_lists *lists)
{
    PyObject *list = PyList_New(lists->n);

    for (int32_t i = 0; list != NULL && i < lists->n; i++) {
        PyObject *item = picks_tuple(picks[i], lists->lengths[i]);

        if (item == NULL) {
            Py_CLEAR(list);
            return NULL;
        }
        PyList_SET_ITEM(list, i, item);
    }
    return list;
}

static PyObject *score(session_object *self, branch_object *branch,
                       const rk_token_lists *lists)
{
    rk_pick **picks = picks_new(lists);
    PyObject *list = NULL;
    rk_status status;
    rk_call call;

    if (picks != NULL && rk_call_enter(&call, self, &branch, 1) == 0) {
        rk_call_begin(&call);
        status = rk_session_score(call.engine, call.one,
                                  (const int32_t *const *)lists->ids,
                                  lists->lengths, lists->n, picks, &call.err);
        if (rk_call_leave(&call, status) == 0) {
            list = picks_list(picks, lists);
        }
    }
    picks_free(picks, lists->n);
    return list;
}

PyObject *rk_session_py_score(session_object *self, PyObject *args,
                              PyObject *kwargs)
{
    static char *keywords[] = {"branch", "continuations", NULL};
    PyObject *object, *continuations, *scores;
    branch_object *branch;
    rk_token_lists lists;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:_score", keywords,
                                     &object, &continuations)) {
        return NULL;
    }
    branch = rk_branch_read(self, object, "branch");
    if (branch == NULL ||
        rk_token_lists_read(&lists, continuations, self->vocab_size,
                            "continuations") < 0) {
        return NULL;
    }
    scores = score(self, branch, &lists);
    rk_token_lists_free(&lists);
    return scores;
}

/* ---- logits of many positions -------------------------------------------- */

PyObject *rk_session_py_logits_at(session_object *self, PyObject *args,
                                  PyObject *kwargs)
{
    static char *keywords[] = {"branch", "begin", "end", NULL};
    PyObject *object, *begin_object, *end_object, *array = NULL;
    branch_object *branch;
    rk_status status = RK_OK;
    int32_t begin, end;
    rk_call call;
    float *out;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:_logits_at", keywords,
                                     &object, &begin_object, &end_object)) {
        return NULL;
    }
    branch = rk_branch_read(self, object, "branch");
    if (branch == NULL ||
        rk_int_read(&begin, begin_object, "begin", 0, INT32_MAX) < 0 ||
        rk_int_read(&end, end_object, "end", begin, INT32_MAX) < 0) {
        return NULL;
    }
    if (rk_call_enter(&call, self, &branch, 1) < 0) {
        return NULL;
    }
    end = end < rk_look(call.one)->n_tokens ? end : rk_look(call.one)->n_tokens;
    begin = begin < end ? begin : end;
    array = rk_array_float32_2d(end - begin, self->vocab_size, &out);
    if (array != NULL) {
        rk_call_begin(&call);
        status = rk_session_logits_at(call.engine, call.one, begin, end, out,
                                      &call.err);
    }
    if (rk_call_leave(&call, status) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

/* ---- ASKS ---------------------------------------------------------------- */

PyObject *rk_session_py_prompt_means(session_object *self, PyObject *args,
                                     PyObject *kwargs)
{
    static char *keywords[] = {"tokens", "begin", "end", NULL};
    PyObject *object, *first, *last, *array = NULL;
    int32_t begin, end;
    const rk_config *config;
    rk_tokens tokens;
    rk_status status = RK_OK;
    rk_call call;
    float *means;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:_prompt_means",
                                     keywords, &object, &first, &last) ||
        rk_tokens_read(&tokens, object, self->vocab_size, "tokens") < 0) {
        return NULL;
    }
    if (rk_int_read(&begin, first, "begin", 0, INT32_MAX) < 0 ||
        rk_int_read(&end, last, "end", 0, INT32_MAX) < 0 ||
        rk_call_enter(&call, self, NULL, 0) < 0) {
        rk_tokens_free(&tokens);
        return NULL;
    }
    config = &rk_session_model(call.engine)->config;
    array = rk_array_float32_2d(config->n_layers, config->width, &means);
    if (array != NULL) {
        rk_call_begin(&call);
        status = rk_session_prompt_means(call.engine, tokens.ids, tokens.n,
                                         begin, end, means, &call.err);
    }
    if (rk_call_leave(&call, status) < 0) {
        Py_CLEAR(array);
    }
    rk_tokens_free(&tokens);
    return array;
}

static const char *gate_name(rk_gate gate, bool allowed)
{
    switch (gate) {
    case RK_GATE_ACCEPTED:
        return "accepted";
    case RK_GATE_REJECTED:
        return "rejected";
    case RK_GATE_UNREACHABLE:
        return "unreachable";
    case RK_GATE_UNDEFINED:
        return "undefined";
    case RK_GATE_OPEN: /* nothing was probed */
        return allowed ? "rejected" : "guard";
    }
    return NULL;
}

/* What `_prefill_similar` was given. */
typedef struct similar {
    branch_object *root;
    rk_tokens tokens, suffix;
    rk_asks asks;
    PyObject *center; /* keeps asks.center alive, or NULL */
    bool allowed;
} similar;

static int read_choice(PyObject *object, const char *what, const char *no,
                       const char *yes, bool *out)
{
    if (PyUnicode_Check(object)) {
        *out = PyUnicode_CompareWithASCIIString(object, yes) == 0;
        if (*out || PyUnicode_CompareWithASCIIString(object, no) == 0) {
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "%s must be \"%s\" or \"%s\", got %R", what,
                 yes, no, object);
    return -1;
}

static void similar_free(similar *s)
{
    rk_tokens_free(&s->tokens);
    rk_tokens_free(&s->suffix);
    Py_CLEAR(s->center);
}

static int read_similar(similar *s, session_object *self, PyObject *args,
                        PyObject *kwargs)
{
    static char *keywords[] = {"root",   "tokens",       "suffix", "probe",
                               "pool",   "probe_layers", "tau",    "alpha",
                               "center", "allowed",      NULL};
    PyObject *root, *tokens, *suffix, *probe, *pool, *layers, *center;
    int32_t n_layers, width;
    bool is_suffix;
    int allowed;

    *s = (similar){0};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOddOp:_prefill_similar", keywords, &root,
            &tokens, &suffix, &probe, &pool, &layers, &s->asks.tau,
            &s->asks.alpha, &center, &allowed)) {
        return -1;
    }
    s->root = rk_branch_read(self, root, "root");
    if (s->root == NULL || rk_session_enter(self) < 0) {
        return -1;
    }
    n_layers = rk_session_model(self->engine)->config.n_layers;
    width = rk_session_model(self->engine)->config.width;
    rk_session_leave(self);
    s->allowed = allowed != 0;
    if (read_choice(probe, "probe", "prefix", "suffix", &is_suffix) < 0 ||
        read_choice(pool, "pool", "last", "mean", &s->asks.pool_mean) < 0 ||
        rk_int_read(&s->asks.probe_layers, layers, "probe_layers", 1,
                    n_layers) < 0 ||
        rk_tokens_read(&s->tokens, tokens, self->vocab_size, "tokens") < 0 ||
        rk_tokens_read(&s->suffix, suffix, self->vocab_size, "suffix") < 0) {
        return -1;
    }
    s->asks.probe = is_suffix ? RK_PROBE_SUFFIX : RK_PROBE_PREFIX;
    if (center != Py_None) {
        s->center = rk_array_read_2d(center, s->asks.probe_layers, width,
                                     "center", &s->asks.center);
        if (s->center == NULL) {
            return -1;
        }
    }
    return 0;
}

/* The report; `cosines` holds at least n_layers numbers. */
static PyObject *report_dict(const rk_gate_report *report, bool allowed)
{
    float *cosines;
    PyObject *array = rk_array_float32(report->n_layers, &cosines);

    if (array == NULL) {
        return NULL;
    }
    if (report->n_layers > 0) {
        memcpy(cosines, report->cosines,
               (size_t)report->n_layers * sizeof *cosines);
    }
    return Py_BuildValue(
        "{sssNsNsNsLsL}", "gate", gate_name(report->gate, allowed), "equal",
        PyBool_FromLong(report->equal), "sigma", float_or_none(report->sigma),
        "cosines", array, "own_token_layers",
        (long long)report->own_token_layers, "root_token_layers",
        (long long)report->root_token_layers);
}

static PyObject *prefill_similar(session_object *self, const similar *s)
{
    branch_object *branch = rk_branch_new(self);
    rk_gate_report report = {.sigma = NAN};
    rk_branch *made = NULL;
    PyObject *dict = NULL;
    rk_status status;
    rk_call call;

    report.cosines =
        PyMem_RawCalloc((size_t)s->asks.probe_layers, sizeof *report.cosines);
    if (report.cosines == NULL) {
        PyErr_NoMemory();
    }
    if (branch != NULL && report.cosines != NULL &&
        rk_call_enter(&call, self, &s->root, 1) == 0) {
        rk_call_begin(&call);
        status = rk_session_prefill_similar(
            call.engine, &made, call.one, s->tokens.ids, s->tokens.n,
            s->suffix.ids, s->suffix.n, &s->asks, s->allowed, &report,
            &call.err);
        if (status == RK_OK) {
            rk_branch_bind(branch, made);
        }
        if (rk_call_leave(&call, status) == 0) {
            dict = report_dict(&report, s->allowed);
        }
    }
    PyMem_RawFree(report.cosines);
    if (dict == NULL) {
        Py_XDECREF(branch);
        return NULL;
    }
    return Py_BuildValue("(NN)", branch, dict);
}

PyObject *rk_session_py_prefill_similar(session_object *self, PyObject *args,
                                        PyObject *kwargs)
{
    PyObject *result = NULL;
    similar s;

    if (read_similar(&s, self, args, kwargs) == 0) {
        result = prefill_similar(self, &s);
    }
    similar_free(&s);
    return result;
}
