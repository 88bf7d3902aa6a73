/* bfloat16 as the kernels use it: storage and conversions. */
#ifndef RK_HOST_CUDA_BF16_H
#define RK_HOST_CUDA_BF16_H

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
    uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x)
{
    uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
    float y;
    std::memcpy(&y, &wide, sizeof y);
    return y;
}

inline __nv_bfloat16 __float2bfloat16_rn(float x)
{
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return {0x7fff};
    }
    bits += 0x7fffu + (bits >> 16 & 1);
    return {static_cast<uint16_t>(bits >> 16)};
}

#endif
