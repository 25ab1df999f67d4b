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
enum { V = 16, LANES = 4, COLUMNS = 2, IS_UNSIGNED = 0 };
#define MAX_ROWS 4
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
FUNCTION VF fma_f(VF a, VF b, VF c) { return a * b + c; }
FUNCTION VF spread_f(const float *p, long n, VI spread) {
  (void)n;  // lanes past the last block have no values
  return n == 1 ? set_f(*p) : (VF){p[spread[0]], p[spread[1]], p[spread[2]], p[spread[3]]};
}
FUNCTION VI zero_i(void) { return (VI){0}; }
FUNCTION VI load_i(const int *p) {
  VI a;
  memcpy(&a, p, 16);
  return a;
}
FUNCTION void store_i(int *p, VI a) { memcpy(p, &a, 16); }
FUNCTION VF to_float(VI a) { return __builtin_convertvector(a, VF); }
FUNCTION VB load_b(const unsigned char *p, long n) {
  VB a = {0};
  memcpy(&a, p, n);
  return a;
}
FUNCTION VB all_b(const unsigned char *p) { return load_b(p, V); }
FUNCTION VB four_b(const unsigned char *p) {
  int32_t value;
  memcpy(&value, p, 4);
  return (VB)(VI){value, value, value, value};
}
FUNCTION VB low_half(VB w) { return w & 15; }
FUNCTION VB high_half(VB w) { return w >> 4; }
#ifdef NEON
FUNCTION VI dot8(VB w, VB x, VI sum) {
  return (VI)vdotq_s32((int32x4_t)sum, (int8x16_t)(w ^ 0x80), (int8x16_t)x);
}
FUNCTION VI dot4(VB low, VB high, VB x0, VB x1) {
  int32x4_t sum = vdotq_s32(vdupq_n_s32(0), (int8x16_t)low, (int8x16_t)x0);
  return (VI)vdotq_s32(sum, (int8x16_t)high, (int8x16_t)x1);
}
#else
// In 16 bits, the sums of two products are at most 2 * 128 * 127.
FUNCTION VH pairs(VB a, VB b) {
  VH low = ((VH)a << 8 >> 8) * ((VH)b << 8 >> 8);
  return low + ((VH)a >> 8) * ((VH)b >> 8);
}
FUNCTION VI in_pairs(VH sums) { return ((VI)sums << 16 >> 16) + ((VI)sums >> 16); }
FUNCTION VI dot8(VB w, VB x, VI sum) { return sum + in_pairs(pairs(w ^ 0x80, x)); }
FUNCTION VI dot4(VB low, VB high, VB x0, VB x1) {
  return in_pairs(pairs(low, x0) + pairs(high, x1));
}
#endif
FUNCTION VF halves_f(unsigned long long packed) {
  return (VF){packed & 15, packed >> 4 & 15, packed >> 8 & 15, packed >> 12 & 15};
}
FUNCTION VF add_lanes(const VF v[4]) {
  VF sums;
  for (int i = 0; i < 4; i++) sums[i] = (v[i][0] + v[i][2]) + (v[i][1] + v[i][3]);
  return sums;
}
FUNCTION void interleave(const signed char *w, long stride, unsigned char *to) {
  for (int c = 0; c < V; c++)
    for (int i = 0; i < 4; i++) to[4 * c + i] = (unsigned char)w[i * stride + c] ^ 0x80;
}
FUNCTION void untangle(VI a[4]) { (void)a; }

#include "loops.h"

#ifdef NEON
const Instructions neon = {"neon", V, layout, quantise, multiply};
#else
const Instructions portable = {"portable", V, layout, quantise, multiply};
#endif
#endif
