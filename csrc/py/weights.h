/* A model's weights, borrowed by name: in place where they fit, else as dense
 * copies in the type that the engine computes with.
 */
#ifndef RKSC_PY_WEIGHTS_H
#define RKSC_PY_WEIGHTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "backend.h"

typedef struct rk_weights rk_weights;

/* Bind the tensors of `mapping` (Hugging Face names) to the fields of `config`
 * (a rksc.ModelConfig). compute: RK_F32, RK_BF16, or -1: bfloat16 where the
 * embedding is, else float32. takes: block types that the device reads as they
 * are (rk_cpu_takes). cuda: the session's GPU, borrowed, NULL: none; its
 * memory is used in place, too. n_threads: for conversions. 0, or -1 with an
 * exception that names the tensor. Needs the GIL; conversions give it up. */
int rk_weights_bind(rk_weights **out, PyObject *mapping, PyObject *config,
                    int compute, bool (*takes)(rk_type), rk_cuda *cuda,
                    int n_threads, PyObject *tensor_type);

/* Are the names and shapes of `mapping` those that `config` wants? 0, or -1
 * with an exception that names the tensor, as rk_weights_bind would raise. */
int rk_weights_check(PyObject *mapping, PyObject *config,
                     PyObject *tensor_type);

/* Gives all tensors back. Needs the GIL; takes NULL. */
void rk_weights_free(rk_weights *weights);

/* Pointers into lent memory and copies; valid until rk_weights_free. */
const rk_model *rk_weights_model(const rk_weights *weights);
int64_t rk_weights_copied_bytes(const rk_weights *weights);

/* Is any matrix of a block type, in place? */
bool rk_weights_in_blocks(const rk_weights *weights);

/* Make all copies again from the lent memory. Needs no GIL. */
void rk_weights_refresh(rk_weights *weights);

#endif
