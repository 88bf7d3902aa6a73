/* Every address in the model is looked at in turn; one that the device does
 * not hold is replaced by a copy there. Two fields with the same memory (a
 * tied head) share one copy. */
#include "place.h"

#include "layout.h"
#include "quant.h"

#include <stdlib.h>
#include <string.h>

typedef struct copy {
    const void *from;
    void *to;
    size_t bytes;
} copy;

struct rk_placed {
    rk_device *device; /* borrowed */
    rk_layer *layers;  /* (n_layers,) */
    copy *copies;      /* (n_copies,) */
    size_t n_copies, room;
};

static rk_status place(rk_placed *p, const void **address, size_t bytes,
                       rk_error *err)
{
    const rk_ops *ops = p->device->ops;
    if (*address == NULL || ops->holds(p->device, *address)) {
        return RK_OK;
    }
    for (size_t i = 0; i < p->n_copies; i++) {
        if (p->copies[i].from == *address && p->copies[i].bytes == bytes) {
            *address = p->copies[i].to;
            return RK_OK;
        }
    }
    if (p->n_copies == p->room) {
        size_t room = p->room > 0 ? 2 * p->room : 64;
        copy *more = realloc(p->copies, room * sizeof *more);
        if (more == NULL) {
            return rk_fail(err, RK_ENOMEM, "no memory for weights");
        }
        p->copies = more;
        p->room = room;
    }
    void *to = ops->alloc(p->device, bytes);
    if (to == NULL) {
        return rk_fail(err, RK_ENOMEM,
                       "weights: the device has no memory for a tensor of %zu "
                       "bytes",
                       bytes);
    }
    ops->upload(p->device, to, *address, bytes);
    p->copies[p->n_copies++] = (copy){*address, to, bytes};
    *address = to;
    return ops->check(p->device, err);
}

/* Tensor i of the layout, where the model has it. */
static rk_status place_entry(rk_placed *p, rk_model *model, size_t i,
                             rk_error *err)
{
    rk_slot slot = rk_layout_slot(model, p->layers, i);
    int64_t shape[RK_LAYOUT_DIMS];
    rk_layout_shape(shape, &model->config, i);
    int64_t n = shape[0] * shape[1];
    if (slot.matrix != NULL) {
        return place(p, &slot.matrix->data,
                     (size_t)rk_type_bytes(slot.matrix->type, n), err);
    }
    const void *address = *slot.vector;
    rk_status status = place(p, &address, (size_t)n * sizeof(float), err);
    *slot.vector = address;
    return status;
}

rk_status rk_place(rk_placed **out, rk_model *model, rk_device *device,
                   const rk_model *from, rk_error *err)
{
    *out = NULL;
    *model = *from;
    int32_t n_layers = from->config.n_layers;
    rk_placed *p = calloc(1, sizeof *p);
    if (p != NULL) {
        p->device = device;
        p->layers = calloc((size_t)n_layers, sizeof *p->layers);
    }
    if (p == NULL || p->layers == NULL) {
        rk_placed_free(p);
        return rk_fail(err, RK_ENOMEM, "no memory for weights");
    }
    memcpy(p->layers, from->layers, (size_t)n_layers * sizeof *p->layers);
    rk_status status = RK_OK;
    for (size_t i = 0; i < rk_layout_count(n_layers) && status == RK_OK; i++) {
        status = place_entry(p, model, i, err);
    }
    model->layers = p->layers;
    if (status != RK_OK) {
        rk_placed_free(p);
        return status;
    }
    *out = p;
    return RK_OK;
}

void rk_placed_refresh(rk_placed *p)
{
    for (size_t i = 0; i < p->n_copies; i++) {
        p->device->ops->upload(p->device, p->copies[i].to, p->copies[i].from,
                               p->copies[i].bytes);
    }
}

void rk_placed_free(rk_placed *p)
{
    if (p == NULL) {
        return;
    }
    for (size_t i = 0; i < p->n_copies; i++) {
        p->device->ops->free(p->device, p->copies[i].to);
    }
    free(p->copies);
    free(p->layers);
    free(p);
}
