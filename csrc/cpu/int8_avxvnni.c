/* Products in integers for AVX-VNNI: int8_avx2.c with that instruction set. */
#if defined(__x86_64__)
#include "int8_avx2.c"
#else
typedef int int8_avxvnni_is_empty;
#endif
