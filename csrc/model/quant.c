/* Tensor types by name and number, and their values in float32. What blocks
 * look like is written in unpack.h. */
#include "quant.h"

#include "unpack.h"

static const rk_type_info TYPES[RK_N_TYPES] = {
    [RK_F32] = {"F32", RK_F32, 1, 4},
    [RK_F16] = {"F16", RK_F16, 1, 2},
    [RK_BF16] = {"BF16", RK_BF16, 1, 2},
#define TYPE_ROW(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET)                      \
    [RK_##NAME] = {#NAME, RK_##NAME, BLOCK, BYTES},
    RK_BLOCK_TYPES(TYPE_ROW)};

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

/* Blocks to floats, one after the other. */
#define DEFINE_VALUES(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET)                 \
    static void values_##TYPE(float *out, const uint8_t *bytes, int64_t n)     \
    {                                                                          \
        rk_unpacked x;                                                         \
                                                                               \
        for (int64_t at = 0; at < n; at += BLOCK) {                            \
            rk_unpack_##TYPE(&x, bytes);                                       \
            for (int i = 0; i < BLOCK; i++) {                                  \
                float value = x.scale[i / GROUP] * (float)x.q[i];              \
                                                                               \
                out[at + i] = OFFSET ? value + x.offset[i / GROUP] : value;    \
            }                                                                  \
            bytes += TYPES[RK_##NAME].block_bytes;                             \
        }                                                                      \
    }

RK_BLOCK_TYPES(DEFINE_VALUES)

void rk_dequantize(float *out, const void *blocks, rk_type type, int64_t n)
{
    const uint8_t *bytes = blocks;

    switch (type) {
    case RK_F32:
        if (n > 0) {
            memcpy(out, blocks, (size_t)n * sizeof *out);
        }
        break;
    case RK_F16:
        for (int64_t i = 0; i < n; i++) {
            out[i] = rk_read_half(bytes + 2 * i);
        }
        break;
    case RK_BF16:
        for (int64_t i = 0; i < n; i++) {
            out[i] = rk_bf16_to_f32(rk_read_u16(bytes + 2 * i));
        }
        break;
#define VALUES(NAME, TYPE, BLOCK, BYTES, GROUP, OFFSET)                        \
    case RK_##NAME:                                                            \
        values_##TYPE(out, bytes, n);                                          \
        break;
        RK_BLOCK_TYPES(VALUES)
    case RK_N_TYPES:
        break;
    }
}
