/* What the files of csrc/py share: the module's state, the objects, and a
 * call's way in and out of the engine.
 *
 * The engine (session.h) runs under the session's lock. A short visit holds
 * lock and GIL together; a call that computes gives the GIL up meanwhile
 * (rk_call). Nobody ever waits for the lock, or for anything else, while
 * holding the GIL.
 */
#ifndef RKSC_PY_H
#define RKSC_PY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "lock.h"
#include "session.h"
#include "weights.h"

#include <sys/types.h>

/* ---- the module ---------------------------------------------------------- */

typedef struct rk_state {
    PyObject *capacity_error; /* RuntimeError's child */
    PyObject *tensor_type, *session_type, *branch_type, *request_type;
    PyObject *device_array_type;
} rk_state;

extern PyModuleDef rk_module_def; /* state.c; methods and slots: module.c */

/* The state of the module that `type`, or a base of it, belongs to. NULL with
 * an exception for a type that is none of ours. */
rk_state *rk_state_of(PyTypeObject *type);

/* A new reference to the heap type; NULL with an exception. */
PyObject *rk_session_type_new(PyObject *module);
PyObject *rk_branch_type_new(PyObject *module);
PyObject *rk_request_type_new(PyObject *module);
PyObject *rk_device_array_type_new(PyObject *module);

/* ---- objects --------------------------------------------------------------
 */

/* A branch's place in the engine, shared by the Python object and the queue of
 * branches to be dropped. Lives until both are done with it. */
typedef struct rk_handle {
    struct rk_handle *next; /* in the queue; guarded by drops_mutex */
    bool queued, orphan;    /* guarded by drops_mutex; orphan: no object */
    rk_branch *branch;      /* guarded by the session's lock; NULL: dropped */
} rk_handle;

typedef struct rk_call rk_call;
typedef struct rk_requests rk_requests; /* request.h */

typedef struct session_object {
    PyObject_HEAD PyObject *weak_references;
    rk_state *state; /* lives as long as this object's type */
    PyObject *config;
    pid_t process;             /* that made it; in any other nothing works */
    unsigned long main_thread; /* Python's identity of it */
    rk_isa isa;
    rk_rounding rounding; /* activations */
    int32_t n_threads, block_tokens, vocab_size;
    bool locks_made;

    rk_lock lock;
    /* guarded by lock */
    rk_session *engine; /* NULL: closed by the garbage collector */
    rk_cuda *cuda;      /* NULL: the CPU, or closed */
    rk_weights *weights;
    rk_call *call; /* that computes; NULL: none does */
    rk_requests *requests;

    pthread_mutex_t drops_mutex; /* never held while waiting for anything */
    rk_handle *drops;
} session_object;

/* A verdict names its branch: kept as it is, the two would hold each other, and
 * a forgotten branch its KV, until the garbage collector comes. So the branch
 * keeps its type and its other fields, and makes it again on request. */
typedef struct rk_kept_verdict {
    PyObject *verdict; /* the type; where fields are NULL: whatever was set */
    PyObject *fields;  /* dict */
} rk_kept_verdict;

typedef struct branch_object {
    PyObject_HEAD PyObject *weak_references;
    session_object *session; /* strong, never NULL */
    rk_handle *handle;       /* never NULL */
    uint64_t id, parent_id;
    int32_t depth;
    bool dropped;            /* guarded by the GIL */
    PyObject *gate, *prompt; /* NULL: None */
    rk_kept_verdict verdict;
} branch_object;

/* ---- arguments of a session -------------------------------------------------
 */

typedef struct rk_session_arguments {
    PyObject *weights, *config, *token_bytes, *special_ids; /* borrowed */
    int compute;  /* RK_F32, RK_BF16, -1: as the weights are */
    int gpu;      /* its number; -1: the CPU */
    int rounding; /* rk_rounding as asked for; -1: what suits the weights */
    rk_options options;
} rk_session_arguments;

/* 0, or -1 with an exception that names the argument. */
int rk_session_arguments_read(rk_session_arguments *out, PyObject *args,
                              PyObject *kwargs);

/* ---- the engine: in and out (call.c) ------------------------------------- */

/* Take the lock; GIL held on entry and on return. -1 with an exception: the
 * session belongs to another process, is closed, or this very thread is in it;
 * or Ctrl-C came while waiting, which `surely` does not look at. */
int rk_session_enter(session_object *session);
int rk_session_enter_surely(session_object *session);
/* The branch's session: its engine branch, or NULL with an exception (then the
 * lock is not held). */
