/* What every file of the backend needs of the GPU: errors as statuses, and
 * making it current for as long as a call lasts. */
#include "cuda.h"

/* ---- errors -----------------------------------------------------------------
 */

rk_status cuda_error(cudaError_t code, const char *call, rk_error *err)
{
    switch (code) {
    case cudaSuccess:
        return RK_OK;
    case cudaErrorMemoryAllocation:
        return rk_fail(err, RK_ENOMEM, "%s: the GPU is out of memory", call);
    case cudaErrorNoKernelImageForDevice:
        return rk_fail(err, RK_ESTATE,
                       "%s: this build of rksc has no code for this GPU; build "
                       "it with its compute capability in RKSC_CUDA_ARCHS",
                       call);
    default:
        return rk_fail(err, RK_ESTATE, "%s: %s (%s)", call,
                       cudaGetErrorString(code), cudaGetErrorName(code));
    }
}

rk_status cublas_error(cublasStatus_t code, const char *call, rk_error *err)
{
    return code == CUBLAS_STATUS_SUCCESS
               ? RK_OK
               : rk_fail(err,
                         code == CUBLAS_STATUS_ALLOC_FAILED ? RK_ENOMEM
                                                            : RK_ESTATE,
                         "%s: %s", call, cublasGetStatusString(code));
}

rk_status cuda_no_room(const char *what, size_t bytes, rk_error *err)
{
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    return rk_fail(err, RK_ENOMEM,
                   "%s: the GPU has no memory for %zu bytes, %zu of %zu are "
                   "free",
                   what, bytes, free, total);
}

void cuda_note(cuda_device *dev, cudaError_t code, const char *call)
{
    if (code != cudaSuccess && dev->error.status == RK_OK) {
        cuda_error(code, call, &dev->error);
    }
}

/* ---- the GPU
 * ----------------------------------------------------------------- */

int cuda_enter(const cuda_context *context)
{
    int before = context->base.ordinal;
    (void)cudaGetLastError(); /* what others have left behind is not ours */
    cudaGetDevice(&before);
    if (before != context->base.ordinal) {
        cudaSetDevice(context->base.ordinal);
    }
    return before;
}

void cuda_leave(int before)
{
    int now = before;
    cudaGetDevice(&now);
    if (now != before) {
        cudaSetDevice(before);
    }
}
