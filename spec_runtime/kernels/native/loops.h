// Multiplies quantised rows with weights, in terms of an instruction set's vectors.
//
// Included once for each instruction set, which has defined before:
//   V, LANES          bytes, and int32 or float lanes, of a vector
//   VB, VI, VF        vectors of bytes, int32, float
//   MAX_ROWS, COLUMNS rows and columns of weights whose sums are kept in registers
//   IS_UNSIGNED       whether dot8 takes weights as unsigned, so that sums begin at -128 * sum(x)
//   TARGET            the attribute of all functions
//   and the functions on these vectors that are used below.
// A row's float operations come in one order, whatever rows and columns are computed beside it:
// its results are the same bit for bit.
#include <string.h>

#include "few_rows.h"

#define INLINE TARGET static inline __attribute__((always_inline))
#define MAGIC 12582912.0f  // 1.5 * 2^23: added to a float, its lowest bits are the nearest integer
enum { SLAB = 256, MANY = 32, ALIGNED = 64, MAGIC_BITS = 0x4B400000, INFINITE = 0x7F800000 };

INLINE int64_t up_to(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

TARGET static Record layout(const Product *p) {
  int64_t group = p->bits == 4 ? 2 * V : V;
  int64_t values = up_to(p->K, p->bits == 0 ? 4 : group < ACTIVATIONS ? ACTIVATIONS : group);
  Record l = {.lanes = p->bits == 0 ? 1 : values / (p->bits == 4 ? 8 : 4)};
  l.scale_at = up_to(values, ALIGNED);
  l.start_at = l.scale_at + up_to(4 * l.lanes, ALIGNED);
  l.sum_at = l.start_at + (p->bits == 4 ? 0 : up_to(4 * l.lanes, ALIGNED));
  int has_sums = p->bits != 0 && (p->zero || p->minimum);
  l.size = l.sum_at + (has_sums ? up_to(4 * p->blocks, ALIGNED) : 0);
  return l;
}

// Returns the largest magnitude of n values as the bits of a float; of NaN, more than INFINITE.
INLINE int32_t largest(const float *x, int64_t n) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7FFFFFFF;
    most = bits > most ? bits : most;
  }
  return most;
}

INLINE int8_t nearest(float value) {
  float moved = value + MAGIC;
  int32_t bits;
  memcpy(&bits, &moved, 4);
  return (int8_t)(bits - MAGIC_BITS);
}

// Quantises a row with one scale, as QuantizeLinear does x / max|x| with a scale of 1 / 127.
INLINE void quantise_whole(const Product *p, const Record *l, const float *x, uint8_t *record) {
  int8_t *q = (int8_t *)record;
  int32_t most = largest(x, p->K), sum = 0;
  memcpy(record + l->scale_at, &most, 4);
  if (most == 0 || most >= INFINITE) {
    memset(q, 0, l->scale_at);
  } else {
    float size, step = 1.0f / 127;
    memcpy(&size, &most, 4);
    for (int64_t k = 0; k < p->K; k++) q[k] = nearest(x[k] / size / step);
    for (int64_t k = 0; k < p->K; k++) sum += q[k];
    memset(q + p->K, 0, l->scale_at - p->K);
  }
  sum *= -128;
  memcpy(record + l->start_at, &sum, 4);
}

TARGET static void quantise(const Product *p, const Record *l, const float *x, uint8_t *record) {
  if (p->bits == 0) {
    quantise_whole(p, l, x, record);
    return;
  }
  float *scales = (float *)(record + l->scale_at), *sums = (float *)(record + l->sum_at);
  int32_t *start = (int32_t *)(record + l->start_at);
  const int64_t lane = p->bits == 4 ? 8 : 4;
  memset(record, 0, l->size);
  for (int64_t k = 0; k < p->K; k += ACTIVATIONS) {
    int64_t n = p->K - k < ACTIVATIONS ? p->K - k : ACTIVATIONS;
    float values[ACTIVATIONS] = {0}, size;
    int8_t q[ACTIVATIONS] = {0};
    memcpy(values, x + k, n * sizeof(float));
    int32_t most = largest(values, ACTIVATIONS);
    memcpy(&size, &most, 4);
    float scale = size / 127;
    if (most < INFINITE && size > 1e-30f) {  // NaN and infinity stay in the scale
      float inverse = 127 / size;
      for (int i = 0; i < ACTIVATIONS; i++) q[i] = nearest(values[i] * inverse);
    }
    if (p->bits == 4) {
      uint8_t *to = record + k / (2 * V) * (2 * V) + k % (2 * V) / 2;
      for (int i = 0; i < ACTIVATIONS / 2; i++) to[i] = (uint8_t)q[2 * i];
      for (int i = 0; i < ACTIVATIONS / 2; i++) to[V + i] = (uint8_t)q[2 * i + 1];
    } else {
      memcpy(record + k, q, ACTIVATIONS);
      for (int i = 0; i < ACTIVATIONS / 4; i++)
        start[k / 4 + i] = -128 * (q[4 * i] + q[4 * i + 1] + q[4 * i + 2] + q[4 * i + 3]);
    }
    for (int i = 0; i < ACTIVATIONS / lane; i++) scales[k / lane + i] = scale;
    if (l->size == l->sum_at) continue;
    for (int half = 0; half < n / 16; half++) {
      int32_t sum = 0;
      for (int i = 0; i < 16; i++) sum += q[16 * half + i];
      sums[(k + 16 * half) / p->block] += scale * (float)sum;
    }
  }
}

