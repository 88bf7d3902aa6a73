/* Birth and death of a CPU device: memory, KV pool, the table of ops.
 *
 * All scratch memory is sized here from the extent, so no op allocates. The
 * pool is mapped without being committed: the system gives pages to blocks as
 * they are first written, and takes them back all at once at the end.
 */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "int16.h"
#include "int8.h"

#if !defined(MAP_NORESERVE)
#define MAP_NORESERVE 0
#endif

#define HUGE_PAGE ((size_t)2 << 20)
#define PARTIALS_BYTES ((size_t)32 << 20) /* committed as it is used */

/* ---- memory -------------------------------------------------------------- */

/* Zeroed pages, committed when touched; NULL when there is no room for it. */
static void *map_pages(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return NULL;
    }
#if defined(MADV_HUGEPAGE)
    if (bytes >= 8 * HUGE_PAGE) {
        madvise(memory, bytes, MADV_HUGEPAGE);
    }
#endif
    return memory;
}

static void *device_alloc(rk_device *base, size_t bytes)
{
    void *memory = NULL;
    (void)base;
    if (bytes > SIZE_MAX - 128 ||
        posix_memalign(&memory, 128, cpu_align(bytes ? bytes : 1)) != 0) {
        return NULL;
    }
    return memory;
}

static void device_free(rk_device *base, void *memory)
{
    (void)base;
    free(memory);
}

static void device_upload(rk_device *base, void *dst, const void *host,
                          size_t bytes)
{
    (void)base;
    memcpy(dst, host, bytes);
}

static void device_download(rk_device *base, void *host, const void *src,
                            size_t bytes)
{
    (void)base;
    memcpy(host, src, bytes);
}

static rk_status device_check(rk_device *base, rk_error *err)
{
    (void)base;
    (void)err;
    return RK_OK; /* memory and threads do not break */
}

static bool device_holds(rk_device *base, const void *memory)
{
    (void)base;
    (void)memory;
    return true;
}

static char *block_address(const cpu_device *dev, int32_t block)
{
    return dev->kv + block * dev->block_bytes;
}

static void device_kv_copy(rk_device *base, int32_t dst_block,
                           int32_t src_block)
{
    const cpu_device *dev = (cpu_device *)base;
    memmove(block_address(dev, dst_block), block_address(dev, src_block),
            (size_t)dev->block_bytes);
}

static void device_kv_fill(rk_device *base, int32_t block, uint8_t byte)
{
    const cpu_device *dev = (cpu_device *)base;
    memset(block_address(dev, block), byte, (size_t)dev->block_bytes);
}

static void device_destroy(rk_device *base)
{
    cpu_device *dev = (cpu_device *)base;
    if (dev == NULL) {
        return;
    }
    cpu_pool_free(dev->pool);
    if (dev->kv != NULL) {
        munmap(dev->kv, dev->kv_bytes);
    }
    if (dev->partials != NULL) {
        munmap(dev->partials, dev->partials_bytes);
    }
    free((void *)dev->config.inv_freq);
    free(dev->narrow);
    free(dev->packed);
    free(dev->panels);
    free(dev->rows);
    free(dev->integers);
    free(dev->scratch);
    free(dev->cosine);
    free(dev->sine);
    free(dev->tiles);
    free(dev->chunk_tiles);
    free(dev->slices);
    free(dev);
}

static const rk_ops cpu_ops = {
    .alloc = device_alloc,
    .free = device_free,
    .upload = device_upload,
    .download = device_download,
    .destroy = device_destroy,
    .check = device_check,
    .holds = device_holds,
    .kv_copy = device_kv_copy,
    .kv_fill = device_kv_fill,
    .begin = cpu_begin,
    .embed = cpu_embed,
    .norm = cpu_norm,
    .qkv = cpu_qkv,
    .attention = cpu_attention,
    .linear = cpu_linear,
    .swiglu = cpu_swiglu,
    .gather = cpu_gather,
    .pick = cpu_pick,
    .answer = cpu_answer,
    .mean = cpu_mean,
    .cosine = cpu_cosine,
};

/* ---- creation ------------------------------------------------------------ */

