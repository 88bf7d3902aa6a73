/* Three loops over one kind of dot product; peak.c includes this once for each.
 *
 * Defined before: NAME(loop), SUM and OPERAND (vector types), ZERO, DOT(sum, x,
 * y) and OPERATIONS, the operations of one DOT. No one shape is the fastest on
 * every processor: some run products of registers alone at less than half of
 * the speed that they reach with operands fresh from the cache.
 */

/* Operands that stay in registers. */
static double NAME(registers)(void *argument, int thread)
{
    SUM sum[SUMS];
    OPERAND x = *(const OPERAND *)operands[thread];
    (void)argument;
    for (int i = 0; i < SUMS; i++) {
        sum[i] = ZERO;
    }
    for (long t = 0; t < TURNS; t++) {
#pragma GCC unroll 24
        for (int i = 0; i < SUMS; i++) {
            sum[i] = DOT(sum[i], x, x);
            __asm__ volatile("" : "+v"(sum[i]));
        }
    }
    return (OPERATIONS)*SUMS * TURNS;
}

/* One operand of each from the cache. */
static double NAME(loads)(void *argument, int thread)
{
    SUM sum[SUMS];
    const OPERAND *y = (const OPERAND *)operands[thread];
    OPERAND x = y[0];
    (void)argument;
    for (int i = 0; i < SUMS; i++) {
        sum[i] = ZERO;
    }
    for (long t = 0; t < TURNS; t++) {
        __asm__ volatile("" : "+r"(y)::"memory");
#pragma GCC unroll 24
        for (int i = 0; i < SUMS; i++) {
            sum[i] = DOT(sum[i], x, y[i]);
            __asm__ volatile("" : "+v"(sum[i]));
        }
    }
    return (OPERATIONS)*SUMS * TURNS;
}

/* The shape of a matrix product: 4 rows, every loaded column used 4 times. */
static double NAME(product)(void *argument, int thread)
{
    SUM sum[SUMS];
    const OPERAND *x = (const OPERAND *)operands[thread];
    (void)argument;
    for (int i = 0; i < SUMS; i++) {
        sum[i] = ZERO;
    }
    for (long t = 0; t < TURNS; t++) {
        __asm__ volatile("" : "+r"(x)::"memory");
        OPERAND rows[4] = {x[0], x[1], x[2], x[3]};
#pragma GCC unroll 24
        for (int i = 0; i < SUMS; i++) {
            sum[i] = DOT(sum[i], rows[i % 4], x[4 + i / 4]);
            __asm__ volatile("" : "+v"(sum[i]));
        }
    }
    return (OPERATIONS)*SUMS * TURNS;
}

static work *const NAME(loops)[] = {NAME(registers), NAME(loads),
                                    NAME(product)};

#undef NAME
#undef SUM
#undef OPERAND
#undef ZERO
#undef DOT
#undef OPERATIONS
