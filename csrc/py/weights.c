/* Names become fields, as csrc/model/layout.h says which: borrow, check and,
 * where memory does not fit, convert.
 *
 * A matrix is used in place when it is dense, row-major, aligned and of the
 * compute type, or of a block type that the device takes; a norm or a bias when
 * it is dense float32. Everything else gets a dense copy, which `refresh` makes
 * again after the lender trained it.
 *
 * A tied head: the embedding serves as the head, unless the mapping brings a
 * lm_head of its own (other memory), which then is used: so does transformers
 * where both are present and differ, and where they are equal so is the result.
 */
#include "weights.h"

#include "borrow.h"
#include "model/dense.h"
#include "model/layout.h"
#include "model/quant.h"
#include "py.h"
#include "tensor.h"

#include <stdlib.h>
#include <string.h>

#define COPY_ALIGNMENT 64 /* a cache line and the widest vector */

/* One tensor of the layout. */
typedef struct entry {
    rk_borrowed lent;
    bool present;
    rk_type target; /* what the engine wants it to be */
    void *copy;     /* owned, or NULL: used in place */
    void *fetched;  /* owned: room for what a copy is made from, where that is
                     * on the GPU */
    const void *data;
} entry;

struct rk_weights {
    rk_model model;
    rk_layer *layers;
    double *inv_freq;
    entry *entries; /* (n_entries,) as csrc/model/layout.h numbers them */
    size_t n_entries;
    int64_t copied_bytes;
    rk_cuda *cuda; /* borrowed, or NULL */
    int n_threads;
};

/* ---- borrowing ----------------------------------------------------------- */

static int raised(const rk_error *err)
{
    rk_raise(NULL, err); /* the KV budget has no part in it */
    return -1;
}

/* The key of `names` that stands for a full name: itself, or without its
 * leading "model."; borrowed. NULL: absent, or an exception. */
static PyObject *find_key(PyObject *names, const char *full)
{
    static const char prefix[] = "model.";
    size_t skipped[] = {0, sizeof prefix - 1};
    bool bare = strncmp(full, prefix, skipped[1]) == 0;
    PyObject *key = NULL;

    for (int i = 0; i <= bare && key == NULL && !PyErr_Occurred(); i++) {
        PyObject *name = PyUnicode_FromString(full + skipped[i]);

        key = name != NULL ? PyDict_GetItemWithError(names, name) : NULL;
        Py_XDECREF(name);
    }
    return key;
}

/* Borrow entry i where it is there, and take its name out of `names`. */
static int borrow(rk_weights *w, size_t i, PyObject *mapping, PyObject *names,
                  PyObject *tensor_type)
{
    rk_borrowed *lent = &w->entries[i].lent;
    char name[RK_LAYOUT_NAME];
    const char *called = NULL;
    PyObject *key, *producer;
    rk_error err = {0};
    int failed = -1;

    rk_layout_name(name, i);
    key = find_key(names, name);
    if (key == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(key);
    producer = PyObject_GetItem(mapping, key);
    if (producer != NULL && PyDict_DelItem(names, key) == 0) {
        failed = rk_borrowed_take(lent, producer, key, tensor_type, w->cuda);
    }
    if (failed == 0 && lent->tensor != NULL) {
        called = rk_tensor_look(lent->tensor)->name;
    }
    w->entries[i].present = failed == 0;
    if (failed == 0 && rk_layout_check_shape(
                           &w->model.config, i, called != NULL ? called : name,
                           lent->shape, lent->n_dims, &err) != RK_OK) {
        failed = raised(&err);
    }
    Py_XDECREF(producer);
    Py_DECREF(key);
    return failed;
}

/* Entry i is there or not, as the configuration says. */
static int check_presence(const rk_weights *w, size_t i, PyObject *config)
{
    const char *field = rk_layout_flag(i);
    rk_choice choice = RK_CHOICE_YES;
    rk_error err = {0};
    bool flag;

    if (field != NULL && rk_config_choice(&choice, config, field) < 0) {
        return -1;
    }
    flag = choice == RK_CHOICE_OPEN ? w->entries[rk_layout_first(i)].present
                                    : choice == RK_CHOICE_YES;
    return rk_layout_check_presence(&w->model.config, i, flag,
                                    w->entries[i].present, &err) != RK_OK
               ? raised(&err)
               : 0;
}

static bool is_derived(PyObject *name)
{
    bool found = false;

    for (const char *const *end = rk_layout_derived; *end && !found; end++) {
        PyObject *ending = PyUnicode_FromString(*end);

        found = ending != NULL &&
                PyUnicode_Tailmatch(name, ending, 0, PY_SSIZE_T_MAX, 1) > 0;
        Py_XDECREF(ending);
    }
    PyErr_Clear();
    return found;
}

/* What nobody asked for would be silently ignored: refuse it. */
static int refuse_leftovers(const rk_weights *w, PyObject *names)
{
    PyObject *key, *first = NULL;
    Py_ssize_t at = 0, n = 0;

    while (PyDict_Next(names, &at, &key, NULL)) {
        if (!is_derived(key)) {
            first = n++ == 0 ? key : first;
        }
    }
    if (n == 0) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "tensor %U has no place in this model of %d layers (it is one "
                 "of %zd such tensors)",
                 first, (int)w->model.config.n_layers, n);
    return -1;
}

