// Products on x86-64 with AVX2; with AVX_VNNI defined, with AVX-VNNI's products besides.
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#ifdef AVX_VNNI
#define TARGET __attribute__((target("avx2,fma,avxvnni")))
enum { IS_UNSIGNED = 1 };
#else
#define TARGET __attribute__((target("avx2,fma")))
enum { IS_UNSIGNED = 0 };
#endif
#define FUNCTION TARGET static inline __attribute__((always_inline))
enum { V = 32, LANES = 8, COLUMNS = 2 };
#define MAX_ROWS 4
typedef __m256i VB, VI;
typedef __m256 VF;

FUNCTION VF set_f(float value) { return _mm256_set1_ps(value); }
FUNCTION VF load_f(const float *p) { return _mm256_loadu_ps(p); }
FUNCTION VF mul_f(VF a, VF b) { return _mm256_mul_ps(a, b); }
FUNCTION VF add_f(VF a, VF b) { return _mm256_add_ps(a, b); }
FUNCTION VF fma_f(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
FUNCTION VI first(long n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
FUNCTION VF first_f(const float *p, long n) { return _mm256_maskload_ps(p, first(n)); }
FUNCTION void store_first(float *p, VF a, long n) { _mm256_maskstore_ps(p, first(n), a); }
FUNCTION VF spread_f(const float *p, long n, VI spread) {
  if (n == 1) return _mm256_broadcast_ss(p);
  __m128 few = _mm_maskload_ps(p, _mm256_castsi256_si128(first(n)));
  return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(few), spread);
}
FUNCTION VI zero_i(void) { return _mm256_setzero_si256(); }
FUNCTION VI load_i(const int *p) { return _mm256_loadu_si256((const __m256i *)p); }
FUNCTION void store_i(int *p, VI a) { _mm256_storeu_si256((__m256i *)p, a); }
FUNCTION VF to_float(VI a) { return _mm256_cvtepi32_ps(a); }
FUNCTION VB all_b(const unsigned char *p) { return _mm256_loadu_si256((const __m256i *)p); }
FUNCTION VB load_b(const unsigned char *p, long n) {
  if (n == V) return all_b(p);
  unsigned char few[V] = {0};
  memcpy(few, p, n);
  return all_b(few);
}
FUNCTION VB four_b(const unsigned char *p) { return _mm256_set1_epi32(*(const int *)p); }
FUNCTION VB low_half(VB w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
FUNCTION VB high_half(VB w) { return low_half(_mm256_srli_epi16(w, 4)); }
#ifdef AVX_VNNI
FUNCTION VI dot8(VB w, VB x, VI sum) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
FUNCTION VI dot4(VB low, VB high, VB x0, VB x1) { return dot8(high, x1, dot8(low, x0, zero_i())); }
#else
FUNCTION VI in_pairs(VI sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
// In 16 bits, the sums of two products are at most 2 * 128 * 127, with weights made signed.
FUNCTION VI dot8(VB w, VB x, VI sum) {
  VB is = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
  VI pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(is), _mm256_sign_epi8(x, is));
  return _mm256_add_epi32(sum, in_pairs(pairs));
}
// In 16 bits, the sums of four products are at most 4 * 15 * 127.
FUNCTION VI dot4(VB low, VB high, VB x0, VB x1) {
  return in_pairs(_mm256_add_epi16(_mm256_maddubs_epi16(low, x0), _mm256_maddubs_epi16(high, x1)));
}
#endif
FUNCTION VF halves_f(unsigned long long packed) {
  __m128i v = _mm_cvtsi64_si128((long long)packed), mask = _mm_set1_epi8(15);
  __m128i low = _mm_and_si128(v, mask), high = _mm_and_si128(_mm_srli_epi16(v, 4), mask);
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)));
}

// Adds the lanes of each of 8 vectors: lane i of the result is the sum of vector i.
FUNCTION VF add_lanes(const VF v[8]) {
  VF half[2];
  for (int i = 0; i < 2; i++) {
    const VF *a = v + 4 * i;
    VF ab = add_f(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1]));
    VF cd = add_f(_mm256_unpacklo_ps(a[2], a[3]), _mm256_unpackhi_ps(a[2], a[3]));
    __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
    half[i] = add_f(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                    _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  }
  return add_f(_mm256_permute2f128_ps(half[0], half[1], 0x20),
               _mm256_permute2f128_ps(half[0], half[1], 0x31));
}

// Makes of four rows of 32 columns four vectors, each with four values of 8 columns: those of
// 4 * j to 4 * j + 3 in each half of vector j.
FUNCTION void interleave(const signed char *w, long stride, unsigned char *to) {
  VB row[4], flip = _mm256_set1_epi8((char)0x80);
  for (int i = 0; i < 4; i++)
    row[i] = _mm256_xor_si256(all_b((const unsigned char *)w + i * stride), flip);
  VB low0 = _mm256_unpacklo_epi8(row[0], row[1]), high0 = _mm256_unpackhi_epi8(row[0], row[1]);
  VB low1 = _mm256_unpacklo_epi8(row[2], row[3]), high1 = _mm256_unpackhi_epi8(row[2], row[3]);
  _mm256_store_si256((__m256i *)to, _mm256_unpacklo_epi16(low0, low1));
  _mm256_store_si256((__m256i *)(to + 32), _mm256_unpackhi_epi16(low0, low1));
  _mm256_store_si256((__m256i *)(to + 64), _mm256_unpacklo_epi16(high0, high1));
  _mm256_store_si256((__m256i *)(to + 96), _mm256_unpackhi_epi16(high0, high1));
}

// Puts sums of columns that `interleave` mixed into their order.
FUNCTION void untangle(VI a[4]) {
  VI low0 = _mm256_permute2x128_si256(a[0], a[1], 0x20);
  VI low1 = _mm256_permute2x128_si256(a[2], a[3], 0x20);
  VI high0 = _mm256_permute2x128_si256(a[0], a[1], 0x31);
  VI high1 = _mm256_permute2x128_si256(a[2], a[3], 0x31);
  a[0] = low0, a[1] = low1, a[2] = high0, a[3] = high1;
}

#include "loops.h"

#ifdef AVX_VNNI
const Instructions avx_vnni = {"avx-vnni", V, layout, quantise, multiply};
#else
const Instructions avx2 = {"avx2", V, layout, quantise, multiply};
#endif
#endif