// Leaves the sums of C columns and R rows in vectors, whose lanes are still to be added.
INLINE void tile(const Product *p, const Record *l, const uint8_t *records, int64_t n, VI spread,
                 VF (*sums)[MAX_ROWS], const int bits, const int C, const int R) {
  const int64_t group = bits == 4 ? 2 * V : V, length = p->K * bits / 8;
  const int64_t per_group = group > p->block ? group / p->block : 1;
  VF acc[COLUMNS][MAX_ROWS];
  const uint8_t *weight[COLUMNS], *zero[COLUMNS];
  const float *scale[COLUMNS];
  for (int c = 0; c < C; c++) {
    int64_t column = n + c < p->N ? n + c : p->N - 1;
    weight[c] = p->weight + column * length;
    scale[c] = p->scale + column * p->blocks;
    zero[c] = p->zero ? p->zero + column * ((p->blocks + 1) / 2) : 0;
    for (int r = 0; r < R; r++) acc[c][r] = set_f(0);
  }
  for (int64_t g = 0, at = 0; at < length; g++, at += V) {
    int64_t left = length - at < V ? length - at : V, first = g * group / p->block;
    int64_t num_scales = p->blocks - first < per_group ? p->blocks - first : per_group;
    VB low[COLUMNS], high[COLUMNS];
    VF each[COLUMNS];
    for (int c = 0; c < C; c++) {
      VB w = load_b(weight[c] + at, left);
      low[c] = bits == 4 ? low_half(w) : w;
      high[c] = bits == 4 ? high_half(w) : w;
      each[c] = spread_f(scale[c] + first, num_scales, spread);
    }
    for (int r = 0; r < R; r++) {
      const uint8_t *x = records + r * l->size;
      VF x_scale = load_f((const float *)(x + l->scale_at) + g * LANES);
      const int32_t *start = (const int32_t *)(x + l->start_at) + g * LANES;
      VB x0 = all_b(x + g * group), x1 = bits == 4 ? all_b(x + g * group + V) : x0;
      for (int c = 0; c < C; c++) {
        VI sum = bits == 4 ? dot4(low[c], high[c], x0, x1)
                           : dot8(low[c], x0, IS_UNSIGNED ? load_i(start) : zero_i());
        acc[c][r] = fma_f(to_float(sum), mul_f(each[c], x_scale), acc[c][r]);
      }
    }
  }
  for (int64_t b = 0; zero[0] && b < p->blocks; b += LANES) {
    int64_t left = p->blocks - b < LANES ? p->blocks - b : LANES;
    for (int c = 0; c < C; c++) {
      uint64_t packed = 0;
      memcpy(&packed, zero[c] + b / 2, (left + 1) / 2);
      VF offset = mul_f(halves_f(packed), mul_f(set_f(-1), first_f(scale[c] + b, left)));
      for (int r = 0; r < R; r++) {
        const float *x_sum = (const float *)(records + r * l->size + l->sum_at) + b;
        acc[c][r] = fma_f(load_f(x_sum), offset, acc[c][r]);
      }
    }
  }
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++) sums[c][r] = acc[c][r];
}

// Computes LANES columns, or as many as there are before `end`, of R rows.
INLINE void columns_of(const Product *p, const Record *l, const uint8_t *records, float *y,
                       int64_t n, int64_t width, VI spread, const int bits, const int R) {
  VF sums[LANES][MAX_ROWS], out[MAX_ROWS];
  for (int c = 0; c < LANES; c += COLUMNS)
    if (c < width) tile(p, l, records, n + c, spread, sums + c, bits, COLUMNS, R);
    else
      for (int i = 0; i < COLUMNS; i++)
        for (int r = 0; r < R; r++) sums[c + i][r] = set_f(0);
  for (int r = 0; r < R; r++) {
    VF row[LANES];
    for (int c = 0; c < LANES; c++) row[c] = sums[c][r];
    out[r] = add_lanes(row);
  }
  for (int64_t b = 0; p->minimum && b < p->blocks; b++) {
    VF minimum = first_f(p->minimum + b * p->N + n, width);
    for (int r = 0; r < R; r++) {
      float x_sum = ((const float *)(records + r * l->size + l->sum_at))[b];
      out[r] = fma_f(set_f(x_sum), minimum, out[r]);
    }
  }
  for (int r = 0; r < R; r++) {
    if (p->bias) out[r] = add_f(out[r], first_f(p->bias + n, width));
    store_first(y + r * p->N + n, out[r], width);
  }
}

