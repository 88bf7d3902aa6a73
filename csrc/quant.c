/* Block-quantised weights to float32.
 *
 * Each type stores blocks of small integers q with scales of their own:
 *
 *   plain blocks of 32     x = d * (q - offset)            Q4_0 Q5_0 Q8_0
 *                          x = d * q + m                   Q4_1 Q5_1
 *   super-blocks of 256    x = d * s[g] * (q - offset)     Q3_K Q6_K
 *                          x = d * s[g] * q - dmin * m[g]  Q2_K Q4_K Q5_K
 *
 * with d, m, dmin in half precision and s, m small integers for each group g
 * of 16 or 32 values. Fields lie in the order of the layouts below, without
 * padding, little-endian. Products are rounded in the order written (the
 * build has no contraction), which makes results the same everywhere.
 */
#include "quant.h"

static const rk_type_info TYPES[RK_N_TYPES] = {
    [RK_F32] = {"F32", RK_F32, 1, 4},
    [RK_F16] = {"F16", RK_F16, 1, 2},
    [RK_BF16] = {"BF16", RK_BF16, 1, 2},
    [RK_Q4_0] = {"Q4_0", RK_Q4_0, 32, 18},
    [RK_Q4_1] = {"Q4_1", RK_Q4_1, 32, 20},
    [RK_Q5_0] = {"Q5_0", RK_Q5_0, 32, 22},
    [RK_Q5_1] = {"Q5_1", RK_Q5_1, 32, 24},
    [RK_Q8_0] = {"Q8_0", RK_Q8_0, 32, 34},
    [RK_Q2_K] = {"Q2_K", RK_Q2_K, 256, 84},
    [RK_Q3_K] = {"Q3_K", RK_Q3_K, 256, 110},
    [RK_Q4_K] = {"Q4_K", RK_Q4_K, 256, 144},
    [RK_Q5_K] = {"Q5_K", RK_Q5_K, 256, 176},
    [RK_Q6_K] = {"Q6_K", RK_Q6_K, 256, 210},
};

const rk_type_info *rk_type_get(rk_type type)
{
    return &TYPES[type];
}

const rk_type_info *rk_type_find(const char *name)
{
    for (int i = 0; i < RK_N_TYPES; i++) {
        if (strcmp(TYPES[i].name, name) == 0) {
            return &TYPES[i];
        }
    }
    return NULL;
}

int64_t rk_type_bytes(rk_type type, int64_t n)
{
    const rk_type_info *info = &TYPES[type];

    return n / info->block_elements * info->block_bytes;
}

void rk_to_bf16(uint16_t *out, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        out[i] = rk_f32_to_bf16(x[i]);
    }
}

static inline uint16_t read_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static inline float read_half(const uint8_t *p)
{
    return rk_f16_to_f32(read_u16(p));
}

/* ---- one block of 32 --------------------------------------------------- */

/* d:f16 | 16 bytes: low nibbles are values 0..15, high ones 16..31 */
static void block_q4_0(float *out, const uint8_t *b)
{
    float d = read_half(b);

    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)((b[2 + i] & 15) - 8);
        out[i + 16] = d * (float)((b[2 + i] >> 4) - 8);
    }
}

/* d:f16 | m:f16 | 16 bytes of nibbles */
static void block_q4_1(float *out, const uint8_t *b)
{
    float d = read_half(b), m = read_half(b + 2);

    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)(b[4 + i] & 15) + m;
        out[i + 16] = d * (float)(b[4 + i] >> 4) + m;
    }
}

/* The fifth bit of value i, in its place: bit i of four bytes. */
static inline int fifth_bit(const uint8_t *high, int i)
{
    return (high[i >> 3] >> (i & 7) & 1) << 4;
}

