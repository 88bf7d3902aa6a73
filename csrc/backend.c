/* Which backend: the CPU's, or the CUDA backend, a shared object that is opened
 * when a session first asks for a GPU. */
#include "backend.h"

#include <dlfcn.h>

rk_status rk_cuda_open(rk_cuda **out, const char *path, int ordinal,
                       rk_error *err)
{
    *out = NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return rk_fail(err, RK_ESTATE,
                       "device \"cuda\": %s (NVIDIA's libraries come with pip "
                       "install \"rksc[cuda]\" or a CUDA toolkit)",
                       dlerror());
    }
    const rk_cuda_calls *calls = dlsym(library, "rk_cuda_library");
    if (calls == NULL || calls->abi != RK_ABI) {
        return rk_fail(
            err, RK_ESTATE,
            "device \"cuda\": %s belongs to another version of rksc; "
            "build it again",
            path);
    }
    rk_status status = calls->open(out, ordinal, err);
    if (status == RK_OK) {
        (*out)->calls = calls;
    }
    return status;
}

rk_status rk_device_create(rk_device **out, rk_cuda *cuda, rk_isa isa,
                           int n_threads, const rk_config *config,
                           const rk_extent *extent, rk_error *err)
{
    return cuda != NULL
               ? cuda->calls->create(out, cuda, config, extent, err)
               : rk_cpu_create(out, config, extent, isa, n_threads, err);
}
