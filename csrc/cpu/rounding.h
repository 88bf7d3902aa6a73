/* A block of activations to integers of one scale: x = scale * q, with
 * scale = max |x| / top. What int8 and int16 products have in common. */
#ifndef RKSC_CPU_ROUNDING_H
#define RKSC_CPU_ROUNDING_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef struct cpu_rounding {
    float scale;   /* 0: the block counts as zero; NaN: NaN or infinity in it */
    float inverse; /* 1 / scale, 0 where q is zero */
    bool some;     /* q is not zero throughout */
} cpu_rounding;

/* Of n values; a maximum below `smallest` counts as zero. */
static inline cpu_rounding cpu_rounding_of(const float *x, int n, float top,
                                           float smallest)
{
    uint32_t most = 0; /* of positive floats the bits rise with the values */
    float max;
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    memcpy(&max, &most, sizeof max);
    const bool finite = most < 0x7f800000, some = finite && max >= smallest;
    return (cpu_rounding){
        .scale = some     ? max / top
                 : finite ? 0.0f
                          : NAN,
        .inverse = some ? top / max : 0.0f,
        .some = some,
    };
}

/* The nearest integer of x / scale, ties to even: adding 1.5 * 2^23 leaves it
 * in the low bits of the float. */
static inline int32_t cpu_round(float x, cpu_rounding r)
{
    const float shifted = (r.some ? x : 0.0f) * r.inverse + 0x1.8p23f;
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    return bits - 0x4b400000; /* those of 1.5 * 2^23 */
}

#endif
