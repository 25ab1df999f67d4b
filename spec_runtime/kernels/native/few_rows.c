// The operator FewRows: a product of float rows with int4 or int8 weights, for which the rows are
// quantised inside, or with float weights.
//
// Inputs: x f32[..., K]; weight; scale; zero points, minima and bias, each of which may be missing
// (see few_rows.h for their forms). All but x are initializers, which are read where they lie.
// Attribute `bits`: 4 or 8, 0 for weights s8[K, N] with a scale a column, or 32 for float weights,
// which have no scale, and are f32[N, K] if `turned` is 1; `threads`: how many the session has.
// Output: f32[..., N].
#include <stdlib.h>
#include <string.h>

#include "operator.h"

enum { ROWS_TO_READ = 16, FEW_PRODUCTS = 100000, FEW_VALUES = 30000 };
// An int32 holds sums of so many products of 128 * 127.
enum { MOST_VALUES = 130000 };
enum { X, WEIGHT, SCALE, ZERO, MINIMUM, BIAS, NUM_INPUTS };

typedef struct {
  OrtApi api;
  const Instructions *instructions;
  Product product;
  Record record;
} Kernel;

// Leaves an initializer's memory in `data`, null if it may be missing and is.
static OrtStatus *initializer(OrtApi api, const OrtKernelInfo *info, size_t index, int wanted,
                              int64_t *sizes, size_t *count, const void **data) {
  size_t inputs, length = 1;
  int is_constant = 0, type;
  const OrtValue *value = 0;
  *data = 0;
  TRY(ORT(api, KernelInfoGetInputCount)(info, &inputs));
  if (index < inputs) TRY(ORT(api, KernelInfoGetInputName)(info, index, 0, &length));
  if (length <= 1 && index > WEIGHT) return 0;  // its name is empty
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

static OrtStatus *create_kernel(const OrtCustomOp *op, OrtApi api, const OrtKernelInfo *info,
                                void **made) {
  (void)op;
  Kernel *kernel = calloc(1, sizeof *kernel);
  if (!kernel) return ORT(api, CreateStatus)(ORT_FAIL, "got no memory");
  kernel->api = api;
  kernel->instructions = chosen();
  OrtStatus *status = kernel->instructions ? read_product(api, info, &kernel->product)
      : ORT(api, CreateStatus)(ORT_FAIL, "this CPU has not SPECSPLIT_INSTRUCTIONS");
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
  const float *x;
  float *y;
  uint8_t *records;
  int64_t rows;
  int64_t parts, row_parts;  // tasks: each a part of the columns, and of the rows
  int is_short_of_memory;
} Call;

static void quantise_row(void *data, size_t row) {
  const Call *call = data;
  const Kernel *k = call->kernel;
  k->instructions->quantise(&k->product, &k->record, call->x + row * k->product.K,
                            call->records + row * k->record.size);
}

static void multiply_columns(void *data, size_t task) {
  Call *call = data;
  const Kernel *k = call->kernel;
  const int64_t N = k->product.N, step = k->record.columns, tiles = (N + step - 1) / step;
  const int64_t part = task % call->parts, row_part = task / call->parts;
  const int64_t row = call->rows * row_part / call->row_parts;
  const int64_t rows = call->rows * (row_part + 1) / call->row_parts - row;
  int64_t first = tiles * part / call->parts * step, end = tiles * (part + 1) / call->parts * step;
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
  call->parts = tiles, call->row_parts = 1;  // of fewer tiles than threads
  for (int64_t parts = 1; parts <= threads; parts++) {
    const int64_t row_parts = threads / parts;
    const int64_t tall = (call->rows + row_parts - 1) / row_parts, wide = (tiles + parts - 1) / parts;
    if (wide * (tall + ROWS_TO_READ) > least || parts > tiles || row_parts > call->rows) continue;
    least = wide * (tall + ROWS_TO_READ), call->parts = parts, call->row_parts = row_parts;
  }
}

static OrtStatus *compute(void *data, OrtKernelContext *context) {
  const Kernel *k = data;
  const Product *p = &k->product;
  OrtApi api = k->api;
  const OrtValue *x;
  OrtValue *y;
  int64_t sizes[MOST_SIZES], rows = 1;
  size_t count = 0;
  int type;
  Call call = {.kernel = k};
  TRY(ORT(api, KernelContextGetInput)(context, X, &x));
  TRY(shape_of(api, x, &type, sizes, &count));
  if (count < 1 || sizes[count - 1] != p->K)
    return refuse(api, "values a row", count < 1 ? 0 : sizes[count - 1], p->K);
  for (size_t i = 0; i + 1 < count; i++) rows *= sizes[i];
  sizes[count - 1] = p->N;
  TRY(ORT(api, KernelContextGetOutput)(context, 0, sizes, count, &y));
  if (rows == 0) return 0;
  TRY(ORT(api, GetTensorMutableData)((OrtValue *)x, (void **)&call.x));
  TRY(ORT(api, GetTensorMutableData)(y, (void **)&call.y));
  call.rows = rows;
  divide(k, &call);
  const int is_small = rows * p->K * p->N < FEW_PRODUCTS;
  const int64_t tasks = call.parts * call.row_parts;
  OrtStatus *status = 0;
  void *memory = 0;
  if (p->bits == 32) {
    call.records = (uint8_t *)call.x;
  } else {
    memory = malloc(rows * k->record.size + 64);
    if (!memory) return ORT(api, CreateStatus)(ORT_FAIL, "got no memory");
    call.records = (uint8_t *)(((uintptr_t)memory + 63) / 64 * 64);
    status = run(api, context, quantise_row, rows, rows * p->K < FEW_VALUES, &call);
  }
  if (!status) status = run(api, context, multiply_columns, tasks, is_small, &call);
  free(memory);
  if (!status && call.is_short_of_memory)
    return ORT(api, CreateStatus)(ORT_FAIL, "got no memory");
  return status;
}

static const char *name(const OrtCustomOp *op) { return (void)op, "FewRows"; }
static int input_type(const OrtCustomOp *op, size_t i) {
  static const int types[NUM_INPUTS] = {FLOAT, ANY_TYPE, FLOAT, UINT8, FLOAT, FLOAT};
  return (void)op, types[i];
}
static size_t num_inputs(const OrtCustomOp *op) { return (void)op, NUM_INPUTS; }
static int output_type(const OrtCustomOp *op, size_t i) { return (void)op, (void)i, FLOAT; }
static size_t num_outputs(const OrtCustomOp *op) { return (void)op, 1; }
static int input_kind(const OrtCustomOp *op, size_t i) {
  return (void)op, i > WEIGHT ? IS_OPTIONAL : IS_REQUIRED;
}

const OrtCustomOp FEW_ROWS = {
    SHARED_DECLARATION,
    .GetName = name,
    .GetInputType = input_type,
    .GetInputCount = num_inputs,
    .GetOutputType = output_type,
    .GetOutputCount = num_outputs,
    .GetInputKind = input_kind,
    .GetOutputKind = zero_at,
    .CreateKernelV2 = create_kernel,
    .ComputeV2 = compute,
};
