/* Birth and death of a CUDA device, its memory, the table of ops.
 *
 * All scratch memory is sized here from the extent. Every entry makes the GPU
 * current and gives the caller's back. Nobody but `download` and `upload`
 * waits for the device; a failure is remembered, and from then on what comes
 * back is NaN until `check` tells the reason.
 */
#include "cuda.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WORKSPACE ((size_t)32 << 20) /* what cuBLAS wants on Hopper */

/* ---- memory -------------------------------------------------------------- */

static void *device_alloc(rk_device *base, size_t bytes)
{
    cuda_device *dev = cuda_of(base);
    int before = cuda_enter(dev->context);
    void *memory = NULL;
    cudaError_t code = cuda_pool_take(dev->context->pool, &memory, bytes);
    if (code != cudaErrorMemoryAllocation) {
        cuda_note(dev, code, "cudaMalloc");
    }
    cuda_leave(before);
    return memory;
}

static void device_free(rk_device *base, void *memory)
{
    cuda_device *dev = cuda_of(base);
    int before = cuda_enter(dev->context);
    if (memory != NULL) {
        cuda_play(dev); /* what was recorded may use it */
        cuda_pool_give(dev->context->pool, memory);
    }
    cuda_leave(before);
}

static void wait(cuda_device *dev)
{
    CUDA_TRY(dev, cudaStreamSynchronize, dev->context->stream);
}

static void device_upload(rk_device *base, void *dst, const void *host,
                          size_t bytes)
{
    cuda_device *dev = cuda_of(base);
    int before = cuda_enter(dev->context);
    cuda_play(dev);
    CUDA_TRY(dev, cudaMemcpyAsync, dst, host, bytes, cudaMemcpyHostToDevice,
             dev->context->stream);
    wait(dev); /* `host` is the caller's again */
    cuda_leave(before);
}

static void device_download(rk_device *base, void *host, const void *src,
                            size_t bytes)
{
    cuda_device *dev = cuda_of(base);
    int before = cuda_enter(dev->context);
    bool small = bytes <= CUDA_BOUNCE;
    cuda_play(dev);
    CUDA_TRY(dev, cudaMemcpyAsync, small ? dev->bounce : host, src, bytes,
             cudaMemcpyDeviceToHost, dev->context->stream);
    wait(dev);
    if (dev->error.status != RK_OK) {
        memset(host, 0xff, bytes);
    } else if (small) {
        memcpy(host, dev->bounce, bytes);
    }
    cuda_leave(before);
}

static rk_status device_check(rk_device *base, rk_error *err)
{
    const cuda_device *dev = cuda_of(base);
    return dev->error.status == RK_OK
               ? RK_OK
               : rk_fail(err, dev->error.status, "%s", dev->error.text);
}

static bool device_holds(rk_device *base, const void *memory)
{
    const cuda_device *dev = cuda_of(base);
    int before = cuda_enter(dev->context);
    struct cudaPointerAttributes found;
    bool holds = cudaPointerGetAttributes(&found, memory) == cudaSuccess &&
                 (found.type == cudaMemoryTypeDevice ||
                  found.type == cudaMemoryTypeManaged) &&
                 found.device == dev->context->base.ordinal;
    cudaGetLastError();
    cuda_leave(before);
    return holds;
}

/* The copy is no part of what is recorded: its address is another each time. */
static rk_status device_lend(rk_device *base, rk_lent **out, const void *src,
                             size_t bytes, rk_error *err)
{
    cuda_device *dev = cuda_of(base);
    int before = cuda_enter(dev->context);
    cuda_play(dev);
    rk_status status = device_check(base, err);
    if (status == RK_OK) {
        status = cuda_pool_lend(dev->context->pool, out, src, bytes,
                                dev->context->stream, err);
    }
    cuda_leave(before);
    return status;
}

static unsigned char *block_address(const cuda_device *dev, int32_t block)
{
    return dev->kv + block * dev->block_bytes;
}

