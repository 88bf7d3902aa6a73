/* The vocabulary of the engine: status, error, types, configuration, limits.
 *
 * Read this first. A model is weights and a configuration; a session is a tree
 * of branches over one pool of KV blocks; a backend computes. Data flows one
 * way: py -> session -> scheduler -> tree, kv; session -> forward -> backend.
 */
#ifndef RKSC_H
#define RKSC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ------------------------------------------------------------ */

/* What a function returns; each maps to one Python exception in csrc/py. */
typedef enum rk_status {
    RK_OK = 0,
    RK_EVALUE,       /* ValueError: a bad number, name, length, id */
    RK_ETYPE,        /* TypeError: a wrong dtype or kind of object */
    RK_EBUFFER,      /* BufferError: a producer of memory broke its contract */
    RK_ENOMEM,       /* MemoryError */
    RK_ECAPACITY,    /* rksc.CapacityError: the KV budget cannot hold it */
    RK_ESTATE,       /* RuntimeError: dropped branch, other process, ... */
    RK_EINTERRUPTED, /* a signal handler raised; Python's error is set */
} rk_status;

/* Filled by whoever fails first; `text` names the field, tensor or token. */
typedef struct rk_error {
    rk_status status;
    char text[512];
} rk_error;

/* Write status and printf-style text into `err` (may be NULL); return status.
 */
rk_status rk_fail(rk_error *err, rk_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

/* ---- tensors ----------------------------------------------------------- */

typedef enum rk_type {
    RK_F32 = 0,
    RK_F16,
    RK_BF16,
    RK_Q4_0, /* block types as GGUF defines them, see quant.h */
    RK_Q4_1,
    RK_Q5_0,
    RK_Q5_1,
    RK_Q8_0,
    RK_Q2_K,
    RK_Q3_K,
    RK_Q4_K,
    RK_Q5_K,
    RK_Q6_K,
    RK_N_TYPES
} rk_type;

/* A weight matrix (rows, cols), rows contiguous and dense: y = W x + bias. Of a
 * block type (beyond RK_BF16) where the backend takes it, and then unaligned.
 * `data` and `bias` are addresses of the device and are not owned. */
typedef struct rk_matrix {
    const void *data;
    const float *bias; /* (rows,) or NULL */
    rk_type type;
    int32_t rows, cols;
} rk_matrix;

/* ---- model ------------------------------------------------------------- */

/* Architecture variants are fields, never code paths by name. */
typedef struct rk_config {
    int32_t n_layers, width, ffn_width;
    int32_t n_heads, n_kv_heads, head_dim; /* n_heads % n_kv_heads == 0 */
    int32_t vocab_size, max_positions;
    float norm_eps;
    bool rope_interleaved;  /* rotate pairs (2i, 2i+1), not (i, i + dim/2) */
    int32_t window;         /* keys a query sees, itself included; 0: all */
    int32_t window_from;    /* first layer that has the window */
    const double *inv_freq; /* (head_dim / 2,) RoPE frequencies, scaled */
} rk_config;

typedef struct rk_layer {
    const float *attention_norm; /* (width,) */
    rk_matrix query, key, value; /* (n_heads | n_kv_heads * head_dim, width) */
    rk_matrix output;            /* (width, n_heads * head_dim) */
    const float *ffn_norm;       /* (width,) */
    rk_matrix gate, up;          /* (ffn_width, width) */
    rk_matrix down;              /* (width, ffn_width) */
} rk_layer;

/* Bound weights; every pointer is valid for the life of the session. */
typedef struct rk_model {
    rk_config config;
    rk_type compute;        /* rk_extent.compute */
    rk_matrix embedding;    /* (vocab_size, width) */
    rk_matrix head;         /* (vocab_size, width) */
    const float *norm;      /* (width,) */
    const rk_layer *layers; /* (n_layers,) */
} rk_model;

/* ---- limits and constants ---------------------------------------------- */

/* Attention cuts keys into tiles of this many at absolute positions; partial
 * results merge in the order of positions. Never depends on block_tokens,
 * threads or sharing: this is what makes results independent of all three. */
#define RK_TILE 256

/* Query rows of one attention chunk: the unit that threads share out. */
#define RK_CHUNK_ROWS 32

/* Tokens of a KV block: blocks never cross a tile. */
static inline rk_status rk_check_block_tokens(int32_t n, rk_error *err)
{
    return n >= 1 && n <= RK_TILE && (n & (n - 1)) == 0
               ? RK_OK
               : rk_fail(err, RK_EVALUE,
                         "block_tokens must be a power of two in 1 .. %d, got "
                         "%d",
                         RK_TILE, (int)n);
}

#ifdef __cplusplus
}
#endif

#endif
