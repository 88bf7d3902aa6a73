/* Which instruction sets and how many threads this process may use. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "int16.h"
#include "int8.h"

const char *rk_isa_name(rk_isa isa)
{
    static const char *const names[RK_N_ISAS] = {"portable", "avx2", "avx512",
                                                 "avx512_bf16", "amx"};
    return (unsigned)isa < RK_N_ISAS ? names[isa] : "unknown";
}

#if defined(__x86_64__)
/* AMX-TILE and AMX-BF16 by the processor, and the system's leave to use the
 * tile registers, which a process must ask for once (Linux 5.16). */
static bool amx_granted(void)
{
#if defined(__linux__) && defined(SYS_arch_prctl)
    unsigned a, b, c, d;
    const unsigned bf16 = 1u << 22, tile = 1u << 24;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bf16) &&
           (d & tile) && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}
#endif

/* __builtin_cpu_supports also asks whether the system saves the registers. */
bool rk_isa_supported(rk_isa isa)
{
    if (isa == RK_ISA_PORTABLE) {
        return true;
    }
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                  __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512dq");
    switch (isa) {
    case RK_ISA_AVX2:
        return avx2;
    case RK_ISA_AVX512:
        return avx512;
    case RK_ISA_AVX512_BF16:
        return avx512 && __builtin_cpu_supports("avx512bf16");
    case RK_ISA_AMX:
        return avx512 && __builtin_cpu_supports("avx512bf16") && amx_granted();
    default:
        return false;
    }
#else
    return false;
#endif
}

rk_isa rk_isa_best(void)
{
    rk_isa isa = (rk_isa)(RK_N_ISAS - 1);
    while (!rk_isa_supported(isa)) {
        isa--;
    }
    return isa;
}

const cpu_kernels *cpu_kernels_of(rk_isa isa)
{
    switch (isa) {
#if defined(__x86_64__)
    case RK_ISA_AVX2:
        return &cpu_kernels_avx2;
    case RK_ISA_AVX512:
        return &cpu_kernels_avx512;
    case RK_ISA_AVX512_BF16:
        return &cpu_kernels_avx512_bf16;
    case RK_ISA_AMX:
        return &cpu_kernels_amx;
#endif
    default:
        return &cpu_kernels_portable;
    }
}

/* ---- products in integers ------------------------------------------------ */

#if defined(__x86_64__)
static bool has_avxvnni(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
#endif

const cpu_int8_kernels *cpu_int8_of(rk_isa isa)
{
#if defined(__x86_64__)
    if (isa >= RK_ISA_AVX512 && __builtin_cpu_supports("avx512vnni")) {
        return &cpu_int8_avx512vnni;
    }
    if (isa >= RK_ISA_AVX2) {
        return has_avxvnni() ? &cpu_int8_avxvnni : &cpu_int8_avx2;
    }
#endif
    (void)isa;
    return &cpu_int8_portable;
}

const cpu_int16_kernels *cpu_int16_of(rk_isa isa)
{
#if defined(__x86_64__)
    if (isa >= RK_ISA_AVX512 && __builtin_cpu_supports("avx512vnni")) {
        return &cpu_int16_avx512vnni;
    }
    if (isa >= RK_ISA_AVX2) {
        return has_avxvnni() ? &cpu_int16_avxvnni : &cpu_int16_avx2;
    }
#endif
    (void)isa;
    return &cpu_int16_portable;
}

/* ---- threads ------------------------------------------------------------- */

/* First line of a file into text; false when it cannot be read. */
static bool read_line(const char *path, char *text, int size)
{
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        return false;
    }
    bool ok = fgets(text, size, file) != NULL;
    fclose(file);
    return ok;
}

/* Quota of a cgroup v2 directory in processors, rounded up; 0: none. */
static long quota_v2(const char *directory)
{
    char path[640], text[128];
    long quota, period;
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", directory);
    if (read_line(path, text, sizeof text) &&
        sscanf(text, "%ld %ld", &quota, &period) == 2 && quota > 0 &&
        period > 0) {
        return (quota + period - 1) / period;
    }
    return 0;
}

static long quota_v1(const char *directory)
{
    char path[640], text[128];
    long quota, period;
    snprintf(path, sizeof path, "/sys/fs/cgroup/cpu%s/cpu.cfs_quota_us",
             directory);
    if (!read_line(path, text, sizeof text) ||
        sscanf(text, "%ld", &quota) != 1 || quota <= 0) {
        return 0;
    }
    snprintf(path, sizeof path, "/sys/fs/cgroup/cpu%s/cpu.cfs_period_us",
             directory);
    if (!read_line(path, text, sizeof text) ||
        sscanf(text, "%ld", &period) != 1 || period <= 0) {
        return 0;
    }
    return (quota + period - 1) / period;
}

static long smaller(long a, long b)
{
    return b > 0 && b < a ? b : a;
}

/* The quotas of our own group, all groups above it, and the root (which is
 * what a container sees). */
static long limit_by_cgroup(long n)
{
    char line[512];
    n = smaller(smaller(n, quota_v2("")), quota_v1(""));
    FILE *file = fopen("/proc/self/cgroup", "r");
    if (file == NULL) {
        return n;
    }
    while (fgets(line, sizeof line, file) != NULL) {
        char *controllers = strchr(line, ':');
        char *directory = controllers ? strchr(controllers + 1, ':') : NULL;
        if (directory == NULL) {
            continue;
        }
        *directory++ = '\0';
        directory[strcspn(directory, "\n")] = '\0';
        bool v2 = controllers[1] == '\0';
        if (!v2 && strstr(controllers, "cpu") == NULL) {
            continue;
        }
        char *cut;
        do {
            n = smaller(n, v2 ? quota_v2(directory) : quota_v1(directory));
            cut = strrchr(directory, '/');
            if (cut != NULL) {
                *cut = '\0';
            }
        } while (cut != NULL);
    }
    fclose(file);
    return n;
}

static long limit_by_variable(long n, const char *name)
{
    const char *text = getenv(name);
    return text != NULL ? smaller(n, strtol(text, NULL, 10)) : n;
}

int rk_cpu_default_threads(void)
{
    long n = 0;
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        n = CPU_COUNT(&set);
    }
#endif
    if (n <= 0) {
        n = sysconf(_SC_NPROCESSORS_ONLN);
    }
    n = n < 1 ? 1 : n;
    n = limit_by_cgroup(n);
    n = limit_by_variable(n, "OMP_NUM_THREADS");
    n = limit_by_variable(n, "RKSC_NUM_THREADS");
    return (int)n;
}
