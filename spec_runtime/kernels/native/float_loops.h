// Multiplies float rows with float weights, in terms of an instruction set's vectors, see loops.h.
// Each result's operations come in one order, however many rows and columns are computed beside it:
// of f32[K, N], products are added one after another to the bias; of f32[N, K], each lane of a
// vector adds every LANES-th product, then the lanes are added, and the bias.
//
// Memory decides the speed of few rows, so that weights are read once, and those that come next
// are meanwhile fetched into the second cache. Three rows or fewer are done too fast for that: they
// take SHALLOW values of all columns before the next ones, which are long runs of memory. Of many
// rows, arithmetic decides: they meet panels of weights that were copied.
enum { SHALLOW = 16, DEEP = 8 * LANES, COPIED = 768, NEED_DEPTH = 4, NEED_COPY = 25 };
// With f32[N, K]: rows that stay in the second cache, columns between two groups of rows, floats.
enum { TALL = 64, WIDE = 24, AHEAD = 1 << 14 };

// Says which weights are next, for PANEL columns, and what to fetch meanwhile.
typedef struct {
  const float *at, *next;
  int64_t stride, next_stride;
} Panel;

// Adds the products of `count` values of R rows to what `from` holds, by weights f32[K, N].
INLINE void add_floats(const float *x, int64_t K, Panel panel, int64_t count, const float *from,
                       int64_t pitch, float *y, int64_t N, const int R) {
  VF acc[FLOAT_ROWS][3];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 3; j++) acc[r][j] = load_f(from + r * pitch + j * LANES);
  for (int64_t k = 0; k < count; k++, panel.at += panel.stride, panel.next += panel.next_stride) {
    VF w[3];
    for (int at = 0; at < PANEL; at += 16) __builtin_prefetch(panel.next + at, 0, 2);
    for (int j = 0; j < 3; j++) w[j] = load_f(panel.at + j * LANES);
    for (int r = 0; r < R; r++) {
      VF value = set_f(x[r * K + k]);
      for (int j = 0; j < 3; j++) acc[r][j] = fma_f(w[j], value, acc[r][j]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 3; j++) memcpy(y + r * N + j * LANES, &acc[r][j], sizeof(VF));
}

// Computes up to three columns of R rows by weights f32[N, K].
INLINE void dot_floats(const float *x, int64_t K, const float *weight, const float *bias, float *y,
                       int64_t N, int64_t width, int64_t ahead, const int R) {
  const float *w_of[3];
  VF acc[FLOAT_ROWS][3];
  for (int j = 0; j < 3; j++) w_of[j] = weight + (j < width ? j : 0) * K;
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 3; j++) acc[r][j] = set_f(0);
  int64_t k = 0;
  for (; k + LANES <= K; k += LANES) {
    VF w[3];
    for (int j = 0; j < 3; j++) {
      __builtin_prefetch(w_of[j] + k + ahead, 0, 2);
      w[j] = load_f(w_of[j] + k);
    }
    for (int r = 0; r < R; r++) {
      VF values = load_f(x + r * K + k);
      for (int j = 0; j < 3; j++) acc[r][j] = fma_f(w[j], values, acc[r][j]);
    }
  }
  for (int r = 0; r < R && k < K; r++)
    for (int j = 0; j < 3; j++)
      acc[r][j] = fma_f(first_f(w_of[j] + k, K - k), first_f(x + r * K + k, K - k), acc[r][j]);
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 3; j++)
      if (j < width) y[r * N + j] = sum_f(acc[r][j]) + (bias ? bias[j] : 0);
}

#define EACH_FLOATS(call)                                       \
  case 1: call(1); break;                                       \
  case 2: call(2); break;                                       \
  case 3: call(3); break;                                       \
  case 4: call(4); break;
#if FLOAT_ROWS == 8
#define ALL_FLOATS(call)                                        \
  EACH_FLOATS(call)                                             \
  case 5: call(5); break;                                       \
  case 6: call(6); break;                                       \
  case 7: call(7); break;                                       \
  case 8: call(8); break;
