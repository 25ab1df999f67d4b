// The operator FewRows: a product of float rows with int4 or int8 weights, for which the rows are
// quantised inside, or with float weights.
//
// Inputs: x f32[..., K]; weight; scale; zero points, minima, bias and the weights of an RMS norm of
// x, each of which may be missing (see few_rows.h for their forms); what is added to x before the
// norm; cos f32[P, d], sin and positions i64[rows]. Initializers are read where they lie.
// Attribute `bits`: 4 or 8, 0 for weights s8[K, N] with a scale a column, or 32 for float weights,
// which have no scale, and are f32[N, K] if `turned` is 1; `threads`: how many the session has;
// `epsilon` of a norm; `gated`: x is f32[..., 2 * K], of gates and values; `heads` of queries and
// keys, whose first 2 * d columns are rotated, and `queries` and `keys`, the columns of all.
// Outputs: f32[..., N], or with heads its queries, keys and values; x and what is added to it.
#include <stdlib.h>
#include <string.h>

#include "operator.h"

enum { ROWS_TO_READ = 16, FEW_PRODUCTS = 100000, FEW_VALUES = 30000 };
// An int32 holds sums of so many products of 128 * 127.
enum { MOST_VALUES = 130000 };
enum { X, WEIGHT, SCALE, ZERO, MINIMUM, BIAS, NORM, ADDED, COS, SIN, POSITIONS, NUM_INPUTS };
enum { PARTS = 3, SUM = PARTS, NUM_OUTPUTS };

typedef struct {
  OrtApi api;
  const Instructions *instructions;
  Product product;
  Record record;
  int has_added;
  int64_t heads, parts[PARTS];  // columns of the outputs, if there are heads
} Kernel;

static OrtStatus *find_input(OrtApi api, const OrtKernelInfo *info, size_t index, int *is_there) {
  size_t inputs, length = 1;
  TRY(ORT(api, KernelInfoGetInputCount)(info, &inputs));
  if (index < inputs) TRY(ORT(api, KernelInfoGetInputName)(info, index, 0, &length));
  *is_there = length > 1;  // or its name is empty
  return 0;
}

// Leaves an initializer's memory in `data`, null if it may be missing and is.
static OrtStatus *initializer(OrtApi api, const OrtKernelInfo *info, size_t index, int wanted,
                              int64_t *sizes, size_t *count, const void **data) {
  int is_constant = 0, is_there, type;
  const OrtValue *value = 0;
  *data = 0;
  TRY(find_input(api, info, index, &is_there));
  if (!is_there && index > WEIGHT) return 0;
  TRY(ORT(api, KernelInfoGetConstantInput)(info, index, &is_constant, &value));
  if (!is_constant || !value)
    return ORT(api, CreateStatus)(ORT_INVALID_ARGUMENT,
                                  "got a computed input, expected initializers after x");
  TRY(shape_of(api, value, &type, sizes, count));
  if (type != wanted) return refuse(api, "an initializer of type", type, wanted);
  return ORT(api, GetTensorMutableData)((OrtValue *)value, (void **)data);
}

// Reads an initializer that must have as many elements as `expected`.
static OrtStatus *elements(OrtApi api, const OrtKernelInfo *info, size_t index, int type,
                           int64_t expected, const void **data) {
  int64_t sizes[MOST_SIZES], got = 1;
  size_t count = 0;
  TRY(initializer(api, info, index, type, sizes, &count, data));
  for (size_t i = 0; i < count; i++) got *= sizes[i];
  return !*data || got == expected ? 0 : refuse(api, "elements of an input:", got, expected);
}

