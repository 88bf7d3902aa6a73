/* The way in and out of the engine: the session's lock, the GIL, Ctrl-C, and
 * branches that are dropped while somebody else is inside.
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

/* Let signal handlers run when it is time; true when one raised. */
static bool look(void *context)
{
    rk_visitor *visitor = context;
    int failed;

    if (!visitor->looks || now_ns() - visitor->looked_ns < LOOK_NS) {
        return false;
    }
    PyEval_RestoreThread(visitor->suspended);
    failed = PyErr_CheckSignals();
    visitor->suspended = PyEval_SaveThread();
    visitor->looked_ns = now_ns();
    return failed < 0;
}

bool rk_session_interrupted(void *context)
{
    session_object *session = context;

    return session->visitor != NULL && look(session->visitor);
}

static void visitor_begin(const session_object *session, rk_visitor *visitor)
{
    *visitor = (rk_visitor){
        .looks = PyThread_get_thread_ident() == session->main_thread,
        .looked_ns = now_ns(),
    };
    visitor->suspended = PyEval_SaveThread();
}

static void visitor_end(rk_visitor *visitor)
{
    PyEval_RestoreThread(visitor->suspended);
    visitor->suspended = NULL;
}

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
            rk_generating_forget(session->generating, handle->branch);
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

int rk_session_enter(session_object *session)
{
    if (session->process != getpid()) {
        PyErr_Format(PyExc_RuntimeError,
                     "this session belongs to process %ld and its threads do "
                     "not exist in a forked child: make a session here",
                     (long)session->process);
        return -1;
    }
    if (!rk_lock_try(&session->lock)) {
        rk_visitor visitor;
        bool taken;

        if (rk_lock_mine(&session->lock)) {
            PyErr_SetString(PyExc_RuntimeError,
                            "the session is running in this very thread; a "
                            "signal handler or finalizer cannot use it");
            return -1;
        }
        visitor_begin(session, &visitor);
        taken = rk_lock_take(&session->lock, look, &visitor);
        visitor_end(&visitor);
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

void rk_long_begin(session_object *session, rk_visitor *visitor)
{
    visitor_begin(session, visitor);
    session->visitor = visitor;
}

void rk_long_end(session_object *session, rk_visitor *visitor)
{
    session->visitor = NULL;
    visitor_end(visitor);
}

bool rk_long_pause(session_object *session)
{
    rk_visitor *visitor = session->visitor;
    bool interrupted;

    if (!rk_lock_wanted(&session->lock)) {
        rk_session_drain(session);
        return true;
    }
    session->visitor = NULL;
    rk_session_leave(session);
    interrupted = !rk_lock_take(&session->lock, look, visitor);
    if (interrupted) {
        rk_lock_take(&session->lock, NULL, NULL);
    }
    session->visitor = visitor;
    rk_session_drain(session);
    return !interrupted;
}
