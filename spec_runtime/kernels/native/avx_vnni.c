// Products on x86-64 with AVX-VNNI, on CPUs without AVX-512.
#define AVX_VNNI
#include "avx2.c"