static OrtStatus *read_product(OrtApi api, const OrtKernelInfo *info, Product *p) {
  int64_t bits, sizes[MOST_SIZES];
  size_t count = 0;
  TRY(ORT(api, KernelInfoGetAttributeInt)(info, "bits", &bits));
  if (bits != 0 && bits != 4 && bits != 8 && bits != 32) return refuse(api, "bits", bits, 4);
  const int is_float = bits == 32, has_blocks = bits && !is_float;
  int64_t turned = 0;
  if (is_float) TRY(ORT(api, KernelInfoGetAttributeInt)(info, "turned", &turned));
  TRY(ORT(api, KernelInfoGetAttributeInt)(info, "threads", &p->threads));
  if (p->threads < 1) return refuse(api, "threads", p->threads, 1);
  p->bits = (int)bits, p->is_turned = turned != 0;
  TRY(initializer(api, info, WEIGHT, is_float ? FLOAT : bits ? UINT8 : INT8, sizes, &count,
                  (const void **)&p->weight));
  if ((int)count != 2 + has_blocks) return refuse(api, "dimensions of weights", count, 2 + has_blocks);
  if (has_blocks) {
    p->N = sizes[0], p->blocks = sizes[1], p->block = sizes[2] * 8 / bits;
    p->K = p->blocks * p->block;
    if (p->block < 16 || p->block > 256 || p->block & (p->block - 1))
      return refuse(api, "weights a block", p->block, 32);
  } else {
    p->K = sizes[p->is_turned], p->N = sizes[!p->is_turned], p->blocks = 1;
  }
  if (p->K < 1 || p->K > MOST_VALUES) return refuse(api, "values a row", p->K, MOST_VALUES);
  if (p->N < 1) return refuse(api, "columns", p->N, 1);
  TRY(elements(api, info, SCALE, FLOAT, p->N * p->blocks, (const void **)&p->scale));
  int64_t zeros = p->N * ((p->blocks + 1) / 2), is_not_zero = 0;
  TRY(elements(api, info, ZERO, UINT8, zeros, (const void **)&p->zero));
  TRY(elements(api, info, MINIMUM, FLOAT, p->N * p->blocks, (const void **)&p->minimum));
  TRY(elements(api, info, BIAS, FLOAT, p->N, (const void **)&p->bias));
  if (!p->scale == !is_float) return refuse(api, "scales:", !!p->scale, !is_float);
  if (bits != 4 && p->zero) return refuse(api, "zero points with bits", bits, 4);
  if (!has_blocks && p->minimum) return refuse(api, "minima with bits", bits, 4);
  for (int64_t i = 0; p->zero && i < zeros; i++) is_not_zero |= p->zero[i];
  if (!is_not_zero) p->zero = 0;
  return 0;
}

// Reads what stands before and after the product.
static OrtStatus *read_neighbours(OrtApi api, const OrtKernelInfo *info, Kernel *k) {
  Product *p = &k->product;
  int64_t gated;
  TRY(ORT(api, KernelInfoGetAttributeInt)(info, "gated", &gated));
  p->is_gated = gated != 0;
  TRY(elements(api, info, NORM, FLOAT, p->K, (const void **)&p->norm));
  if (p->norm) TRY(ORT(api, KernelInfoGetAttributeFloat)(info, "epsilon", &p->epsilon));
  TRY(find_input(api, info, ADDED, &k->has_added));
  if (p->norm ? p->is_gated : k->has_added) return refuse(api, "norms:", !!p->norm, !p->norm);
  TRY(ORT(api, KernelInfoGetAttributeInt)(info, "heads", &k->heads));
  if (!k->heads) return 0;
  TRY(ORT(api, KernelInfoGetAttributeInt)(info, "queries", &k->parts[0]));
  TRY(ORT(api, KernelInfoGetAttributeInt)(info, "keys", &k->parts[1]));
  const uint64_t turned = (uint64_t)k->parts[0] + (uint64_t)k->parts[1];
  if (k->parts[0] < 0 || k->parts[1] < 0 || turned > (uint64_t)p->N)
    return refuse(api, "columns of queries and keys", (int64_t)turned, p->N);
  k->parts[2] = p->N - (int64_t)turned;
  return k->heads > 0 && turned % k->heads == 0 ? 0 : refuse(api, "heads", k->heads, turned);
}

static OrtStatus *create_kernel(const OrtCustomOp *op, OrtApi api, const OrtKernelInfo *info,
                                void **made) {
  (void)op;
  Kernel *kernel = calloc(1, sizeof *kernel);
  if (!kernel) return ORT(api, CreateStatus)(ORT_FAIL, "got no memory");
  kernel->api = api;
  kernel->instructions = chosen();
  OrtStatus *status = kernel->instructions ? read_product(api, info, &kernel->product)
      : ORT(api, CreateStatus)(ORT_FAIL, "this CPU has not SPECSPLIT_INSTRUCTIONS");
  if (!status) status = read_neighbours(api, info, kernel);
  if (status) {
    free(kernel);
    return status;
  }
  kernel->record = kernel->instructions->layout(&kernel->product);
  *made = kernel;
  return 0;
}

typedef struct {
  const Kernel *kernel;
  const float *x, *added, *cos, *sin;
  const int64_t *positions;
  float *y, *sum, *prepared;  // the latter if something stands before the product
  float *parts[PARTS];
  int64_t half;  // of the columns of a head that are rotated
  uint8_t *records;
  int64_t rows;
  int64_t column_parts, row_parts;  // tasks: each a part of the columns, and of the rows
  int is_short_of_memory;
} Call;