static rk_status check(const rk_config *c, const rk_extent *e, rk_isa isa,
                       int n_threads, rk_error *err)
{
    if (!rk_isa_supported(isa)) {
        return rk_fail(err, RK_EVALUE, "instruction set %s is not supported",
                       rk_isa_name(isa));
    }
    if (n_threads < 1 || n_threads > 1024) {
        return rk_fail(err, RK_EVALUE, "n_threads: %d is not in 1 .. 1024",
                       n_threads);
    }
    return rk_check_sizes("the CPU", c, e, err);
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* False: out of memory. */
static bool allocate(cpu_device *dev)
{
    const size_t half = (size_t)dev->config.head_dim / 2;
    const size_t rows = (size_t)dev->extent.max_rows;
    rk_device *base = &dev->base;
    double *inv_freq = malloc(half * sizeof *inv_freq);
    if (inv_freq == NULL) {
        dev->config.inv_freq = NULL;
        return false;
    }
    memcpy(inv_freq, dev->config.inv_freq, half * sizeof *inv_freq);
    dev->config.inv_freq = inv_freq;

    size_t scratch =
        larger(cpu_product_scratch(dev), cpu_attention_scratch(dev));
    scratch = larger(scratch, cpu_rows_scratch(dev));
    dev->scratch_bytes = cpu_align(larger(scratch, cpu_pick_scratch(dev)));
    dev->scratch =
        device_alloc(base, dev->scratch_bytes * (size_t)dev->n_threads);
    dev->cosine = device_alloc(base, rows * half * sizeof(float));
    dev->sine = device_alloc(base, rows * half * sizeof(float));
    dev->tiles = malloc(CPU_MAX_TILES * sizeof *dev->tiles);
    dev->chunk_tiles = malloc((CPU_MAX_TILES + 1) * sizeof *dev->chunk_tiles);
    dev->slices = device_alloc(base, cpu_pick_slices_bytes(dev));
    dev->partials_bytes = PARTIALS_BYTES;
    dev->partials = map_pages(dev->partials_bytes);
    return cpu_product_allocate(dev) && dev->scratch != NULL &&
           dev->cosine != NULL && dev->sine != NULL && dev->tiles != NULL &&
           dev->chunk_tiles != NULL && dev->slices != NULL &&
           dev->partials != NULL;
}

/* Types of what passes between ops, and the kernels over them. */
static void choose_kernels(cpu_device *dev)
{
    const rk_extent *e = &dev->extent;
    const cpu_kernels *all = dev->kernels;
    dev->attention = cpu_attention_over(all, e->kv_type);
    dev->base.input = e->rounding == RK_ROUND_ACT ? e->compute : RK_F32;
    dev->base.query = dev->attention->query;
    dev->compute = cpu_kernels_over(all, e->compute);
    dev->input = cpu_kernels_over(all, dev->base.input);
    dev->query = cpu_kernels_over(all, dev->base.query);
}

rk_status rk_cpu_create(rk_device **out, const rk_config *config,
                        const rk_extent *extent, rk_isa isa, int n_threads,
                        rk_error *err)
{
    rk_status status = check(config, extent, isa, n_threads, err);
    if (status != RK_OK) {
        return status;
    }
    cpu_device *dev = calloc(1, sizeof *dev);
    if (dev == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for a device");
    }
    dev->base.ops = &cpu_ops;
    dev->config = *config;
    dev->extent = *extent;
    dev->kernels = cpu_kernels_of(isa);
    if (extent->rounding == RK_ROUND_INT16) {
        dev->int16 = cpu_int16_of(isa);
    } else if (extent->rounding == RK_ROUND_INT8) {
        dev->int8 = cpu_int8_of(isa);
    }
    dev->n_threads = n_threads;
    choose_kernels(dev);
    dev->group = config->n_heads / config->n_kv_heads;
    dev->acc_stride = dev->attention->acc_stride(config->head_dim);
    dev->block_shift = __builtin_ctz((unsigned)extent->block_tokens);
    size_t block_bytes =
        rk_block_bytes(config, extent->kv_type, extent->block_tokens);
    dev->block_bytes = (int64_t)block_bytes;
    dev->layer_bytes = dev->block_bytes / config->n_layers;
    dev->head_bytes = dev->layer_bytes / (2 * config->n_kv_heads);
    if (!allocate(dev)) {
        status = rk_fail(err, RK_ENOMEM, "no memory for scratch space");
        goto fail;
    }
    if (__builtin_mul_overflow(block_bytes, (size_t)extent->n_blocks,
                               &dev->kv_bytes) ||
        dev->kv_bytes > INT64_MAX ||
        (dev->kv = map_pages(dev->kv_bytes)) == NULL) {
        status = rk_fail(
            err, RK_ENOMEM,
            "kv_bytes: no address space for %lld KV blocks of %zu bytes",
            (long long)extent->n_blocks, block_bytes);
        goto fail;
    }
    dev->pool = cpu_pool_create(n_threads);
    if (dev->pool == NULL) {
        status = rk_fail(err, RK_ENOMEM, "cannot start %d threads", n_threads);
        goto fail;
    }
    *out = &dev->base;
    return RK_OK;
fail:
    device_destroy(&dev->base);
    return status;
}
