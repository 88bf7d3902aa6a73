/* Raise a signal before the n-th instruction that Python executes from now on.
 *
 * The hook of the interpreter's tracing only counts and raises; it calls no
 * Python. So the signal is pending from that instruction on, as if it had come
 * from outside, and the interpreter decides where its handler runs. */
#include <Python.h>

#include <signal.h>

static long before, gap, times, fired;
static int number;
static PyObject *quiet; /* code during which nothing is raised; compared only */

static int watch(PyObject *self, PyFrameObject *frame, int what,
                 PyObject *argument)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    int is_quiet = (PyObject *)code == quiet;

    (void)self;
    (void)argument;
    Py_DECREF(code);
    if (is_quiet) {
        return 0;
    }
    if (what == PyTrace_CALL &&
        PyObject_SetAttrString((PyObject *)frame, "f_trace_opcodes", Py_True) <
            0) {
        PyErr_Clear();
    }
    if (times > 0 && --before <= 0) {
        before = gap;
        times--;
        fired++;
        raise(number);
    }
    return 0;
}

/* Before the n-th instruction, and `n_times` in all, n_gap instructions apart;
 * none in frames of the code `caller`. */
void signals_begin(long n, long n_gap, long n_times, int signal_number,
                   PyObject *caller)
{
    before = n;
    gap = n_gap;
    times = n_times;
    fired = 0;
    number = signal_number;
    quiet = caller;
    PyEval_SetTrace(watch, NULL);
}

/* How many were raised. */
long signals_end(void)
{
    PyEval_SetTrace(NULL, NULL);
    times = 0;
    return fired;
}