static void prepare_row(void *data, size_t row) {
  const Call *call = data;
  const Kernel *k = call->kernel;
  const int64_t K = k->product.K;
  const float *x = call->x + row * (k->product.is_gated ? 2 * K : K);
  if (call->prepared) {
    float *to = call->prepared + row * K;
    k->instructions->prepare(&k->product, x, call->added ? call->added + row * K : 0,
                             call->sum ? call->sum + row * K : 0, to);
    x = to;
  }
  if (k->product.bits != 32)
    k->instructions->quantise(&k->product, &k->record, x, call->records + row * k->record.size);
}

// Rotates queries and keys of a row, and cuts it.
static void rotate_row(void *data, size_t row) {
  const Call *call = data;
  const Kernel *k = call->kernel;
  const int64_t wide = (k->parts[0] + k->parts[1]) / k->heads, half = call->half;
  const float *cos = call->cos + call->positions[row] * half;
  const float *sin = call->sin + call->positions[row] * half;
  float *y = call->y + row * k->product.N;
  for (int64_t h = 0; h < k->heads; h++)
    for (int64_t i = h * wide; i < h * wide + half; i++) {
      const float a = y[i], b = y[i + half], c = cos[i - h * wide], s = sin[i - h * wide];
      y[i] = a * c - b * s, y[i + half] = b * c + a * s;
    }
  for (int part = 0; part < PARTS; y += k->parts[part++])
    if (k->parts[part]) memcpy(call->parts[part] + row * k->parts[part], y, k->parts[part] * sizeof *y);
}

static void multiply_columns(void *data, size_t task) {
  Call *call = data;
  const Kernel *k = call->kernel;
  const int64_t N = k->product.N, step = k->record.columns, tiles = (N + step - 1) / step;
  const int64_t part = task % call->column_parts, row_part = task / call->column_parts;
  const int64_t row = call->rows * row_part / call->row_parts;
  const int64_t rows = call->rows * (row_part + 1) / call->row_parts - row;
  int64_t first = tiles * part / call->column_parts * step,
          end = tiles * (part + 1) / call->column_parts * step;
  if (end > N) end = N;
  if (!k->instructions->multiply(&k->product, &k->record, call->records + row * k->record.size,
                                 rows, call->y + row * N, first, end))
    __atomic_store_n(&call->is_short_of_memory, 1, __ATOMIC_RELAXED);
}

// Divides a product among the threads, so that the longest task is short. Reading weights takes as
// long as multiplying them by ROWS_TO_READ rows.
static void divide(const Kernel *k, Call *call) {
  const int64_t threads = k->product.threads, step = k->record.columns;
  const int64_t tiles = (k->product.N + step - 1) / step;
  int64_t least = INT64_MAX;
  call->column_parts = tiles, call->row_parts = 1;  // of fewer tiles than threads
  for (int64_t parts = 1; parts <= threads && parts <= tiles; parts++) {
    const int64_t row_parts = threads / parts;
    const int64_t tall = (call->rows + row_parts - 1) / row_parts, wide = (tiles + parts - 1) / parts;
    if (wide * (tall + ROWS_TO_READ) > least || row_parts > call->rows) continue;
    least = wide * (tall + ROWS_TO_READ), call->column_parts = parts, call->row_parts = row_parts;
  }
}

// Makes an output whose rows have `columns`.
static OrtStatus *rows_of(OrtApi api, OrtKernelContext *context, size_t index, int64_t *sizes,
                          size_t count, int64_t columns, float **data) {
  sizes[count - 1] = columns;
  return output(api, context, index, sizes, count, data);
}

static OrtStatus *read_positions(OrtApi api, OrtKernelContext *context, Call *call) {
  const Kernel *k = call->kernel;
  int64_t sizes[MOST_SIZES];
  size_t count = 0;
  TRY(tensor(api, context, COS, FLOAT, -1, sizes, &count, (const void **)&call->cos));
  if (count != 2) return refuse(api, "dimensions", count, 2);
  const int64_t positions = sizes[0], wide = (k->parts[0] + k->parts[1]) / k->heads;
  call->half = sizes[1];
  if (call->half > wide / 2) return refuse(api, "pairs of columns", call->half, wide / 2);
  TRY(tensor(api, context, SIN, FLOAT, positions * call->half, sizes, &count, (const void **)&call->sin));
  TRY(tensor(api, context, POSITIONS, INT64, call->rows, sizes, &count, (const void **)&call->positions));
  for (int64_t row = 0; row < call->rows; row++)
    if (call->positions[row] < 0 || call->positions[row] >= positions)
      return refuse(api, "a position", call->positions[row], positions - 1);
  return 0;
}

