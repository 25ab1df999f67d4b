// Computes attention over slots of a cache, in terms of an instruction set's vectors.
//
// Included after loops.h. What a row gets depends on the rows of keys and values that it attends,
// and neither on their slots nor on what is computed beside it, bit for bit: each score is a sum of
// its own, and sums over slots are sums of integers, whose order makes no difference. Terms of a
// row's mixed values are rounded to 2^-27 of a bound of all values that it attends, and those of the
// sum of its weights to 2^-30.
//
// A float between 2^23 and 2^24 holds an integer, and a product that is added to it is rounded to
// one: the same one whatever the sum is, unless its fraction is a half. None is, for the lowest bit
// of each weight is set: of 2^22 or less, the product then has a lower bit than a half. So a float
// holds the sum of a tile's terms if their weights are LIGHT together; else each has its own, unless
// it is too big for one.
#include <math.h>

typedef int32_t I __attribute__((vector_size(V)));
typedef uint32_t U __attribute__((vector_size(V)));  // wraps around
#define UNIT 134217728.0f         // 2^27
#define WEIGHT_UNIT 1073741824.0f // 2^30
#define LIGHT 0.03f               // of all weights of a row: less than 2^22 / UNIT
#define ONE_BITS 0x3F800000
#define TO_INTEGERS(x) __builtin_convertvector(x, I)
enum { QUERIES = FLOAT_ROWS / 2, IS_LIGHT = 1, IS_HEAVY = 2 };
enum { SUMMED = 1 << 17 };  // slots whose weights' sums fit 32 bits in two halves, in four lanes too
#ifndef add_term
#define add_term fma_f
#endif

// Returns a where `is` is -1, b where it is 0.
INLINE VF either(I is, VF a, VF b) { return (VF)(((I)a & is) | ((I)b & ~is)); }

// Returns TILE rows of a cache, `wide` apart: where they lie, or copies. With `norms`, rows that are
// not finite are zeros: who attends them gets NaN anyway.
INLINE const float *tile_of(const Attention *a, const float *cache, int64_t slot, int64_t wide,
                            const float *norms, float *copies) {
  const int64_t D = a->D;
  int is_plain = D == wide && slot + TILE <= a->S;
  for (int j = 0; norms && j < TILE; j++) is_plain &= norms[slot + j] < INFINITY;
  if (is_plain) return cache + slot * D;
  for (int64_t j = slot; j < slot + TILE; j++, copies += wide) {
    if (j < a->S && (!norms || norms[j] < INFINITY)) memcpy(copies, cache + j * D, D * sizeof *copies);
    else memset(copies, 0, D * sizeof *copies);
  }
  return copies - TILE * wide;
}

// Lists the queries that read a tile in one of these ways.
INLINE int queries_of(const uint8_t *is_read, int64_t pitch, int64_t R, int ways, int *list) {
  int count = 0;
  for (int64_t r = 0; r < R; r++)
    if (is_read[r * pitch] & ways) list[count++] = (int)r;
  return count;
}

// Writes the products of TILE rows with R listed queries to their scores, or those of the rows with
// themselves if there are no queries. Meanwhile memory gets the rows from `next` on.
INLINE void dots(const float *rows, const float *next, const float *queries, int64_t wide,
                 const int *list, float *scores, int64_t pitch, const int R) {
  for (int n = 0; n < TILE; n += LANES) {
    VF parts[4][LANES / 4];
    for (int p = 0; p < LANES / 4; p++) {
      VF sums[4][4];
      for (int i = 0; i < 4 * R; i++) sums[i / 4][i % 4] = set_f(0);
      for (int64_t d = 0; d < wide; d += LANES) {
        VF row[4];
        for (int j = 0; j < 4; j++) {
          row[j] = load_f(rows + (n + 4 * p + j) * wide + d);
          __builtin_prefetch(next + (n + 4 * p + j) * wide + d, 0, 2);
        }
        for (int r = 0; r < R; r++)
          for (int j = 0; j < 4; j++) {
            VF x = queries ? load_f(queries + list[r] * wide + d) : row[j];
            sums[r][j] = fma_f(row[j], x, sums[r][j]);
          }
      }
      for (int r = 0; r < R; r++)
        parts[r][p] = add_pairs(add_pairs(sums[r][0], sums[r][1]), add_pairs(sums[r][2], sums[r][3]));
    }
    for (int r = 0; r < R; r++) {
      for (int m = LANES / 8; m > 0; m /= 2)
        for (int i = 0; i < m; i++) parts[r][i] = add_parts(parts[r][2 * i], parts[r][2 * i + 1]);
      memcpy(scores + list[r] * pitch + n, parts[r], sizeof(VF));
    }
  }
}

