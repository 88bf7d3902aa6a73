/* The tensors of a model: one table of their names, shapes and places.
 *
 * A tensor more is a row in layout.c, a field of rk_layer or rk_model for it,
 * and its use in engine/forward.c. Pure C, no state.
 *
 * All tensors of a model are numbered: those of the model first, then layer by
 * layer. `i` below is such a number, less than rk_layout_count.
 */
#ifndef RKSC_LAYOUT_H
#define RKSC_LAYOUT_H

#include "rksc.h"

#define RK_LAYOUT_NAME 96 /* room for a name, its end included */
#define RK_LAYOUT_DIMS 2  /* at most */

/* Which of them come first, before those of layers. */
enum { RK_LAYOUT_EMBEDDING, RK_LAYOUT_NORM, RK_LAYOUT_HEAD };

/* Does a model have the tensor? A flag of ModelConfig may decide it. */
typedef enum rk_need {
    RK_NEED_ALWAYS,
    RK_NEED_IF,    /* where the flag is set, and nowhere else */
    RK_NEED_UNLESS /* where it is not set; else it may be there */
} rk_need;

/* Number of tensors; those that a model may lack included. */
size_t rk_layout_count(int32_t n_layers);

/* The full name, as Hugging Face's checkpoints have it, and as GGUF's. */
void rk_layout_name(char name[RK_LAYOUT_NAME], size_t i);
void rk_layout_gguf_name(char name[RK_LAYOUT_NAME], size_t i);

/* Returns the number of dimensions: 2 of a matrix (rows, cols), 1 of a vector,
 * whose second is 1. */
int rk_layout_shape(int64_t shape[RK_LAYOUT_DIMS], const rk_config *config,
                    size_t i);

/* The flag that decides about it: a field of ModelConfig, or NULL: none. */
const char *rk_layout_flag(size_t i);
/* The first tensor with the same flag: what the configuration leaves open is as
 * it is there. */
size_t rk_layout_first(size_t i);

/* RK_EVALUE, unless it has its shape; called: its name in messages. */
rk_status rk_layout_check_shape(const rk_config *config, size_t i,
                                const char *called, const int64_t *shape,
                                int n_dims, rk_error *err);
/* RK_EVALUE, unless it is there, or not, as its flag says. */
rk_status rk_layout_check_presence(const rk_config *config, size_t i, bool flag,
                                   bool present, rk_error *err);

/* Where it goes; one of the two is NULL. */
typedef struct rk_slot {
    rk_matrix *matrix;
    const float **vector;
} rk_slot;
rk_slot rk_layout_slot(rk_model *model, rk_layer *layers, size_t i);
/* Put it there: `data` of its shape, of a vector float32. */
void rk_layout_bind(rk_model *model, rk_layer *layers, size_t i,
                    const void *data, rk_type type);

/* How names of buffers end that old checkpoints carry and whose values follow
 * from the configuration. NULL is the last. */
extern const char *const rk_layout_derived[];

#endif