static OrtStatus *compute(void *data, OrtKernelContext *context) {
  const Kernel *k = data;
  const Product *p = &k->product;
  OrtApi api = k->api;
  int64_t sizes[MOST_SIZES], rows = 1, other[MOST_SIZES];
  const int64_t given = p->is_gated ? 2 * p->K : p->K;
  size_t count = 0, others;
  Call call = {.kernel = k};
  TRY(tensor(api, context, X, FLOAT, -1, sizes, &count, (const void **)&call.x));
  if (count < 1 || sizes[count - 1] != given)
    return refuse(api, "values a row", count < 1 ? 0 : sizes[count - 1], given);
  for (size_t i = 0; i + 1 < count; i++) rows *= sizes[i];
  call.rows = rows;
  if (k->has_added) {
    TRY(tensor(api, context, ADDED, FLOAT, rows * p->K, other, &others, (const void **)&call.added));
    TRY(rows_of(api, context, SUM, sizes, count, p->K, &call.sum));
  }
  if (!k->heads) TRY(rows_of(api, context, 0, sizes, count, p->N, &call.y));
  for (int part = 0; k->heads && part < PARTS; part++)
    TRY(rows_of(api, context, part, sizes, count, k->parts[part], &call.parts[part]));
  if (k->heads) TRY(read_positions(api, context, &call));
  if (rows == 0) return 0;
  divide(k, &call);
  const int is_small = rows * p->K * p->N < FEW_PRODUCTS;
  const int is_prepared = p->norm || p->is_gated, is_float = p->bits == 32;
  const int64_t prepared = is_prepared * rows * p->K, whole = k->heads ? rows * p->N : 0;
  float *memory = malloc((prepared + whole) * sizeof *memory + !is_float * rows * k->record.size + 64);
  if (!memory) return ORT(api, CreateStatus)(ORT_FAIL, "got no memory");
  if (is_prepared) call.prepared = memory;
  if (k->heads) call.y = memory + prepared;
  call.records = (uint8_t *)(((uintptr_t)(memory + prepared + whole) + 63) / 64 * 64);
  if (is_float) call.records = is_prepared ? (uint8_t *)call.prepared : (uint8_t *)call.x;
  OrtStatus *status = 0;
  if (is_prepared || !is_float) status = run(api, context, prepare_row, rows, rows * p->K < FEW_VALUES, &call);
  if (!status) status = run(api, context, multiply_columns, call.column_parts * call.row_parts, is_small, &call);
  if (!status && k->heads) status = run(api, context, rotate_row, rows, rows * p->N < FEW_VALUES, &call);
  free(memory);
  if (!status && call.is_short_of_memory)
    return ORT(api, CreateStatus)(ORT_FAIL, "got no memory");
  return status;
}

static const char *name(const OrtCustomOp *op) { return (void)op, "FewRows"; }
static int input_type(const OrtCustomOp *op, size_t i) {
  return (void)op, i == WEIGHT ? ANY_TYPE : i == ZERO ? UINT8 : i == POSITIONS ? INT64 : FLOAT;
}
static size_t num_inputs(const OrtCustomOp *op) { return (void)op, NUM_INPUTS; }
static int output_type(const OrtCustomOp *op, size_t i) { return (void)op, (void)i, FLOAT; }
static size_t num_outputs(const OrtCustomOp *op) { return (void)op, NUM_OUTPUTS; }
static int input_kind(const OrtCustomOp *op, size_t i) {
  return (void)op, i > WEIGHT ? IS_OPTIONAL : IS_REQUIRED;
}

static int output_kind(const OrtCustomOp *op, size_t i) {
  return (void)op, i ? IS_OPTIONAL : IS_REQUIRED;
}

const OrtCustomOp FEW_ROWS = {
    SHARED_DECLARATION,
    .GetName = name,
    .GetInputType = input_type,
    .GetInputCount = num_inputs,
    .GetOutputType = output_type,
    .GetOutputCount = num_outputs,
    .GetInputKind = input_kind,
    .GetOutputKind = output_kind,
    .CreateKernelV2 = create_kernel,
    .ComputeV2 = compute,
};
