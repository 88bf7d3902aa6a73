/* A call's way in and out of the engine: the session's lock, the GIL, Ctrl-C,
 * and branches that are dropped while somebody else is inside.
 *
 * A branch is dropped by whoever holds the lock: dropping puts its handle on a
 * list, then tries the lock; the holder looks at the list before and after it
 * gives the lock up, so no handle is left behind.
 */
#include "py.h"

#include <time.h>
#include <unistd.h>

/* Between two looks at Python's signals. Each needs the GIL, for which another
 * thread may let us wait 5 ms. */
#define LOOK_NS 50000000

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- signals ------------------------------------------------------------- */

/* Let signal handlers run when it is time; true when one raised. */
static bool look(void *context)
{
    rk_call *call = context;
    int failed;

    if (!call->looks || now_ns() - call->looked_ns < LOOK_NS) {
        return false;
    }
    PyEval_RestoreThread(call->suspended);
    failed = PyErr_CheckSignals();
    call->suspended = PyEval_SaveThread();
    call->looked_ns = now_ns();
    return failed < 0;
}

bool rk_session_interrupted(void *context)
{
    session_object *session = context;

    return session->call != NULL && look(session->call);
}

static void gil_release(rk_call *call)
{
    call->looks = PyThread_get_thread_ident() == call->session->main_thread;
    call->looked_ns = now_ns();
    call->suspended = PyEval_SaveThread();
}

static void gil_take(rk_call *call)
{
    PyEval_RestoreThread(call->suspended);
    call->suspended = NULL;
}

/* ---- branches that are dropped ------------------------------------------- */

void rk_session_drain(session_object *session)
{
    for (;;) {
        rk_handle *handle;
        bool orphan;

        pthread_mutex_lock(&session->drops_mutex);
        handle = session->drops;
        if (handle != NULL) {
            session->drops = handle->next;
        }
        pthread_mutex_unlock(&session->drops_mutex);
        if (handle == NULL) {
            return;
        }
        if (handle->branch != NULL && session->engine != NULL) {
            rk_requests_forget(session->requests, handle->branch);
            rk_session_drop(session->engine, handle->branch);
        }
        handle->branch = NULL;
        pthread_mutex_lock(&session->drops_mutex);
        handle->queued = false;
        orphan = handle->orphan;
        pthread_mutex_unlock(&session->drops_mutex);
        if (orphan) {
            PyMem_RawFree(handle);
        }
    }
}

static bool has_drops(session_object *session)
{
    bool any;

    pthread_mutex_lock(&session->drops_mutex);
    any = session->drops != NULL;
    pthread_mutex_unlock(&session->drops_mutex);
    return any;
}

void rk_session_leave(session_object *session)
{
    do {
        rk_session_drain(session);
        rk_lock_give(&session->lock);
        /* Something queued since: its owner may have found the lock taken. */
    } while (has_drops(session) && rk_lock_try(&session->lock));
}

void rk_handle_drop(session_object *session, rk_handle *handle, bool orphan)
{
    bool done;

    if (session->process != getpid()) {
        return; /* the engine is the parent's: nothing here may touch it */
    }
    pthread_mutex_lock(&session->drops_mutex);
    handle->orphan = handle->orphan || orphan;
    if (!handle->queued) {
        handle->queued = true;
        handle->next = session->drops;
        session->drops = handle;
    }
    pthread_mutex_unlock(&session->drops_mutex);
    done = !rk_lock_try(&session->lock);
    if (!done) {
        rk_session_leave(session);
    }
}

/* ---- the lock ------------------------------------------------------------ */

int rk_session_check_process(const session_object *session)
{
    if (session->process != getpid()) {
        PyErr_Format(PyExc_RuntimeError,
                     "this session belongs to process %ld and its threads do "
                     "not exist in a forked child: make a session here",
                     (long)session->process);
        return -1;
    }
    return 0;
}

