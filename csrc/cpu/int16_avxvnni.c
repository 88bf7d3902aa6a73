/* Products in 16-bit integers for AVX-VNNI: int16_avx2.c with that instruction
 * set. */
#if defined(__x86_64__)
#include "int16_avx2.c"
#else
typedef int int16_avxvnni_is_empty;
#endif
