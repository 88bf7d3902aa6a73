/* Three loops over one kind of dot product; peak.c includes this once for each.
 *
 * Defined before: NAME(loop), SUM and OPERAND (vector types), ZERO, DOT(sum, x,
 * y) and OPERATIONS, the operations of one DOT. No one shape is the fastest
 * with every processor and compiler.
 */

/* Operands that stay in registers. */
static double NAME(registers)(void *argument, int thread)
{
    (void)argument;
    OPERAND x = *(const OPERAND *)operands[thread];
    EACH(BEGIN)
    for (long t = 0; t < TURNS; t++) {
/* x may have changed: a product of its own for each sum. */
#define STEP(i, row)                                                           \
    __asm__ volatile("" : "+v"(x));                                            \
    INTO(i, x, x)
        EACH(STEP)
#undef STEP
    }
    return (OPERATIONS)*SUMS * TURNS;
}

/* One operand of each from the cache. */
static double NAME(loads)(void *argument, int thread)
{
    (void)argument;
    const OPERAND *y = (const OPERAND *)operands[thread];
    OPERAND x = y[0];
    EACH(BEGIN)
    for (long t = 0; t < TURNS; t++) {
        __asm__ volatile("" : "+r"(y)::"memory");
#define STEP(i, row) INTO(i, x, y[i])
        EACH(STEP)
#undef STEP
    }
    return (OPERATIONS)*SUMS * TURNS;
}

/* The shape of a matrix product: 4 rows, every loaded column used 4 times. */
static double NAME(product)(void *argument, int thread)
{
    (void)argument;
    const OPERAND *x = (const OPERAND *)operands[thread];
    EACH(BEGIN)
    for (long t = 0; t < TURNS; t++) {
        __asm__ volatile("" : "+r"(x)::"memory");
        OPERAND row_0 = x[0], row_1 = x[1], row_2 = x[2], row_3 = x[3];
#define STEP(i, row) INTO(i, row_##row, x[4 + i / 4])
        EACH(STEP)
#undef STEP
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
