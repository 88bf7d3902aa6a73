/* Products in 16-bit integers for every machine. */
#include "int16.h"
#include "model/quant.h"

#include "vector_portable.h"

#define VECTORS 1
#define COLUMNS 4
#define COLUMN_CASES(X) X(1) X(2) X(3) X(4)
#define FEW 1
#define FEW_CASES(X) X(1)

typedef uint32_t vu __attribute__((vector_size(16)));
typedef uint16_t vh __attribute__((vector_size(16)));

/* a * b + c, rounded once, without an instruction for it: the product is exact
 * as a double; their sum is rounded to odd, that is its last bit set where
 * something was lost, and so keeps what the rounding to float must know. */
INLINE float fused(float a, float b, float c)
{
    const double product = (double)a * (double)b, more = (double)c;
    double sum = product + more;
    const double kept = sum - product;
    const double lost = (product - (sum - kept)) + (more - kept);
    int64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    if (lost != 0.0 && !(bits & 1) && sum - sum == 0.0) {
        bits += (lost > 0.0) == (sum > 0.0) ? 1 : -1;
        memcpy(&sum, &bits, sizeof sum);
    }
    return (float)sum;
}

INLINE vf vf_fused(vf a, vf b, vf c)
{
    vf x;
    for (int lane = 0; lane < LANES; lane++) {
        x[lane] = fused(a[lane], b[lane], c[lane]);
    }
    return x;
}

INLINE vi vi_set1(int32_t x)
{
    return (vi){x, x, x, x};
}

INLINE vf vf_of_vi(vi x)
{
    return (vf){(float)x[0], (float)x[1], (float)x[2], (float)x[3]};
}

INLINE vf vf_half(vu x)
{
    vf y;
    for (int lane = 0; lane < LANES; lane++) {
        y[lane] = rk_f16_to_f32((uint16_t)x[lane]);
    }
    return y;
}

INLINE vi vi_dot(vi acc, vi p, vi q)
{
    const vi even = (vi)((vu)p << 16) >> 16, odd = p >> 16;
    return acc + even * ((vi)((vu)q << 16) >> 16) + odd * (q >> 16);
}

INLINE void turn(vu *out, const uint8_t *p, int64_t stride)
{
    for (int j = 0; j < 4; j++) {
        uint32_t x[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            memcpy(x + lane, p + lane * stride + 4 * j, sizeof *x);
        }
        memcpy(out + j, x, sizeof x);
    }
}

#define TABLE cpu_int16_portable
#include "template_int16.h"
