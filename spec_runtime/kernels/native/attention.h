// Computes attention over slots of a cache, in terms of an instruction set's vectors.
//
// Included after loops.h. What a row gets depends on the rows of keys and values that it attends,
// and neither on their slots nor on what is computed beside it, bit for bit: each score is a sum of
// its own, and sums over slots are sums of integers, whose order makes no difference. Terms of a
// row's mixed values are rounded to 2^-30 of a bound of all values that it attends, and those of the
// sum of its weights to 2^-30.
#include <math.h>

typedef float F __attribute__((vector_size(V)));
typedef int32_t I __attribute__((vector_size(V)));
#define UNIT 1073741824.0f  // 2^30
#define TO_INTEGERS(x) __builtin_convertvector(x, I)

INLINE F load(const float *p) {
  F x;
  memcpy(&x, p, sizeof x);
  return x;
}
// Returns a where `is` is -1, b where it is 0.
INLINE F either(I is, F a, F b) { return (F)(((I)a & is) | ((I)b & ~is)); }

// Adds LANES rows, each times its weight, to sums, T vectors of each.
INLINE void add_part(const float *rows, const float *weights, int64_t wide, int32_t *sums,
                     const int T) {
  I acc[4];
  for (int t = 0; t < T; t++) memcpy(acc + t, sums + t * LANES, sizeof *acc);
#pragma GCC unroll 1
  for (int j = 0; j < LANES; j++)
    for (int t = 0; t < T; t++)
      acc[t] += TO_INTEGERS(load(rows + j * wide + t * LANES) * weights[j]);
  for (int t = 0; t < T; t++) memcpy(sums + t * LANES, acc + t, sizeof *acc);
}

INLINE void add_values(const float *rows, const float *weights, int64_t wide, int32_t *sums) {
  int64_t d = 0;
  for (; d + 4 * LANES <= wide; d += 4 * LANES) add_part(rows + d, weights, wide, sums + d, 4);
  for (; d < wide; d += LANES) add_part(rows + d, weights, wide, sums + d, 1);
}

// Returns LANES rows of a cache, `wide` apart: where they lie, or copies, if they lie elsewhere.
// With `norms`, rows that are not finite are zeros: who attends them gets NaN anyway.
INLINE const float *gathered(const float *cache, const int32_t *seen, int64_t D, int64_t wide,
                             const float *norms, float *copies) {
  int is_straight = D == wide && seen[LANES - 1] - seen[0] == LANES - 1;
  for (int j = 0; norms && j < LANES; j++) is_straight &= norms[j] < INFINITY;
  if (is_straight) return cache + seen[0] * D;
  for (int j = 0; j < LANES; j++) {
    if (!norms || norms[j] < INFINITY)
      memcpy(copies + j * wide, cache + seen[j] * D, D * sizeof *cache);
    else memset(copies + j * wide, 0, D * sizeof *cache);
  }
  return copies;
}

// Puts LANES rows beside each other, f32[wide, LANES].
INLINE void turn_rows(const float *rows, int64_t wide, float *to) {
  for (int64_t d = 0; d < wide; d += LANES)
    transpose((const uint8_t *)(rows + d), 4 * wide, (uint8_t *)(to + d * LANES));
}

// Returns the products of LANES turned rows with x, or with themselves if it is null.
INLINE VF dots(const float *turned, const float *x, int64_t wide) {
  VF sums[4] = {set_f(0), set_f(0), set_f(0), set_f(0)};
  for (int64_t d = 0; d < wide; d += 4, turned += 4 * LANES)
    for (int i = 0; i < 4; i++) {
      VF part = load_f(turned + i * LANES);
      sums[i] = fma_f(part, x ? set_f(x[d + i]) : part, sums[i]);
    }
  return add_f(add_f(sums[0], sums[1]), add_f(sums[2], sums[3]));
}

// Writes the squares of the lengths of value rows: those of blocks `first` to `end` of LANES slots.
TARGET static int measure(const Attention *a, int64_t g, int64_t first, int64_t end) {
  const int64_t D = a->D, wide = up_to(D, LANES);
  void *memory = calloc(2 * LANES * wide * sizeof(float) + ALIGNED, 1);
  if (!memory) return 0;
  float *turned = (float *)up_to((int64_t)memory, ALIGNED), *copies = turned + LANES * wide;
  float *norms = a->norms + g * up_to(a->num_seen, MOST_LANES);
  for (int64_t u = first; u < end; u += LANES) {
    turn_rows(gathered(a->value + g * a->S * D, a->seen + u, D, wide, 0, copies), wide, turned);
    VF all = dots(turned, 0, wide);
    memcpy(norms + u, &all, sizeof all);
  }
  free(memory);
  return 1;
}

// Returns e^x of values up to 0.
INLINE F exponential(F x) {
  I is_small = x < -87.0f;
  x = either(is_small, (F){0}, x);
  I n = TO_INTEGERS(x * 1.44269504f - 0.5f);
  F whole = __builtin_convertvector(n, F);
  F r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r * r + r + 1.0f) * (F)((n + 127) << 23);
  return (F)((I)p & ~is_small);
}

// Returns cap * tanh(x / cap).
INLINE F capped(F x, float cap) {
  I sign = (I)x & INT32_MIN;
  F t = exponential((F)((I)x | INT32_MIN) * (2 / cap));
  return (F)((I)((1 - t) / (1 + t) * cap) | sign);
}

