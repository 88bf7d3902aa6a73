/* The way to the CUDA backend: a shared object, opened when a session first
 * asks for a GPU. */
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
