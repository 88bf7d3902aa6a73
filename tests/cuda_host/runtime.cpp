/* The host's calls: memory, streams, events, graphs, errors.
 *
 * A stream does nothing until somebody waits for it; then work that may run is
 * taken from all streams in the order that the settings say. Device memory is
 * closed to the host: it opens while queued work runs, so host code that looks
 * into it ends there. Pinned memory is read and written when the work runs,
 * ordinary memory is read when the call is made.
 */
#include "host.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <sys/mman.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "rk_port_host.h"

namespace host
{
std::recursive_mutex mutex;
settings options;

void arrange(std::vector<unsigned> &out, size_t n)
{
    if (out.size() != n) {
        out.resize(n);
        for (size_t i = 0; i < n; i++) {
            out[i] = static_cast<unsigned>(
                options.threads == order::reverse ? n - 1 - i : i);
        }
    }
    if (options.threads == order::random) {
        std::shuffle(out.begin(), out.end(), options.random);
    }
}
} // namespace host

using host::fail;
using host::options;
using lock = std::lock_guard<std::recursive_mutex>;

struct task {
    std::function<bool()> work;      /* false: a kernel broke a rule */
    std::shared_ptr<uint64_t> waits; /* an event's count of done records */
    uint64_t until = 0;
    std::shared_ptr<uint64_t> records;
    uint64_t record = 0;
};

/* An event may be destroyed while streams have still to wait for it. */
struct CUevent_st {
    uint64_t recorded = 0;
    std::shared_ptr<uint64_t> done = std::make_shared<uint64_t>(0);
};

struct CUgraph_st {
    std::vector<std::function<bool()>> work;
};

struct CUgraphExec_st {
    std::vector<std::function<bool()>> work;
};

struct CUstream_st {
    std::deque<task> queue;
    std::unique_ptr<CUgraph_st> capture;
    bool broken = false; /* the capture has seen an illegal call */
    int device = 0;
};

namespace
{

constexpr size_t ARENA = size_t(1) << 38, PAGE = 4096, GAP = 256;
constexpr size_t POISONED = size_t(8) << 20; /* larger pieces stay unwritten */

struct piece {
    size_t bytes;
    int device;
};

CUstream_st legacy;
std::set<cudaStream_t> streams;
std::map<const unsigned char *, piece> pieces, pinned;
std::map<const void *, size_t> shared_limits;
unsigned char *arena;
size_t arena_end, used_bytes[16];
int opened, key = -1; /* protection key of the arena */
int to_spoil;         /* captures that another thread will disturb */
cudaError_t last, sticky;
std::map<std::string, int> failures; /* a call's name: fails at its n-th */
thread_local int device_now;

bool must_fail(const char *call)
{
    auto found = failures.find(call);
    return found != failures.end() && --found->second == 0;
}

/* The piece that holds p, or NULL. */
const piece *piece_of(const std::map<const unsigned char *, piece> &all,
                      const void *address, size_t n)
{
    auto p = static_cast<const unsigned char *>(address);
    auto next = all.upper_bound(p);
    if (next == all.begin()) {
        return nullptr;
    }
    --next;
    return p + n <= next->first + next->second.bytes ? &next->second : nullptr;
}

/* Open device memory to this thread, or close it: by a protection key where
 * the processor has them, else page by page, which takes its time. */
void protect(int flags)
{
    if (key >= 0) {
        pkey_set(key, flags == PROT_NONE ? PKEY_DISABLE_ACCESS : 0);
    } else if (!pieces.empty()) {
        auto begin = reinterpret_cast<uintptr_t>(pieces.begin()->first);
        auto end = reinterpret_cast<uintptr_t>(arena + arena_end);
        begin = begin / PAGE * PAGE;
        mprotect(reinterpret_cast<void *>(begin),
                 (end - begin + PAGE - 1) / PAGE * PAGE, flags);
    }
}

cudaStream_t real(cudaStream_t stream)
{
    return stream == nullptr || stream == cudaStreamLegacy ? &legacy : stream;
}

/* ---- work ---------------------------------------------------------------- */

bool can_run(const CUstream_st *stream)
{
    return !stream->queue.empty() &&
           (stream->queue.front().waits == nullptr ||
            *stream->queue.front().waits >= stream->queue.front().until);
}

void run_one(CUstream_st *stream)
{
    task t = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (t.work && sticky == cudaSuccess && !t.work()) {
        sticky = last = cudaErrorLaunchFailure;
    }
    if (t.records != nullptr) {
        *t.records = std::max(*t.records, t.record);
    }
}

/* Run queued work until `reached`, from all streams in some order. */
cudaError_t drain(const std::function<bool()> &reached)
{
    host::open_memory open;
    std::vector<cudaStream_t> able;
    while (!reached()) {
        able.clear();
        if (can_run(&legacy)) {
            able.push_back(&legacy);
        }
        for (cudaStream_t s : streams) {
            if (can_run(s)) {
                able.push_back(s);
            }
        }
        if (able.empty()) {
            return fail(cudaErrorLaunchFailure, "drain",
                        "streams wait for each other");
        }
        size_t i = options.threads == host::order::forward ? 0
                   : options.threads == host::order::reverse
                       ? able.size() - 1
                       : options.random() % able.size();
        run_one(able[i]);
    }
    return sticky;
}

/* Calls that a capture does not allow spoil it. */
cudaError_t check_capture(const char *call)
{
    for (cudaStream_t s : streams) {
        if (s->capture) {
            s->broken = true;
            return fail(cudaErrorStreamCaptureUnsupported, call,
                        "a stream is capturing");
        }
    }
    return cudaSuccess;
}

cudaError_t enter(const char *call)
{
    if (sticky != cudaSuccess) {
        return sticky;
    }
    if (must_fail(call)) {
        return fail(cudaErrorUnknown, call, "asked to fail");
    }
    return cudaSuccess;
}

} // namespace

