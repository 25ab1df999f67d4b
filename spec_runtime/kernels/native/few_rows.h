// Says what the operators compute, to them and to each instruction set.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { ACTIVATIONS = 32 };  // the most values of a row that share a scale

// A product's weights, as they lie in the bundle.
typedef struct {
  int bits;               // 4 or 8: blocks of a column's weights; 0: s8[K, N], a scale a column;
                          // 32: f32[K, N], or f32[N, K] if they are turned
  int is_turned;
  int64_t threads;        // of the session
  int64_t K, N;           // a row has K values, and N results
  int64_t block, blocks;  // weights that share a scale; blocks of a column
  const uint8_t *weight;  // bits 4: u8[N, blocks, block / 2], the first value is the low half;
                          // 8: u8[N, blocks, block], 128 is zero
  const float *scale;     // f32[N, blocks], or f32[N]
  const uint8_t *zero;    // u8[N, (blocks + 1) / 2] packed alike, or null for no zero point
  const float *minimum;   // f32[blocks, N] or null
  const float *bias;      // f32[N] or null
  const float *norm;      // f32[K] of an RMS norm before the product, or null
  float epsilon;
  int is_gated;  // a row is K gates and K values; its product is that of SiLU(gate) * value
} Product;

// Rows quantised to s8. A record holds one: its K values, in the order in which weights meet them,
// and for each step of values the scale, -128 * their sum, and their sum times the scale. With
// bits 0 the whole row is a step; with bits 32 a record is the row itself. Places are in bytes.
typedef struct {
  int64_t scale_at, start_at, sum_at, size;
  int64_t columns;  // calls of `multiply` begin best at multiples of it
} Record;

// Attention of N rows over slots of a cache, TILE slots at a time.
enum { TILE = 16, MOST_QUERIES = 48 };
typedef struct {
  int64_t N, H, G, D, S, W;         // rows, heads, key/value heads, width of a head, slots, a bias's
  const float *query, *key, *value; // f32[N, H, D], f32[G, S, D], f32[G, S, D]
  const float *bias;                // f32[N, W]: below MASKED, a row does not attend this slot
  const float *sinks;               // f32[H] or null
  float scale, softcap;             // no cap: 0
} Attention;
#define MASKED -1e8f

typedef struct {
  const char *name;
  Record (*layout)(const Product *);
  // Computes what stands before a product: the row `to` of x + added, which `sum` gets. Of these,
  // `added` may be null, and `sum` then is.
  void (*prepare)(const Product *, const float *x, const float *added, float *sum, float *to);
  void (*quantise)(const Product *, const Record *, const float *x, uint8_t *record);
  // Computes columns [first, end) of y f32[rows, N]; returns 0 if there is no memory.
  int (*multiply)(const Product *, const Record *, const uint8_t *records, int64_t rows,
                  float *y, int64_t first, int64_t end);
  // Computes those of y f32[N, H, D] whose heads read key/value head g, from the row and head
  // `first` of these, n * H / G + h, to `end`, at most MOST_QUERIES; returns 0 if there is no memory.
  int (*attend)(const Attention *, int64_t g, int64_t first, int64_t end, float *y);
} Instructions;

extern const Instructions portable;
#if defined(__x86_64__)
extern const Instructions avx2, avx_vnni, avx512_vnni;
#elif defined(__aarch64__)
extern const Instructions neon;
#endif
