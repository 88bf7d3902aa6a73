/* Requests: the Python object, the running ones of a session, and where their
 * events go. */
#include "request.h"

#include <math.h>

/* ---- the requests of a session ------------------------------------------- */

rk_requests *rk_requests_new(PyObject *token_bytes, PyObject *special_ids,
                             int32_t vocab_size)
{
    rk_requests *all = PyMem_RawCalloc(1, sizeof *all);

    if (all == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    all->kept = PyDict_New();
    if (all->kept == NULL || rk_token_table_read(&all->table, token_bytes,
                                                 special_ids, vocab_size) < 0) {
        rk_requests_free(all);
        return NULL;
    }
    return all;
}

void rk_requests_free(rk_requests *all)
{
    if (all == NULL) {
        return;
    }
    rk_token_table_free(&all->table);
    Py_XDECREF(all->kept);
    PyMem_RawFree(all->running);
    PyMem_RawFree(all);
}

int rk_requests_traverse(rk_requests *all, visitproc visit, void *arg)
{
    if (all != NULL) {
        Py_VISIT(all->kept);
    }
    return 0;
}

void rk_requests_clear(rk_requests *all)
{
    if (all != NULL) {
        all->n = all->n_ended = all->n_submitted = 0;
        PyDict_Clear(all->kept);
    }
}

static request_object *find(const rk_requests *all, uint64_t id)
{
    int32_t low = 0, high = all->n;

    while (low < high) {
        int32_t middle = low + (high - low) / 2;

        if (all->running[middle]->id < id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < all->n && all->running[low]->id == id ? all->running[low]
                                                       : NULL;
}

static bool runs(const request_object *request)
{
    return request->id != 0 && request->end.finish == RK_FINISH_NONE;
}

void rk_requests_sweep(rk_requests *all)
{
    int32_t n = 0;

    for (int32_t i = 0; all->n_ended > 0 && i < all->n; i++) {
        if (runs(all->running[i])) {
            all->running[n++] = all->running[i];
        }
    }
    all->n = all->n_ended > 0 ? n : all->n;
    all->n_ended = 0;
}

static bool make_room(rk_requests *all)
{
    int32_t capacity = 2 * (all->n + 8);
    request_object **grown;

    if (all->n < all->capacity) {
        return true;
    }
    grown = PyMem_RawRealloc(all->running,
                             (size_t)capacity * sizeof(request_object *));
    if (grown == NULL) {
        return false;
    }
    all->running = grown;
    all->capacity = capacity;
    return true;
}

rk_status rk_request_submit(session_object *session, request_object *request,
                            const rk_generation_options *options,
                            uint64_t group, rk_wait *wait, rk_error *err)
{
    rk_requests *all = session->requests;
    rk_branch *branch = request->branch->handle->branch;
    uint64_t id;
    rk_status status;

    if (request->id != 0) {
        return rk_fail(err, RK_ESTATE, "request %llu was submitted before",
                       (unsigned long long)request->id);
    }
    if (branch == NULL) {
        return rk_fail(err, RK_ESTATE, "branch %llu was dropped",
                       (unsigned long long)request->branch->id);
    }
    if (!make_room(all)) {
        return rk_fail(err, RK_ENOMEM, "no memory for a request");
    }
    status =
        rk_session_submit(session->engine, branch, options, group, &id, err);
    if (status != RK_OK) {
        return status;
    }
    request->id = id;
    request->wait = wait;
    request->n_before = rk_look(branch)->n_tokens;
    request->confidence_before = rk_look(branch)->confidence;
    all->running[all->n++] = request;
    *(wait != NULL ? &wait->n_left : &all->n_submitted) += 1;
    return RK_OK;
}

/* ---- what comes of them -------------------------------------------------- */

/* Room for one more token, so that a step's events can be taken. */
static bool grow(request_object *r)
{
    int32_t capacity = r->capacity < 32 ? 32 : r->capacity * 2;
    size_t bytes = (size_t)capacity * 4; /* all four arrays are this large */
    int32_t *tokens;
    float *top_probs, *logprobs, *entropies;

    if (r->n < r->capacity) {
        return true;
    }
    tokens = PyMem_RawRealloc(r->tokens, bytes);
    top_probs = PyMem_RawRealloc(r->top_probs, bytes);
    logprobs = PyMem_RawRealloc(r->logprobs, bytes);
    entropies = PyMem_RawRealloc(r->entropies, bytes);
    r->tokens = tokens != NULL ? tokens : r->tokens;
    r->top_probs = top_probs != NULL ? top_probs : r->top_probs;
    r->logprobs = logprobs != NULL ? logprobs : r->logprobs;
    r->entropies = entropies != NULL ? entropies : r->entropies;
    if (tokens == NULL || top_probs == NULL || logprobs == NULL ||
        entropies == NULL) {
        return false;
    }
    r->capacity = capacity;
    return true;
}

static void end(rk_requests *all, request_object *r, const rk_token *event)
{
    r->end = *event;
    *(r->wait != NULL ? &r->wait->n_left : &all->n_submitted) -= 1;
    all->n_ended++;
}

static void cancelled(rk_requests *all, request_object *r)
{
    end(all, r,
        &(rk_token){.request = r->id,
                    .token = -1,
                    .finish = RK_FINISH_CANCELLED,
                    .stop_index = -1});
}

/* Events of requests that nobody waits for any more are none of our business.
 */
static void take(rk_requests *all, const rk_token *event)
{
    request_object *r = find(all, event->request);

    if (r == NULL || !runs(r)) {
        return;
    }
    if (event->token >= 0) {
        r->tokens[r->n] = event->token;
        r->top_probs[r->n] = event->top_prob;
        r->logprobs[r->n] = event->logprob;
        r->entropies[r->n] = event->entropy;
        r->n++;
    }
    if (event->finish != RK_FINISH_NONE) {
        end(all, r, event);
    }
}

double rk_request_confidence(const request_object *r)
{
    double sum = 0;

    if (r->n == 0) {
        return r->end.finish == RK_FINISH_EOS ? (double)r->end.top_prob : NAN;
    }
    for (int32_t i = 0; i < r->n; i++) {
        sum += r->top_probs[i];
    }
    return sum / r->n;
}

void rk_request_stop(session_object *session, request_object *r)
{
    if (runs(r)) {
        rk_session_cancel(session->engine, r->id);
        cancelled(session->requests, r);
    }
}

void rk_request_undo(session_object *session, request_object *r, int32_t keep)
{
    rk_branch *branch = r->branch->handle->branch;
    bool untouched;

    rk_request_stop(session, r);
    /* Another thread may have gone on with a branch whose request had ended.
     */
    untouched = r->id != 0 && !r->undone && branch != NULL &&
                !rk_look(branch)->busy &&
                rk_look(branch)->n_tokens == r->n_before + r->n;
    r->undone = true;
    r->n = keep < r->n ? keep : r->n;
    if (untouched) {
        rk_session_undo(session->engine, branch, r->n_before + r->n,
                        r->n > 0 ? rk_request_confidence(r)
                                 : r->confidence_before);
    }
}

void rk_requests_forget(rk_requests *all, const rk_branch *branch)
{
    request_object *r =
        rk_look(branch)->busy ? find(all, rk_look(branch)->request) : NULL;

    if (r != NULL && runs(r)) {
        cancelled(all, r);
    }
}

/* ---- a step -------------------------------------------------------------- */

/* End a request that cannot go on, and keep why for its owner: a `_generate`
 * as a whole, as if it had never been called. False: it is `own`, who is told
 * by the step itself. */
static bool blame(session_object *session, const rk_wait *own, uint64_t id,
                  const rk_error *err)
{
    request_object *r = find(session->requests, id);
    rk_wait *wait;

    if (r == NULL || (own != NULL && r->wait == own)) {
        return false;
    }
    wait = r->wait;
    if (wait == NULL) {
        rk_request_stop(session, r);
        r->failure = PyMem_RawMalloc(sizeof *r->failure);
        if (r->failure == NULL) {
            return false; /* then it is whoever made the step */
        }
        *r->failure = *err;
        return true;
    }
    wait->failure = *err;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(wait->requests); i++) {
        rk_request_undo(
            session, (request_object *)PyTuple_GET_ITEM(wait->requests, i), 0);
    }
    return true;
}

rk_status rk_requests_step(session_object *session, const rk_wait *own,
                           int32_t *n_active, rk_error *err)
{
    rk_requests *all = session->requests;
    const rk_token *events = NULL;
    int32_t n_events = 0;
    rk_status status;

    for (int32_t i = 0; i < all->n; i++) {
        if (!grow(all->running[i])) {
            return rk_fail(err, RK_ENOMEM, "no memory for new tokens");
        }
    }
    status =
        rk_session_step(session->engine, &events, &n_events, n_active, err);
    for (int32_t i = 0; i < n_events; i++) {
        take(all, &events[i]);
    }
    if (status != RK_OK) {
        uint64_t blamed = rk_session_blamed(session->engine);

        if (blamed != 0 && blame(session, own, blamed, err)) {
            status = RK_OK;
        }
    }
    rk_requests_sweep(all);
    return status;
}

/* ---- the Python object --------------------------------------------------- */

static PyObject *request_new(PyTypeObject *type, PyObject *args,
                             PyObject *kwargs)
{
    static char *keywords[] = {"branch", NULL};
    rk_state *state = rk_state_of(type);
    PyObject *branch;
    request_object *self;

    if (state == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "O:Request",
                                                      keywords, &branch)) {
        return NULL;
    }
    if ((PyObject *)Py_TYPE(branch) != state->branch_type) {
        PyErr_Format(PyExc_TypeError,
                     "branch must be a rksc.Branch, not %.200s",
                     Py_TYPE(branch)->tp_name);
        return NULL;
    }
    self = (request_object *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->branch = (branch_object *)Py_NewRef(branch);
    }
    return (PyObject *)self;
}

/* A cycle through the session is broken there. */
static int request_traverse(request_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->branch);
    return 0;
}

