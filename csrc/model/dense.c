/* A row at a time, in pieces that stay in the first cache: gather the elements
 * if they are not adjacent, widen them to float32, round if asked to. Threads
 * take rows from a common counter; each row is independent of the others. */
#include "dense.h"

#include "quant.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define PIECE 2048 /* elements; whole blocks of every type */
#define MAX_THREADS 64
#define ELEMENTS_PER_THREAD                                                    \
    ((int64_t)1 << 18) /* less is not worth a thread                           \
                        */

_Static_assert(PIECE % RK_MAX_BLOCK_ELEMENTS == 0, "pieces hold whole blocks");

typedef struct conversion {
    void *out;
    rk_type to;
    const rk_strided *from;
    int64_t rows_at_once;
    atomic_llong next_row;
} conversion;

bool rk_dense_fits(const rk_strided *from, rk_type type)
{
    const rk_type_info *info = rk_type_get(type);

    if (from->type != type || info->block_elements > 1) {
        return from->type == type;
    }
    return (uintptr_t)from->data % (uintptr_t)info->block_bytes == 0 &&
           (from->cols == 1 || from->col_stride == 1) &&
           (from->rows == 1 || from->row_stride == from->cols);
}

/* n elements, `stride` elements apart, side by side into out. */
static void gather(uint8_t *out, const uint8_t *from, int64_t stride, int64_t n,
                   int64_t element_bytes)
{
    /* A constant size lets the compiler turn memcpy into one move. */
    if (element_bytes == 2) {
        for (int64_t i = 0; i < n; i++) {
            memcpy(out + 2 * i, from + 2 * i * stride, 2);
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            memcpy(out + 4 * i, from + 4 * i * stride, 4);
        }
    }
}

/* Where n elements of a row begin, adjacent: in place or in `room`. */
static const void *adjacent(const rk_strided *from, int64_t row, int64_t col,
                            int64_t n, uint8_t *room)
{
    const rk_type_info *info = rk_type_get(from->type);
    const uint8_t *data = from->data;

    if (info->block_elements > 1) {
        return data + row * rk_type_bytes(from->type, from->cols) +
               rk_type_bytes(from->type, col);
    }
    data +=
        (row * from->row_stride + col * from->col_stride) * info->block_bytes;
    if (from->col_stride == 1 || n == 1) {
        return data;
    }
    gather(room, data, from->col_stride, n, info->block_bytes);
    return room;
}

static void convert_row(const conversion *job, int64_t row)
{
    int64_t cols = job->from->cols;
    float values[PIECE];
    uint8_t room[4 * PIECE];

    for (int64_t col = 0; col < cols; col += PIECE) {
        int64_t n = cols - col < PIECE ? cols - col : PIECE;
        int64_t at = row * cols + col;
        const void *from = adjacent(job->from, row, col, n, room);

        if (job->to == RK_F32) {
            rk_dequantize((float *)job->out + at, from, job->from->type, n);
        } else {
            rk_dequantize(values, from, job->from->type, n);
            rk_to_bf16((uint16_t *)job->out + at, values, n);
        }
    }
}

static void *convert_rows(void *context)
{
    conversion *job = context;
    int64_t rows = job->from->rows;

    for (;;) {
        int64_t row = atomic_fetch_add(&job->next_row, job->rows_at_once);
        int64_t end = row + job->rows_at_once;

        if (row >= rows) {
            return NULL;
        }
        for (; row < end && row < rows; row++) {
            convert_row(job, row);
        }
    }
}

void rk_dense_convert(void *out, rk_type to, const rk_strided *from,
                      int n_threads)
{
    conversion job = {.out = out, .to = to, .from = from};
    pthread_t helpers[MAX_THREADS];
    int64_t worth = from->rows * from->cols / ELEMENTS_PER_THREAD;
    int n = 0;

    job.rows_at_once = 1 + PIECE / (from->cols > 0 ? from->cols : 1);
    worth = worth < n_threads - 1 ? worth : n_threads - 1;
    worth = worth < MAX_THREADS ? worth : MAX_THREADS;
    while (n < worth &&
           pthread_create(&helpers[n], NULL, convert_rows, &job) == 0) {
        n++; /* fewer threads than hoped for only take longer */
    }
    convert_rows(&job);
    while (n > 0) {
        pthread_join(helpers[--n], NULL);
    }
}
