/* What this machine can do: dot products in registers alone, and plain reads.
 *
 * Built by machine.py for the machine it runs on (-march=native); each function
 * runs the same loop on n threads and returns operations or bytes per second
 * of all of them together.
 */
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256

typedef double work(void *argument, int thread);

struct start {
    work *run;
    void *argument;
    int thread;
    double amount;
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *begin(void *argument)
{
    struct start *s = argument;
    s->amount = s->run(s->argument, s->thread);
    return NULL;
}

static double rate(work *run, void *argument, int n_threads)
{
    pthread_t threads[MAX_THREADS];
    struct start starts[MAX_THREADS];
    double best = 0;
    for (int turn = 0; turn < 5; turn++) {
        double amount = 0, since = now();
        for (int i = 0; i < n_threads; i++) {
            starts[i] = (struct start){run, argument, i, 0};
            pthread_create(&threads[i], NULL, begin, &starts[i]);
        }
        for (int i = 0; i < n_threads; i++) {
            pthread_join(threads[i], NULL);
            amount += starts[i].amount;
        }
        double this_rate = amount / (now() - since);
        best = this_rate > best ? this_rate : best;
    }
    return best;
}

/* ---- dot products --------------------------------------------------------- */

#define TURNS 4000000L

static double fma_loop(void *argument, int thread)
{
    (void)argument;
    (void)thread;
#if defined(__AVX512F__)
    __m512 x = _mm512_set1_ps(1e-9f), a[12];
    for (int i = 0; i < 12; i++) {
        a[i] = x;
    }
    for (long t = 0; t < TURNS; t++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            a[i] = _mm512_fmadd_ps(a[i], x, x);
            __asm__ volatile("" : "+v"(a[i]));
        }
    }
    return 32.0 * 12 * TURNS;
#elif defined(__AVX2__)
    __m256 x = _mm256_set1_ps(1e-9f), a[12];
    for (int i = 0; i < 12; i++) {
        a[i] = x;
    }
    for (long t = 0; t < TURNS; t++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            a[i] = _mm256_fmadd_ps(a[i], x, x);
            __asm__ volatile("" : "+x"(a[i]));
        }
    }
    return 16.0 * 12 * TURNS;
#else
    return 0.0;
#endif
}

static double bf16_loop(void *argument, int thread)
{
    (void)argument;
    (void)thread;
#if defined(__AVX512BF16__)
    __m512bh x = (__m512bh)_mm512_set1_epi32(0);
    __m512 a[12];
    for (int i = 0; i < 12; i++) {
        a[i] = _mm512_setzero_ps();
    }
    for (long t = 0; t < TURNS; t++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            a[i] = _mm512_dpbf16_ps(a[i], x, x);
            __asm__ volatile("" : "+v"(a[i]));
        }
    }
    return 64.0 * 12 * TURNS;
#else
    return 0.0;
#endif
}

static double amx_loop(void *argument, int thread)
{
    (void)argument;
    (void)thread;
#if defined(__AMX_BF16__)
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) {
        return 0.0;
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
    for (long t = 0; t < TURNS / 8; t++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 16384.0 * 4 * (TURNS / 8);
#else
    return 0.0;
#endif
}

double peak_fma(int n_threads)
{
    return rate(fma_loop, NULL, n_threads);
}

double peak_bf16(int n_threads)
{
    return rate(bf16_loop, NULL, n_threads);
}

double peak_amx(int n_threads)
{
    return rate(amx_loop, NULL, n_threads);
}

/* ---- reads ------------------------------------------------------------------ */

struct area {
    const char *memory;
    size_t bytes; /* of each thread */
};

static double read_loop(void *argument, int thread)
{
    const struct area *area = argument;
    const uint64_t *p =
        (const uint64_t *)(area->memory + (size_t)thread * area->bytes);
    uint64_t sum[16] = {0};
    for (size_t i = 0; i + 16 <= area->bytes / 8; i += 16) {
        for (int j = 0; j < 16; j++) {
            sum[j] += p[i + (size_t)j];
        }
    }
    for (int j = 1; j < 16; j++) {
        sum[0] += sum[j];
    }
    __asm__ volatile("" ::"r"(sum[0]));
    return (double)area->bytes;
}

double peak_read(int n_threads, size_t bytes)
{
    struct area area = {NULL, bytes / (size_t)n_threads / 128 * 128};
    char *memory = malloc(bytes);
    double result = 0.0;
    if (memory != NULL) {
        memset(memory, 1, bytes);
        area.memory = memory;
        result = rate(read_loop, &area, n_threads);
        free(memory);
    }
    return result;
}