#define ENTER(call)                                                            \
    lock held(host::mutex);                                                    \
    do {                                                                       \
        cudaError_t entered = enter(call);                                     \
        if (entered != cudaSuccess) {                                          \
            return entered;                                                    \
        }                                                                      \
    } while (0)

#define ENTER_UNCAPTURED(call)                                                 \
    ENTER(call);                                                               \
    do {                                                                       \
        cudaError_t captured = check_capture(call);                            \
        if (captured != cudaSuccess) {                                         \
            return captured;                                                   \
        }                                                                      \
    } while (0)

namespace host
{

bool in_device(const void *p)
{
    auto q = static_cast<const unsigned char *>(p);
    return arena != nullptr && q >= arena && q < arena + ARENA;
}

bool in_piece(const void *p, size_t n)
{
    return piece_of(pieces, p, n) != nullptr;
}

open_memory::open_memory()
{
    if (opened++ == 0) {
        protect(PROT_READ | PROT_WRITE);
    }
}

open_memory::~open_memory()
{
    if (--opened == 0) {
        protect(PROT_NONE);
    }
}

cudaError_t fail(cudaError_t error, const char *call, const char *why)
{
    last = error;
    std::fprintf(stderr, "cuda-host: %s: %s (%s)\n", call,
                 cudaGetErrorName(error), why);
    return error;
}

bool is_capturing(cudaStream_t stream)
{
    return real(stream)->capture != nullptr;
}

cudaError_t enqueue(cudaStream_t stream, const char *call,
                    std::function<bool()> work)
{
    stream = real(stream);
    if (stream != &legacy && streams.count(stream) == 0) {
        return fail(cudaErrorInvalidResourceHandle, call, "no such stream");
    }
    if (stream->capture) {
        if (stream->broken) {
            return fail(cudaErrorStreamCaptureInvalidated, call,
                        "an illegal call came before");
        }
        stream->capture->work.push_back(std::move(work));
        return cudaSuccess;
    }
    task t;
    t.work = std::move(work);
    stream->queue.push_back(std::move(t));
    return cudaSuccess;
}

} // namespace host

/* ---- errors, devices ----------------------------------------------------- */

