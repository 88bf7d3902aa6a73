/* Birth and death of a context: one GPU that is good enough, one stream, one
 * pool of memory. Sessions on the same GPU share nothing of it. */
#include "cuda.h"

#include <stdlib.h>

static rk_status count_gpus(int ordinal, rk_error *err)
{
    int n = 0;
    cudaError_t code = cudaGetDeviceCount(&n);
    if (code == cudaErrorInsufficientDriver) {
        return rk_fail(
            err, RK_ESTATE,
            "device \"cuda\": no NVIDIA driver, or one that is older "
            "than CUDA 13 (nvidia-smi shows it): install a driver "
            "of version 580 or newer");
    }
    if (code == cudaErrorNoDevice || (code == cudaSuccess && n == 0)) {
        return rk_fail(err, RK_ESTATE,
                       "device \"cuda\": the driver finds no GPU (is "
                       "CUDA_VISIBLE_DEVICES set?)");
    }
    if (code != cudaSuccess) {
        return cuda_error(code, "cudaGetDeviceCount", err);
    }
    if (ordinal < 0 || ordinal >= n) {
        return rk_fail(err, RK_EVALUE, "device \"cuda:%d\": there are %d GPUs",
                       ordinal, n);
    }
    return RK_OK;
}

static rk_status look_at_gpu(cuda_context *c, rk_error *err)
{
    int major = 0, minor = 0;
    const struct {
        enum cudaDeviceAttr what;
        int *value;
    } wanted[] = {
        {cudaDevAttrComputeCapabilityMajor, &major},
        {cudaDevAttrComputeCapabilityMinor, &minor},
        {cudaDevAttrMultiProcessorCount, &c->n_processors},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        cudaError_t code = cudaDeviceGetAttribute(
            wanted[i].value, wanted[i].what, c->base.ordinal);
        if (code != cudaSuccess) {
            return cuda_error(code, "cudaDeviceGetAttribute", err);
        }
    }
    c->base.capability = 10 * major + minor;
    if (major < 8) {
        return rk_fail(
            err, RK_ESTATE,
            "device \"cuda:%d\": compute capability %d.%d; rksc needs "
            "8.0 or newer (bfloat16, asynchronous copies)",
            c->base.ordinal, major, minor);
    }
    return RK_OK;
}

void cuda_context_close(rk_cuda *base)
{
    cuda_context *c = (cuda_context *)base;
    if (c == NULL) {
        return;
    }
    int before = cuda_enter(c);
    if (c->stream != NULL) {
        cudaStreamDestroy(c->stream);
    }
    cuda_pool_release(c->pool);
    cuda_leave(before);
    free(c);
}

rk_status cuda_context_open(rk_cuda **out, int ordinal, rk_error *err)
{
    *out = NULL;
    rk_status status = count_gpus(ordinal, err);
    if (status != RK_OK) {
        return status;
    }
    cuda_context *c = calloc(1, sizeof *c);
    if (c == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for a device");
    }
    c->base = (rk_cuda){.ordinal = ordinal};
    status = look_at_gpu(c, err);
    if (status == RK_OK) {
        int before = cuda_enter(c);
        status = cuda_error(cudaSetDevice(ordinal), "cudaSetDevice", err);
        if (status == RK_OK) {
            status = cuda_error(
                cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking),
                "cudaStreamCreateWithFlags", err);
        }
        if (status == RK_OK) {
            status = cuda_error(rk_cuda_attention_prepare(),
                                "cudaFuncSetAttribute", err);
        }
        cuda_leave(before);
    }
    c->pool = cuda_pool_create(ordinal);
    if (status == RK_OK && c->pool == NULL) {
        status = rk_fail(err, RK_ENOMEM, "no memory for a device");
    }
    if (status != RK_OK) {
        cuda_context_close(&c->base);
        return status;
    }
    *out = &c->base;
    return RK_OK;
}

uintptr_t cuda_context_stream(const rk_cuda *base)
{
    return (uintptr_t)((const cuda_context *)base)->stream;
}

rk_status cuda_context_fetch(rk_cuda *base, void *host, const void *src,
                             size_t bytes, rk_error *err)
{
    const cuda_context *c = (const cuda_context *)base;
    int before = cuda_enter(c);
    rk_status status = cuda_error(
        cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, c->stream),
        "cudaMemcpyAsync", err);
    if (status == RK_OK) {
        status = cuda_error(cudaStreamSynchronize(c->stream),
                            "cudaStreamSynchronize", err);
    }
    cuda_leave(before);
    return status;
}

rk_status cuda_context_settle(rk_cuda *base, rk_error *err)
{
    int before = cuda_enter((const cuda_context *)base);
    rk_status status =
        cuda_error(cudaDeviceSynchronize(), "cudaDeviceSynchronize", err);
    cuda_leave(before);
    return status;
}