rk_branch *rk_branch_enter(branch_object *branch);
/* 0, or -1 with an exception: another process has made it. */
int rk_session_check_process(const session_object *session);
/* Drop what was queued and give the lock up; GIL held or not. */
void rk_session_leave(session_object *session);
/* Drop what was queued. Lock held, or nobody can reach the session. */
void rk_session_drain(session_object *session);

/* A call that computes, on its stack:
 *
 *     rk_call_enter    the lock, and the branches' places in the engine
 *     rk_call_begin    the GIL is given up
 *     ...              functions of session.h with `engine`, `branches`, `err`
 *     rk_call_end      the GIL is ours again; only where Python is needed now
 *     rk_call_leave    the lock is given up, a failure becomes an exception
 */
struct rk_call {
    session_object *session;
    rk_session *engine;   /* the session's */
    rk_branch **branches; /* (n,) of those that it was entered with */
    int32_t n;
    rk_branch *one;           /* branches[0] where it is the only one */
    PyThreadState *suspended; /* NULL while it holds the GIL */
    bool looks;               /* the main thread: signals are handled here */
    int64_t looked_ns;
    rk_error err;
};

/* branches: (n,) of this session, borrowed and kept alive by the caller. -1
 * with an exception, also when one was dropped: nothing is held then. */
int rk_call_enter(rk_call *call, session_object *session,
                  branch_object *const *branches, Py_ssize_t n);
void rk_call_begin(rk_call *call);
void rk_call_end(rk_call *call);
/* 0, or -1 with the exception that a status other than RK_OK means, whose text
 * is in call->err. Whether the call has begun, ended, or neither. */
int rk_call_leave(rk_call *call, rk_status status);

/* Let the others who wait in. False when a signal handler raised meanwhile;
 * the lock is held again in any case. */
bool rk_call_pause(rk_call *call);
/* Call a Python function with a number, outside of the engine: it may use the
 * session. False with an exception when it, or a signal handler, raised; the
 * lock is held again in any case. */
bool rk_call_tell(rk_call *call, PyObject *function, long number);

/* rk_interrupted of the engine; context: the session_object. */
bool rk_session_interrupted(void *context);

/* Queue the handle's branch to be dropped, at once when the engine is free.
 * orphan: the Python object is going. Never waits; GIL held or not. */
void rk_handle_drop(session_object *session, rk_handle *handle, bool orphan);

/* ---- branches (branch.c, arguments.c) ------------------------------------ */

/* A Branch without a place in the engine yet; NULL with an exception. */
branch_object *rk_branch_new(session_object *session);
/* Put an engine's branch into it. Lock held; cannot fail. */
void rk_branch_bind(branch_object *self, rk_branch *branch);
/* Never waits; twice is fine. */
void rk_branch_drop(branch_object *self);

/* -1 with an exception. */
int rk_kept_verdict_make(rk_kept_verdict *out, branch_object *branch,
                         PyObject *verdict);
/* Exchange it with the branch's; calls nothing. */
void rk_kept_verdict_swap(rk_kept_verdict *kept, branch_object *branch);
void rk_kept_verdict_clear(rk_kept_verdict *kept);

/* Branches of a sequence argument, as a tuple that keeps them alive. */
PyObject *rk_branches_read(session_object *session, PyObject *sequence);
/* What rk_call_enter takes. */
branch_object *const *rk_branches_of(PyObject *tuple);
/* The one branch of an argument, borrowed; NULL with an exception. */
branch_object *rk_branch_read(session_object *session, PyObject *object,
                              const char *what);
/* ---- results on a GPU (device_array.c) ----------------------------------- */

/* A rksc.DeviceArray, float32, which owns `lent` from now on, or NULL with an
 * exception. n_dims: 1 or 2. */
PyObject *rk_device_array_new(const rk_state *state, rk_lent *lent,
                              const int64_t *shape, int n_dims);

/* ---- the model (config.c) ------------------------------------------------ */

/* The fields of a rksc.ModelConfig; config->inv_freq points to *frequencies,
 * which the caller frees (PyMem_RawFree) in any case. -1 with an exception. */
int rk_config_read(rk_config *config, double **frequencies, PyObject *object);
/* A truth value, or -1 with an exception. */
int rk_config_flag(PyObject *object, const char *field);
/* The same for a field that may be None; 0, or -1 with an exception. */
typedef enum rk_choice {
    RK_CHOICE_NO,
    RK_CHOICE_YES,
    RK_CHOICE_OPEN
} rk_choice;
int rk_config_choice(rk_choice *out, PyObject *object, const char *field);