extern "C" {

const char *cudaGetErrorName(cudaError_t error)
{
    switch (error) {
    case cudaSuccess:
        return "cudaSuccess";
    case cudaErrorInvalidValue:
        return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
        return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
        return "cudaErrorInvalidConfiguration";
    case cudaErrorInsufficientDriver:
        return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice:
        return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
        return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
        return "cudaErrorInvalidResourceHandle";
    case cudaErrorNoKernelImageForDevice:
        return "cudaErrorNoKernelImageForDevice";
    case cudaErrorNotReady:
        return "cudaErrorNotReady";
    case cudaErrorLaunchFailure:
        return "cudaErrorLaunchFailure";
    case cudaErrorStreamCaptureUnsupported:
        return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated:
        return "cudaErrorStreamCaptureInvalidated";
    default:
        return "cudaErrorUnknown";
    }
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "out of memory"
           : error == cudaErrorNoDevice ? "no CUDA-capable device is detected"
                                        : cudaGetErrorName(error);
}

cudaError_t cudaPeekAtLastError(void)
{
    lock held(host::mutex);
    return sticky != cudaSuccess ? sticky : last;
}

cudaError_t cudaGetLastError(void)
{
    lock held(host::mutex);
    cudaError_t error = sticky != cudaSuccess ? sticky : last;
    last = cudaSuccess;
    return error;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    ENTER("cudaGetDeviceCount");
    *count = options.n_devices;
    return options.n_devices > 0 ? cudaSuccess : last = cudaErrorNoDevice;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = device_now;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    ENTER("cudaSetDevice");
    if (device < 0 || device >= options.n_devices) {
        return fail(cudaErrorInvalidDevice, "cudaSetDevice", "no such device");
    }
    device_now = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int)
{
    ENTER("cudaDeviceGetAttribute");
    *value = attribute == cudaDevAttrComputeCapabilityMajor   ? options.major
             : attribute == cudaDevAttrComputeCapabilityMinor ? options.minor
             : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin
                 ? int(host::SHARED)
                 : 4; /* multiprocessors: few, so that loops go round */
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total)
{
    ENTER("cudaMemGetInfo");
    *total = options.memory;
    *free = options.memory - std::min(options.memory, used_bytes[device_now]);
    return cudaSuccess;
}

/* ---- memory -------------------------------------------------------------- */

static void fill(void *to, int byte, size_t bytes)
{
    host::open_memory open;
    std::memset(to, byte, bytes);
}

cudaError_t cudaMalloc(void **memory, size_t bytes)
{
    ENTER_UNCAPTURED("cudaMalloc");
    *memory = nullptr;
    if (bytes == 0) {
        return cudaSuccess;
    }
    if (bytes > options.memory ||
        used_bytes[device_now] > options.memory - bytes) {
        return last = cudaErrorMemoryAllocation;
    }
    if (arena == nullptr) {
        void *space = mmap(nullptr, ARENA, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (space == MAP_FAILED) {
            std::abort();
        }
        arena = static_cast<unsigned char *>(space);
        key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
        if (key >= 0 &&
            pkey_mprotect(space, ARENA, PROT_READ | PROT_WRITE, key) != 0) {
            std::abort();
        }
    }
    size_t at = (arena_end + GAP + 255) / 256 * 256;
    if (at + bytes > ARENA) {
        return last = cudaErrorMemoryAllocation;
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(arena + arena_end, at - arena_end);
#endif
    arena_end = at + bytes;
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(arena + arena_end, GAP);
    __asan_unpoison_memory_region(arena + at, bytes);
#endif
    pieces[arena + at] = {bytes, device_now};
    if (bytes <= POISONED) {
        fill(arena + at, 0xff, bytes);
    }
    used_bytes[device_now] += bytes;
    *memory = arena + at;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    ENTER_UNCAPTURED("cudaDeviceSynchronize");
    return drain([] {
        for (cudaStream_t s : streams) {
            if (!s->queue.empty()) {
                return false;
            }
        }
        return legacy.queue.empty();
    });
}

cudaError_t cudaFree(void *memory)
{
    lock held(host::mutex);
    if (memory == nullptr) {
        return cudaSuccess;
    }
    cudaError_t captured = check_capture("cudaFree");
    if (captured != cudaSuccess) {
        return captured;
    }
    auto found = pieces.find(static_cast<unsigned char *>(memory));
    if (found == pieces.end()) {
        return fail(cudaErrorInvalidValue, "cudaFree", "not an allocation");
    }
    if (sticky == cudaSuccess) {
        cudaDeviceSynchronize();
    }
    used_bytes[found->second.device] -= found->second.bytes;
    auto begin = reinterpret_cast<uintptr_t>(memory);
    uintptr_t end = (begin + found->second.bytes) / PAGE * PAGE;
    if (end > (begin + PAGE - 1) / PAGE * PAGE) { /* never used again */
        begin = (begin + PAGE - 1) / PAGE * PAGE;
        madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED);
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(memory, found->second.bytes);
#endif
    pieces.erase(found);
    return sticky;
}

cudaError_t cudaMallocHost(void **memory, size_t bytes)
{
    ENTER_UNCAPTURED("cudaMallocHost");
    *memory = std::malloc(bytes > 0 ? bytes : 1);
    if (*memory == nullptr) {
        return last = cudaErrorMemoryAllocation;
    }
    pinned[static_cast<unsigned char *>(*memory)] = {bytes, 0};
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *memory)
{
    lock held(host::mutex);
    if (memory == nullptr) {
        return cudaSuccess;
    }
    if (pinned.erase(static_cast<unsigned char *>(memory)) == 0) {
        return fail(cudaErrorInvalidValue, "cudaFreeHost", "not an allocation");
    }
    if (sticky == cudaSuccess) {
        cudaDeviceSynchronize();
    }
    std::free(memory);
    return sticky;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes,
                                     const void *memory)
{
    ENTER("cudaPointerGetAttributes");
    const piece *found = piece_of(pieces, memory, 1);
    *attributes = {};
    attributes->type = found != nullptr ? cudaMemoryTypeDevice
                       : piece_of(pinned, memory, 1) != nullptr
                           ? cudaMemoryTypeHost
                           : cudaMemoryTypeUnregistered;
    attributes->device = found != nullptr ? found->device : -1;
    attributes->devicePointer =
        found != nullptr ? const_cast<void *>(memory) : nullptr;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                            cudaMemcpyKind kind, cudaStream_t stream)
{
    ENTER("cudaMemcpyAsync");
    bool device_to = host::in_piece(to, bytes);
    bool device_from = host::in_piece(from, bytes);
    bool should_to =
        kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool should_from =
        kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (bytes == 0) {
        return cudaSuccess;
    }
    if (device_to != should_to || device_from != should_from ||
        (!should_to && host::in_device(to)) ||
        (!should_from && host::in_device(from))) {
        return fail(cudaErrorInvalidValue, "cudaMemcpyAsync",
                    "an end is not in one piece of the memory that the kind "
                    "says");
    }
    if (kind == cudaMemcpyHostToDevice &&
        piece_of(pinned, from, bytes) == nullptr) {
        if (host::is_capturing(stream)) {
            return fail(cudaErrorStreamCaptureUnsupported, "cudaMemcpyAsync",
                        "memory that is not pinned");
        }
        std::vector<char> copy(static_cast<const char *>(from),
                               static_cast<const char *>(from) + bytes);
        return host::enqueue(stream, "cudaMemcpyAsync",
                             [to, copy = std::move(copy)] {
                                 std::memcpy(to, copy.data(), copy.size());
                                 return true;
                             });
    }
    return host::enqueue(stream, "cudaMemcpyAsync", [=] {
        std::memmove(to, from, bytes);
        return true;
    });
}

cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes,
                            cudaStream_t stream)
{
    ENTER("cudaMemsetAsync");
    if (!host::in_piece(to, bytes)) {
        return fail(cudaErrorInvalidValue, "cudaMemsetAsync",
                    "not in one piece of device memory");
    }
    return host::enqueue(stream, "cudaMemsetAsync", [=] {
        std::memset(to, byte, bytes);
        return true;
    });
}

/* ---- streams, events ----------------------------------------------------- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    ENTER_UNCAPTURED("cudaStreamCreateWithFlags");
    *stream = new CUstream_st;
    (*stream)->device = device_now;
    streams.insert(*stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    ENTER_UNCAPTURED("cudaStreamSynchronize");
    stream = real(stream);
    return drain([=] { return stream->queue.empty(); });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    lock held(host::mutex);
    if (streams.count(stream) == 0) {
        return fail(cudaErrorInvalidResourceHandle, "cudaStreamDestroy",
                    "no such stream");
    }
    if (sticky == cudaSuccess) {
        cudaStreamSynchronize(stream);
    }
    streams.erase(stream);
    delete stream;
    return sticky;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    ENTER_UNCAPTURED("cudaEventCreateWithFlags");
    *event = new CUevent_st;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    lock held(host::mutex);
    delete event;
    return sticky;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    ENTER_UNCAPTURED("cudaEventRecord");
    task t;
    t.records = event->done;
    t.record = ++event->recorded;
    real(stream)->queue.push_back(std::move(t));
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                unsigned)
{
    ENTER_UNCAPTURED("cudaStreamWaitEvent");
    task t;
    t.waits = event->done;
    t.until = event->recorded;
    real(stream)->queue.push_back(std::move(t));
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    ENTER_UNCAPTURED("cudaEventSynchronize");
    uint64_t until = event->recorded;
    return drain([=] { return *event->done >= until; });
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    ENTER_UNCAPTURED("cudaEventQuery");
    return *event->done >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}

/* ---- graphs -------------------------------------------------------------- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode)
{
    ENTER_UNCAPTURED("cudaStreamBeginCapture");
    if (streams.count(stream) == 0) {
        return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture",
                    "not a stream of the caller");
    }
    stream->capture.reset(new CUgraph_st);
    stream->broken = to_spoil > 0 && to_spoil-- > 0;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    lock held(host::mutex);
    *graph = nullptr;
    if (streams.count(stream) == 0 || !stream->capture) {
        return fail(cudaErrorInvalidValue, "cudaStreamEndCapture",
                    "the stream does not capture");
    }
    std::unique_ptr<CUgraph_st> made = std::move(stream->capture);
    if (stream->broken) {
        return fail(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture",
                    "an illegal call came before");
    }
    *graph = made.release();
    return sticky;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long)
{
    ENTER_UNCAPTURED("cudaGraphInstantiate");
    *exec = new CUgraphExec_st{graph->work};
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    ENTER_UNCAPTURED("cudaGraphLaunch");
    return host::enqueue(stream, "cudaGraphLaunch", [work = exec->work] {
        return std::all_of(work.begin(), work.end(),
                           [](const std::function<bool()> &w) { return w(); });
    });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    delete exec;
    return cudaSuccess;
}

} // extern "C"

/* ---- launches ------------------------------------------------------------ */

cudaError_t rk_host_func_attribute(const void *kernel, cudaFuncAttribute,
                                   int value)
{
    ENTER("cudaFuncSetAttribute");
    if (value < 0 || size_t(value) > host::SHARED) {
        return fail(cudaErrorInvalidValue, "cudaFuncSetAttribute",
                    "more shared memory than a block can have");
    }
    shared_limits[kernel] = static_cast<size_t>(value);
    return cudaSuccess;
}

void rk_host_check_argument(const void *address)
{
    lock held(host::mutex);
    if (address != nullptr && !host::in_device(address)) {
        fail(cudaErrorInvalidValue, "launch",
             "an argument is an address of the host");
        sticky = cudaErrorLaunchFailure;
    }
}

bool rk_host_launch(const void *kernel, dim3 grid, dim3 block, size_t bytes,
                    cudaStream_t stream, std::function<void()> body)
{
    lock held(host::mutex);
    size_t n_threads = size_t(block.x) * block.y * block.z;
    auto found = shared_limits.find(kernel);
    size_t limit =
        found != shared_limits.end() ? found->second : size_t(48) << 10;
    if (n_threads < 1 || n_threads > 1024 || block.z > 64 || grid.x < 1 ||
        grid.y < 1 || grid.z < 1 || grid.x > 0x7fffffffu || grid.y > 65535 ||
        grid.z > 65535 || bytes > limit) {
        fail(bytes > limit ? cudaErrorInvalidValue
                           : cudaErrorInvalidConfiguration,
             "launch", "the shape of the grid, or too much shared memory");
        return false;
    }
    if (must_fail("launch")) {
        fail(cudaErrorUnknown, "launch", "asked to fail");
        return false;
    }
    return host::enqueue(stream, "launch", [=] {
               return host::run_kernel(grid, block, bytes, body);
           }) == cudaSuccess;
}

/* ---- what tests set ------------------------------------------------------ */

#pragma GCC visibility push(default)
extern "C" {

/* order: 0 forward, 1 reverse, 2 random with this seed. */
void rk_host_set_order(int order, uint64_t seed)
{
    lock held(host::mutex);
    options.threads = static_cast<host::order>(order);
    options.random.seed(seed);
}

void rk_host_set_devices(int n, int major, int minor, size_t memory)
{
    lock held(host::mutex);
    options.n_devices = n;
    options.major = major;
    options.minor = minor;
    options.memory = memory;
}

/* The n-th call of this name from now on fails; 0: none. */
void rk_host_fail_at(const char *call, int n)
{
    lock held(host::mutex);
    failures[call] = n;
}

/* The next n captures are spoiled, as by another thread's call; how many of
 * the last ones still were to be. */
int rk_host_spoil_captures(int n)
{
    lock held(host::mutex);
    std::swap(n, to_spoil);
    return n;
}

/* Forget a kernel's fault; what was queued is dropped. */
void rk_host_reset(void)
{
    lock held(host::mutex);
    sticky = last = cudaSuccess;
    failures.clear();
    to_spoil = 0;
    legacy.queue.clear();
    for (cudaStream_t s : streams) {
        s->queue.clear();
    }
}

/* Bytes of device memory in use. */
size_t rk_host_used(int device)
{
    lock held(host::mutex);
    return used_bytes[device];
}

} // extern "C"
#pragma GCC visibility pop

/* RKSC_CUDA_HOST_ORDER=forward|reverse|random[:seed], read once. */
namespace
{
struct from_environment {
    from_environment()
    {
        const char *text = std::getenv("RKSC_CUDA_HOST_ORDER");
        std::string order = text != nullptr ? text : "";
        if (order == "reverse") {
            options.threads = host::order::reverse;
        } else if (order.rfind("random", 0) == 0) {
            options.threads = host::order::random;
            options.random.seed(order.size() > 7 ? std::stoull(order.substr(7))
                                                 : 0);
        }
    }
} read_environment;
} // namespace
