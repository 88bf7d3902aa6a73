/* A table of token bytes, collectors, submissions and one queue of events. */
#include "collect.h"

#include <string.h>

/* ---- the table of token bytes -------------------------------------------- */

static int fill_table(rk_generating *g, PyObject *items, int32_t vocab_size)
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
    g->token_bytes = PyMem_RawMalloc((size_t)total + 1);
    g->token_offsets =
        PyMem_RawCalloc((size_t)vocab_size + 1, sizeof *g->token_offsets);
    if (g->token_bytes == NULL || g->token_offsets == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    total = 0;
    for (Py_ssize_t i = 0; i < vocab_size; i++) {
        if (i < n) {
            PyObject *item = PyTuple_GET_ITEM(items, i);

            memcpy(g->token_bytes + total, PyBytes_AS_STRING(item),
                   (size_t)PyBytes_GET_SIZE(item));
            total += PyBytes_GET_SIZE(item);
        }
        g->token_offsets[i + 1] = total;
    }
    return 0;
}

static int fill_special(rk_generating *g, PyObject *special_ids,
                        int32_t vocab_size)
{
    rk_tokens ids = {0};

    if (rk_tokens_read(&ids, special_ids, vocab_size, "special_ids") < 0) {
        return -1;
    }
    g->special = PyMem_RawCalloc((size_t)vocab_size, 1);
    if (g->special == NULL) {
        PyErr_NoMemory();
    } else {
        for (int32_t i = 0; i < ids.n; i++) {
            g->special[ids.ids[i]] = 1;
        }
    }
    rk_tokens_free(&ids);
    return g->special == NULL ? -1 : 0;
}

