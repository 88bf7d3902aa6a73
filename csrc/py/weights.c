/* Names become fields. A table says for each tensor of a layer what it is
 * called, how large it has to be and whether it may be missing; the rest of
 * the file borrows, checks and, where memory does not fit, converts.
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
#include "dense.h"
#include "model/quant.h"
#include "py.h"

#include <stdlib.h>
#include <string.h>

#define COPY_ALIGNMENT 64 /* a cache line and the widest vector */

/* One expected tensor. */
typedef struct entry {
    rk_borrowed lent;
    bool present;
    rk_type target; /* what the engine wants it to be */
    void *copy;     /* owned, or NULL: used in place */
    void *fetched;  /* owned: room for what a copy is made from, where that is
                     * on the GPU */
    const void *data;
} entry;

enum { EMBEDDING, NORM, HEAD, N_GLOBAL };

enum {
    ATTENTION_NORM,
    QUERY,
    QUERY_BIAS,
    KEY,
    KEY_BIAS,
    VALUE,
    VALUE_BIAS,
    OUTPUT,
    OUTPUT_BIAS,
    FFN_NORM,
    GATE,
    UP,
    DOWN,
    N_LAYER
};

struct rk_weights {
    rk_model model;
    rk_layer *layers;
    double *inv_freq;
    entry *entries; /* (N_GLOBAL + n_layers * N_LAYER,) */
    size_t n_entries;
    int64_t copied_bytes;
    rk_cuda *cuda; /* borrowed, or NULL */
    int n_threads;
};

/* What a tensor must look like. */
typedef struct want {
    const char *name; /* without "model." and, in a layer, "layers.N." */
    bool matrix;
    bool optional;
    int32_t rows, cols; /* a vector has rows 1 */
} want;

/* ---- shapes ----------------------------------------------------------------
 */

static want want_global(const rk_config *c, int which)
{
    switch (which) {
    case EMBEDDING:
        return (want){"embed_tokens.weight", true, false, c->vocab_size,
                      c->width};
    case NORM:
        return (want){"norm.weight", false, false, 1, c->width};
    default:
        return (want){"lm_head.weight", true, true, c->vocab_size, c->width};
    }
}

static want want_layer(const rk_config *c, int which)
{
    int32_t heads = c->n_heads * c->head_dim;
    int32_t kv_heads = c->n_kv_heads * c->head_dim;
    const want wants[N_LAYER] = {
        [ATTENTION_NORM] = {"input_layernorm.weight", false, false, 1,
                            c->width},
        [QUERY] = {"self_attn.q_proj.weight", true, false, heads, c->width},
        [QUERY_BIAS] = {"self_attn.q_proj.bias", false, true, 1, heads},
        [KEY] = {"self_attn.k_proj.weight", true, false, kv_heads, c->width},
        [KEY_BIAS] = {"self_attn.k_proj.bias", false, true, 1, kv_heads},
        [VALUE] = {"self_attn.v_proj.weight", true, false, kv_heads, c->width},
        [VALUE_BIAS] = {"self_attn.v_proj.bias", false, true, 1, kv_heads},
        [OUTPUT] = {"self_attn.o_proj.weight", true, false, c->width, heads},
        [OUTPUT_BIAS] = {"self_attn.o_proj.bias", false, true, 1, c->width},
        [FFN_NORM] = {"post_attention_layernorm.weight", false, false, 1,
                      c->width},
        [GATE] = {"mlp.gate_proj.weight", true, false, c->ffn_width, c->width},
        [UP] = {"mlp.up_proj.weight", true, false, c->ffn_width, c->width},
        [DOWN] = {"mlp.down_proj.weight", true, false, c->width, c->ffn_width},
    };

    return wants[which];
}

static want want_entry(const rk_weights *w, size_t i)
{
    return i < N_GLOBAL
               ? want_global(&w->model.config, (int)i)
               : want_layer(&w->model.config, (int)((i - N_GLOBAL) % N_LAYER));
}

static entry *layer_entry(const rk_weights *w, int32_t layer, int which)
{
    return &w->entries[N_GLOBAL + (size_t)layer * N_LAYER + (size_t)which];
}