// Adds T vectors of TILE rows, each times its weight, to the sums of R listed queries. Of tiles that
// are not light, negative weights stand for those that are not light by themselves.
INLINE void add_tile(const float *rows, const float *weights, int64_t pitch, const int *list,
                     int32_t *sums, int64_t wide, const int is_light, const int R, const int T) {
  U acc[4][4];
  for (int i = 0; i < R * T; i++)
    acc[i / T][i % T] = (U){0} + (is_light ? 1u : 1u - TILE) * MAGIC_BITS;
  for (int j = 0; j < TILE; j++, rows += wide)
    for (int r = 0; r < R; r++) {
      const float weight = weights[list[r] * pitch + j];
      for (int t = 0; t < T; t++) {
        VF row = load_f(rows + t * LANES);
        if (is_light) acc[r][t] = (U)add_term(set_f(weight), row, (VF)acc[r][t]);
        else if (weight < 0) acc[r][t] += MAGIC_BITS - (U)TO_INTEGERS(row * weight);
        else acc[r][t] += (U)add_term(set_f(weight), row, set_f(MAGIC));
      }
    }
  for (int i = 0; i < R * T; i++) {
    int32_t *to = sums + list[i / T] * wide + i % T * LANES;
    U whole = (U)load_f((float *)to) + acc[i / T][i % T] - MAGIC_BITS;
    memcpy(to, &whole, sizeof whole);
  }
}

// Returns e^x of values up to 0.
INLINE VF exponential(VF x) {
  I is_small = x < -87.0f;
  I n = TO_INTEGERS(either(is_small, set_f(0), x) * 1.44269504f - 0.5f);
  VF whole = __builtin_convertvector(n, VF);
  VF r = fma_f(whole, set_f(2.12194440e-4f), fma_f(whole, set_f(-0.693359375f), x));
  VF p = fma_f(r, set_f(1.9875691500e-4f), set_f(1.3981999507e-3f));
  p = fma_f(p, r, set_f(8.3334519073e-3f));
  p = fma_f(p, r, set_f(4.1665795894e-2f));
  p = fma_f(p, r, set_f(1.6666665459e-1f));
  p = fma_f(p, r, set_f(5.0000001201e-1f));
  p = fma_f(p * r, r, r + 1.0f) * (VF)((n + 127) << 23);
  return (VF)((I)p & ~is_small);
}

// Returns cap * tanh(x / cap).
INLINE VF capped(VF x, float cap) {
  I sign = (I)x & INT32_MIN;
  VF t = exponential((VF)((I)x | INT32_MIN) * (2 / cap));
  return (VF)((I)((1 - t) / (1 + t) * cap) | sign);
}

