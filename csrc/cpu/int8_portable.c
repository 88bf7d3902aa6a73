/* Products in integers for every machine; no fused multiply-add. */
#include "int8.h"

#include "vector_portable.h"

#define COLUMNS 4
#define OFFSET_BYTES 0

INLINE vi vi_set1(int32_t x)
{
    return (vi){x, x, x, x};
}

INLINE vf vf_of_vi(vi x)
{
    return (vf){(float)x[0], (float)x[1], (float)x[2], (float)x[3]};
}

INLINE vi vi_dot(vi acc, const uint8_t *p, int32_t q)
{
    int8_t a[4];
    memcpy(a, &q, sizeof a);
    for (int lane = 0; lane < LANES; lane++) {
        const int8_t *r = (const int8_t *)p + 4 * lane;
        acc[lane] += r[0] * a[0] + r[1] * a[1] + r[2] * a[2] + r[3] * a[3];
    }
    return acc;
}

INLINE void interleave(uint8_t *p, const int8_t *x, size_t stride)
{
    for (int quad = 0; quad < 8; quad++) {
        for (int lane = 0; lane < LANES; lane++, p += 4) {
            memcpy(p, x + (size_t)lane * stride + 4 * quad, 4);
        }
    }
}

#define TABLE cpu_int8_portable
#include "template_int8.h"
