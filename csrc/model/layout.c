/* A row for each tensor. Of a layer's names "model.layers.N.", in GGUF
 * "blk.N.", is left out. */
#include "layout.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* A dimension, in terms of the configuration. */
typedef enum dim { NONE, WIDTH, FFN, VOCAB, HEADS, KV } dim;

typedef struct row {
    const char *name, *gguf; /* Hugging Face's and GGUF's */
    size_t at; /* in rk_model or rk_layer: a rk_matrix, or of a vector its
                  pointer */
    dim dims[RK_LAYOUT_DIMS];
    rk_need need;
    const char *flag;    /* of ModelConfig; NULL where it is always needed */
    const char *setting; /* what a config.json calls it */
} row;

#define MODEL(field) offsetof(rk_model, field)
#define LAYER(field) offsetof(rk_layer, field)
#define ALWAYS RK_NEED_ALWAYS, NULL, NULL
#define QKV_BIAS RK_NEED_IF, "qkv_bias", "attention_bias"
#define OUT_BIAS RK_NEED_IF, "output_bias", "attention_bias"
#define NOT_TIED RK_NEED_UNLESS, "tied", "tie_word_embeddings"

/* clang-format off */
static const row OF_MODEL[] = {
    [RK_LAYOUT_EMBEDDING] = {"model.embed_tokens.weight", "token_embd.weight",
     MODEL(embedding), {VOCAB, WIDTH}, ALWAYS},
    [RK_LAYOUT_NORM] = {"model.norm.weight", "output_norm.weight",
     MODEL(norm), {WIDTH}, ALWAYS},
    [RK_LAYOUT_HEAD] = {"lm_head.weight", "output.weight",
     MODEL(head), {VOCAB, WIDTH}, NOT_TIED},
};

static const row OF_LAYER[] = {
    {"input_layernorm.weight", "attn_norm.weight",
     LAYER(attention_norm), {WIDTH}, ALWAYS},
    {"self_attn.q_proj.weight", "attn_q.weight",
     LAYER(query), {HEADS, WIDTH}, ALWAYS},
    {"self_attn.q_proj.bias", "attn_q.bias",
     LAYER(query.bias), {HEADS}, QKV_BIAS},
    {"self_attn.k_proj.weight", "attn_k.weight",
     LAYER(key), {KV, WIDTH}, ALWAYS},
    {"self_attn.k_proj.bias", "attn_k.bias",
     LAYER(key.bias), {KV}, QKV_BIAS},
    {"self_attn.v_proj.weight", "attn_v.weight",
     LAYER(value), {KV, WIDTH}, ALWAYS},
    {"self_attn.v_proj.bias", "attn_v.bias",
     LAYER(value.bias), {KV}, QKV_BIAS},
    {"self_attn.o_proj.weight", "attn_output.weight",
     LAYER(output), {WIDTH, HEADS}, ALWAYS},
    {"self_attn.o_proj.bias", "attn_output.bias",
     LAYER(output.bias), {WIDTH}, OUT_BIAS},
    {"post_attention_layernorm.weight", "ffn_norm.weight",
     LAYER(ffn_norm), {WIDTH}, ALWAYS},
    {"mlp.gate_proj.weight", "ffn_gate.weight",
     LAYER(gate), {FFN, WIDTH}, ALWAYS},
    {"mlp.up_proj.weight", "ffn_up.weight",
     LAYER(up), {FFN, WIDTH}, ALWAYS},
    {"mlp.down_proj.weight", "ffn_down.weight",
     LAYER(down), {WIDTH, FFN}, ALWAYS},
};
/* clang-format on */

enum {
    N_OF_MODEL = sizeof OF_MODEL / sizeof *OF_MODEL,
    N_OF_LAYER = sizeof OF_LAYER / sizeof *OF_LAYER
};

const char *const rk_layout_derived[] = {"rotary_emb.inv_freq",
                                         "rotary_emb.original_inv_freq",
                                         "rotary_emb.cos_cached",
                                         "rotary_emb.sin_cached",
                                         "self_attn.bias",
                                         "self_attn.masked_bias",
                                         NULL};

static const row *row_of(size_t i)
{
    return i < N_OF_MODEL ? &OF_MODEL[i]
                          : &OF_LAYER[(i - N_OF_MODEL) % N_OF_LAYER];
}

size_t rk_layout_count(int32_t n_layers)
{
    return N_OF_MODEL + (size_t)n_layers * N_OF_LAYER;
}

/* The row's name, in a layer behind `layer` and its number. */
static void write_name(char out[RK_LAYOUT_NAME], size_t i, const char *layer,
                       const char *name)
{
    if (i < N_OF_MODEL) {
        snprintf(out, RK_LAYOUT_NAME, "%s", name);
    } else {
        snprintf(out, RK_LAYOUT_NAME, "%s.%zu.%s", layer,
                 (i - N_OF_MODEL) / N_OF_LAYER, name);
    }
}