/* looks: Ctrl-C ends the wait for the lock. */
static int enter(session_object *session, bool looks)
{
    if (rk_session_check_process(session) < 0) {
        return -1;
    }
    if (!rk_lock_try(&session->lock)) {
        rk_call waiting = {.session = session};
        bool taken;

        if (rk_lock_mine(&session->lock)) {
            PyErr_SetString(PyExc_RuntimeError,
                            "the session is running in this very thread; a "
                            "signal handler or finalizer cannot use it");
            return -1;
        }
        gil_release(&waiting);
        taken = rk_lock_take(&session->lock, looks ? look : NULL, &waiting);
        gil_take(&waiting);
        if (!taken) {
            return -1;
        }
    }
    rk_session_drain(session);
    if (session->engine == NULL) {
        rk_session_leave(session);
        PyErr_SetString(PyExc_RuntimeError, "the session is closed");
        return -1;
    }
    return 0;
}

int rk_session_enter(session_object *session)
{
    return enter(session, true);
}

int rk_session_enter_surely(session_object *session)
{
    return enter(session, false);
}

/* ---- a short visit ------------------------------------------------------- */

static void raise_dropped(const branch_object *branch)
{
    PyErr_Format(PyExc_RuntimeError, "branch %llu was dropped",
                 (unsigned long long)branch->id);
}

rk_branch *rk_branch_enter(branch_object *branch)
{
    if (branch->dropped) {
        raise_dropped(branch);
        return NULL;
    }
    if (rk_session_enter(branch->session) < 0) {
        return NULL;
    }
    if (branch->handle->branch == NULL) { /* while we waited */
        rk_session_leave(branch->session);
        raise_dropped(branch);
        return NULL;
    }
    return branch->handle->branch;
}

/* ---- a call -------------------------------------------------------------- */

static void forget_branches(rk_call *call)
{
    if (call->branches != &call->one) {
        PyMem_RawFree(call->branches);
    }
    call->branches = NULL;
}

int rk_call_enter(rk_call *call, session_object *session,
                  branch_object *const *branches, Py_ssize_t n)
{
    const branch_object *dropped = NULL;

    *call = (rk_call){.session = session, .n = (int32_t)n};
    call->branches = &call->one;
    if (n > 1) {
        call->branches = PyMem_RawCalloc((size_t)n, sizeof(rk_branch *));
        if (call->branches == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    for (Py_ssize_t i = 0; i < n && dropped == NULL; i++) {
        dropped = branches[i]->dropped ? branches[i] : NULL;
    }
    if (dropped != NULL || rk_session_enter(session) < 0) {
        goto fail;
    }
    for (Py_ssize_t i = 0; i < n && dropped == NULL; i++) {
        call->branches[i] = branches[i]->handle->branch;
        dropped = call->branches[i] == NULL ? branches[i] : NULL;
    }
    if (dropped != NULL) { /* while we waited */
        rk_session_leave(session);
        goto fail;
    }
    call->engine = session->engine;
    return 0;

fail:
    if (dropped != NULL) {
        raise_dropped(dropped);
    }
    forget_branches(call);
    return -1;
}

void rk_call_begin(rk_call *call)
{
    gil_release(call);
    call->session->call = call;
}

void rk_call_end(rk_call *call)
{
    if (call->suspended != NULL) {
        call->session->call = NULL;
        gil_take(call);
    }
}

int rk_call_leave(rk_call *call, rk_status status)
{
    rk_call_end(call);
    rk_session_leave(call->session);
    forget_branches(call);
    if (status != RK_OK) {
        rk_raise(call->session->state, &call->err);
        return -1;
    }
    return 0;
}

/* The lock again, and with it the engine. False: a signal handler raised while
 * we waited; the lock is ours in any case. */
static bool come_back(rk_call *call, bool looks)
{
    session_object *session = call->session;
    bool interrupted = !rk_lock_take(&session->lock, looks ? look : NULL, call);

    if (interrupted) {
        rk_lock_take(&session->lock, NULL, NULL);
    }
    session->call = call;
    rk_session_drain(session);
    return !interrupted;
}

bool rk_call_pause(rk_call *call)
{
    session_object *session = call->session;

    if (!rk_lock_wanted(&session->lock)) {
        rk_session_drain(session);
        return true;
    }
    session->call = NULL;
    rk_session_leave(session);
    return come_back(call, true);
}

bool rk_call_tell(rk_call *call, PyObject *function, long number)
{
    session_object *session = call->session;
    PyObject *answer;

    session->call = NULL;
    rk_session_leave(session);
    gil_take(call);
    answer = PyObject_CallFunction(function, "l", number);
    Py_XDECREF(answer);
    gil_release(call);
    return come_back(call, answer != NULL) && answer != NULL;
}
