/* float16 as the kernels use it: storage and conversions. */
#ifndef RK_HOST_CUDA_FP16_H
#define RK_HOST_CUDA_FP16_H

#include <cmath>
#include <cstdint>
#include <cstring>

struct __half {
    uint16_t bits;
};

inline float __half2float(__half x)
{
    int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
    float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                 : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                 : std::ldexp(1024.0f + fraction, exponent - 25);
    return x.bits & 0x8000 ? -size : size;
}

inline __half __float2half_rn(float x)
{
    uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    float size = std::fabs(x);
    if (std::isnan(x)) {
        return {0x7fff};
    }
    if (size >= 65520.0f) {
        return {static_cast<uint16_t>(sign | 0x7c00)};
    }
    if (size == 0.0f) {
        return {sign};
    }
    int exponent = 0;
    std::frexp(size, &exponent); /* size in [2^(exponent-1), 2^exponent) */
    int shift = exponent < -13 ? -24 : exponent - 11;
    /* nearbyint rounds to even; a carry runs into the exponent by itself */
    int fraction =
        static_cast<int>(std::nearbyint(std::ldexp(size, -shift)));
    return {static_cast<uint16_t>(
        sign | (shift == -24 ? fraction : ((shift + 24) << 10) + fraction))};
}

#endif
