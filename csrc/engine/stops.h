/* What ends a text: stop ids, and stop strings that may begin in one token and
 * end in another. */
#ifndef RKSC_STOPS_H
#define RKSC_STOPS_H

#include "requests.h"

/* A text's last bytes that may still belong to a stop string. */
typedef struct rk_stop_window {
    uint8_t *bytes;
    uint8_t *shown; /* by byte: 0 where a special token is spelled */
    int32_t n;
} rk_stop_window;

/* Zeroed, it stops nothing. */
typedef struct rk_stops {
    void *storage; /* owns ids, strings and lengths */
    const int32_t *ids, *lengths;
    const uint8_t **strings;
    int32_t n_ids, n_strings, longest;
    const uint8_t *token_bytes, *special; /* borrowed, as in the options */
    const int64_t *token_offsets;
    uint8_t *window_bytes;  /* owned: of both windows */
    rk_stop_window text;    /* without special tokens */
    rk_stop_window spelled; /* with them */
} rk_stops;

/* Copies ids and strings of the options. */
rk_status rk_stops_create(rk_stops *stops, const rk_generation_options *options,
                          int32_t vocab_size, rk_error *err);
void rk_stops_free(rk_stops *stops);

/* Index of the stop id that this token is; -1: none. */
int32_t rk_stops_find_id(const rk_stops *stops, int32_t token);

/* The text goes on with this token. Index of the stop string that now ends in
 * it, the one that begins first; -1: none. cut: bytes of the text from its
 * beginning to the end, those of special tokens not counted. */
int32_t rk_stops_take(rk_stops *stops, int32_t token, int32_t *cut);

#endif
