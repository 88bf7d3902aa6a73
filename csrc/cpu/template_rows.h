/* Kernels over one row: exp, norm, silu, rotation, statistics of logits.
 *
 * exp(x) = 2^n e^r with n = round(x log2 e) and |r| <= ln 2 / 2: the rounding
 * is an addition of 1.5 * 2^23, whose low mantissa bits then are n and go
 * straight into the exponent. All lanes see the same operations, a tail is
 * loaded with a mask, so a value has the same bits at every place of a row.
 */
#ifndef RKSC_CPU_TEMPLATE_ROWS_H
#define RKSC_CPU_TEMPLATE_ROWS_H

/* e^r = 1 + r (EXP_1 + r (EXP_2 + ...)): least greatest relative error, 1e-7.
 */
#define EXP_1 0.99999970f
#define EXP_2 0.49999142f
#define EXP_3 0.16667645f
#define EXP_4 0.04189885f
#define EXP_5 0.0082901446f

/* exp(x) for x <= 88, relative error below 4e-7; 0 below -87, where the
 * smallest normal results are, and for -inf; NaN stays NaN. */
INLINE vf vf_exp_below(vf x)
{
    const vf shift = vf_set1(12582912.0f);
    vf t = vf_fma(x, vf_set1(1.44269504088896341f), shift);
    vf n = vf_sub(t, shift);
#if HAS_FMA /* n ln 2 is not rounded, and n times the constant's error small   \
             */
    vf r = vf_fma(n, vf_set1(-0.69314718056f), x);
#else
    vf r = vf_fma(n, vf_set1(-0.693359375f), x);
    r = vf_fma(n, vf_set1(2.12194440e-4f), r);
#endif
    vf p = vf_set1(EXP_5);
    p = vf_fma(p, r, vf_set1(EXP_4));
    p = vf_fma(p, r, vf_set1(EXP_3));
    p = vf_fma(p, r, vf_set1(EXP_2));
    p = vf_fma(p, r, vf_set1(EXP_1));
    p = vf_fma(p, r, vf_set1(1.0f));
    return vf_scale_above(p, t, n, x, vf_set1(-87.0f));
}

/* exp(x) for all x; e^88 above 88. */
INLINE vf vf_exp(vf x)
{
    return vf_exp_below(vf_min(vf_set1(88.0f), x));
}

/* For x <= 88. */
static float exp1(float x)
{
    return vf_first(vf_exp_below(vf_set1(x)));
}

/* The row in steps of LANES, the last one masked: BODY sees `i` and uses LOAD
 * and STORE with `n_left` elements. */
#define FOR_LANES(n)                                                           \
    for (int32_t i = 0, n_left; n_left = (n) - i, n_left > 0; i += LANES)
#define LOAD(x)                                                                \
    (n_left >= LANES ? vf_load((x) + i) : vf_load_n((x) + i, n_left))
#define LOAD_OR(x, other)                                                      \
    (n_left >= LANES                                                           \
         ? vf_load((x) + i)                                                    \
         : vf_select_first(n_left, vf_load_n((x) + i, n_left), other))
#define STORE_f32(out, v)                                                      \
    (n_left >= LANES ? vf_store((float *)(out) + i, v)                         \
                     : vf_store_n((float *)(out) + i, v, n_left))
#define STORE_bf16(out, v)                                                     \
    (n_left >= LANES ? vf_store_bf16((uint16_t *)(out) + i, v)                 \
                     : vf_store_bf16_n((uint16_t *)(out) + i, v, n_left))

static float row_sum(const float *x, int32_t n)
{
    vf sum = vf_zero();
    FOR_LANES(n)
    {
        sum = vf_add(sum, LOAD(x));
    }
    return vf_sum(sum);
}

static float row_dot(const float *x, const float *y, int32_t n)
{
    vf sum = vf_zero();
    FOR_LANES(n)
    {
        sum = vf_fma(LOAD(x), LOAD(y), sum);
    }
    return vf_sum(sum);
}

