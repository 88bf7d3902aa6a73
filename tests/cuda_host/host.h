/* What the files of the host runtime share. One mutex serialises every call;
 * kernels run under it, so the state below needs no other. */
#ifndef RK_HOST_H
#define RK_HOST_H

#include <cuda_runtime.h>

#include <cstdio>
#include <functional>
#include <mutex>
#include <random>
#include <vector>

namespace host
{

/* Shared memory of a block, static and dynamic: the least that a supported GPU
 * has (capabilities 8.6, 8.9 and 12.0; others have 163 or 227 KiB). */
constexpr size_t SHARED = size_t(99) << 10;

enum class order { forward, reverse, random };

struct settings {
    order threads = order::forward;
    std::mt19937_64 random{0};
    int n_devices = 1, major = 8, minor = 0;
    size_t memory = size_t(32) << 30; /* of each device */
};

extern std::recursive_mutex mutex;
extern settings options;

/* 0 .. n-1 as the settings have it. */
void arrange(std::vector<unsigned> &out, size_t n);

/* runtime.cpp: where device memory lies, and whether [p, p + n) is part of one
 * piece of it. */
bool in_device(const void *p);
bool in_piece(const void *p, size_t n);
/* Device memory may be touched while one of these lives. */
struct open_memory {
    open_memory();
    ~open_memory();
};
/* Append to the stream, or to the graph that it captures. */
cudaError_t enqueue(cudaStream_t stream, const char *call,
                    std::function<bool()> work);
bool is_capturing(cudaStream_t stream);
cudaError_t fail(cudaError_t error, const char *call, const char *why);

/* fibers.cpp: false when a thread of the block broke a rule. */
bool run_kernel(dim3 grid, dim3 block, size_t shared_bytes,
                const std::function<void()> &body);

} // namespace host

#endif