void rk_layout_name(char name[RK_LAYOUT_NAME], size_t i)
{
    write_name(name, i, "model.layers", row_of(i)->name);
}

void rk_layout_gguf_name(char name[RK_LAYOUT_NAME], size_t i)
{
    write_name(name, i, "blk", row_of(i)->gguf);
}

int rk_layout_shape(int64_t shape[RK_LAYOUT_DIMS], const rk_config *config,
                    size_t i)
{
    const int64_t sizes[] = {
        [WIDTH] = config->width,
        [FFN] = config->ffn_width,
        [VOCAB] = config->vocab_size,
        [HEADS] = (int64_t)config->n_heads * config->head_dim,
        [KV] = (int64_t)config->n_kv_heads * config->head_dim,
    };
    const dim *dims = row_of(i)->dims;

    shape[0] = sizes[dims[0]];
    shape[1] = dims[1] != NONE ? sizes[dims[1]] : 1;
    return dims[1] != NONE ? 2 : 1;
}

const char *rk_layout_flag(size_t i)
{
    return row_of(i)->flag;
}

size_t rk_layout_first(size_t i)
{
    size_t first = 0;

    while (row_of(first)->flag == NULL ||
           strcmp(row_of(first)->flag, row_of(i)->flag) != 0) {
        first++;
    }
    return first;
}

/* ---- checks -------------------------------------------------------------- */

#define SHAPE_TEXT 192 /* room for eight dimensions of 64 bits */

static const char *shape_text(char text[SHAPE_TEXT], const int64_t *shape,
                              int n_dims)
{
    int at = snprintf(text, SHAPE_TEXT, "(");

    for (int i = 0; i < n_dims && at < SHAPE_TEXT; i++) {
        at += snprintf(text + at, (size_t)(SHAPE_TEXT - at), "%s%" PRId64,
                       i > 0 ? ", " : "", shape[i]);
    }
    if (at < SHAPE_TEXT) {
        snprintf(text + at, (size_t)(SHAPE_TEXT - at),
                 n_dims == 1 ? ",)" : ")");
    }
    return text;
}

rk_status rk_layout_check_shape(const rk_config *config, size_t i,
                                const char *called, const int64_t *shape,
                                int n_dims, rk_error *err)
{
    int64_t expected[RK_LAYOUT_DIMS];
    int n = rk_layout_shape(expected, config, i);
    char has[SHAPE_TEXT], wants[SHAPE_TEXT];

    if (n == n_dims &&
        memcmp(shape, expected, (size_t)n * sizeof *shape) == 0) {
        return RK_OK;
    }
    return rk_fail(err, RK_EVALUE, "tensor %.200s has shape %s, expected %s",
                   called, shape_text(has, shape, n_dims),
                   shape_text(wants, expected, n));
}

rk_status rk_layout_check_presence(const rk_config *config, size_t i, bool flag,
                                   bool present, rk_error *err)
{
    const row *row = row_of(i);
    bool needed =
        row->need == RK_NEED_ALWAYS || flag == (row->need == RK_NEED_IF);
    bool refused = row->need == RK_NEED_IF && !flag;
    char name[RK_LAYOUT_NAME], wants[SHAPE_TEXT];
    int64_t shape[RK_LAYOUT_DIMS];

    if (present ? !refused : !needed) {
        return RK_OK;
    }
    rk_layout_name(name, i);
    if (present) {
        return rk_fail(err, RK_EVALUE,
                       "tensor %s has no place in this model (%s is false)",
                       name, row->setting);
    }
    shape_text(wants, shape, rk_layout_shape(shape, config, i));
    return rk_fail(err, RK_EVALUE,
                   "tensor %s is missing, expected shape %s%s%s%s", name, wants,
                   flag ? "" : ", as ", flag ? "" : row->setting,
                   flag ? "" : " is false");
}

/* ---- where they go ------------------------------------------------------- */

rk_slot rk_layout_slot(rk_model *model, rk_layer *layers, size_t i)
{
    const row *row = row_of(i);
    char *base = i < N_OF_MODEL
                     ? (char *)model
                     : (char *)&layers[(i - N_OF_MODEL) / N_OF_LAYER];
    void *at = base + row->at;

    return row->dims[1] != NONE ? (rk_slot){.matrix = at}
                                : (rk_slot){.vector = at};
}

void rk_layout_bind(rk_model *model, rk_layer *layers, size_t i,
                    const void *data, rk_type type)
{
    rk_slot slot = rk_layout_slot(model, layers, i);
    int64_t shape[RK_LAYOUT_DIMS];

    if (slot.vector != NULL) {
        *slot.vector = data;
        return;
    }
    rk_layout_shape(shape, &model->config, i);
    slot.matrix->data = data; /* its bias is a tensor of its own */
    slot.matrix->type = type;
    slot.matrix->rows = (int32_t)shape[0];
    slot.matrix->cols = (int32_t)shape[1];
}