/* The full name of entry i; NULL with an exception. */
static PyObject *entry_name(const rk_weights *w, size_t i)
{
    want wanted = want_entry(w, i);

    if (i == HEAD) {
        return PyUnicode_FromString(wanted.name);
    }
    if (i < N_GLOBAL) {
        return PyUnicode_FromFormat("model.%s", wanted.name);
    }
    return PyUnicode_FromFormat("model.layers.%zu.%s", (i - N_GLOBAL) / N_LAYER,
                                wanted.name);
}

static PyObject *shape_text(const rk_borrowed *lent)
{
    PyObject *shape = PyTuple_New(lent->n_dims), *text;

    for (int i = 0; shape != NULL && i < lent->n_dims; i++) {
        PyObject *dim = PyLong_FromLongLong(lent->shape[i]);

        if (dim == NULL) {
            Py_CLEAR(shape);
            return NULL;
        }
        PyTuple_SET_ITEM(shape, i, dim);
    }
    text = shape != NULL ? PyObject_Str(shape) : NULL;
    Py_XDECREF(shape);
    return text;
}

static PyObject *wanted_text(const want *wanted)
{
    return wanted->matrix ? PyUnicode_FromFormat("(%d, %d)", (int)wanted->rows,
                                                 (int)wanted->cols)
                          : PyUnicode_FromFormat("(%d,)", (int)wanted->cols);
}

static int check_shape(const entry *e, const want *wanted, PyObject *name)
{
    const int64_t *shape = e->lent.shape;
    PyObject *has, *wants;

    if (wanted->matrix ? e->lent.n_dims == 2 && shape[0] == wanted->rows &&
                             shape[1] == wanted->cols
                       : e->lent.n_dims == 1 && shape[0] == wanted->cols) {
        return 0;
    }
    has = shape_text(&e->lent);
    wants = wanted_text(wanted);
    if (has != NULL && wants != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "%U has shape %U, the configuration wants %U", name, has,
                     wants);
    }
    Py_XDECREF(has);
    Py_XDECREF(wants);
    return -1;
}

/* ---- borrowing ----------------------------------------------------------- */

/* The key of `names` that stands for the full name of entry i: itself, or
 * without its leading "model."; borrowed. NULL without an exception: absent. */
static PyObject *find_key(PyObject *names, PyObject *full, size_t i)
{
    PyObject *key = PyDict_GetItemWithError(names, full), *bare;

    if (key != NULL || PyErr_Occurred() || i == HEAD) {
        return key;
    }
    bare = PyUnicode_Substring(full, (Py_ssize_t)strlen("model."),
                               PyUnicode_GET_LENGTH(full));
    key = bare != NULL ? PyDict_GetItemWithError(names, bare) : NULL;
    Py_XDECREF(bare);
    return key;
}

static int missing(const rk_weights *w, size_t i, PyObject *name)
{
    want wanted = want_entry(w, i);
    PyObject *wants = wanted_text(&wanted);

    if (wants != NULL) {
        PyErr_Format(PyExc_ValueError, "weights lack %U, shape %U", name,
                     wants);
        Py_DECREF(wants);
    }
    return -1;
}

/* Borrow entry i and take its name out of `names`. */
static int borrow(rk_weights *w, size_t i, PyObject *mapping, PyObject *names,
                  PyObject *tensor_type)
{
    entry *e = &w->entries[i];
    want wanted = want_entry(w, i);
    PyObject *name = entry_name(w, i), *key, *producer = NULL;
    int failed = -1;

    if (name == NULL) {
        return -1;
    }
    key = find_key(names, name, i);
    if (key == NULL) {
        if (!PyErr_Occurred()) {
            failed = wanted.optional ? 0 : missing(w, i, name);
        }
        Py_DECREF(name);
        return failed;
    }
    Py_INCREF(key);
    producer = PyObject_GetItem(mapping, key);
    if (producer != NULL && PyDict_DelItem(names, key) == 0 &&
        rk_borrowed_take(&e->lent, producer, key, tensor_type, w->cuda) == 0) {
        e->present = true;
        failed = check_shape(e, &wanted, key);
    }
    Py_XDECREF(producer);
    Py_DECREF(key);
    Py_DECREF(name);
    return failed;
}

