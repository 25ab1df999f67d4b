// Multiplies quantised rows with weights, in terms of an instruction set's vectors.
//
// Included once for each instruction set, which has defined before:
//   V, LANES          bytes, and int32 or float lanes, of a vector
//   VB, VI, VF        vectors of bytes, int32, float
//   IS_UNSIGNED       whether dot8 takes weights as unsigned, so that sums begin at -128 * sum(x)
//   TARGET            the attribute of all functions
//   FLOAT_ROWS        how many rows' sums of PANEL float columns the registers hold
//   and the functions on these vectors that are used below.
// A row's float operations come in one order, whatever rows and columns are computed beside it:
// its results are the same bit for bit.
#include <stdlib.h>
#include <string.h>

#include "few_rows.h"

#define INLINE TARGET static inline __attribute__((always_inline))
INLINE int64_t up_to(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
#define MAGIC 12582912.0f  // 1.5 * 2^23: added to a float, its lowest bits are the nearest integer
enum { SLAB = 256, MANY = 32, MAX_ROWS = 8, SOON = 32, ALIGNED = 64, MAGIC_BITS = 0x4B400000, INFINITE = 0x7F800000, PANEL = 3 * LANES };

// Returns how many values of a row share a scale: never those of two blocks of weights.
INLINE int64_t step_of(const Product *p) { return p->block < ACTIVATIONS ? p->block : ACTIVATIONS; }

TARGET static Record layout(const Product *p) {
  if (p->bits == 32) return (Record){.size = 4 * p->K, .columns = PANEL};
  int64_t steps = p->bits == 0 ? 1 : p->K / step_of(p);
  Record l = {.scale_at = up_to(p->K + 3, ALIGNED), .columns = V};
  l.start_at = l.scale_at + up_to(4 * steps, ALIGNED);
  l.sum_at = l.start_at + up_to(4 * steps, ALIGNED);
  l.size = l.sum_at + up_to(4 * steps, ALIGNED);
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
  const int64_t K = p->K;
  const int32_t most = largest(x, K);
  int32_t sum = 0;
  memset(record, 0, l->size);
  memcpy(record + l->scale_at, &most, 4);
  if (most != 0 && most < INFINITE) {
    float size, step = 1.0f / 127;
    memcpy(&size, &most, 4);
    for (int64_t k = 0; k < K; k += SLAB) {
      int64_t n = K - k < SLAB ? K - k : SLAB;
      int8_t q[SLAB];
      for (int64_t i = 0; i < n; i++) q[i] = nearest(x[k + i] / size / step);
      for (int64_t i = 0; i < n; i++) sum += q[i];
      memcpy(record + k, q, n);
    }
  }
  sum *= -128;
  memcpy(record + l->start_at, &sum, 4);
}

INLINE void quantise_steps(const Product *p, const Record *l, const float *x, uint8_t *record,
                           const int step, const int bits) {
  float *scales = (float *)(record + l->scale_at), *sums = (float *)(record + l->sum_at);
  int32_t *start = (int32_t *)(record + l->start_at);
  const int64_t steps = p->K / step;
  for (int64_t s = 0; s < steps; s++, x += step, record += step) {
    int8_t q[ACTIVATIONS];
    float values[ACTIVATIONS], size;
    memcpy(values, x, step * sizeof(float));
    const int32_t most = largest(values, step);
    memcpy(&size, &most, 4);
    // NaN and infinity stay in the scale, and so does what is too small to be divided by.
    const int is_plain = most < INFINITE && size > 1e-30f;
    const float inverse = is_plain ? 127 / size : 0, scale = size / 127;
    int32_t sum = 0;
    for (int i = 0; i < step; i++) q[i] = nearest(values[i] * inverse);
    if (!is_plain) memset(q, 0, sizeof q);
    for (int i = 0; i < step; i++) sum += q[i];
    if (bits == 4) {  // values meet the low halves of four bytes, and then the high ones
      for (int i = 0; i < step; i += 16) {
        typedef int8_t Sixteen __attribute__((vector_size(16)));
        Sixteen part;
        memcpy(&part, q + i, 16);
        part = __builtin_shufflevector(part, part, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        memcpy(record + i, &part, 16);
      }
    } else {
      memcpy(record, q, step);
    }
    scales[s] = scale, start[s] = -128 * sum, sums[s] = scale * (float)sum;
  }
}

TARGET static void quantise(const Product *p, const Record *l, const float *x, uint8_t *record) {
  if (p->bits == 0) quantise_whole(p, l, x, record);
  else if (p->bits == 4 && p->block == 16) quantise_steps(p, l, x, record, 16, 4);
  else if (p->bits == 4) quantise_steps(p, l, x, record, ACTIVATIONS, 4);
  else if (p->block == 16) quantise_steps(p, l, x, record, 16, 8);
  else quantise_steps(p, l, x, record, ACTIVATIONS, 8);
}

// What LANES columns have, beside each other: four bytes of each, or a float of each.
typedef struct {
  const uint8_t *weights;  // [K * bits / 32, LANES, 4]
  const float *scales;     // [blocks, LANES]
  const float *offsets;    // [blocks, stride], or null
  int64_t stride;
} Columns;

// Puts `width` rows of `length` bytes beside each other, four bytes of each at a time; LANES rows
// come out, and a multiple of V bytes of each.
INLINE void turn(const uint8_t *rows, int64_t length, int64_t width, uint8_t *to) {
  for (int64_t at = 0; at < length; at += V) {
    if (width == LANES && length >= V) {
      if (at > length - V) at = length - V;  // some come twice
      transpose(rows + at, length, to + at * LANES);
      continue;
    }
    _Alignas(ALIGNED) uint8_t part[LANES * V];
    memset(part, 0, sizeof part);
    for (int64_t c = 0; c < width; c++)
      memcpy(part + c * V, rows + c * length + at, length - at < V ? length - at : V);
    transpose(part, V, to + at * LANES);
  }
}

// Writes what a row's sum of a block is multiplied by: -scale * zero point, and minima.
INLINE void find_offsets(const Product *p, int64_t n, int64_t width, const float *scales,
                         float *offsets) {
  for (int64_t c = 0; c < width; c++) {
    const uint8_t *zero = p->zero + (n + c) * ((p->blocks + 1) / 2);
    for (int64_t b = 0; b < p->blocks; b++) {
      float minimum = p->minimum ? p->minimum[b * p->N + n + c] : 0;
      float point = (float)(zero[b / 2] >> b % 2 * 4 & 15);
      offsets[b * LANES + c] = minimum - scales[b * LANES + c] * point;
    }
  }
}

// Adds what a step's sums of products are worth, and the offsets of its block.
INLINE VF add_step(const Product *p, const Record *l, const uint8_t *record, const Columns *columns,
                   VF acc, VI total, int64_t s, int64_t b, int64_t width) {
  VF x_scale = set_f(((const float *)(record + l->scale_at))[s]);
  acc = fma_f(to_float(total), mul_f(load_f(columns->scales + b * LANES), x_scale), acc);
  if (!columns->offsets) return acc;
  VF x_sum = set_f(((const float *)(record + l->sum_at))[s]);
  return fma_f(x_sum, first_f(columns->offsets + b * columns->stride, width), acc);
}

// Fetches what LANES columns have besides weights, SOON columns further on.
INLINE void fetch_scales(const Product *p, int64_t n, int64_t b) {
  __builtin_prefetch(p->scale + (n + SOON) * p->blocks + b * LANES, 0, 2);
  if (p->minimum) __builtin_prefetch(p->minimum + b * p->N + n + SOON, 0, 2);
}

#ifdef HAS_FOURS
// Computes LANES columns of one row, without putting their weights beside each other: for `bits` 4,
// `low` and `high` are what the halves of bytes meet. Sums are those of columns_of.
INLINE void columns_of_one(const Product *p, const Record *l, const uint8_t *record,
                           const uint8_t *low, const uint8_t *high, float *y, int64_t n,
                           const Columns *columns, const int bits) {
  typedef int32_t Integers __attribute__((vector_size(V)));
  const int64_t length = p->K * bits / 8, step = 4 * bits, per_block = p->block / ACTIVATIONS;
  VF acc = set_f(0);
  for (int64_t at = 0, s = 0, b = 0, part = 0; at < length; at += V) {
    const int64_t again = at > length - V ? at - (length - V) : 0;  // bytes that come twice
    const uint8_t *weights = p->weight + n * length + at - again;
    VB x0 = all_b(low + at - again), x1 = all_b(high + at - again);
    VI parts[LANES], sums[V / 16];
    for (int c = 0; c < LANES; c++, weights += length) {
      VB w = all_b(weights);
      __builtin_prefetch(weights + SOON * length, 0, 2);
      if (bits == 4) parts[c] = sum4(add4(low_half(w), high_half(w), x0, x1, set_i(0)));
      else parts[c] = dot8(w, x0, set_i(0));
    }
    add_fours(parts, sums);
    for (int i = again / step; i < V / step; i++, s++) {
      VI total = sums[i];
      if (bits == 8) {
        const int32_t start = IS_UNSIGNED ? ((const int32_t *)(record + l->start_at))[s] : 0;
        total = (VI)((Integers)sums[2 * i] + (Integers)sums[2 * i + 1] + start);
      }
      if (part == 0) fetch_scales(p, n, b);
      acc = add_step(p, l, record, columns, acc, total, s, b, LANES);
      if (++part == per_block) b++, part = 0;
    }
  }
  if (p->bias) acc = add_f(acc, load_f(p->bias + n));
  store_first(y + n, acc, LANES);
}
#endif

// Computes LANES columns, or as many as there are, of R rows. Meanwhile memory gets what is SOON
// columns further on, whose weights begin at `next`, unless it is null.
INLINE void columns_of(const Product *p, const Record *l, const uint8_t *records, float *y,
                       int64_t n, int64_t width, const Columns *columns, const uint8_t *next,
                       const int bits, const int R) {
  const int64_t step = step_of(p), steps = p->K / step, per_block = p->block / step;
  const int64_t fours = step * bits / 32, size = l->size;
  const uint8_t *weights = columns->weights;
  VF acc[MAX_ROWS];
  for (int r = 0; r < R; r++) acc[r] = set_f(0);
  for (int64_t s = 0, b = 0, part = 0; s < steps; s++) {
    const uint8_t *x = records + s * step;
    VI sum[MAX_ROWS];
    for (int r = 0; r < R; r++)
      sum[r] = bits == 8 && IS_UNSIGNED
                   ? set_i(((const int32_t *)(records + r * size + l->start_at))[s]) : set_i(0);
    // Some lines of weights go to the first cache, which waits for fewer at a time than the second.
    for (int64_t at = 0; next && at < fours * V; at += ALIGNED, next += ALIGNED)
      if (at < (R > 4 ? 2 : R > 1) * ALIGNED) __builtin_prefetch(next, 0, 3);
      else __builtin_prefetch(next, 0, 2);
    for (int64_t i = 0; i < fours; i++, weights += V, x += 32 / bits) {
      VB w = all_b(weights);
      if (bits == 4) {
        VB low = low_half(w), high = high_half(w);
        for (int r = 0; r < R; r++)
          sum[r] = add4(low, high, four_b(x + r * size), four_b(x + r * size + 4), sum[r]);
      } else {
        for (int r = 0; r < R; r++) sum[r] = dot8(w, four_b(x + r * size), sum[r]);
      }
    }
    if (next && part == 0) fetch_scales(p, n, b);
    for (int r = 0; r < R; r++)
      acc[r] = add_step(p, l, records + r * size, columns, acc[r], bits == 4 ? sum4(sum[r]) : sum[r],
                        s, b, width);
    if (++part == per_block) b++, part = 0;
  }
  for (int r = 0; r < R; r++) {
    if (p->bias) acc[r] = add_f(acc[r], first_f(p->bias + n, width));
    store_first(y + r * p->N + n, acc[r], width);
  }
}

// Puts V columns of up to SLAB values beside each other, four values of a column at a time, as
// unsigned bytes; columns and values that are not there are zero.
INLINE void gather(const Product *p, int64_t n, int64_t width, int64_t k, int64_t count,
                   uint8_t *to) {
  const int8_t *from = (const int8_t *)p->weight + k * p->N + n;
  for (int64_t i = 0; i < count; i += 4, to += 4 * V, from += 4 * p->N) {
    if (width == V && count - i >= 4) {
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

// Adds a slab's products to the sums of R rows. Meanwhile memory gets the next slab, whose rows
// begin at `next` and lie `stride` apart.
INLINE void add_slab(const Record *l, const uint8_t *records, const uint8_t *weight, int64_t k,
                     int64_t count, int32_t (*sums)[V], const uint8_t *next, int64_t stride,
                     const int R) {
  VI acc[4][4];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 4; j++) acc[r][j] = load_i(sums[r] + j * LANES);
  for (int64_t i = 0; i < count; i += 4, weight += 4 * V) {
    VB w[4];
    for (int j = 0; j < 4; j++, next += stride) __builtin_prefetch(next, 0, 2);
    for (int j = 0; j < 4; j++) w[j] = all_b(weight + j * V);
    for (int r = 0; r < R; r++) {
      VB x = four_b(records + r * l->size + k + i);
      for (int j = 0; j < 4; j++) acc[r][j] = dot8(w[j], x, acc[r][j]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 4; j++) store_i(sums[r] + j * LANES, acc[r][j]);
}

// Writes V columns of a row, or as many as there are, with a scale a column.
INLINE void scale_columns(const Product *p, float size, const int32_t *sums, float *y, int64_t n,
                          int64_t width) {
  VI natural[4];
  for (int j = 0; j < 4; j++) natural[j] = load_i(sums + j * LANES);
  untangle(natural);
  for (int j = 0; j < 4 && j * LANES < width; j++) {
    int64_t at = n + j * LANES, left = width - j * LANES;
    if (left > LANES) left = LANES;
    VF out = mul_f(to_float(natural[j]), first_f(p->scale + at, left));
    out = mul_f(out, set_f(size));
    if (p->bias) out = add_f(out, first_f(p->bias + at, left));
    store_first(y + at, out, left);
  }
}

// Computes columns [first, end) of some rows; up to MANY times V columns of a row. Several times V
// columns are read few values deep, which are longer runs of memory.
INLINE void whole_columns(const Product *p, const Record *l, const uint8_t *records, int64_t rows,
                          float *y, int64_t first, int64_t end) {
  _Alignas(ALIGNED) uint8_t slab[SLAB * V];
  _Alignas(ALIGNED) int32_t sums[MANY][V];
  const int64_t panels = (end - first + V - 1) / V, depth = panels == 1 ? SLAB : rows < 4 ? SLAB / 16 : SLAB / 4;
  for (int64_t i = 0; i < rows * panels; i++) {
    int32_t start = 0;
    if (IS_UNSIGNED) memcpy(&start, records + i % rows * l->size + l->start_at, 4);
    for (int j = 0; j < V; j++) sums[i][j] = start;
  }
  for (int64_t k = 0; k < p->K; k += depth)
    for (int64_t i = 0; i < panels; i++) {
      const int64_t n = first + i * V, width = end - n < V ? end - n : V;
      const int64_t count = p->K - k < depth ? p->K - k : depth;
      const uint8_t *next = p->weight + (panels > 1 || k + depth < p->K ? (k + depth) * p->N + n : n + V);
      int64_t stride = p->N;
      gather(p, n, width, k, count, slab);
      for (int64_t r = 0; r < rows; next = slab, stride = 0) {
        const uint8_t *record = records + r * l->size;
        int64_t left = rows - r;
        int32_t (*to)[V] = sums + i * rows + r;
        if (left >= 4) add_slab(l, record, slab, k, count, to, next, stride, 4), r += 4;
        else if (left >= 2) add_slab(l, record, slab, k, count, to, next, stride, 2), r += 2;
        else add_slab(l, record, slab, k, count, to, next, stride, 1), r += 1;
      }
    }
  for (int64_t i = 0; i < rows * panels; i++) {
    const int64_t r = i % rows, n = first + i / rows * V;
    float size;
    memcpy(&size, records + r * l->size + l->scale_at, 4);
    scale_columns(p, size, sums[i], y + r * p->N, n, end - n);
  }
}

#include "float_loops.h"

#define ROWS(bits, R)                                                               \
  case R:                                                                           \
    columns_of(p, l, record, y + r * p->N, n, width, &columns, next, bits, R);      \
    break;
#define EACH_ROWS(bits)                                                                   \
  ROWS(bits, 1) ROWS(bits, 2) ROWS(bits, 3) ROWS(bits, 4) ROWS(bits, 5) ROWS(bits, 6)     \
  ROWS(bits, 7) ROWS(bits, 8)

TARGET static int multiply(const Product *p, const Record *l, const uint8_t *records, int64_t rows,
                           float *y, int64_t first, int64_t end) {
  if (p->bits == 32) return multiply_floats(p, (const float *)records, rows, y, first, end);
  if (p->bits == 0) {
    const int64_t wide = rows < MANY ? MANY / rows * V : V;
    for (int64_t n = first; n < end; n += wide)
      for (int64_t r = 0; r < rows; r += MANY)
        whole_columns(p, l, records + r * l->size, rows - r < MANY ? rows - r : MANY,
                      y + r * p->N, n, end - n < wide ? end : n + wide);
    return 1;
  }
  const int64_t length = p->K * p->bits / 8;
  const int64_t weights_size = up_to(length, V) * LANES, scales_size = up_to(4 * p->blocks, V) * LANES;
  uint8_t *memory = malloc(weights_size + 2 * scales_size + ALIGNED);
  if (!memory) return 0;
  uint8_t *weights = (uint8_t *)up_to((int64_t)memory, ALIGNED);
  float *scales = (float *)(weights + weights_size), *offsets = (float *)(weights + weights_size + scales_size);
#ifdef HAS_FOURS
  const int is_direct = rows == 1 && p->block >= ACTIVATIONS && length >= V && (end - first) % LANES == 0;
  for (int64_t i = 0; is_direct && p->bits == 4 && i < length; i += 4) {
    memcpy(weights + i, records + 2 * i, 4);
    memcpy(weights + length + i, records + 2 * i + 4, 4);
  }
#endif
  Columns columns = {weights, scales, p->zero ? offsets : 0, p->zero ? LANES : p->N};
  for (int64_t n = first; n < end; n += LANES) {
    int64_t width = end - n < LANES ? end - n : LANES;
    turn((const uint8_t *)(p->scale + n * p->blocks), 4 * p->blocks, width, (uint8_t *)scales);
    if (p->zero) find_offsets(p, n, width, scales, offsets);
    else if (p->minimum) columns.offsets = p->minimum + n;
#ifdef HAS_FOURS
    if (is_direct) {
      if (p->bits == 4) columns_of_one(p, l, records, weights, weights + length, y, n, &columns, 4);
      else columns_of_one(p, l, records, records, records, y, n, &columns, 8);
      continue;
    }
#endif
    turn(p->weight + n * length, length, width, weights);
    const uint8_t *next = p->weight + (n + SOON) * length;
    for (int64_t r = 0; r < rows; r += MAX_ROWS, next = 0) {
      const uint8_t *record = records + r * l->size;
      int64_t few = rows - r < MAX_ROWS ? rows - r : MAX_ROWS;
      if (p->bits == 4) {
        switch (few) { EACH_ROWS(4) }
      } else {
        switch (few) { EACH_ROWS(8) }
      }
    }
  }
  free(memory);
  return 1;
}