/* ---- generation (generate.c, request.c) ---------------------------------- */

/* NULL with an exception. token_bytes: sequence of bytes or None. special_ids:
 * those whose bytes are no part of the text, or None. */
rk_requests *rk_requests_new(PyObject *token_bytes, PyObject *special_ids,
                             int32_t vocab_size);
void rk_requests_free(rk_requests *requests); /* takes NULL */
/* The garbage collector's part of them. */
int rk_requests_traverse(rk_requests *requests, visitproc visit, void *arg);
void rk_requests_clear(rk_requests *requests);
/* The branch is about to be dropped: its request ends. Lock held. */
void rk_requests_forget(rk_requests *requests, const rk_branch *branch);

PyObject *rk_session_py_submit(session_object *self, PyObject *args,
                               PyObject *kwargs);
PyObject *rk_session_py_step(session_object *self, PyObject *args,
                             PyObject *kwargs);
PyObject *rk_session_py_end(session_object *self, PyObject *args,
                            PyObject *kwargs);
PyObject *rk_session_py_generate(session_object *self, PyObject *args,
                                 PyObject *kwargs);

/* ---- scoring, verification, ASKS (judge.c) ------------------------------- */

PyObject *rk_session_py_verify(session_object *self, PyObject *args,
                               PyObject *kwargs);
int rk_session_py_set_verified(session_object *self, PyObject *verdicts,
                               void *closure);
PyObject *rk_session_py_logits_at(session_object *self, PyObject *args,
                                  PyObject *kwargs);
PyObject *rk_session_py_score(session_object *self, PyObject *args,
                              PyObject *kwargs);
PyObject *rk_session_py_prompt_means(session_object *self, PyObject *args,
                                     PyObject *kwargs);
PyObject *rk_session_py_prefill_similar(session_object *self, PyObject *args,
                                        PyObject *kwargs);

/* ---- values (convert.c) -------------------------------------------------- */

/* The exception that a failed call means, or NULL with another one set. */
PyObject *rk_exception(const rk_state *state, const rk_error *err);
/* Set it (RK_EINTERRUPTED: the handler's is there); always returns NULL. */
PyObject *rk_raise(const rk_state *state, const rk_error *err);

/* NumPy's table of functions; 0, or -1 with an exception. */
int rk_numpy_import(void);

typedef struct rk_tokens {
    int32_t *ids; /* owned; not NULL after a success */
    int32_t n;
} rk_tokens;

/* Token ids from a sequence of ints or an integer array; `what` names them in
 * messages. 0, or -1 with an exception: TypeError, ValueError. */
int rk_tokens_read(rk_tokens *out, PyObject *object, int32_t vocab_size,
                   const char *what);
void rk_tokens_free(rk_tokens *tokens);

/* Several of them, from a sequence of sequences. Item i is called "what[i]". */
typedef struct rk_token_lists {
    int32_t **ids; /* (n,) each owned */
    int32_t *lengths;
    int32_t n;
} rk_token_lists;
int rk_token_lists_read(rk_token_lists *out, PyObject *object,
                        int32_t vocab_size, const char *what);
void rk_token_lists_free(rk_token_lists *lists);

/* An int in [least, most]; ValueError or TypeError names `what`. */
int rk_int_read(int32_t *out, PyObject *object, const char *what, int32_t least,
                int32_t most);
int rk_uint64_read(uint64_t *out, PyObject *object, const char *what);

/* New arrays, uninitialised; *data points to their memory. */
PyObject *rk_array_int32(int64_t n, int32_t **data);
PyObject *rk_array_float32(int64_t n, float **data);
PyObject *rk_array_float32_2d(int64_t rows, int64_t cols, float **data);
/* A float32 array (rows >= least_rows, cols), C-contiguous: new reference. */
PyObject *rk_array_read_2d(PyObject *object, int64_t least_rows, int64_t cols,
                           const char *what, const float **data);

/* Run a statement that may call anything, without losing the exception. */
#define RK_KEEP_EXCEPTION(statement)                                           \
    do {                                                                       \
        PyObject *kept_type_, *kept_value_, *kept_traceback_;                  \
        PyErr_Fetch(&kept_type_, &kept_value_, &kept_traceback_);              \
        statement;                                                             \
        PyErr_Restore(kept_type_, kept_value_, kept_traceback_);               \
    } while (0)

#endif