/* Buffers that old checkpoints carry and that the configuration decides. */
static bool is_harmless(PyObject *name)
{
    static const char *const endings[] = {
        "rotary_emb.inv_freq", "rotary_emb.original_inv_freq",
        "rotary_emb.cos_cached", "rotary_emb.sin_cached"};
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(name, &length);

    if (text == NULL) {
        PyErr_Clear();
        return false;
    }
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        size_t n = strlen(endings[i]);

        if ((size_t)length >= n && strcmp(text + length - n, endings[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* What nobody asked for would be silently ignored: refuse it. */
static int refuse_leftovers(PyObject *names)
{
    PyObject *key, *left = PyList_New(0), *shown = NULL;
    Py_ssize_t at = 0, n;
    int failed = -1;

    if (left == NULL) {
        return -1;
    }
    while (PyDict_Next(names, &at, &key, NULL)) {
        if (!is_harmless(key) && PyList_Append(left, key) < 0) {
            goto done;
        }
    }
    n = PyList_GET_SIZE(left);
    if (n == 0) {
        failed = 0;
        goto done;
    }
    shown = PyList_GetSlice(left, 0, n < 5 ? n : 5);
    if (shown != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "weights hold %zd tensor%s that the configuration has no "
                     "use for: %R%s",
                     n, n == 1 ? "" : "s", shown, n > 5 ? " ..." : "");
    }

done:
    Py_XDECREF(shown);
    Py_DECREF(left);
    return failed;
}

/* One bias, in all layers or in none. */
static int check_bias(const rk_weights *w, int which, bool wanted)
{
    for (int32_t l = 0; l < w->model.config.n_layers; l++) {
        const entry *e = layer_entry(w, l, which);
        size_t i = (size_t)(e - w->entries);
        PyObject *name;

        if (e->present == wanted) {
            continue;
        }
        name = entry_name(w, i);
        if (name != NULL && wanted) {
            missing(w, i, name);
        } else if (name != NULL) {
            PyErr_Format(PyExc_ValueError,
                         "weights hold %U, which has no place in this model "
                         "(attention_bias)",
                         name);
        }
        Py_XDECREF(name);
        return -1;
    }
    return 0;
}

/* What the configuration leaves open is as in the first layer; q, k and v go
 * together. */
static int check_biases(const rk_weights *w, PyObject *config)
{
    static const int biases[] = {QUERY_BIAS, KEY_BIAS, VALUE_BIAS, OUTPUT_BIAS};

    for (int b = 0; b < 4; b++) {
        bool output = biases[b] == OUTPUT_BIAS, wanted;
        rk_choice choice;

        if (rk_config_choice(&choice, config,
                             output ? "output_bias" : "qkv_bias") < 0) {
            return -1;
        }
        wanted = choice == RK_CHOICE_YES;
        if (choice == RK_CHOICE_OPEN) {
            wanted =
                layer_entry(w, 0, output ? OUTPUT_BIAS : QUERY_BIAS)->present;
        }
        if (check_bias(w, biases[b], wanted) < 0) {
            return -1;
        }
    }
    return 0;
}

/* `names` are those of the mapping. */
static int borrow_all(rk_weights *w, PyObject *mapping, PyObject *names,
                      PyObject *config, PyObject *tensor_type)
{
    int tied = rk_config_flag(config, "tied");

    if (tied < 0) {
        return -1;
    }
    for (size_t i = 0; i < w->n_entries; i++) {
        if (borrow(w, i, mapping, names, tensor_type) < 0) {
            return -1;
        }
    }
    if (!tied && !w->entries[HEAD].present) {
        PyObject *name = entry_name(w, HEAD);
        int failed = name != NULL ? missing(w, HEAD, name) : -1;

        Py_XDECREF(name);
        return failed;
    }
    return refuse_leftovers(names) < 0 ? -1 : check_biases(w, config);
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
static int place(rk_weights *w, entry *e, const want *wanted)
{
    rk_strided from = rk_borrowed_strided(&e->lent);
    int64_t bytes =
        rk_type_bytes(e->target, (int64_t)wanted->rows * wanted->cols);

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

static int convert_all(rk_weights *w, bool (*takes)(rk_type))
{
    entry *head = &w->entries[HEAD];

    if (head->present &&
        same_memory(&head->lent, &w->entries[EMBEDDING].lent)) {
        rk_borrowed_release(&head->lent);
        head->present = false;
    }
    for (size_t i = 0; i < w->n_entries; i++) {
        entry *e = &w->entries[i];
        want wanted = want_entry(w, i);

        if (!e->present) {
            continue;
        }
        e->target = wanted.matrix ? w->model.compute : RK_F32;
        if (wanted.matrix && takes(e->lent.type)) {
            e->target = e->lent.type;
        }
        if (place(w, e, &wanted) < 0) {
            return -1;
        }
        if (e->copy != NULL) {
            rk_error err = {0};
            rk_status status;

            Py_BEGIN_ALLOW_THREADS status = convert(w, e, &err);
            Py_END_ALLOW_THREADS if (status != RK_OK)
            {
                rk_raise(NULL, &err); /* the KV budget has no part in it */
                return -1;
            }
            if (PyErr_CheckSignals() < 0) {
                return -1;
            }
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

static rk_matrix matrix(const entry *e, const entry *bias, want wanted)
{
    return (rk_matrix){
        .data = e->data,
        .bias = bias != NULL ? bias->data : NULL, /* NULL where absent */
        .type = e->target,
        .rows = wanted.rows,
        .cols = wanted.cols,
    };
}

static void fill_layer(rk_weights *w, int32_t l)
{
    const rk_config *c = &w->model.config;
    const entry *e = layer_entry(w, l, 0);

    w->layers[l] = (rk_layer){
        .attention_norm = e[ATTENTION_NORM].data,
        .query = matrix(&e[QUERY], &e[QUERY_BIAS], want_layer(c, QUERY)),
        .key = matrix(&e[KEY], &e[KEY_BIAS], want_layer(c, KEY)),
        .value = matrix(&e[VALUE], &e[VALUE_BIAS], want_layer(c, VALUE)),
        .output = matrix(&e[OUTPUT], &e[OUTPUT_BIAS], want_layer(c, OUTPUT)),
        .ffn_norm = e[FFN_NORM].data,
        .gate = matrix(&e[GATE], NULL, want_layer(c, GATE)),
        .up = matrix(&e[UP], NULL, want_layer(c, UP)),
        .down = matrix(&e[DOWN], NULL, want_layer(c, DOWN)),
    };
}

static void fill_model(rk_weights *w)
{
    const entry *embedding = &w->entries[EMBEDDING];
    const entry *head =
        w->entries[HEAD].present ? &w->entries[HEAD] : embedding;
    want table = want_global(&w->model.config, EMBEDDING);

    w->model.embedding = matrix(embedding, NULL, table);
    w->model.head = matrix(head, NULL, table);
    w->model.norm = w->entries[NORM].data;
    w->model.layers = w->layers;
    for (int32_t l = 0; l < w->model.config.n_layers; l++) {
        fill_layer(w, l);
    }
}

int rk_weights_bind(rk_weights **out, PyObject *mapping, PyObject *config,
                    int compute, bool (*takes)(rk_type), rk_cuda *cuda,
                    int n_threads, PyObject *tensor_type)
{
    rk_weights *w = PyMem_RawCalloc(1, sizeof *w);
    PyObject *names = NULL;
    size_t n_layers;

    *out = NULL;
    if (w == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    w->n_threads = n_threads;
    w->cuda = cuda;
    if (rk_config_read(&w->model.config, &w->inv_freq, config) < 0) {
        goto fail;
    }
    names = rk_borrow_names(mapping);
    if (names == NULL) {
        goto fail;
    }
    n_layers = (size_t)w->model.config.n_layers;
    if (n_layers >
        (size_t)PyDict_GET_SIZE(names)) { /* before a table of them */
        PyErr_Format(PyExc_ValueError,
                     "config: num_hidden_layers (n_layers) is %zu, and weights "
                     "hold %zd tensors in all",
                     n_layers, PyDict_GET_SIZE(names));
        goto fail;
    }
    w->layers = PyMem_RawCalloc(n_layers, sizeof *w->layers);
    w->entries =
        PyMem_RawCalloc(N_GLOBAL + n_layers * N_LAYER, sizeof *w->entries);
    if (w->layers == NULL || w->entries == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    w->n_entries = N_GLOBAL + n_layers * N_LAYER;
    if (borrow_all(w, mapping, names, config, tensor_type) < 0) {
        goto fail;
    }
    Py_CLEAR(names);
    if (compute < 0) {
        compute = w->entries[EMBEDDING].lent.type == RK_BF16 ? RK_BF16 : RK_F32;
    }
    w->model.compute = (rk_type)compute;
    if (convert_all(w, takes) < 0) {
        goto fail;
    }
    fill_model(w);
    *out = w;
    return 0;

fail:
    Py_XDECREF(names);
    rk_weights_free(w);
    return -1;
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