// Puts V columns of up to SLAB values beside each other, four values of a column at a time, as
// unsigned bytes; columns and values that are not there are zero.
INLINE void gather(const Product *p, int64_t n, int64_t width, int64_t k, int64_t count,
                   uint8_t *to) {
  const int8_t *from = (const int8_t *)p->weight + k * p->N + n;
  for (int64_t i = 0; i < count; i += 4, to += 4 * V, from += 4 * p->N) {
    if (width == V && count - i >= 4) {
      if (k + i + SLAB / 8 + 4 <= p->K)
        for (int j = 0; j < 4; j++) __builtin_prefetch(from + (SLAB / 8 + j) * p->N);
      interleave(from, p->N, to);
      continue;
    }
    int64_t rows = count - i < 4 ? count - i : 4;
    uint8_t natural[4 * V];
    memset(natural, 0, sizeof natural);
    for (int j = 0; j < rows; j++) memcpy(natural + j * V, from + j * p->N, width);
    interleave((const int8_t *)natural, V, to);
  }
}

INLINE void add_slab(const Record *l, const uint8_t *records, const uint8_t *weight, int64_t k,
                     int64_t count, int32_t (*sums)[V], const int R) {
  VI acc[MAX_ROWS][4];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 4; j++) acc[r][j] = load_i(sums[r] + j * LANES);
  for (int64_t i = 0; i < count; i += 4, weight += 4 * V) {
    VB w[4];
    for (int j = 0; j < 4; j++) w[j] = all_b(weight + j * V);
    for (int r = 0; r < R; r++) {
      VB x = four_b(records + r * l->size + k + i);
      for (int j = 0; j < 4; j++) acc[r][j] = dot8(w[j], x, acc[r][j]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 4; j++) store_i(sums[r] + j * LANES, acc[r][j]);
}

// Computes V columns, or as many as there are, of up to MANY rows with a scale a column.
INLINE void whole_columns(const Product *p, const Record *l, const uint8_t *records, int64_t rows,
                          float *y, int64_t n, int64_t width) {
  _Alignas(ALIGNED) uint8_t slab[SLAB * V];
  _Alignas(ALIGNED) int32_t sums[MANY][V];
  for (int64_t r = 0; r < rows; r++) {
    int32_t start = 0;
    if (IS_UNSIGNED) memcpy(&start, records + r * l->size + l->start_at, 4);
    for (int j = 0; j < V; j++) sums[r][j] = start;
  }
  for (int64_t k = 0; k < p->K; k += SLAB) {
    int64_t count = p->K - k < SLAB ? p->K - k : SLAB;
    gather(p, n, width, k, count, slab);
    for (int64_t r = 0; r < rows;) {
      const uint8_t *record = records + r * l->size;
      if (rows - r >= 4) add_slab(l, record, slab, k, count, sums + r, 4), r += 4;
      else if (rows - r >= 2) add_slab(l, record, slab, k, count, sums + r, 2), r += 2;
      else add_slab(l, record, slab, k, count, sums + r, 1), r += 1;
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    float size;
    memcpy(&size, records + r * l->size + l->scale_at, 4);
    VI natural[4];
    for (int j = 0; j < 4; j++) natural[j] = load_i(sums[r] + j * LANES);
    untangle(natural);
    for (int j = 0; j < 4 && j * LANES < width; j++) {
      int64_t at = n + j * LANES, left = width - j * LANES;
      if (left > LANES) left = LANES;
      VF out = mul_f(to_float(natural[j]), first_f(p->scale + at, left));
      out = mul_f(out, set_f(size));
      if (p->bias) out = add_f(out, first_f(p->bias + at, left));
      store_first(y + r * p->N + at, out, left);
    }
  }
}

#define ROWS(bits, R) \
  case R:             \
    columns_of(p, l, record, y + r * p->N, n, width, spread, bits, R); \
    break;
#if MAX_ROWS == 8
#define EACH_ROWS(bits) ROWS(bits, 1) ROWS(bits, 2) ROWS(bits, 3) ROWS(bits, 4) \
  ROWS(bits, 5) ROWS(bits, 6) ROWS(bits, 7) ROWS(bits, 8)
#else
#define EACH_ROWS(bits) ROWS(bits, 1) ROWS(bits, 2) ROWS(bits, 3) ROWS(bits, 4)
#endif

TARGET static void multiply(const Product *p, const Record *l, const uint8_t *records, int64_t rows,
                            float *y, int64_t first, int64_t end) {
  const int64_t step = p->bits == 0 ? V : LANES, most = p->bits == 0 ? MANY : MAX_ROWS;
  int32_t lanes[LANES];
  for (int j = 0; j < LANES && p->bits; j++) lanes[j] = j * (p->bits == 4 ? 8 : 4) / p->block;
  VI spread = p->bits ? load_i(lanes) : zero_i();
  for (int64_t n = first; n < end; n += step) {
    int64_t width = end - n < step ? end - n : step;
    for (int64_t r = 0; r < rows; r += most) {
      const uint8_t *record = records + r * l->size;
      int64_t few = rows - r < most ? rows - r : most;
      if (p->bits == 0) {
        whole_columns(p, l, record, few, y + r * p->N, n, width);
      } else if (p->bits == 4) {
        switch (few) { EACH_ROWS(4) }
      } else {
        switch (few) { EACH_ROWS(8) }
      }
    }
  }
}