// Turns the scores of a row and head into what values are multiplied by, so that their sums fill
// integers, says which tiles are light, and returns what one of these integers is worth. `bias` is
// that of the row, `norms` are squares of the values' lengths; tiles that are 0 are not read.
INLINE float weigh(const Attention *a, int64_t h, const float *bias, const float *norms,
                   float *scores, uint8_t *tiles) {
  const float none = -INFINITY;
  const VF least = set_f(none);
  VF most = least, norm = {0};
  I is_odd = {0};
  for (int64_t u = 0; u < up_to(a->W, TILE); u += LANES) {
    if (!tiles[u / TILE]) continue;
    VF added = load_f(bias + u), s = load_f(scores + u) * a->scale;
    if (a->softcap != 0) s = capped(s, a->softcap);
    I is_read = added > MASKED;
    s = either(is_read, s + added, least);
    VF size = (VF)((I)load_f(norms + u) & is_read);
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
  if (has_odd || !(top < INFINITY)) return NAN;
  if (top == none) top = 0;
  int64_t sum = a->sinks ? (int64_t)(expf(a->sinks[h] - top) * WEIGHT_UNIT) : 0;
  for (int64_t begin = 0; begin < a->W; begin += SUMMED) {
    I low = {0}, high = {0};  // of the sum's terms
    for (int64_t u = begin; u < up_to(a->W, TILE) && u < begin + SUMMED; u += LANES) {
      if (!tiles[u / TILE]) continue;
      VF weight = exponential(load_f(scores + u) - top);
      I part = TO_INTEGERS(weight * WEIGHT_UNIT);
      low += part & 0x7FFF, high += part >> 15;
      memcpy(scores + u, &weight, sizeof weight);
    }
    for (int j = 0; j < LANES; j++) sum += low[j] + ((int64_t)high[j] << 15);
  }
  bound = sqrtf(bound);
  const float factor = sum ? (float)(UNIT / ((double)sum / WEIGHT_UNIT) / bound) : 0;
  const float limit = LIGHT * UNIT / bound;
  for (int64_t u = 0; u < a->W; u += TILE) {
    if (!tiles[u / TILE]) continue;
    VF all = {0}, weights[TILE / LANES];
    for (int j = 0; j < TILE / LANES; j++) {
      weights[j] = load_f(scores + u + j * LANES) * factor;
      weights[j] = (VF)((I)weights[j] | ((weights[j] > 0) & 1));
      all += weights[j];
    }
    const int is_heavy = sum_f(all) > limit;
    tiles[u / TILE] = is_heavy ? IS_HEAVY : IS_LIGHT;
    for (int j = 0; j < TILE / LANES && is_heavy; j++)
      weights[j] = either(weights[j] > limit, -weights[j], weights[j]);
    memcpy(scores + u, weights, sizeof weights);
  }
  return bound / UNIT;
}

#define DOTS(R) \
  dots(rows, i ? rows : keys + (b + 1) * TILE * D, queries, wide, list + i, scores + b * TILE, places, R)
#define ADD_PART(R, T, is_light) \
  add_tile(rows + d, weights, places, list + i, sums + d, wide, is_light, R, T)
#define ADD_TILE(R, is_light)                                                    \
  for (int64_t d = 0; d < wide; d += 4 * LANES)                                  \
    if (d + 4 * LANES <= wide) ADD_PART(R, 4, is_light);                         \
    else for (; d < wide; d += LANES) ADD_PART(R, 1, is_light)
#define ADD_LIGHT(R) ADD_TILE(R, 1)
#define ADD_HEAVY(R) ADD_TILE(R, 0)
#define EACH_QUERY(call)                                                        \
  for (int i = 0; i < count; i += QUERIES)                                      \
    switch (count - i < QUERIES ? count - i : QUERIES) { EACH_FLOATS(call) }

TARGET static int attend(const Attention *a, int64_t g, int64_t first, int64_t end, float *y) {
  const int64_t D = a->D, wide = up_to(D, LANES), rep = a->H / a->G, R = end - first;
  const int64_t places = up_to(a->W, TILE), tiles = places / TILE, N = (end - 1) / rep - first / rep + 1;
  const float *keys = a->key + g * a->S * D, *values = a->value + g * a->S * D, *rows;
  const int64_t floats = TILE * wide + places + N * places + R * (2 * wide + places);
  void *memory = malloc(floats * sizeof(float) + R * tiles + ALIGNED);
  if (!memory) return 0;
  float *copies = (float *)up_to((int64_t)memory, ALIGNED), *queries = copies + TILE * wide;
  int32_t *sums = (int32_t *)(queries + R * wide);
  float *norms = (float *)(sums + R * wide), *biases = norms + places, *scores = biases + N * places;
  uint8_t *is_read = (uint8_t *)(scores + R * places);  // and how, see weigh
  memset(copies, 0, (TILE + 2 * R) * wide * sizeof *copies);
  int list[MOST_QUERIES], count;
  for (int64_t r = 0; r < R; r++) {
    int64_t n = (first + r) / rep, h = g * rep + (first + r) % rep;
    memcpy(queries + r * wide, a->query + (n * a->H + h) * D, D * sizeof *queries);
    float *bias = biases + (n - first / rep) * places;
    if (r > 0 && (first + r) % rep) {
      memcpy(is_read + r * tiles, is_read + (r - 1) * tiles, tiles);
      continue;
    }
    memcpy(bias, a->bias + n * a->W, a->W * sizeof *bias);
    for (int64_t u = a->W; u < places; u++) bias[u] = MASKED;
    for (int64_t b = 0; b < tiles; b++) {
      I is = {0};
      for (int j = 0; j < TILE; j += LANES) is |= load_f(bias + b * TILE + j) > MASKED;
      is_read[r * tiles + b] = sum_f((VF)(is & ONE_BITS)) > 0;
    }
  }
  for (int64_t b = 0; b < tiles; b++) {
    if (!(count = queries_of(is_read + b, tiles, R, IS_LIGHT, list))) continue;
    rows = tile_of(a, values, b * TILE, wide, 0, copies);
    dots(rows, values + (b + 1) * TILE * D, 0, wide, (int[]){0}, norms + b * TILE, 0, 1);
    rows = tile_of(a, keys, b * TILE, wide, 0, copies);
    EACH_QUERY(DOTS)
  }
  for (int64_t r = 0; r < R; r++) {  // what a sum's unit is worth takes the query's place
    queries[r * wide] = weigh(a, g * rep + (first + r) % rep, biases + ((first + r) / rep - first / rep) * places,
                              norms, scores + r * places, is_read + r * tiles);
    if (isnan(queries[r * wide])) memset(is_read + r * tiles, 0, tiles);
  }
  for (int64_t b = 0; b < tiles; b++) {
    float *weights = scores + b * TILE;
    if (!queries_of(is_read + b, tiles, R, IS_LIGHT | IS_HEAVY, list)) continue;
    rows = tile_of(a, values, b * TILE, wide, norms, copies);
    count = queries_of(is_read + b, tiles, R, IS_LIGHT, list);
    EACH_QUERY(ADD_LIGHT)
    count = queries_of(is_read + b, tiles, R, IS_HEAVY, list);
    EACH_QUERY(ADD_HEAVY)
  }
  for (int64_t r = 0; r < R; r++) {
    int64_t n = (first + r) / rep, h = g * rep + (first + r) % rep;
    float *to = y + (n * a->H + h) * D;
    for (int64_t d = 0; d < D; d++) to[d] = (float)sums[r * wide + d] * queries[r * wide];
  }
  free(memory);
  return 1;
}