static void device_kv_copy(rk_device *base, int32_t dst_block,
                           int32_t src_block)
{
    cuda_device *dev = cuda_of(base);
    int before = cuda_enter(dev->context);
    cuda_play(dev);
    CUDA_TRY(dev, cudaMemcpyAsync, block_address(dev, dst_block),
             block_address(dev, src_block), (size_t)dev->block_bytes,
             cudaMemcpyDeviceToDevice, dev->context->stream);
    cuda_leave(before);
}

static void device_kv_fill(rk_device *base, int32_t block, uint8_t byte)
{
    cuda_device *dev = cuda_of(base);
    int before = cuda_enter(dev->context);
    cuda_play(dev);
    CUDA_TRY(dev, cudaMemsetAsync, block_address(dev, block), byte,
             (size_t)dev->block_bytes, dev->context->stream);
    cuda_leave(before);
}

/* ---- life ---------------------------------------------------------------- */

static void device_destroy(rk_device *base)
{
    cuda_device *dev = cuda_of(base);
    if (dev == NULL) {
        return;
    }
    int before = cuda_enter(dev->context);
    cudaStreamSynchronize(dev->context->stream);
    cuda_step_free(dev);
    rk_worker_free(dev->worker);
    if (dev->cublas != NULL) {
        cublasDestroy(dev->cublas);
    }
    void *pieces[] = {dev->kv,   dev->inv_freq, dev->cosine,   dev->sine,
                      dev->qkv,  dev->gate_up,  dev->partials, dev->sums,
                      dev->pick, dev->workspace};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        cuda_pool_give(dev->context->pool, pieces[i]);
    }
    cudaFreeHost(dev->bounce);
    cuda_leave(before);
    free(dev);
}

static const rk_ops cuda_ops = {
    .alloc = device_alloc,
    .free = device_free,
    .upload = device_upload,
    .download = device_download,
    .destroy = device_destroy,
    .check = device_check,
    .holds = device_holds,
    .lend = device_lend,
    .kv_copy = device_kv_copy,
    .kv_fill = device_kv_fill,
    .begin = cuda_begin,
    .embed = cuda_embed,
    .norm = cuda_norm,
    .qkv = cuda_qkv,
    .attention = cuda_attention,
    .linear = cuda_linear,
    .swiglu = cuda_swiglu,
    .gather = cuda_gather,
    .pick = cuda_pick,
    .answer = cuda_answer,
    .mean = cuda_mean,
    .cosine = cuda_cosine,
};

/* The blocks of the pool: the one large piece. */
static rk_status make_kv(cuda_device *dev, rk_error *err)
{
    size_t bytes;
    if (__builtin_mul_overflow((size_t)dev->block_bytes,
                               (size_t)dev->extent.n_blocks, &bytes)) {
        return cuda_no_room("kv_bytes", SIZE_MAX, err);
    }
    return cuda_pool_reserve(dev->context->pool, (void **)&dev->kv, bytes,
                             "kv_bytes", err);
}

static int32_t max_partials(const cuda_device *dev)
{
    return 1024 + 4 * dev->extent.max_rows;
}

static rk_status make_scratch(cuda_device *dev, rk_error *err)
{
    const rk_config *c = &dev->config;
    size_t half = (size_t)c->head_dim / 2;
    size_t rows = (size_t)rk_rows_room(dev->extent.max_rows);
    size_t heads = (size_t)c->n_heads, dim = (size_t)c->head_dim;
    size_t all_heads = heads + 2 * (size_t)c->n_kv_heads;
    size_t partials = (size_t)max_partials(dev);
    int32_t outputs = rk_rows_room(dev->extent.max_outputs);
    const struct {
        void *address;
        size_t bytes;
    } pieces[] = {
        {&dev->inv_freq, half * sizeof(double)},
        {&dev->cosine, rows * half * sizeof(float)},
        {&dev->sine, rows * half * sizeof(float)},
        {&dev->qkv, rows * all_heads * dim * sizeof(float)},
        {&dev->gate_up, rows * 2 * (size_t)c->ffn_width * sizeof(float)},
        {&dev->partials, partials * heads * dim * sizeof(float)},
        {&dev->sums, partials * heads * 2 * sizeof(float)},
        {&dev->pick, rk_cuda_pick_scratch(outputs, c->vocab_size)},
        {&dev->workspace, WORKSPACE},
    };
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        rk_status status =
            cuda_pool_reserve(dev->context->pool, pieces[i].address,
                              pieces[i].bytes, "step_tokens", err);
        if (status != RK_OK) {
            return status;
        }
    }
    rk_status status =
        cuda_error(cudaMallocHost((void **)&dev->bounce, CUDA_BOUNCE),
                   "cudaMallocHost", err);
    if (status == RK_OK) {
        device_upload(&dev->base, dev->inv_freq, c->inv_freq,
                      half * sizeof(double));
        dev->config.inv_freq = dev->inv_freq;
        status = device_check(&dev->base, err);
    }
    return status;
}

