/* What this machine can do: dot products on operands near by, and reads.
 *
 * Built by rates.py for the machine it runs on (-march=native); each function
 * runs several loops on n threads, one after the other, and returns operations
 * or bytes per second of all threads together in the fastest of them. A second
 * is one of the thread's own processor time: a limit is what the machine can
 * do, whoever else uses it meanwhile.
 */
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256

typedef double work(void *argument, int thread);

struct start {
    work *run;
    void *argument;
    int thread;
    double speed; /* per second of the thread's own time */
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *begin(void *argument)
{
    struct start *s = argument;
    double since = now();
    double amount = s->run(s->argument, s->thread);
    s->speed = amount / (now() - since);
    return NULL;
}

static double rate(work *run, void *argument, int n_threads)
{
    pthread_t threads[MAX_THREADS];
    struct start starts[MAX_THREADS];
    double best = 0;
    for (int turn = 0; turn < 5; turn++) {
        double speed = 0;
        for (int i = 0; i < n_threads; i++) {
            starts[i] = (struct start){run, argument, i, 0};
            pthread_create(&threads[i], NULL, begin, &starts[i]);
        }
        for (int i = 0; i < n_threads; i++) {
            pthread_join(threads[i], NULL);
            speed += starts[i].speed;
        }
        best = speed > best ? speed : best;
    }
    return best;
}

/* ---- dot products ---------------------------------------------------------
 */

#define TURNS 2000000L

/* F(sum, row) for each sum: a variable, since an array would lie in memory,
 * where a sum waits for its last store. */
#define FOUR(F, a, b, c, d) F(a, 0) F(b, 1) F(c, 2) F(d, 3)
#define TWELVE(F) FOUR(F, 0, 1, 2, 3) FOUR(F, 4, 5, 6, 7) FOUR(F, 8, 9, 10, 11)
#if defined(__AVX512F__)
#define SUMS 24 /* of 32 registers */
#define MORE(F)                                                                \
    FOUR(F, 12, 13, 14, 15) FOUR(F, 16, 17, 18, 19) FOUR(F, 20, 21, 22, 23)
#define EACH(F) TWELVE(F) MORE(F)
#else
#define SUMS 12 /* of 16 */
#define EACH(F) TWELVE(F)
#endif
#define BEGIN(i, row) SUM sum##i = ZERO;
/* One multiplication into a sum, which the compiler may not leave out. */
#define INTO(i, x, y)                                                          \
    sum##i = DOT(sum##i, (x), (y));                                            \
    __asm__ volatile("" : "+v"(sum##i));

static char operands[MAX_THREADS][4096] __attribute__((aligned(64)));

#if defined(__AVX512F__)
#define NAME(loop) fma_##loop
#define SUM __m512
#define OPERAND __m512
#define ZERO _mm512_setzero_ps()
#define DOT(sum, x, y) _mm512_fmadd_ps(x, y, sum)
#define OPERATIONS 32.0
#include "peak_dot.h"
#elif defined(__AVX2__)
#define NAME(loop) fma_##loop
#define SUM __m256
#define OPERAND __m256
#define ZERO _mm256_setzero_ps()
#define DOT(sum, x, y) _mm256_fmadd_ps(x, y, sum)
#define OPERATIONS 16.0
#include "peak_dot.h"
#else
static work *const fma_loops[] = {NULL, NULL, NULL};
#endif

#if defined(__AVX512BF16__)
#define NAME(loop) bf16_##loop
#define SUM __m512
#define OPERAND __m512bh
#define ZERO _mm512_setzero_ps()
#define DOT(sum, x, y) _mm512_dpbf16_ps(sum, x, y)
#define OPERATIONS 64.0
#include "peak_dot.h"
#else
static work *const bf16_loops[] = {NULL, NULL, NULL};
#endif

/* 16-bit integers, sums of pairs in int32; then bytes, sums of four. */
#if defined(__AVX512VNNI__)
#define NAME(loop) int16_##loop
#define SUM __m512i
#define OPERAND __m512i
#define ZERO _mm512_setzero_si512()
#define DOT(sum, x, y) _mm512_dpwssd_epi32(sum, x, y)
#define OPERATIONS 64.0
#include "peak_dot.h"
#define NAME(loop) int8_##loop
#define SUM __m512i
#define OPERAND __m512i
#define ZERO _mm512_setzero_si512()
#define DOT(sum, x, y) _mm512_dpbusd_epi32(sum, x, y)
#define OPERATIONS 128.0
#include "peak_dot.h"
#elif defined(__AVX2__)
#if defined(__AVXVNNI__)
#define DOT16(sum, x, y) _mm256_dpwssd_avx_epi32(sum, x, y)
#define DOT8(sum, x, y) _mm256_dpbusd_avx_epi32(sum, x, y)
#else
#define DOT16(sum, x, y) _mm256_add_epi32(sum, _mm256_madd_epi16(x, y))
#define DOT8(sum, x, y)                                                        \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, y),        \
                                            _mm256_set1_epi16(1)))
#endif
#define NAME(loop) int16_##loop
#define SUM __m256i
#define OPERAND __m256i
#define ZERO _mm256_setzero_si256()
#define DOT(sum, x, y) DOT16(sum, x, y)
#define OPERATIONS 32.0
#include "peak_dot.h"
#define NAME(loop) int8_##loop
#define SUM __m256i
#define OPERAND __m256i
#define ZERO _mm256_setzero_si256()
#define DOT(sum, x, y) DOT8(sum, x, y)
#define OPERATIONS 64.0
#include "peak_dot.h"
#else
static work *const int16_loops[] = {NULL, NULL, NULL};
static work *const int8_loops[] = {NULL, NULL, NULL};
#endif

#if defined(__AMX_BF16__)
static int amx_begin(void)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) {
        return -1;
    }
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = 16;
    }
    /* gcc 12 tells the optimiser of the first 8 bytes only. */
    __asm__ volatile("" ::"m"(config) : "memory");
    _tile_loadconfig(&config);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    return 0;
}

