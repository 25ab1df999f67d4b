// Products in vectors of 16 bytes, which compilers turn into what any CPU has; with NEON defined,
// with ARM's dot products.
#if !defined(NEON) || defined(__aarch64__)
#include <stdint.h>
#include <string.h>

#ifdef NEON
#include <arm_neon.h>
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#else
#define TARGET
#endif
#define FUNCTION TARGET static inline __attribute__((always_inline))
enum { V = 16, LANES = 4, IS_UNSIGNED = 0 };
typedef uint8_t VB __attribute__((vector_size(16)));
typedef int16_t VH __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
typedef float VF __attribute__((vector_size(16)));

FUNCTION VF set_f(float value) { return (VF){value, value, value, value}; }
FUNCTION VF first_f(const float *p, long n) {
  VF a = {0};
  memcpy(&a, p, 4 * n);
  return a;
}
FUNCTION VF load_f(const float *p) { return first_f(p, 4); }
FUNCTION void store_first(float *p, VF a, long n) { memcpy(p, &a, 4 * n); }
FUNCTION VF mul_f(VF a, VF b) { return a * b; }
FUNCTION VF add_f(VF a, VF b) { return a + b; }
#ifdef NEON
FUNCTION VF fma_f(VF a, VF b, VF c) { return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
FUNCTION VF fma_f(VF a, VF b, VF c) { return a * b + c; }
// Of a product that was rounded, the lowest bit is set, see attention.h.
#define add_term(a, b, c) ((VF)((VI)((a) * (b)) | 1) + (c))
#endif
FUNCTION VF add_pairs(VF a, VF b) {  // neighbours, those of a first
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
}
FUNCTION VF add_parts(VF a, VF b) { return (void)b, a; }  // there is one
FUNCTION float sum_f(VF a) { return (a[0] + a[2]) + (a[1] + a[3]); }
FUNCTION VI set_i(int value) { return (VI){value, value, value, value}; }
FUNCTION VI load_i(const int *p) {
  VI a;
  memcpy(&a, p, 16);
  return a;
}
FUNCTION void store_i(int *p, VI a) { memcpy(p, &a, 16); }
FUNCTION VF to_float(VI a) { return __builtin_convertvector(a, VF); }
FUNCTION VB all_b(const unsigned char *p) { return (VB)load_i((const int *)p); }
FUNCTION VB four_b(const unsigned char *p) {
  int32_t value;
  memcpy(&value, p, 4);
  return (VB)set_i(value);
}
FUNCTION VB low_half(VB w) { return w & 15; }
FUNCTION VB high_half(VB w) { return w >> 4; }
#ifdef NEON
FUNCTION VI dot8(VB w, VB x, VI sum) {
  return (VI)vdotq_s32((int32x4_t)sum, (int8x16_t)(w ^ 0x80), (int8x16_t)x);
}
FUNCTION VI add4(VB low, VB high, VB x0, VB x1, VI sum) {
  int32x4_t half = vdotq_s32((int32x4_t)sum, (int8x16_t)low, (int8x16_t)x0);
  return (VI)vdotq_s32(half, (int8x16_t)high, (int8x16_t)x1);
}
FUNCTION VI sum4(VI sum) { return sum; }
#else
// In 16 bits, the sums of two products are at most 2 * 128 * 127.
FUNCTION VH pairs(VB a, VB b) {
  VH low = ((VH)a << 8 >> 8) * ((VH)b << 8 >> 8);
  return low + ((VH)a >> 8) * ((VH)b >> 8);
}
FUNCTION VI in_pairs(VH sums) { return ((VI)sums << 16 >> 16) + ((VI)sums >> 16); }
FUNCTION VI dot8(VB w, VB x, VI sum) { return sum + in_pairs(pairs(w ^ 0x80, x)); }
// Of 32 values, each half of a word gets 16 products, at most 16 * 15 * 127.
FUNCTION VI add4(VB low, VB high, VB x0, VB x1, VI sum) {
  return (VI)((VH)sum + pairs(low, x0) + pairs(high, x1));
}
FUNCTION VI sum4(VI sum) { return in_pairs((VH)sum); }
#endif
FUNCTION void transpose(const unsigned char *rows, long stride, unsigned char *to) {
  for (int c = 0; c < LANES; c++)
    for (int i = 0; i < LANES; i++) memcpy(to + V * i + 4 * c, rows + c * stride + 4 * i, 4);
}
FUNCTION void interleave(const signed char *w, long stride, unsigned char *to) {
  for (int c = 0; c < V; c++)
    for (int i = 0; i < 4; i++) to[4 * c + i] = (unsigned char)w[i * stride + c] ^ 0x80;
}
FUNCTION void untangle(VI a[4]) { (void)a; }

#ifdef NEON
#define FLOAT_ROWS 8
#else
#define FLOAT_ROWS 4
#endif
#include "loops.h"

#include "attention.h"

#include "before.h"

#ifdef NEON
const Instructions neon = {"neon", layout, prepare, quantise, multiply, attend};
#else
const Instructions portable = {"portable", layout, prepare, quantise, multiply, attend};
#endif
#endif
