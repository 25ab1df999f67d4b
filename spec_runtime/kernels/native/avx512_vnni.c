// Products on x86-64 with AVX-512 VNNI.
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")))
#define FUNCTION TARGET static inline __attribute__((always_inline))
enum { V = 64, LANES = 16, IS_UNSIGNED = 1 };
typedef __m512i VB, VI;
typedef __m512 VF;

FUNCTION VF set_f(float value) { return _mm512_set1_ps(value); }
FUNCTION VF load_f(const float *p) { return _mm512_loadu_ps(p); }
FUNCTION VF mul_f(VF a, VF b) { return _mm512_mul_ps(a, b); }
FUNCTION VF add_f(VF a, VF b) { return _mm512_add_ps(a, b); }
FUNCTION VF fma_f(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
// Adds neighbours in each part of 16 bytes, those of a first; then such parts.
FUNCTION VF add_pairs(VF a, VF b) {
  return add_f(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
}
FUNCTION VF add_parts(VF a, VF b) {
  return add_f(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}
FUNCTION float sum_f(VF a) { return _mm512_reduce_add_ps(a); }
FUNCTION __mmask16 first(long n) { return (__mmask16)((1u << n) - 1); }
FUNCTION VF first_f(const float *p, long n) { return _mm512_maskz_loadu_ps(first(n), p); }
FUNCTION void store_first(float *p, VF a, long n) { _mm512_mask_storeu_ps(p, first(n), a); }
FUNCTION VI set_i(int value) { return _mm512_set1_epi32(value); }
FUNCTION VI load_i(const int *p) { return _mm512_loadu_si512(p); }
FUNCTION void store_i(int *p, VI a) { _mm512_storeu_si512(p, a); }
FUNCTION VF to_float(VI a) { return _mm512_cvtepi32_ps(a); }
FUNCTION VB all_b(const unsigned char *p) { return _mm512_loadu_si512(p); }
FUNCTION VB four_b(const unsigned char *p) { return _mm512_set1_epi32(*(const int *)p); }
FUNCTION VB low_half(VB w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
FUNCTION VB high_half(VB w) { return low_half(_mm512_srli_epi16(w, 4)); }
// The sums of four products, at most 255 * 127 each, are added in 32 bits.
FUNCTION VI dot8(VB w, VB x, VI sum) { return _mm512_dpbusd_epi32(sum, w, x); }
FUNCTION VI add4(VB low, VB high, VB x0, VB x1, VI sum) { return dot8(high, x1, dot8(low, x0, sum)); }
FUNCTION VI sum4(VI sum) { return sum; }

// Turns 16 rows of 16 words of four bytes into 16 vectors: vector i has word i of each row.
FUNCTION void transpose(const unsigned char *rows, long stride, unsigned char *to) {
  VB t[4][4];
  for (int q = 0; q < 4; q++) {
    VB row[4];
    for (int j = 0; j < 4; j++) row[j] = all_b(rows + (4 * q + j) * stride);
    VB low0 = _mm512_unpacklo_epi32(row[0], row[1]), high0 = _mm512_unpackhi_epi32(row[0], row[1]);
    VB low1 = _mm512_unpacklo_epi32(row[2], row[3]), high1 = _mm512_unpackhi_epi32(row[2], row[3]);
    t[q][0] = _mm512_unpacklo_epi64(low0, low1);
    t[q][1] = _mm512_unpackhi_epi64(low0, low1);
    t[q][2] = _mm512_unpacklo_epi64(high0, high1);
    t[q][3] = _mm512_unpackhi_epi64(high0, high1);
  }
  for (int i = 0; i < 4; i++) {
    VB even0 = _mm512_shuffle_i32x4(t[0][i], t[1][i], 0x88);
    VB even1 = _mm512_shuffle_i32x4(t[2][i], t[3][i], 0x88);
    VB odd0 = _mm512_shuffle_i32x4(t[0][i], t[1][i], 0xDD);
    VB odd1 = _mm512_shuffle_i32x4(t[2][i], t[3][i], 0xDD);
    _mm512_store_si512(to + 64 * i, _mm512_shuffle_i32x4(even0, even1, 0x88));
    _mm512_store_si512(to + 64 * (4 + i), _mm512_shuffle_i32x4(odd0, odd1, 0x88));
    _mm512_store_si512(to + 64 * (8 + i), _mm512_shuffle_i32x4(even0, even1, 0xDD));
    _mm512_store_si512(to + 64 * (12 + i), _mm512_shuffle_i32x4(odd0, odd1, 0xDD));
  }
}

// Makes of four rows of 64 columns four vectors, each with four values of 16 columns: those of
// 4 * j to 4 * j + 3 in each quarter of vector j.
FUNCTION void interleave(const signed char *w, long stride, unsigned char *to) {
  VB row[4], flip = _mm512_set1_epi8((char)0x80);
  for (int i = 0; i < 4; i++)
    row[i] = _mm512_xor_si512(_mm512_loadu_si512(w + i * stride), flip);
  VB low0 = _mm512_unpacklo_epi8(row[0], row[1]), high0 = _mm512_unpackhi_epi8(row[0], row[1]);
  VB low1 = _mm512_unpacklo_epi8(row[2], row[3]), high1 = _mm512_unpackhi_epi8(row[2], row[3]);
  _mm512_store_si512(to, _mm512_unpacklo_epi16(low0, low1));
  _mm512_store_si512(to + 64, _mm512_unpackhi_epi16(low0, low1));
  _mm512_store_si512(to + 128, _mm512_unpacklo_epi16(high0, high1));
  _mm512_store_si512(to + 192, _mm512_unpackhi_epi16(high0, high1));
}

// Puts sums of columns that `interleave` mixed into their order.
FUNCTION void untangle(VI a[4]) {
  VI even0 = _mm512_shuffle_i32x4(a[0], a[1], 0x44), odd0 = _mm512_shuffle_i32x4(a[0], a[1], 0xEE);
  VI even1 = _mm512_shuffle_i32x4(a[2], a[3], 0x44), odd1 = _mm512_shuffle_i32x4(a[2], a[3], 0xEE);
  a[0] = _mm512_shuffle_i32x4(even0, even1, 0x88);
  a[1] = _mm512_shuffle_i32x4(even0, even1, 0xDD);
  a[2] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
  a[3] = _mm512_shuffle_i32x4(odd0, odd1, 0xDD);
}

// Adds four neighbours of each of 16 vectors: sum c of vector i is that of part i of vector c.
FUNCTION void add_fours(const VI parts[16], VI sums[4]) {
  for (int q = 0; q < 4; q++) {
    VI pair[2];
    for (int j = 0; j < 2; j++) {
      VI a = parts[4 * q + 2 * j], b = parts[4 * q + 2 * j + 1];
      pair[j] = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
    sums[q] = _mm512_add_epi32(_mm512_unpacklo_epi64(pair[0], pair[1]),
                               _mm512_unpackhi_epi64(pair[0], pair[1]));
  }
  untangle(sums);
}

#define HAS_FOURS
#define FLOAT_ROWS 8
#include "loops.h"

#include "attention.h"

#include "before.h"

const Instructions avx512_vnni = {"avx512-vnni", layout, prepare, quantise, multiply, attend};
#endif
