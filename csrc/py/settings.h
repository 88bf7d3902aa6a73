/* What the requests of one call have in common, and the bytes of tokens. */
#ifndef RKSC_PY_SETTINGS_H
#define RKSC_PY_SETTINGS_H

#include "py.h"

/* Bytes of all tokens, one after the other; stop strings are looked for in
 * them. Zeroed: there are none. */
typedef struct rk_token_table {
    uint8_t *bytes;
    int64_t *offsets; /* (vocab_size + 1,); NULL: no table */
    uint8_t *special; /* (vocab_size,); NULL: no special tokens */
} rk_token_table;

/* 0, or -1 with an exception. token_bytes, special_ids: see rk_requests_new. */
int rk_token_table_read(rk_token_table *table, PyObject *token_bytes,
                        PyObject *special_ids, int32_t vocab_size);
void rk_token_table_free(rk_token_table *table);

/* Owns what options point to, but for the table. */
typedef struct rk_settings {
    rk_generation_options options;
    rk_tokens stop_ids;
    PyObject *strings; /* tuple of bytes */
    const uint8_t **stop_strings;
    int32_t *stop_lengths;
} rk_settings;

#define RK_N_SETTINGS 11
#define RK_SETTINGS_KEYWORDS                                                   \
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed",        \
        "stop_ids", "stop_strings", "stop_top", "stop_lead", "min_steps"
#define RK_SETTINGS_REFERENCES(objects)                                        \
    &(objects)[0], &(objects)[1], &(objects)[2], &(objects)[3], &(objects)[4], \
        &(objects)[5], &(objects)[6], &(objects)[7], &(objects)[8],            \
        &(objects)[9], &(objects)[10]

/* 0, or -1 with an exception and nothing to free. */
int rk_settings_read(rk_settings *s, PyObject *const *objects,
                     const rk_token_table *table, int32_t vocab_size);
void rk_settings_free(rk_settings *s);

#endif