static void row_rope(float *x, const float *cosine, const float *sine,
                     int32_t half, bool interleaved)
{
    if (interleaved) {
        for (int32_t i = 0; i < half; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cosine[i] - b * sine[i];
            x[2 * i + 1] = b * cosine[i] + a * sine[i];
        }
        return;
    }
    FOR_LANES(half)
    {
        vf a = LOAD(x), b = LOAD(x + half), c = LOAD(cosine), s = LOAD(sine);
        STORE_f32(x, vf_sub(vf_mul(a, c), vf_mul(b, s)));
        STORE_f32(x + half, vf_add(vf_mul(b, c), vf_mul(a, s)));
    }
}

#define DEFINE_ROWS(TYPE)                                                      \
    static void row_convert_##TYPE(void *out, const float *x, int32_t n)       \
    {                                                                          \
        FOR_LANES(n)                                                           \
        {                                                                      \
            STORE_##TYPE(out, LOAD(x));                                        \
        }                                                                      \
    }                                                                          \
    static void row_norm_##TYPE(void *out, const float *x,                     \
                                const float *weight, float eps, int32_t n)     \
    {                                                                          \
        float mean = row_dot(x, x, n) / (float)n;                              \
        vf scale = vf_set1(1.0f / __builtin_sqrtf(mean + eps));                \
        FOR_LANES(n)                                                           \
        {                                                                      \
            STORE_##TYPE(out, vf_mul(vf_mul(LOAD(x), scale), LOAD(weight)));   \
        }                                                                      \
    }                                                                          \
    static void row_swiglu_##TYPE(void *out, const float *gate,                \
                                  const float *up, int32_t n)                  \
    {                                                                          \
        const vf one = vf_set1(1.0f);                                          \
        FOR_LANES(n)                                                           \
        {                                                                      \
            vf x = LOAD(gate);                                                 \
            vf e = vf_exp(vf_sub(vf_zero(), x));                               \
            vf y = vf_div(x, vf_add(one, e));                                  \
            STORE_##TYPE(out, vf_mul(y, LOAD(up)));                            \
        }                                                                      \
    }

DEFINE_ROWS(f32)
DEFINE_ROWS(bf16)

/* ---- logits ---------------------------------------------------------------
 */

static float row_max(const float *x, int32_t n)
{
    const vf least = vf_set1(-INFINITY);
    vf max = least;
    FOR_LANES(n)
    {
        max = vf_max(max, LOAD_OR(x, least));
    }
    return vf_hmax(max);
}

static bool row_has_nan(const float *x, int32_t n)
{
    vf seen = vf_zero();
    FOR_LANES(n)
    {
        vf v = LOAD(x);
        seen = vf_add(seen, vf_select_nan(v, vf_set1(1.0f), vf_zero()));
    }
    return vf_sum(seen) > 0.0f;
}

static void row_statistics(float *max, int32_t *index, float *sum, float *dsum,
                           const float *x, int32_t n)
{
    *index = -1;
    *sum = *dsum = 0.0f;
    *max = row_max(x, n);
    if (!(*max > -INFINITY)) { /* nothing but -inf and NaN */
        *max = row_has_nan(x, n) ? NAN : -INFINITY;
        return;
    }
    const vf top = vf_set1(*max), far = vf_set1(-100.0f);
    vf s = vf_zero(), ds = vf_zero();
    FOR_LANES(n)
    {
        vf d = vf_max(far, vf_sub(LOAD_OR(x, vf_set1(-INFINITY)), top));
        vf e = vf_exp_below(d);
        s = vf_add(s, e);
        ds = vf_fma(d, e, ds);
    }
    *sum = vf_sum(s);
    *dsum = vf_sum(ds);
    if (!(*sum >= 1.0f)) { /* a NaN, or an infinite maximum, spoils the sum */
        *max = NAN;
        return;
    }
    int32_t i = 0;
    while (x[i] != *max) {
        i++;
    }
    *index = i;
}

static void row_weights(float *out, const float *x, float max, float scale,
                        int32_t n)
{
    const vf top = vf_set1(max), by = vf_set1(scale);
    FOR_LANES(n)
    {
        STORE_f32(out, vf_exp_below(vf_mul(vf_sub(LOAD(x), top), by)));
    }
}

#endif
