// Computes what stands before a product, in terms of an instruction set's vectors. Included after
// attention.h. Every instruction set adds squares in the same order.
enum { SQUARES = 16 };

INLINE void gate(const float *x, int64_t K, float *to) {
  const VF one = (VF){0} + 1;
  for (int64_t k = 0; k < K; k += LANES) {
    const int64_t width = K - k < LANES ? K - k : LANES;
    VF gates = first_f(x + k, width), values = first_f(x + K + k, width);
    VF part = exponential((VF)((I)gates | INT32_MIN));
    store_first(to + k, gates * (either(gates > 0, one, part) / (one + part)) * values, width);
  }
}

TARGET static void prepare(const Product *p, const float *x, const float *added, float *sum,
                           float *to) {
  const int64_t K = p->K;
  if (p->is_gated) return gate(x, K, to);
  if (!sum) sum = to;
  for (int64_t k = 0; k < K; k++) sum[k] = added ? x[k] + added[k] : x[k];
  VF parts[SQUARES / LANES] = {0};
  for (int64_t k = 0; k < K; k += LANES) {
    VF values = first_f(sum + k, K - k < LANES ? K - k : LANES);
    parts[k / LANES % (SQUARES / LANES)] += values * values;
  }
  float squares[SQUARES], total = 0;
  memcpy(squares, parts, sizeof squares);
  for (int i = 0; i < SQUARES; i++) total += squares[i];
  const float factor = 1 / sqrtf(total / (float)K + p->epsilon);
  for (int64_t k = 0; k < K; k++) to[k] = sum[k] * factor * p->norm[k];
}