static double amx_registers(void *argument, int thread)
{
    (void)argument;
    (void)thread;
    if (amx_begin() < 0) {
        return 0.0;
    }
    for (long t = 0; t < TURNS / 8; t++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 16384.0 * 4 * (TURNS / 8);
}

/* 2 x 2 tiles of sums, whose operands are loaded for each product. */
static double amx_product(void *argument, int thread)
{
    const char *x = operands[thread];
    (void)argument;
    if (amx_begin() < 0) {
        return 0.0;
    }
    for (long t = 0; t < TURNS / 8; t++) {
        _tile_loadd(4, x, 64);
        _tile_loadd(6, x + 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, x + 2048, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + 3072, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 16384.0 * 4 * (TURNS / 8);
}

static work *const amx_loops[] = {amx_registers, amx_product, NULL};
#else
static work *const amx_loops[] = {NULL, NULL, NULL};
#endif

/* The best of the loops that there are; 0 where the processor has none. */
static double best(work *const loops[3], int n_threads)
{
    double most = 0.0;
    for (int i = 0; i < 3; i++) {
        double found = loops[i] == NULL ? 0.0 : rate(loops[i], NULL, n_threads);
        most = found > most ? found : most;
    }
    return most;
}

double peak_fma(int n_threads)
{
    return best(fma_loops, n_threads);
}

double peak_bf16(int n_threads)
{
    return best(bf16_loops, n_threads);
}

double peak_amx(int n_threads)
{
    return best(amx_loops, n_threads);
}

double peak_int16(int n_threads)
{
    return best(int16_loops, n_threads);
}

double peak_int8(int n_threads)
{
    return best(int8_loops, n_threads);
}

/* ---- reads ------------------------------------------------------------------
 */

struct area {
    const char *memory;
    size_t bytes; /* of each thread */
    long turns;   /* a small area is read again and again */
};

static double read_scalar(void *argument, int thread)
{
    const struct area *area = argument;
    const uint64_t *p =
        (const uint64_t *)(area->memory + (size_t)thread * area->bytes);
    uint64_t sum[16] = {0};
    for (long t = 0; t < area->turns; t++) {
        for (size_t i = 0; i + 16 <= area->bytes / 8; i += 16) {
            for (int j = 0; j < 16; j++) {
                sum[j] += p[i + (size_t)j];
            }
        }
        __asm__ volatile("" : "+r"(p)::"memory");
    }
    for (int j = 1; j < 16; j++) {
        sum[0] += sum[j];
    }
    __asm__ volatile("" ::"r"(sum[0]));
    return (double)area->bytes * (double)area->turns;
}

/* Four places at once, each fetched ahead: more reads are under way. */
static double read_streams(void *argument, int thread)
{
    const struct area *area = argument;
    const char *p = area->memory + (size_t)thread * area->bytes;
    size_t part = area->bytes / 4 / 64 * 64;
    uint64_t sum = 0;
    for (long t = 0; t < area->turns; t++) {
        for (size_t i = 0; i < part; i += 64) {
            for (int j = 0; j < 4; j++) {
                const char *line = p + (size_t)j * part + i;
                __builtin_prefetch(line + 1024, 0, 3);
                for (int k = 0; k < 8; k++) {
                    sum += ((const uint64_t *)line)[k];
                }
            }
        }
        __asm__ volatile("" : "+r"(p)::"memory");
    }
    __asm__ volatile("" ::"r"(sum));
    return (double)(4 * part) * (double)area->turns;
}

#define LEAST_READ ((size_t)1 << 28) /* of one measurement */

/* An area of so many bytes, at least 1,024 of each thread. */
double peak_read(int n_threads, size_t bytes)
{
    struct area area = {NULL, bytes / (size_t)n_threads / 256 * 256, 1};
    size_t huge = (size_t)2 << 20;
    char *memory;
    double result = 0.0, streams;
    area.bytes = area.bytes < 1024 ? 1024 : area.bytes;
    bytes = (size_t)n_threads * area.bytes;
    area.turns = (long)(LEAST_READ / bytes) + 1;
    memory = aligned_alloc(huge, (bytes + huge - 1) / huge * huge);
    if (memory != NULL) {
        madvise(memory, bytes, MADV_HUGEPAGE); /* where it is refused: none */
        memset(memory, 1, bytes);
        area.memory = memory;
        result = rate(read_scalar, &area, n_threads);
        streams = rate(read_streams, &area, n_threads);
        result = streams > result ? streams : result;
        free(memory);
    }
    return result;
}
