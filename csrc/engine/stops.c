/* Stop strings over tokens.
 *
 * A window holds the newest token's bytes and, before them, as many as a match
 * that ends in this token could begin with: the longest string less one byte.
 * What ended earlier was found earlier.
 *
 * Special tokens are no part of the text, but a stop string may spell them. So
 * there are two windows, one without them and one with them, and a stop string
 * is looked for in both.
 */
#include "stops.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static rk_status copy_stops(rk_stops *stops, const rk_generation_options *o,
                            rk_error *err)
{
    size_t n_strings = (size_t)o->n_stop_strings, n_bytes = 0;
    size_t n_ids = (size_t)o->n_stop_ids;
    for (size_t i = 0; i < n_strings; i++) {
        n_bytes += (size_t)o->stop_lengths[i];
    }
    /* Pointers, then numbers, then bytes: each is aligned. */
    stops->storage =
        malloc(n_strings * sizeof *stops->strings +
               (n_strings + n_ids) * sizeof(int32_t) + n_bytes + 1);
    if (stops->storage == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for stop strings");
    }
    const uint8_t **strings = stops->storage;
    int32_t *lengths = (int32_t *)(void *)(strings + n_strings);
    int32_t *ids = lengths + n_strings;
    uint8_t *bytes = (uint8_t *)(ids + n_ids);
    for (size_t i = 0; i < n_strings; i++) {
        lengths[i] = o->stop_lengths[i];
        memcpy(bytes, o->stop_strings[i], (size_t)lengths[i]);
        strings[i] = bytes;
        bytes += lengths[i];
        stops->longest =
            lengths[i] > stops->longest ? lengths[i] : stops->longest;
    }
    for (size_t i = 0; i < n_ids; i++) {
        ids[i] = o->stop_ids[i];
    }
    stops->strings = strings;
    stops->lengths = lengths;
    stops->ids = ids;
    stops->n_strings = o->n_stop_strings;
    stops->n_ids = o->n_stop_ids;
    return RK_OK;
}

static rk_status make_windows(rk_stops *stops, int32_t vocab_size,
                              rk_error *err)
{
    int64_t longest = 0; /* token */
    for (int32_t t = 0; t < vocab_size; t++) {
        int64_t n = stops->token_offsets[t + 1] - stops->token_offsets[t];
        longest = n > longest ? n : longest;
    }
    size_t size = (size_t)longest + (size_t)stops->longest;
    stops->window_bytes = malloc(4 * size);
    if (stops->window_bytes == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for stop strings");
    }
    stops->text.bytes = stops->window_bytes;
    stops->text.shown = stops->window_bytes + size;
    stops->spelled.bytes = stops->window_bytes + 2 * size;
    stops->spelled.shown = stops->window_bytes + 3 * size;
    return RK_OK;
}

rk_status rk_stops_create(rk_stops *stops, const rk_generation_options *options,
                          int32_t vocab_size, rk_error *err)
{
    *stops = (rk_stops){.token_bytes = options->token_bytes,
                        .token_offsets = options->token_offsets,
                        .special = options->special};
    rk_status status = copy_stops(stops, options, err);
    if (status == RK_OK && stops->n_strings > 0) {
        status = make_windows(stops, vocab_size, err);
    }
    if (status != RK_OK) {
        rk_stops_free(stops);
    }
    return status;
}

void rk_stops_free(rk_stops *stops)
{
    free(stops->storage);
    free(stops->window_bytes);
    *stops = (rk_stops){0};
}

int32_t rk_stops_find_id(const rk_stops *stops, int32_t token)
{
    int32_t i = stops->n_ids - 1;
    while (i >= 0 && stops->ids[i] != token) {
        i--;
    }
    return i;
}

/* The window moves on; how many of its bytes are older than the token. */
static int32_t slide(rk_stop_window *window, const rk_stops *stops,
                     int32_t token, bool shown)
{
    int32_t keep = stops->longest - 1;
    keep = keep < window->n ? keep : window->n;
    int32_t gone = window->n - keep;
    memmove(window->bytes, window->bytes + gone, (size_t)keep);
    memmove(window->shown, window->shown + gone, (size_t)keep);
    int64_t begin = stops->token_offsets[token];
    int32_t n = (int32_t)(stops->token_offsets[token + 1] - begin);
    memcpy(window->bytes + keep, stops->token_bytes + begin, (size_t)n);
    memset(window->shown + keep, shown, (size_t)n);
    window->n = keep + n;
    return keep;
}

static int32_t count_shown(const rk_stop_window *window, int32_t at)
{
    int32_t n = 0;
    for (; at < window->n; at++) {
        n += window->shown[at];
    }
    return n;
}

/* As rk_stops_take, in one window. */
static int32_t take(rk_stop_window *window, const rk_stops *stops,
                    int32_t token, bool shown, int32_t *cut)
{
    int32_t keep = slide(window, stops, token, shown);
    for (int32_t at = 0; at < window->n; at++) {
        for (int32_t i = 0; i < stops->n_strings; i++) {
            int32_t end = at + stops->lengths[i];
            if (end > keep && end <= window->n &&
                memcmp(window->bytes + at, stops->strings[i],
                       (size_t)stops->lengths[i]) == 0) {
                *cut = count_shown(window, at);
                return i;
            }
        }
    }
    return -1;
}

int32_t rk_stops_take(rk_stops *stops, int32_t token, int32_t *cut)
{
    *cut = 0;
    if (stops->n_strings == 0) {
        return -1;
    }
    bool special = stops->special != NULL && stops->special[token];
    int32_t found = -1, other = -1, other_cut = 0;
    if (!special) {
        found = take(&stops->text, stops, token, true, cut);
    }
    if (stops->special != NULL) {
        other = take(&stops->spelled, stops, token, !special, &other_cut);
    }
    if (other >= 0 && (found < 0 || other_cut > *cut)) {
        found = other;
        *cut = other_cut;
    }
    return found;
}
