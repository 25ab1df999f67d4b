// Products on 64-bit ARM with NEON's dot products.
#define NEON
#include "portable.c"