/* `names` are those of the mapping. */
static int borrow_all(rk_weights *w, PyObject *mapping, PyObject *names,
                      PyObject *config, PyObject *tensor_type)
{
    for (size_t i = 0; i < w->n_entries; i++) {
        if (borrow(w, i, mapping, names, tensor_type) < 0) {
            return -1;
        }
    }
    for (size_t i = 0; i < w->n_entries; i++) {
        if (check_presence(w, i, config) < 0) {
            return -1;
        }
    }
    return refuse_leftovers(w, names);
}

/* ---- conversion ---------------------------------------------------------- */

static bool same_memory(const rk_borrowed *a, const rk_borrowed *b)
{
    return a->data == b->data && a->type == b->type &&
           a->strides[0] == b->strides[0] && a->strides[1] == b->strides[1];
}

/* Where a tensor's elements lie, in elements from its first. */
static void span(const rk_strided *s, int64_t *low, int64_t *high)
{
    int64_t row = (s->rows - 1) * s->row_stride;
    int64_t col = (s->cols - 1) * s->col_stride;

    *low = (row < 0 ? row : 0) + (col < 0 ? col : 0);
    *high = (row > 0 ? row : 0) + (col > 0 ? col : 0);
}

/* Bring what lies on the GPU to the host. `from` shows it there afterwards. */
static rk_status fetch(const rk_weights *w, const entry *e, rk_strided *from,
                       rk_error *err)
{
    int64_t item = rk_type_get(from->type)->block_bytes, low, high;
    const char *first;

    span(from, &low, &high);
    first = (const char *)from->data + low * item;
    from->data = (const char *)e->fetched - low * item;
    return w->cuda->calls->fetch(w->cuda, e->fetched, first,
                                 (size_t)((high - low + 1) * item), err);
}

/* The GPU reads 16 bytes at a time. */
static bool fits(const entry *e, const rk_strided *from)
{
    return rk_dense_fits(from, e->target) &&
           (!e->lent.on_gpu || (uintptr_t)from->data % 16 == 0);
}