/* d:f16 | 4 bytes of fifth bits | 16 bytes of nibbles */
static void block_q5_0(float *out, const uint8_t *b)
{
    float d = read_half(b);
    const uint8_t *high = b + 2, *low = b + 6;

    for (int i = 0; i < 16; i++) {
        int first = (low[i] & 15) | fifth_bit(high, i);
        int second = (low[i] >> 4) | fifth_bit(high, i + 16);

        out[i] = d * (float)(first - 16);
        out[i + 16] = d * (float)(second - 16);
    }
}

/* d:f16 | m:f16 | 4 bytes of fifth bits | 16 bytes of nibbles */
static void block_q5_1(float *out, const uint8_t *b)
{
    float d = read_half(b), m = read_half(b + 2);
    const uint8_t *high = b + 4, *low = b + 8;

    for (int i = 0; i < 16; i++) {
        int first = (low[i] & 15) | fifth_bit(high, i);
        int second = (low[i] >> 4) | fifth_bit(high, i + 16);

        out[i] = d * (float)first + m;
        out[i + 16] = d * (float)second + m;
    }
}

/* d:f16 | 32 signed bytes */
static void block_q8_0(float *out, const uint8_t *b)
{
    float d = read_half(b);

    for (int i = 0; i < 32; i++) {
        out[i] = d * (float)(int8_t)b[2 + i];
    }
}

/* ---- one super-block of 256 -------------------------------------------- */

/* 16 bytes: scale (low nibble) and minimum (high) of 16 groups of 16
 * | 64 bytes of 2-bit values | d:f16 | dmin:f16
 * Each run of 32 bytes holds four times 32 values, one per pair of bits. */
static void block_q2_k(float *out, const uint8_t *b)
{
    const uint8_t *values = b + 16;
    float d = read_half(b + 80), dmin = read_half(b + 82);

    for (int group = 0; group < 16; group++) {
        const uint8_t *run = values + group / 8 * 32 + group % 2 * 16;
        int shift = group % 8 / 2 * 2;
        float scale = d * (float)(b[group] & 15);
        float minimum = dmin * (float)(b[group] >> 4);

        for (int i = 0; i < 16; i++) {
            out[16 * group + i] =
                scale * (float)(run[i] >> shift & 3) - minimum;
        }
    }
}

/* 32 bytes: third bits, bit k of byte i belongs to value 32 k + i
 * | 64 bytes of 2-bit values | 12 bytes: 16 scales of 6 bits | d:f16
 * A scale's low nibble lies in bytes 0..7 (first eight in low nibbles), its
 * two high bits in bytes 8..11. A value is 4 less where its third bit is 0. */
static void block_q3_k(float *out, const uint8_t *b)
{
    const uint8_t *third = b, *values = b + 32, *packed = b + 96;
    float d = read_half(b + 108);

    for (int group = 0; group < 16; group++) {
        int low = packed[group % 8] >> (group / 8 * 4) & 15;
        int high = packed[8 + group % 4] >> (group / 4 * 2) & 3;
        float scale = d * (float)((low | high << 4) - 32);
        const uint8_t *run = values + group / 8 * 32 + group % 2 * 16;
        const uint8_t *bits = third + group % 2 * 16;
        int shift = group % 8 / 2 * 2;

        for (int i = 0; i < 16; i++) {
            int q = (run[i] >> shift & 3) - 4 + (bits[i] >> group / 2 & 1) * 4;

            out[16 * group + i] = scale * (float)q;
        }
    }
}

/* Scale and minimum of group 0..7, six bits each, from 12 bytes: those of
 * groups 0..3 in the low six bits of bytes 0..3 and 4..7; groups 4..7 have
 * their low nibbles in bytes 8..11 and two high bits atop the first eight. */
static void scale_and_minimum(const uint8_t *packed, int group, int *scale,
                              int *minimum)
{
    if (group < 4) {
        *scale = packed[group] & 63;
        *minimum = packed[group + 4] & 63;
    } else {
        *scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4;
        *minimum = packed[group + 4] >> 4 | (packed[group] >> 6) << 4;
    }
}

/* d:f16 | dmin:f16 | 12 bytes of scales and minima | 128 bytes of nibbles:
 * each run of 32 bytes holds two groups of 32 */
