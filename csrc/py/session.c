/* rksc._core.Session: life, branches, books. What it is called with is read in
 * arguments.c, what generates is in generate.c, what judges in judge.c, the way
 * in and out of the engine in call.c. */
#include "request.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <unistd.h>

/* ---- life ---------------------------------------------------------------- */

/* The shared object of the CUDA backend, found by rksc.cuda. */
static int open_gpu(session_object *self, int ordinal)
{
    PyObject *module = PyImport_ImportModule("rksc.cuda"), *path = NULL;
    const char *text = NULL;
    rk_error err = {0};
    rk_status status;

    if (module != NULL) {
        path = PyObject_CallMethod(module, "library", NULL);
        Py_DECREF(module);
    }
    if (path != NULL) {
        text = PyUnicode_AsUTF8(path);
    }
    if (text == NULL) {
        Py_XDECREF(path);
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS status =
        rk_cuda_open(&self->cuda, text, ordinal, &err);
    Py_END_ALLOW_THREADS Py_DECREF(path);
    if (status != RK_OK) {
        rk_raise(self->state, &err);
        return -1;
    }
    return 0;
}

/* Python's identity of the thread in which signal handlers run. */
static int find_main_thread(unsigned long *ident)
{
    PyObject *threading = PyImport_ImportModule("threading");
    PyObject *thread = NULL, *value = NULL;

    if (threading != NULL) {
        thread = PyObject_CallMethod(threading, "main_thread", NULL);
    }
    if (thread != NULL) {
        value = PyObject_GetAttrString(thread, "ident");
    }
    if (value != NULL) {
        *ident = PyLong_AsUnsignedLong(value);
    }
    Py_XDECREF(threading);
    Py_XDECREF(thread);
    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

static int create_engine(session_object *self, rk_options *options)
{
    const rk_model *model = rk_weights_model(self->weights);
    rk_error err = {0};
    rk_status status;

    options->interrupted = rk_session_interrupted;
    options->context = self;
    options->cuda = self->cuda;
    Py_BEGIN_ALLOW_THREADS status =
        rk_session_create(&self->engine, model, options, &err);
    Py_END_ALLOW_THREADS if (status != RK_OK)
    {
        rk_raise(self->state, &err);
        return -1;
    }
    return 0;
}

static int make_locks(session_object *self)
{
    if (rk_lock_init(&self->lock) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    if (pthread_mutex_init(&self->drops_mutex, NULL) != 0) {
        rk_lock_destroy(&self->lock);
        PyErr_NoMemory();
        return -1;
    }
    self->locks_made = true;
    return 0;
}

/* Products on the GPU read plain types alone. */
static bool gpu_takes(rk_type type)
{
    (void)type;
    return false;
}

/* What activations that meet weights of block types are rounded to: as asked
 * for; else bfloat16 sessions on the CPU take 16-bit integers, but for AMX,
 * whose tiles of bf16 are faster with many rows (docs/speed.md). */
static int choose_rounding(session_object *self, const rk_session_arguments *a)
{
    const bool narrow = rk_weights_model(self->weights)->compute == RK_BF16;
    const bool blocks = rk_weights_in_blocks(self->weights);

    if (a->rounding < 0) {
        self->rounding =
            narrow && blocks && a->gpu < 0 && a->options.isa != RK_ISA_AMX
                ? RK_ROUND_INT16
                : RK_ROUND_ACT;
        return 0;
    }
    self->rounding = (rk_rounding)a->rounding;
    if (self->rounding == RK_ROUND_ACT && !narrow) {
        PyErr_SetString(PyExc_ValueError,
                        "activations=\"bfloat16\" needs dtype=\"bfloat16\"");
        return -1;
    }
    if (self->rounding != RK_ROUND_ACT && !blocks) {
        PyErr_Format(PyExc_ValueError,
                     "activations=\"%s\" needs weights of GGUF block types, "
                     "and no matrix is of one",
                     self->rounding == RK_ROUND_INT8 ? "int8" : "int16");
        return -1;
    }
    return 0;
}

static PyObject *session_new(PyTypeObject *type, PyObject *args,
                             PyObject *kwargs)
{
    rk_state *state = rk_state_of(type);
    session_object *self;
    rk_session_arguments a;

    if (state == NULL || rk_session_arguments_read(&a, args, kwargs) < 0) {
        return NULL;
    }
    self = (session_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->state = state;
    self->process = getpid();
    self->isa = a.options.isa;
    self->n_threads = a.options.n_threads;
    self->block_tokens = a.options.block_tokens;
    Py_INCREF(a.config);
    self->config = a.config;
    if (make_locks(self) < 0 || find_main_thread(&self->main_thread) < 0 ||
        (a.gpu >= 0 && open_gpu(self, a.gpu) < 0) ||
        rk_weights_bind(&self->weights, a.weights, a.config, a.compute,
                        a.gpu < 0 ? rk_cpu_takes : gpu_takes, self->cuda,
                        a.options.n_threads, state->tensor_type) < 0) {
        goto fail;
    }
    if (choose_rounding(self, &a) < 0) {
        goto fail;
    }
    a.options.rounding = self->rounding;
    a.options.kv_type = rk_weights_model(self->weights)->compute;
    self->vocab_size = rk_weights_model(self->weights)->config.vocab_size;
    self->requests =
        rk_requests_new(a.token_bytes, a.special_ids, self->vocab_size);
    if (self->requests == NULL || create_engine(self, &a.options) < 0) {
        goto fail;
    }
    return (PyObject *)self;

fail:
    Py_DECREF(self);
    return NULL;
}

static int session_traverse(session_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->config);
    /* What the weights hold, a Tensor or a producer's struct, leads nowhere
     * that the collector could see. */
    return rk_requests_traverse(self->requests, visit, arg);
}

/* Nobody is in the engine: a visitor would hold a reference. The engine goes
 * before the memory that it reads. In a forked child it is left as it is: its
 * threads are not there to be joined, its locks may be held for ever. */
static int session_clear(session_object *self)
{
    rk_session *engine = self->engine;
    rk_weights *weights = self->weights;
    rk_cuda *cuda = self->cuda;

    self->engine = NULL;
    self->weights = NULL;
    self->cuda = NULL;
    if (self->process == getpid()) {
        /* It waits for the GPU, or for threads. */
        Py_BEGIN_ALLOW_THREADS rk_session_free(engine);
        Py_END_ALLOW_THREADS
    }
    rk_weights_free(weights);
    if (cuda != NULL && self->process == getpid()) {
        cuda->calls->close(cuda);
    }
    rk_requests_clear(self->requests);
    Py_CLEAR(self->config);
    return 0;
}

static void session_dealloc(session_object *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL) {
        PyObject_ClearWeakRefs((PyObject *)self);
    }
    session_clear(self);
    rk_requests_free(self->requests);
    if (self->locks_made && self->process == getpid()) {
        rk_session_drain(
            self); /* only handles are left: the branches are gone */
        pthread_mutex_destroy(&self->drops_mutex);
        rk_lock_destroy(&self->lock);
    }
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- branches ------------------------------------------------------------ */

static PyObject *session_tokens(session_object *self, PyObject *args,
                                PyObject *kwargs)
{
    static char *keywords[] = {"tokens", "what", NULL};
    PyObject *object, *array;
    const char *what;
    rk_tokens tokens;
    int32_t *ids;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Os:_tokens", keywords,
                                     &object, &what) ||
        rk_tokens_read(&tokens, object, self->vocab_size, what) < 0) {
        return NULL;
    }
    array = rk_array_int32(tokens.n, &ids);
    if (array != NULL && tokens.n > 0) {
        memcpy(ids, tokens.ids, (size_t)tokens.n * sizeof *ids);
    }
    rk_tokens_free(&tokens);
    return array;
}

/* A branch with these tokens and then the suffix. */
static PyObject *prefill(session_object *self, const rk_tokens *tokens,
                         const rk_tokens *suffix, bool compute)
{
    branch_object *branch = rk_branch_new(self);
    rk_branch *made = NULL;
    rk_status status;
    rk_call call;

    if (branch == NULL || rk_call_enter(&call, self, NULL, 0) < 0) {
        Py_XDECREF(branch);
        return NULL;
    }
    rk_call_begin(&call);
    status = (compute ? rk_session_prefill : rk_session_add)(
        call.engine, &made, tokens->ids, tokens->n, &call.err);
    if (status == RK_OK && suffix->n > 0) {
        status = rk_session_extend(call.engine, made, suffix->ids, suffix->n,
                                   &call.err);
        if (status != RK_OK) {
            rk_session_drop(call.engine, made);
        }
    }
    if (status == RK_OK) {
        rk_branch_bind(branch, made);
    }
    if (rk_call_leave(&call, status) < 0) {
        Py_CLEAR(branch);
    }
    return (PyObject *)branch;
}

static PyObject *session_prefill(session_object *self, PyObject *args,
                                 PyObject *kwargs)
{
    static char *keywords[] = {"tokens", "suffix", "compute", NULL};
    PyObject *object, *tail = NULL, *branch = NULL;
    rk_tokens tokens, suffix = {0};
    int compute = 1;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|Op:_prefill", keywords,
                                     &object, &tail, &compute) ||
        rk_tokens_read(&tokens, object, self->vocab_size, "tokens") < 0) {
        return NULL;
    }
    if (tail == NULL ||
        rk_tokens_read(&suffix, tail, self->vocab_size, "suffix") == 0) {
        branch = prefill(self, &tokens, &suffix, compute != 0);
    }
    rk_tokens_free(&tokens);
    rk_tokens_free(&suffix);
    return branch;
}