#else
#define ALL_FLOATS EACH_FLOATS
#endif
#define DOT(R) dot_floats(x + r * K, K, weight, bias, y + r * N + n, N, width, ahead, R)
#define ADD(R) add_floats(x + r * K + k, K, panel, count, from, pitch, to, to_pitch, R)

INLINE void turned_columns(const Product *p, const float *x, int64_t rows, float *y,
                           int64_t first, int64_t end) {
  const int64_t K = p->K, N = p->N;
  for (int64_t begin = 0; begin < rows; begin += TALL)
    for (int64_t wide = first; wide < end; wide += WIDE) {
      const int64_t last = rows - begin < TALL ? rows : begin + TALL;
      for (int64_t r = begin; r < last; r += FLOAT_ROWS)
        for (int64_t n = wide; n < end && n < wide + WIDE; n += 3) {
          const float *weight = (const float *)p->weight + n * K, *bias = p->bias ? p->bias + n : 0;
          const int64_t width = end - n, ahead = r == begin ? AHEAD : 0;
          switch (last - r < FLOAT_ROWS ? last - r : FLOAT_ROWS) { ALL_FLOATS(DOT) }
        }
    }
}

// Computes columns [first, end) of rows; returns 0 if there is no memory.
INLINE int multiply_floats(const Product *p, const float *x, int64_t rows, float *y, int64_t first,
                           int64_t end) {
  static const float zeros[PANEL];
  float edge[FLOAT_ROWS * PANEL] = {0};  // of the last columns, if they fill no panel
  if (p->is_turned) return turned_columns(p, x, rows, y, first, end), 1;
  const int64_t K = p->K, N = p->N;
  const int64_t deepest = rows < NEED_DEPTH ? SHALLOW : rows < NEED_COPY ? DEEP : COPIED;
  const int64_t slabs = (K + deepest - 1) / deepest, depth = (K + slabs - 1) / slabs;
  const int64_t groups = (rows + FLOAT_ROWS - 1) / FLOAT_ROWS, most = (rows + groups - 1) / groups;
  float *slab = aligned_alloc(ALIGNED, COPIED * PANEL * sizeof(float));
  for (int64_t k = 0; slab && k < K; k += depth)
    for (int64_t n = first; n < end; n += PANEL) {
      const int64_t count = K - k < depth ? K - k : depth, width = end - n < PANEL ? end - n : PANEL;
      const float *weight = (const float *)p->weight + k * N + n;
      Panel panel = {weight, weight + depth * N, N, N};
      if (rows >= NEED_DEPTH) panel.next = n + PANEL < end ? weight + PANEL : panel.next + first - n;
      if (rows >= NEED_COPY || width < PANEL) {
        if (width < PANEL) memset(slab, 0, count * PANEL * sizeof(float));
        for (int64_t i = 0; i < count; i++) {
          if (width == PANEL) memcpy(slab + i * PANEL, weight + i * N, PANEL * sizeof(float));
          else memcpy(slab + i * PANEL, weight + i * N, width * sizeof(float));
        }
        panel.at = slab, panel.stride = PANEL;
      }
      for (int64_t r = 0; r < rows; r += most) {
        const int64_t few = rows - r < most ? rows - r : most;
        float *out = y + r * N + n, *to = width < PANEL ? edge : out;
        const float *from = k ? out : p->bias ? p->bias + n : zeros;
        int64_t pitch = k ? N : 0, to_pitch = width < PANEL ? PANEL : N;
        if (width < PANEL) {
          for (int64_t i = 0; i < few; i++) memcpy(to + i * PANEL, from + i * pitch, width * 4);
          from = to, pitch = PANEL;
        }
        switch (few) { ALL_FLOATS(ADD) }
        for (int64_t i = 0; i < few && width < PANEL; i++) memcpy(out + i * N, to + i * PANEL, width * 4);
        panel.next = panel.at, panel.next_stride = 0;
      }
    }
  free(slab);
  return slab != 0;
}
