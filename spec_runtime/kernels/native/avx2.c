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
enum { V = 32, LANES = 8 };
typedef __m256i VB, VI;
typedef __m256 VF;

FUNCTION VF set_f(float value) { return _mm256_set1_ps(value); }
FUNCTION VF load_f(const float *p) { return _mm256_loadu_ps(p); }
FUNCTION VF mul_f(VF a, VF b) { return _mm256_mul_ps(a, b); }
FUNCTION VF add_f(VF a, VF b) { return _mm256_add_ps(a, b); }
FUNCTION VF fma_f(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
// Adds neighbours in each part of 16 bytes, those of a first; then such parts.
FUNCTION VF add_pairs(VF a, VF b) { return _mm256_hadd_ps(a, b); }
FUNCTION VF add_parts(VF a, VF b) {
  return add_f(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
FUNCTION float sum_f(VF a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
FUNCTION VI first(long n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
FUNCTION VF first_f(const float *p, long n) { return _mm256_maskload_ps(p, first(n)); }
FUNCTION void store_first(float *p, VF a, long n) { _mm256_maskstore_ps(p, first(n), a); }
FUNCTION VI set_i(int value) { return _mm256_set1_epi32(value); }
FUNCTION VI load_i(const int *p) { return _mm256_loadu_si256((const __m256i *)p); }
FUNCTION void store_i(int *p, VI a) { _mm256_storeu_si256((__m256i *)p, a); }
FUNCTION VF to_float(VI a) { return _mm256_cvtepi32_ps(a); }
FUNCTION VB all_b(const unsigned char *p) { return _mm256_loadu_si256((const __m256i *)p); }
FUNCTION VB four_b(const unsigned char *p) { return _mm256_set1_epi32(*(const int *)p); }
FUNCTION VB low_half(VB w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
FUNCTION VB high_half(VB w) { return low_half(_mm256_srli_epi16(w, 4)); }
#ifdef AVX_VNNI
FUNCTION VI dot8(VB w, VB x, VI sum) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
FUNCTION VI add4(VB low, VB high, VB x0, VB x1, VI sum) { return dot8(high, x1, dot8(low, x0, sum)); }
FUNCTION VI sum4(VI sum) { return sum; }
#else
FUNCTION VI in_pairs(VI sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
// In 16 bits, the sums of two products are at most 2 * 128 * 127, with weights made signed.
FUNCTION VI dot8(VB w, VB x, VI sum) {
  VB is = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
  VI pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(is), _mm256_sign_epi8(x, is));
  return _mm256_add_epi32(sum, in_pairs(pairs));
}
// In 16 bits: of 32 values, each half of a word gets 16 products, at most 16 * 15 * 127.
FUNCTION VI add4(VB low, VB high, VB x0, VB x1, VI sum) {
  VI pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, x0), _mm256_maddubs_epi16(high, x1));
  return _mm256_add_epi16(sum, pairs);
}
FUNCTION VI sum4(VI sum) { return in_pairs(sum); }
#endif

// Turns 8 rows of 8 words of four bytes into 8 vectors: vector i has word i of each row.
FUNCTION void transpose(const unsigned char *rows, long stride, unsigned char *to) {
  VB t[2][4];
  for (int q = 0; q < 2; q++) {
    VB row[4];
    for (int j = 0; j < 4; j++) row[j] = all_b(rows + (4 * q + j) * stride);
    VB low0 = _mm256_unpacklo_epi32(row[0], row[1]), high0 = _mm256_unpackhi_epi32(row[0], row[1]);
    VB low1 = _mm256_unpacklo_epi32(row[2], row[3]), high1 = _mm256_unpackhi_epi32(row[2], row[3]);
    t[q][0] = _mm256_unpacklo_epi64(low0, low1);
    t[q][1] = _mm256_unpackhi_epi64(low0, low1);
    t[q][2] = _mm256_unpacklo_epi64(high0, high1);
    t[q][3] = _mm256_unpackhi_epi64(high0, high1);
  }
  for (int i = 0; i < 4; i++) {
    store_i((int *)(to + 32 * i), _mm256_permute2x128_si256(t[0][i], t[1][i], 0x20));
    store_i((int *)(to + 32 * (4 + i)), _mm256_permute2x128_si256(t[0][i], t[1][i], 0x31));
  }
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

// Adds four neighbours of each of 8 vectors: sum c of vector i is that of half i of vector c.
FUNCTION void add_fours(const VI parts[8], VI sums[2]) {
  VI half[2];
  for (int q = 0; q < 2; q++) {
    const VI *a = parts + 4 * q;
    half[q] = _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
  }
  sums[0] = _mm256_permute2x128_si256(half[0], half[1], 0x20);
  sums[1] = _mm256_permute2x128_si256(half[0], half[1], 0x31);
}

#define HAS_FOURS
#define FLOAT_ROWS 4
#include "loops.h"

#include "attention.h"

#include "before.h"

#ifdef AVX_VNNI
const Instructions avx_vnni = {"avx-vnni", layout, prepare, quantise, multiply, attend};
#else
const Instructions avx2 = {"avx2", layout, prepare, quantise, multiply, attend};
#endif
#endif
