/* Products in integers for every machine; no fused multiply-add. */
#include "int8.h"

#include "kernels.h"

#define LANES 4
#define COLUMNS 4
#define OFFSET_BYTES 0

typedef v4 vf;
typedef int32_t vi __attribute__((vector_size(16)));

INLINE vf vf_set1(float x)
{
    return (vf){x, x, x, x};
}

INLINE vf vf_zero(void)
{
    return vf_set1(0.0f);
}

INLINE vf vf_load(const float *p)
{
    return v4_load(p);
}

INLINE vf vf_load_n(const float *p, int n)
{
    vf x = vf_zero();
    memcpy(&x, p, (size_t)n * sizeof *p);
    return x;
}

INLINE void vf_store_n(float *p, vf x, int n)
{
    memcpy(p, &x, (size_t)n * sizeof *p);
}

INLINE vf vf_add(vf a, vf b)
{
    return a + b;
}

INLINE vf vf_mul(vf a, vf b)
{
    return a * b;
}

INLINE vf vf_fma(vf a, vf b, vf c)
{
    return a * b + c;
}

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
