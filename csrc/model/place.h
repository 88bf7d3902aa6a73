/* A model's weights where the device can read them. */
#ifndef RKSC_PLACE_H
#define RKSC_PLACE_H

#include "backend.h"

typedef struct rk_placed rk_placed;

/* Put what the device cannot read into its memory, once each. *model: a copy
 * of `from` with the device's addresses, valid as long as *out and `from`.
 * Where the device reads host memory (the CPU) nothing is copied. */
rk_status rk_place(rk_placed **out, rk_model *model, rk_device *device,
                   const rk_model *from, rk_error *err);
/* The host's memory has changed: copy it again. */
void rk_placed_refresh(rk_placed *placed);
/* Takes NULL. */
void rk_placed_free(rk_placed *placed);

#endif