/* Sums in float32; float32 inputs are not rounded to TF32. */
static rk_status make_cublas(cuda_device *dev, rk_error *err)
{
    cublasStatus_t code = cublasCreate(&dev->cublas);
    const char *call = "cublasCreate";
    if (code == CUBLAS_STATUS_SUCCESS) {
        call = "cublasSetStream";
        code = cublasSetStream(dev->cublas, dev->context->stream);
    }
    if (code == CUBLAS_STATUS_SUCCESS) {
        call = "cublasSetWorkspace";
        code = cublasSetWorkspace(dev->cublas, dev->workspace, WORKSPACE);
    }
    if (code == CUBLAS_STATUS_SUCCESS) {
        call = "cublasSetMathMode";
        code = cublasSetMathMode(
            dev->cublas, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
    }
    return cublas_error(code, call, err);
}

static rk_status make_worker(cuda_device *dev, rk_error *err)
{
    const rk_config *c = &dev->config;
    const rk_type kv_type = dev->extent.kv_type;
    rk_work_rule rule = {
        .block_tokens = dev->extent.block_tokens,
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .narrow_pairs = rk_cuda_attend_pairs(kv_type, c->head_dim, false),
        .wide_pairs = rk_cuda_attend_pairs(kv_type, c->head_dim, true),
        .wanted_units = 4 * dev->context->n_processors,
        .max_partials = max_partials(dev),
        .share_keys = RK_WORK_SHARE_KEYS,
    };
    return rk_worker_create(&dev->worker, &rule, err);
}

static rk_status device_create(rk_device **out, rk_cuda *cuda,
                               const rk_config *config, const rk_extent *extent,
                               rk_error *err)
{
    *out = NULL;
    rk_status status = rk_check_sizes("the GPU", config, extent, err);
    if (status != RK_OK) {
        return status;
    }
    cuda_device *dev = calloc(1, sizeof *dev);
    if (dev == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for a device");
    }
    dev->base.ops = &cuda_ops;
    dev->base.input = extent->compute;
    dev->base.query = extent->kv_type;
    dev->context = (cuda_context *)cuda;
    dev->config = *config;
    dev->extent = *extent;
    dev->block_shift = __builtin_ctz((unsigned)extent->block_tokens);
    dev->block_bytes =
        (int64_t)rk_block_bytes(config, extent->kv_type, extent->block_tokens);
    dev->layer_bytes = dev->block_bytes / config->n_layers;
    int before = cuda_enter(dev->context);
    if ((status = make_scratch(dev, err)) || (status = make_kv(dev, err)) ||
        (status = make_cublas(dev, err)) || (status = make_worker(dev, err)) ||
        (status = cuda_step_create(dev, err))) {
        device_destroy(&dev->base);
    } else {
        *out = &dev->base;
    }
    cuda_leave(before);
    return status;
}

__attribute__((visibility("default"))) const rk_cuda_calls rk_cuda_library = {
    .abi = RK_ABI,
    .open = cuda_context_open,
    .close = cuda_context_close,
    .stream = cuda_context_stream,
    .fetch = cuda_context_fetch,
    .settle = cuda_context_settle,
    .create = device_create,
};
