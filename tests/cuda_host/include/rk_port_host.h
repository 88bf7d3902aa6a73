/* The helpers of csrc/cuda/port.h on the host runtime: the same contracts,
 * checked. tests/test_cuda_host.py holds the fragment maps against the tables
 * of the PTX manual. */
#ifndef RK_PORT_HOST_H
#define RK_PORT_HOST_H

#include <functional>
#include <tuple>

/* ---- launching, shared memory -------------------------------------------- */

/* Queue a kernel; false and the last error when the launch is not legal. */
bool rk_host_launch(const void *kernel, dim3 grid, dim3 block, size_t bytes,
                    cudaStream_t stream, std::function<void()> body);
/* A kernel may only be given addresses of the device. */
void rk_host_check_argument(const void *address);

template <class T> inline void rk_host_check(const T &)
{
}
template <class T> inline void rk_host_check(T *const &address)
{
    rk_host_check_argument(
        const_cast<const void *>(static_cast<const volatile void *>(address)));
}

template <class... P, class... A>
inline void rk_host_start(void (*kernel)(P...), dim3 grid, dim3 block,
                          size_t bytes, cudaStream_t stream, A &&...arguments)
{
    std::tuple<P...> held(static_cast<P>(arguments)...);
    std::apply([](const auto &...each) { (rk_host_check(each), ...); }, held);
    rk_host_launch(reinterpret_cast<const void *>(kernel), grid, block, bytes,
                   stream, [=] { std::apply(kernel, held); });
}

#define RK_LAUNCH(kernel, grid, block, bytes, stream, ...)                     \
    rk_host_start(kernel, grid, block, bytes, stream, __VA_ARGS__)

void *rk_host_shared(const void *key, size_t bytes);
unsigned char *rk_host_dynamic_shared();
void rk_host_check_shared(const void *address, size_t bytes);

#define RK_SHARED(type, name, dims)                                            \
    static char rk_key_##name;                                                 \
    using rk_type_##name = type dims;                                          \
    rk_type_##name &name = *static_cast<rk_type_##name *>(                     \
        rk_host_shared(&rk_key_##name, sizeof(rk_type_##name)))

#define RK_SHARED_DYNAMIC(name) unsigned char *name = rk_host_dynamic_shared()

/* ---- 16 bytes at a time -------------------------------------------------- */

inline void rk_host_align16(const void *address)
{
    if (reinterpret_cast<uintptr_t>(address) % 16 != 0) {
        rk_host_fault("an address is not aligned to 16 bytes");
    }
}

inline uint4 rk_load16(const void *from)
{
    rk_host_align16(from);
    return *static_cast<const uint4 *>(from);
}

inline void rk_store16(void *to, uint4 value)
{
    rk_host_align16(to);
    *static_cast<uint4 *>(to) = value;
}

/* ---- asynchronous copies ------------------------------------------------- */

void rk_copy16(void *shared, const void *global, bool valid);
void rk_copy_commit();
void rk_host_copy_wait(int n);

template <int n> inline void rk_copy_wait()
{
    rk_host_copy_wait(n);
}

inline float rk_exp2(float x)
{
    const float y = exp2f(x);
    return y < __FLT_MIN__ ? 0.0f : y;
}

/* ---- matrix fragments ---------------------------------------------------- */

void rk_ldmatrix(uint32_t out[4], const void *row);
void rk_ldmatrix_trans(uint32_t out[4], const void *row);
void rk_mma(float d[4], const uint32_t a[4], const uint32_t b[2]);

#endif