/* The branches of a call that takes nothing else; NULL with an exception. */
static PyObject *branches_argument(session_object *self, PyObject *args,
                                   PyObject *kwargs, const char *format)
{
    static char *keywords[] = {"branches", NULL};
    PyObject *object;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, keywords, &object)) {
        return NULL;
    }
    return rk_branches_read(self, object);
}

static PyObject *session_compute(session_object *self, PyObject *args,
                                 PyObject *kwargs)
{
    PyObject *branches = branches_argument(self, args, kwargs, "O:compute");
    rk_status status;
    rk_call call;
    int failed;

    if (branches == NULL) {
        return NULL;
    }
    failed = rk_call_enter(&call, self, rk_branches_of(branches),
                           PyTuple_GET_SIZE(branches));
    if (failed == 0) {
        rk_call_begin(&call);
        status =
            rk_session_compute(call.engine, call.branches, call.n, &call.err);
        failed = rk_call_leave(&call, status);
    }
    Py_DECREF(branches);
    if (failed < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* One call, so that no signal comes between two of them. */
static PyObject *session_drop(session_object *self, PyObject *args,
                              PyObject *kwargs)
{
    PyObject *branches = branches_argument(self, args, kwargs, "O:_drop");

    if (branches == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(branches); i++) {
        rk_branch_drop((branch_object *)PyTuple_GET_ITEM(branches, i));
    }
    Py_DECREF(branches);
    Py_RETURN_NONE;
}

/* ---- books --------------------------------------------------------------- */

static PyObject *session_invalidate(session_object *self,
                                    PyObject *Py_UNUSED(unused))
{
    rk_status status = RK_OK;
    rk_call call;

    if (rk_call_enter(&call, self, NULL, 0) < 0) {
        return NULL;
    }
    rk_call_begin(&call);
    if (self->cuda != NULL) { /* whatever stream the weights were written on */
        status = self->cuda->calls->settle(self->cuda, &call.err);
    }
    if (status == RK_OK) {
        rk_weights_refresh(self->weights);
        rk_session_invalidate(call.engine);
    }
    if (rk_call_leave(&call, status) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *session_stats(session_object *self,
                               PyObject *Py_UNUSED(unused))
{
    rk_stats s;

    if (rk_session_enter(self) < 0) {
        return NULL;
    }
    s = rk_session_stats(self->engine);
    rk_session_leave(self);

    const struct {
        const char *name;
        int64_t value;
    } fields[] = {
        {"blocks_total", s.blocks.total},
        {"blocks_used", s.blocks.used},
        {"blocks_free", s.blocks.free},
        {"blocks_cached", s.blocks.cached},
        {"blocks_shared", s.blocks.shared},
        {"blocks_peak", s.blocks.peak_used},
        {"blocks_reclaimed", s.blocks.reclaimed},
        {"block_bytes", s.block_bytes},
        {"block_tokens", s.block_tokens},
        {"branches", s.n_branches},
        {"tokens_computed", s.tokens_computed},
        {"tokens_recomputed", s.tokens_recomputed},
        {"tokens_reused", s.tokens_reused},
        {"tokens_forked", s.tokens_forked},
        {"steps", s.steps},
        {"evictions", s.evictions},
        {"layers_run", s.layers_run},
        {"layers_saved", s.layers_saved},
        {"verifications", s.verifications},
        {"verifications_skipped", s.verifications_skipped},
        {"exits", s.exits},
        {"gate_accepted", s.gate_accepted},
        {"gate_rejected", s.gate_rejected},
    };
    PyObject *dict = PyDict_New();

    for (size_t i = 0; dict != NULL && i < sizeof fields / sizeof *fields;
         i++) {
        PyObject *value = PyLong_FromLongLong(fields[i].value);

        if (value == NULL ||
            PyDict_SetItemString(dict, fields[i].name, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *session_check(session_object *self,
                               PyObject *Py_UNUSED(unused))
{
    rk_error err = {0};
    rk_status status;

    if (rk_session_enter(self) < 0) {
        return NULL;
    }
    status = rk_session_check(self->engine, &err);
    rk_session_leave(self);
    if (status != RK_OK) {
        return rk_raise(self->state, &err);
    }
    Py_RETURN_NONE;
}

/* ---- attributes ---------------------------------------------------------- */

static PyObject *get_config(session_object *self, void *Py_UNUSED(closure))
{
    PyObject *config = self->config != NULL ? self->config : Py_None;

    Py_INCREF(config);
    return config;
}

static PyObject *get_device(session_object *self, void *Py_UNUSED(closure))
{
    return self->cuda == NULL
               ? PyUnicode_FromString("cpu")
               : PyUnicode_FromFormat("cuda:%d", self->cuda->ordinal);
}

static PyObject *get_dtype(session_object *self, void *Py_UNUSED(closure))
{
    rk_type compute;

    if (rk_session_enter(self) < 0) {
        return NULL;
    }
    compute = rk_weights_model(self->weights)->compute;
    rk_session_leave(self);
    return PyUnicode_FromString(compute == RK_BF16 ? "bfloat16" : "float32");
}

static PyObject *get_isa(session_object *self, void *Py_UNUSED(closure))
{
    return self->cuda != NULL
               ? PyUnicode_FromFormat("sm_%d", self->cuda->capability)
               : PyUnicode_FromString(rk_isa_name(self->isa));
}

static PyObject *get_activations(session_object *self, void *Py_UNUSED(closure))
{
    switch (self->rounding) {
    case RK_ROUND_INT16:
        return PyUnicode_FromString("int16");
    case RK_ROUND_INT8:
        return PyUnicode_FromString("int8");
    default:
        return Py_NewRef(Py_None);
    }
}

static PyObject *get_copied_bytes(session_object *self,
                                  void *Py_UNUSED(closure))
{
    int64_t bytes;

    if (rk_session_enter(self) < 0) {
        return NULL;
    }
    bytes = rk_weights_copied_bytes(self->weights);
    rk_session_leave(self);
    return PyLong_FromLongLong(bytes);
}

static PyObject *get_requests(session_object *self, void *Py_UNUSED(closure))
{
    return PyDictProxy_New(self->requests->kept);
}

static PyGetSetDef ATTRIBUTES[] = {
    {"_requests", (getter)get_requests, NULL,
     "{number: Request} of those submitted whose end has not been told.", NULL},
    {"_verified", NULL, (setter)rk_session_py_set_verified,
     "Set it to rksc.Verdicts: all branches get theirs, and the scores, at "
     "once.",
     NULL},
    {"config", (getter)get_config, NULL, "The model's configuration.", NULL},
    {"device", (getter)get_device, NULL, "Where it computes.", NULL},
    {"dtype", (getter)get_dtype, NULL,
     "\"float32\" or \"bfloat16\": inputs of matrix products and KV.", NULL},
    {"activations", (getter)get_activations, NULL,
     "\"int16\" or \"int8\": rounded so where they meet weights of block "
     "types; None: as dtype says.",
     NULL},
    {"isa", (getter)get_isa, NULL,
     "The instruction set in use; on a GPU \"sm_90\" or such.", NULL},
    {"copied_bytes", (getter)get_copied_bytes, NULL,
     "Bytes of weights that could not be used in place and were converted.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef MEMBERS[] = {
    {"n_threads", T_INT, offsetof(session_object, n_threads), READONLY,
     "Threads that compute."},
    {"block_tokens", T_INT, offsetof(session_object, block_tokens), READONLY,
     "Positions of a KV block."},
    {"__weaklistoffset__", T_PYSSIZET,
     offsetof(session_object, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

#define KEYWORDS(function) (PyCFunction)(void (*)(void))(function)
#define WITH_KEYWORDS (METH_VARARGS | METH_KEYWORDS)
#define SAMPLING_ARGUMENTS                                                     \
    "max_new_tokens, temperature, top_k, top_p, min_p, seed, stop_ids, "       \
    "stop_strings, stop_top, stop_lead, min_steps"

static PyMethodDef METHODS[] = {
    {"_tokens", KEYWORDS(session_tokens), WITH_KEYWORDS,
     "_tokens($self, /, tokens, what)\n--\n\n"
     "Ids of the vocabulary, int32 (n,); errors call them `what`."},
    {"_prefill", KEYWORDS(session_prefill), WITH_KEYWORDS,
     "_prefill($self, /, tokens, suffix=(), compute=True)\n--\n\n"
     "A branch with these tokens, computed now or when needed, and a suffix."},
    {"_prefill_similar", KEYWORDS(rk_session_py_prefill_similar), WITH_KEYWORDS,
     "_prefill_similar($self, /, root, tokens, suffix, probe, pool, "
     "probe_layers, tau, alpha, center, allowed)\n--\n\n"
     "A branch that may stand on root's KV, and the gate's report."},
    {"compute", KEYWORDS(session_compute), WITH_KEYWORDS,
     "compute($self, /, branches)\n--\n\n"
     "Bring the KV of these branches up to date in as few steps as possible."},
    {"_drop", KEYWORDS(session_drop), WITH_KEYWORDS,
     "_drop($self, /, branches)\n--\n\nDrop all of these branches."},
    {"_submit", KEYWORDS(rk_session_py_submit), WITH_KEYWORDS,
     "_submit($self, /, requests, " SAMPLING_ARGUMENTS ", group=0)\n--\n\n"
     "Queue continuations, all or none."},
    {"_step", KEYWORDS(rk_session_py_step), WITH_KEYWORDS,
     "_step($self, /, requests, events)\n--\n\n"
     "One step where none of them has news; what is new goes into the list."},
    {"_end", KEYWORDS(rk_session_py_end), WITH_KEYWORDS,
     "_end($self, /, requests, events, undo=False)\n--\n\n"
     "Take events back that were not handed out, then end these requests now; "
     "their branches keep what was handed out, or nothing."},
    {"_generate", KEYWORDS(rk_session_py_generate), WITH_KEYWORDS,
     "_generate($self, /, requests, " SAMPLING_ARGUMENTS ", progress=None)"
     "\n--\n\n"
     "Continue all branches in one batch, without the GIL; a row for each."},
    {"_verify", KEYWORDS(rk_session_py_verify), WITH_KEYWORDS,
     "_verify($self, /, branches, prompt, yes, no, shortcuts)\n--\n\n"
     "Score branches by p(yes) / (p(yes) + p(no)) after the prompt."},
    {"_score", KEYWORDS(rk_session_py_score), WITH_KEYWORDS,
     "_score($self, /, branch, continuations)\n--\n\n"
     "(logprobs, tops) of the tokens of each continuation."},
    {"_logits_at", KEYWORDS(rk_session_py_logits_at), WITH_KEYWORDS,
     "_logits_at($self, /, branch, begin, end)\n--\n\n"
     "Logits after each of the tokens [begin, end), which are cut to what is "
     "there."},
    {"_prompt_means", KEYWORDS(rk_session_py_prompt_means), WITH_KEYWORDS,
     "_prompt_means($self, /, tokens, begin, end)\n--\n\n"
     "Mean residual stream after each layer over positions [begin, end)."},
    {"invalidate", (PyCFunction)session_invalidate, METH_NOARGS,
     "invalidate($self, /)\n--\n\n"
     "Forget all KV (the lent weights changed) and convert copies again."},
    {"_stats", (PyCFunction)session_stats, METH_NOARGS,
     "_stats($self, /)\n--\n\nThe fields of rksc.Stats."},
    {"check", (PyCFunction)session_check, METH_NOARGS,
     "check($self, /)\n--\n\n"
     "Recount the block books; RuntimeError names the first disagreement."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, session_new},
    {Py_tp_dealloc, session_dealloc},
    {Py_tp_traverse, session_traverse},
    {Py_tp_clear, session_clear},
    {Py_tp_methods, METHODS},
    {Py_tp_getset, ATTRIBUTES},
    {Py_tp_members, MEMBERS},
    {Py_tp_doc,
     "Session(weights, config, *, device='cpu', dtype=None, "
     "kv_bytes=2147483648, block_tokens=16, n_threads=None, isa=None, "
     "step_tokens=512, token_bytes=None, special_ids=None, share=True, "
     "hash_bits=64, "
     "poison=False, activations=None)\n--\n\n"
     "A model on a device, a pool of KV blocks and a tree of branches."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "rksc._core.Session",
    .basicsize = sizeof(session_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *rk_session_type_new(PyObject *module)
{
    return PyType_FromModuleAndSpec(module, &SPEC, NULL);
}