rk_generating *rk_generating_new(PyObject *token_bytes, PyObject *special_ids,
                                 int32_t vocab_size)
{
    rk_generating *g = PyMem_RawCalloc(1, sizeof *g);
    PyObject *items;
    int failed;

    if (g == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    if (token_bytes == Py_None) {
        return g;
    }
    items = PySequence_Tuple(token_bytes);
    failed = items == NULL || fill_table(g, items, vocab_size) < 0 ||
             (special_ids != Py_None &&
              fill_special(g, special_ids, vocab_size) < 0);
    Py_XDECREF(items);
    if (failed) {
        rk_generating_free(g);
        return NULL;
    }
    return g;
}

void rk_failed_free(rk_generating *g)
{
    while (g->failed != NULL) {
        rk_submission *told = g->failed;

        g->failed = told->next;
        PyMem_RawFree(told);
    }
    g->n_failed = 0;
}

void rk_generating_free(rk_generating *g)
{
    if (g == NULL) {
        return;
    }
    for (int32_t i = 0; i < g->n_submissions; i++) {
        PyMem_RawFree(g->submissions[i]);
    }
    PyMem_RawFree(g->submissions);
    rk_failed_free(g);
    PyMem_RawFree(g->token_bytes);
    PyMem_RawFree(g->token_offsets);
    PyMem_RawFree(g->special);
    PyMem_RawFree(g->queue);
    PyMem_RawFree(g);
}

/* ---- submissions --------------------------------------------------------- */

bool rk_submission_add(rk_generating *g, uint64_t request)
{
    rk_submission *new;

    if (g->n_submissions == g->submissions_capacity) {
        int32_t capacity = 2 * (g->n_submissions + 8);
        rk_submission **grown = PyMem_RawRealloc(
            g->submissions, (size_t)capacity * sizeof(rk_submission *));

        if (grown == NULL) {
            return false;
        }
        g->submissions = grown;
        g->submissions_capacity = capacity;
    }
    new = PyMem_RawCalloc(1, sizeof *new);
    if (new == NULL) {
        return false;
    }
    new->request = request;
    g->submissions[g->n_submissions++] = new;
    return true;
}

rk_submission **rk_submission_find(const rk_generating *g, uint64_t request)
{
    int32_t low = 0, high = g->n_submissions;

    while (low < high) {
        int32_t middle = low + (high - low) / 2;

        if (g->submissions[middle]->request < request) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < g->n_submissions && g->submissions[low]->request == request
               ? g->submissions + low
               : NULL;
}

/* Take *at out of the others; it is the caller's. */
static rk_submission *submission_take(rk_generating *g, rk_submission **at)
{
    rk_submission *taken = *at;
    rk_submission **end = g->submissions + g->n_submissions--;

    memmove(at, at + 1, (size_t)(end - at - 1) * sizeof(rk_submission *));
    return taken;
}

void rk_submission_remove(rk_generating *g, rk_submission **at)
{
    PyMem_RawFree(submission_take(g, at));
}

/* ---- where events go ----------------------------------------------------- */

static bool series_grow(rk_series *s)
{
    int32_t capacity = s->capacity < 32 ? 32 : s->capacity * 2;
    size_t bytes = (size_t)capacity * 4; /* all four arrays are this large */
    int32_t *tokens = PyMem_RawRealloc(s->tokens, bytes);
    float *top_probs = PyMem_RawRealloc(s->top_probs, bytes);
    float *logprobs = PyMem_RawRealloc(s->logprobs, bytes);
    float *entropies = PyMem_RawRealloc(s->entropies, bytes);

    s->tokens = tokens != NULL ? tokens : s->tokens;
    s->top_probs = top_probs != NULL ? top_probs : s->top_probs;
    s->logprobs = logprobs != NULL ? logprobs : s->logprobs;
    s->entropies = entropies != NULL ? entropies : s->entropies;
    if (tokens == NULL || top_probs == NULL || logprobs == NULL ||
        entropies == NULL) {
        return false;
    }
    s->capacity = capacity;
    return true;
}

static bool series_take(rk_collector *c, rk_series *s, const rk_token *event)
{
    if (event->token >= 0) {
        if (s->n == s->capacity && !series_grow(s)) {
            return false;
        }
        s->tokens[s->n] = event->token;
        s->top_probs[s->n] = event->top_prob;
        s->logprobs[s->n] = event->logprob;
        s->entropies[s->n] = event->entropy;
        s->n++;
    }
    if (event->finish != RK_FINISH_NONE && s->end.finish == RK_FINISH_NONE) {
        s->end = *event;
        c->n_left--;
    }
    return true;
}

static rk_series *find_series(const rk_collector *c, uint64_t request)
{
    int32_t low = 0, high = c->n;

    while (low < high) {
        int32_t middle = low + (high - low) / 2;

        if (c->series[middle].request < request) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < c->n && c->series[low].request == request ? &c->series[low]
                                                           : NULL;
}

static bool enqueue(rk_generating *g, const rk_token *event)
{
    if (g->n_queue == g->queue_capacity) {
        int32_t capacity = g->queue_capacity < 64 ? 64 : g->queue_capacity * 2;
        rk_token *grown =
            PyMem_RawRealloc(g->queue, (size_t)capacity * sizeof *grown);

        if (grown == NULL) {
            return false;
        }
        g->queue = grown;
        g->queue_capacity = capacity;
    }
    g->queue[g->n_queue++] = *event;
    return true;
}

/* False: no memory for it. Events of requests that nobody waits for any more
 * are none of our business. */
static bool dispatch(rk_generating *g, const rk_token *event)
{
    rk_submission **at;

    for (rk_collector *c = g->collectors; c != NULL; c = c->next) {
        rk_series *s = find_series(c, event->request);

        if (s != NULL) {
            return series_take(c, s, event);
        }
    }
    at = rk_submission_find(g, event->request);
    if (at == NULL) {
        return true;
    }
    if (event->finish != RK_FINISH_NONE) {
        rk_submission_remove(g, at);
    }
    return enqueue(g, event);
}

void rk_collector_undo(session_object *session, const rk_collector *c)
{
    for (int32_t i = 0; i < c->n; i++) {
        rk_session_abort(session->engine, c->series[i].request);
    }
}

/* Tell the owner of a request why it cannot go on, and end it: a `_generate`
 * as a whole, as if it had never been called. False: it is `own`, who is told
 * by the step itself. */
static bool blame(session_object *session, const rk_collector *own,
                  uint64_t request, const rk_error *err)
{
    rk_generating *g = session->generating;
    rk_submission **at, *failed;

    for (rk_collector *c = g->collectors; c != NULL; c = c->next) {
        if (find_series(c, request) != NULL) {
            if (c != own) {
                c->failure = *err;
                rk_collector_undo(session, c);
            }
            return c != own;
        }
    }
    at = rk_submission_find(g, request);
    if (at == NULL) {
        return false;
    }
    failed = submission_take(g, at);
    *failed = (rk_submission){g->failed, request, *err};
    g->failed = failed;
    g->n_failed++;
    rk_session_cancel(session->engine, request);
    return true;
}

rk_status rk_generating_step(session_object *session, const rk_collector *own,
                             int32_t *n_active, rk_error *err)
{
    const rk_token *events = NULL;
    int32_t n_events = 0;
    bool taken = true;
    rk_status status =
        rk_session_step(session->engine, &events, &n_events, n_active, err);

    for (int32_t i = 0; i < n_events; i++) {
        taken = dispatch(session->generating, &events[i]) && taken;
    }
    if (status != RK_OK) {
        uint64_t blamed = rk_session_blamed(session->engine);

        if (blamed != 0 && blame(session, own, blamed, err)) {
            status = RK_OK;
        }
    }
    if (status == RK_OK && !taken) {
        status = rk_fail(err, RK_ENOMEM, "no memory for new tokens");
    }
    return status;
}

void rk_generating_forget(rk_generating *g, const rk_branch *branch)
{
    rk_token end = {.request = branch->request,
                    .token = -1,
                    .finish = RK_FINISH_CANCELLED,
                    .stop_index = -1};
    rk_submission **at;

    if (branch->n_requests == 0) {
        return; /* nobody waits for anything of it */
    }
    for (rk_collector *c = g->collectors; c != NULL; c = c->next) {
        for (int32_t i = 0; i < c->n; i++) {
            if (c->series[i].branch == branch) {
                series_take(c, &c->series[i], &end);
                c->series[i].branch = NULL;
            }
        }
    }
    at = branch->busy ? rk_submission_find(g, branch->request) : NULL;
    if (at != NULL) {
        enqueue(g, &end); /* without memory, n_active alone tells */
        rk_submission_remove(g, at);
    }
}

bool rk_generating_collects(const rk_generating *g, uint64_t request)
{
    for (const rk_collector *c = g->collectors; c != NULL; c = c->next) {
        if (find_series(c, request) != NULL) {
            return true;
        }
    }
    return false;
}

void rk_collector_free(rk_collector *c)
{
    for (int32_t i = 0; i < c->n; i++) {
        PyMem_RawFree(c->series[i].tokens);
        PyMem_RawFree(c->series[i].top_probs);
        PyMem_RawFree(c->series[i].logprobs);
        PyMem_RawFree(c->series[i].entropies);
    }
    PyMem_RawFree(c->series);
    *c = (rk_collector){0};
}

void rk_collector_link(rk_generating *g, rk_collector *c)
{
    c->next = g->collectors;
    g->collectors = c;
}

void rk_collector_unlink(rk_generating *g, const rk_collector *c)
{
    rk_collector **at = &g->collectors;

    while (*at != c) {
        at = &(*at)->next;
    }
    *at = c->next;
}