static void block_q4_k(float *out, const uint8_t *b)
{
    float d = read_half(b), dmin = read_half(b + 2);

    for (int group = 0; group < 8; group++) {
        const uint8_t *run = b + 16 + group / 2 * 32;
        int shift = group % 2 * 4, s, m;
        float scale, minimum;

        scale_and_minimum(b + 4, group, &s, &m);
        scale = d * (float)s;
        minimum = dmin * (float)m;
        for (int i = 0; i < 32; i++) {
            out[32 * group + i] =
                scale * (float)(run[i] >> shift & 15) - minimum;
        }
    }
}

/* d:f16 | dmin:f16 | 12 bytes of scales and minima | 32 bytes of fifth bits,
 * bit k of byte i belongs to value 32 k + i | 128 bytes of nibbles */
static void block_q5_k(float *out, const uint8_t *b)
{
    float d = read_half(b), dmin = read_half(b + 2);
    const uint8_t *fifth = b + 16;

    for (int group = 0; group < 8; group++) {
        const uint8_t *run = b + 48 + group / 2 * 32;
        int shift = group % 2 * 4, s, m;
        float scale, minimum;

        scale_and_minimum(b + 4, group, &s, &m);
        scale = d * (float)s;
        minimum = dmin * (float)m;
        for (int i = 0; i < 32; i++) {
            int q = (run[i] >> shift & 15) | (fifth[i] >> group & 1) << 4;

            out[32 * group + i] = scale * (float)q - minimum;
        }
    }
}

/* 128 bytes of low nibbles | 64 bytes of high bit pairs | 16 signed scales
 * | d:f16
 * Each half of 128 values: value 32 k + i takes its nibble from byte
 * 32 (k % 2) + i, low for k < 2, and bits 2 k of byte i of the pairs. */
static void block_q6_k(float *out, const uint8_t *b)
{
    float d = read_half(b + 208);

    for (int group = 0; group < 16; group++) {
        int half = group / 8, k = group % 8 / 2, start = group % 2 * 16;
        const uint8_t *low = b + 64 * half + 32 * (k % 2) + start;
        const uint8_t *high = b + 128 + 32 * half + start;
        float scale = d * (float)(int8_t)b[192 + group];

        for (int i = 0; i < 16; i++) {
            int q = (low[i] >> k / 2 * 4 & 15) | (high[i] >> 2 * k & 3) << 4;

            out[16 * group + i] = scale * (float)(q - 32);
        }
    }
}

/* ---- all types --------------------------------------------------------- */

static void (*const BLOCK[RK_N_TYPES])(float *, const uint8_t *) = {
    [RK_Q4_0] = block_q4_0, [RK_Q4_1] = block_q4_1, [RK_Q5_0] = block_q5_0,
    [RK_Q5_1] = block_q5_1, [RK_Q8_0] = block_q8_0, [RK_Q2_K] = block_q2_k,
    [RK_Q3_K] = block_q3_k, [RK_Q4_K] = block_q4_k, [RK_Q5_K] = block_q5_k,
    [RK_Q6_K] = block_q6_k,
};

void rk_dequantize(float *out, const void *blocks, rk_type type, int64_t n)
{
    const rk_type_info *info = &TYPES[type];
    const uint8_t *bytes = blocks;

    switch (type) {
    case RK_F32:
        if (n > 0) {
            memcpy(out, blocks, (size_t)n * sizeof *out);
        }
        break;
    case RK_F16:
        for (int64_t i = 0; i < n; i++) {
            out[i] = rk_f16_to_f32(read_u16(bytes + 2 * i));
        }
        break;
    case RK_BF16:
        for (int64_t i = 0; i < n; i++) {
            out[i] = rk_bf16_to_f32(read_u16(bytes + 2 * i));
        }
        break;
    default:
        for (int64_t i = 0; i < n; i += info->block_elements) {
            BLOCK[type](out + i, bytes);
            bytes += info->block_bytes;
        }
    }
}