// Turns the scores of row n and head h into what values are multiplied by, so that their sums fill
// integers; returns what one of these is worth. `norms` are squares of the values' lengths.
INLINE float weigh(const Attention *a, int64_t n, int64_t h, const float *norms,
                   float *scores) {
  const float *bias = a->bias + n * a->W, none = -INFINITY;
  const F least = (F){0} + none;
  F most = least, norm = {0};
  I is_odd = {0};
  for (int64_t u = 0; u < a->num_seen; u += LANES) {
    const int32_t *seen = a->seen + u;
    F added, s = load(scores + u) * a->scale;
    if (seen[LANES - 1] - seen[0] == LANES - 1) added = load(bias + seen[0]);
    else for (int j = 0; j < LANES; j++) added[j] = bias[seen[j]];
    for (int64_t j = a->num_seen - u; j < LANES; j++) added[j] = none;
    if (a->softcap != 0) s = capped(s, a->softcap);
    I is_read = added > MASKED;
    s = either(is_read, s + added, least);
    F size = (F)((I)load(norms + u) & is_read);
    is_odd |= ~(s < INFINITY) | ~(size < INFINITY);
    most = either(s > most, s, most);
    norm = either(size > norm, size, norm);
    memcpy(scores + u, &s, sizeof s);
  }
  float top = a->sinks ? a->sinks[h] : none, bound = 1e-30f;
  int32_t has_odd = 0;
  for (int j = 0; j < LANES; j++) {
    if (most[j] > top) top = most[j];
    if (norm[j] > bound) bound = norm[j];
    has_odd |= is_odd[j];
  }
  if (has_odd) return NAN;
  if (top == none) top = 0;
  int64_t sum = a->sinks ? (int64_t)(expf(a->sinks[h] - top) * UNIT) : 0;
  I low = {0}, high = {0};  // of the sum's terms
  for (int64_t u = 0; u < a->num_seen; u += LANES) {
    F weight = exponential(load(scores + u) - top);
    I part = TO_INTEGERS(weight * UNIT);
    low += part & 0x7FFF, high += part >> 15;
    memcpy(scores + u, &weight, sizeof weight);
  }
  for (int j = 0; j < LANES; j++) sum += low[j] + ((int64_t)high[j] << 15);
  bound = sqrtf(bound);
  const float factor = sum ? (float)(UNIT / ((double)sum / UNIT) / bound) : 0;
  for (int64_t u = 0; u < a->num_seen; u += LANES) {
    F weight = load(scores + u) * factor;
    memcpy(scores + u, &weight, sizeof weight);
  }
  return bound / UNIT;
}

TARGET static int attend(const Attention *a, int64_t g, int64_t first, int64_t end, float *y) {
  const int64_t D = a->D, wide = up_to(D, LANES), rep = a->H / a->G, R = end - first;
  const int64_t seen = up_to(a->num_seen, MOST_LANES), blocks = (a->num_seen + LANES - 1) / LANES;
  const float *keys = a->key + g * a->S * D, *values = a->value + g * a->S * D;
  const int64_t floats = 2 * LANES * wide + R * (2 * wide + seen);
  void *memory = calloc(floats * sizeof(float) + R * blocks + ALIGNED, 1);
  if (!memory) return 0;
  float *turned = (float *)up_to((int64_t)memory, ALIGNED), *copies = turned + LANES * wide;
  float *queries = copies + LANES * wide, *scores = queries + R * wide;
  int32_t *sums = (int32_t *)(scores + R * seen);
  uint8_t *is_read = (uint8_t *)(sums + R * wide);
  for (int64_t r = 0; r < R; r++) {
    int64_t n = (first + r) / rep, h = g * rep + (first + r) % rep;
    memcpy(queries + r * wide, a->query + (n * a->H + h) * D, D * sizeof *queries);
  }
  for (int64_t b = 0; b < blocks; b++) {
    const int32_t *some = a->seen + b * LANES;
    turn_rows(gathered(keys, some, D, wide, 0, copies), wide, turned);
    for (int64_t r = 0; r < R; r++) {
      const float *bias = a->bias + (first + r) / rep * a->W;
      uint8_t is = 0;
      for (int j = 0; j < LANES; j++) is |= !(bias[some[j]] <= MASKED);
      is_read[r * blocks + b] = is;
      if (!is) continue;
      VF all = dots(turned, queries + r * wide, wide);
      memcpy(scores + r * seen + b * LANES, &all, sizeof all);
    }
  }
  for (int64_t r = 0; r < R; r++) {  // what a sum's unit is worth takes the query's place
    queries[r * wide] = weigh(a, (first + r) / rep, g * rep + (first + r) % rep,
                              a->norms + g * seen, scores + r * seen);
    if (isnan(queries[r * wide])) memset(is_read + r * blocks, 0, blocks);
  }
  for (int64_t b = 0; b < blocks; b++) {
    const float *norms = a->norms + g * seen + b * LANES;
    const float *rows = gathered(values, a->seen + b * LANES, D, wide, norms, copies);
    for (int64_t r = 0; r < R; r++)
      if (is_read[r * blocks + b])
        add_values(rows, scores + r * seen + b * LANES, wide, sums + r * wide);
  }
  for (int64_t r = 0; r < R; r++) {
    int64_t n = (first + r) / rep, h = g * rep + (first + r) % rep;
    float *to = y + (n * a->H + h) * D;
    for (int64_t d = 0; d < D; d++) to[d] = (float)sums[r * wide + d] * queries[r * wide];
  }
  free(memory);
  return 1;
}