/* Nobody runs it: who does would hold a reference. */
static void request_dealloc(request_object *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    PyMem_RawFree(self->tokens);
    PyMem_RawFree(self->top_probs);
    PyMem_RawFree(self->logprobs);
    PyMem_RawFree(self->entropies);
    PyMem_RawFree(self->failure);
    Py_XDECREF(self->number);
    Py_XDECREF(self->branch);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *get_branch(request_object *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->branch);
}

static PyObject *get_number(request_object *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(self->id);
}

static PyObject *get_over(request_object *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->end_told);
}

static PyGetSetDef ATTRIBUTES[] = {
    {"branch", (getter)get_branch, NULL, "Whose continuation it is.", NULL},
    {"number", (getter)get_number, NULL,
     "Never used twice in a session; 0 until it is submitted.", NULL},
    {"over", (getter)get_over, NULL,
     "Whether its end has been told, or it was ended.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, request_new},
    {Py_tp_dealloc, request_dealloc},
    {Py_tp_traverse, request_traverse},
    {Py_tp_getset, ATTRIBUTES},
    {Py_tp_doc, "Request(branch)\n--\n\n"
                "A continuation of a branch, and what has come of it."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "rksc._core.Request",
    .basicsize = sizeof(request_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *rk_request_type_new(PyObject *module)
{
    return PyType_FromModuleAndSpec(module, &SPEC, NULL);
}