/* Room for a copy where one is needed. */
static int make_room(rk_weights *w, entry *e)
{
    rk_strided from = rk_borrowed_strided(&e->lent);
    int64_t bytes = rk_type_bytes(e->target, from.rows * from.cols);

    e->data = e->lent.data;
    if (fits(e, &from)) {
        return 0;
    }
    if (e->lent.on_gpu) {
        int64_t low, high;

        span(&from, &low, &high);
        e->fetched = malloc(
            (size_t)((high - low + 1) * rk_type_get(from.type)->block_bytes));
        if (e->fetched == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    if (posix_memalign(&e->copy, COPY_ALIGNMENT, (size_t)bytes) != 0) {
        e->copy = NULL;
        PyErr_NoMemory();
        return -1;
    }
    e->data = e->copy;
    w->copied_bytes += bytes;
    return 0;
}

static rk_status convert(const rk_weights *w, const entry *e, rk_error *err)
{
    rk_strided from;
    rk_status status = RK_OK;

    if (e->copy == NULL && e->fetched == NULL) {
        return RK_OK; /* in place, or not lent at all */
    }
    from = rk_borrowed_strided(&e->lent);
    if (e->fetched != NULL) {
        status = fetch(w, e, &from, err);
    }
    if (e->copy != NULL && status == RK_OK) {
        rk_dense_convert(e->copy, e->target, &from, w->n_threads);
    }
    return status;
}

static int convert_now(const rk_weights *w, const entry *e)
{
    rk_error err = {0};
    PyThreadState *thread = PyEval_SaveThread();
    rk_status status = convert(w, e, &err);

    PyEval_RestoreThread(thread);
    return status != RK_OK ? raised(&err) : PyErr_CheckSignals();
}

static int convert_all(rk_weights *w, bool (*takes)(rk_type))
{
    entry *head = &w->entries[RK_LAYOUT_HEAD];

    if (head->present &&
        same_memory(&head->lent, &w->entries[RK_LAYOUT_EMBEDDING].lent)) {
        rk_borrowed_release(&head->lent);
        head->present = false;
    }
    for (size_t i = 0; i < w->n_entries; i++) {
        entry *e = &w->entries[i];
        bool matrix = e->lent.n_dims == 2;

        if (!e->present) {
            continue;
        }
        e->target = matrix ? w->model.compute : RK_F32;
        if (matrix && takes(e->lent.type)) {
            e->target = e->lent.type;
        }
        if (make_room(w, e) < 0) {
            return -1;
        }
        if (e->copy != NULL && convert_now(w, e) < 0) {
            return -1;
        }
    }
    return 0;
}

void rk_weights_refresh(rk_weights *weights)
{
    for (size_t i = 0; i < weights->n_entries; i++) {
        convert(weights, &weights->entries[i], NULL);
    }
}

/* ---- the model ----------------------------------------------------------- */

static void fill_model(rk_weights *w)
{
    for (size_t i = 0; i < w->n_entries; i++) {
        const entry *e = &w->entries[i];

        if (e->present) {
            rk_layout_bind(&w->model, w->layers, i, e->data, e->target);
        }
    }
    if (!w->entries[RK_LAYOUT_HEAD].present) {
        w->model.head = w->model.embedding;
    }
    w->model.layers = w->layers;
}

/* All tensors of `mapping`, checked; NULL with an exception. */
static rk_weights *borrow_model(PyObject *mapping, PyObject *config,
                                rk_cuda *cuda, PyObject *tensor_type)
{
    rk_weights *w = PyMem_RawCalloc(1, sizeof *w);
    PyObject *names = NULL;
    int32_t n_layers;
    int failed = -1;

    if (w == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    w->cuda = cuda;
    if (rk_config_read(&w->model.config, &w->inv_freq, config) < 0) {
        goto done;
    }
    n_layers = w->model.config.n_layers;
    names = rk_borrow_names(mapping);
    if (names == NULL) {
        goto done;
    }
    if (n_layers > PyDict_GET_SIZE(names)) { /* before a table of them */
        PyErr_Format(PyExc_ValueError,
                     "%zd tensors cannot be %d layers (num_hidden_layers)",
                     PyDict_GET_SIZE(names), (int)n_layers);
        goto done;
    }
    w->layers = PyMem_RawCalloc((size_t)n_layers, sizeof *w->layers);
    w->entries = PyMem_RawCalloc(rk_layout_count(n_layers), sizeof *w->entries);
    if (w->layers == NULL || w->entries == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    w->n_entries = rk_layout_count(n_layers);
    failed = borrow_all(w, mapping, names, config, tensor_type);

done:
    Py_XDECREF(names);
    if (failed) {
        rk_weights_free(w);
        w = NULL;
    }
    return w;
}

int rk_weights_check(PyObject *mapping, PyObject *config, PyObject *tensor_type)
{
    rk_weights *w = borrow_model(mapping, config, NULL, tensor_type);

    rk_weights_free(w);
    return w != NULL ? 0 : -1;
}

int rk_weights_bind(rk_weights **out, PyObject *mapping, PyObject *config,
                    int compute, bool (*takes)(rk_type), rk_cuda *cuda,
                    int n_threads, PyObject *tensor_type)
{
    rk_weights *w = borrow_model(mapping, config, cuda, tensor_type);

    *out = NULL;
    if (w == NULL) {
        return -1;
    }
    if (compute < 0) {
        compute = w->entries[RK_LAYOUT_EMBEDDING].lent.type == RK_BF16 ? RK_BF16
                                                                       : RK_F32;
    }
    w->model.compute = (rk_type)compute;
    w->n_threads = n_threads;
    if (convert_all(w, takes) < 0) {
        rk_weights_free(w);
        return -1;
    }
    fill_model(w);
    *out = w;
    return 0;
}

void rk_weights_free(rk_weights *weights)
{
    if (weights == NULL) {
        return;
    }
    for (size_t i = 0; i < weights->n_entries; i++) {
        rk_borrowed_release(&weights->entries[i].lent);
        free(weights->entries[i].copy);
        free(weights->entries[i].fetched);
    }
    PyMem_RawFree(weights->entries);
    PyMem_RawFree(weights->layers);
    PyMem_RawFree(weights->inv_freq);
    PyMem_RawFree(weights);
}

const rk_model *rk_weights_model(const rk_weights *weights)
{
    return &weights->model;
}

int64_t rk_weights_copied_bytes(const rk_weights *weights)
{
    return weights->copied_bytes;
}

bool rk_weights_in_blocks(const rk_weights *weights)
{
    for (size_t i = 0; i < weights->n_entries; i++) {
        const entry *e = &weights->entries[i];

        if (e->present && rk_type_get(e->target)->block_elements > 1) {
            return true;
        }
    }
    return false;
}
