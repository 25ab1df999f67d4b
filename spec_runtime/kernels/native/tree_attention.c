// The operator TreeAttention: writes rows to slots of a cache, and attends to slots. A row's result
// does not depend on the slots in which the rows that it attends lie.
//
// Inputs: query f32[1, N, H * D]; cache of keys and cache of values f32[1, G, S, D]; a bias
// f32[1, 1, N, W], W at most S, MASKED or less where a row does not attend a slot; sinks f32[H],
// which may be missing; new keys and new values, f32 of N * G * D, and their slots i64[N], where
// these are written. Attributes: `num_heads`, `scale` (0: 1 / sqrt(D)), `softcap` (0: none).
// Outputs: f32[1, N, H * D]; with new rows, both caches, which are the inputs' memory if that is
// bound to them.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "operator.h"

enum { QUERY, KEY, VALUE, BIAS, SINKS, NEW_KEY, NEW_VALUE, SLOTS, NUM_INPUTS, NUM_OUTPUTS = 3 };
enum { FEW_TERMS = 100000, LEAST_TASKS = 8, AT_ONCE = 4 };

typedef struct {
  OrtApi api;
  const Instructions *instructions;
  int64_t num_heads;
  float scale, softcap;
} Kernel;

static OrtStatus *create_kernel(const OrtCustomOp *op, OrtApi api, const OrtKernelInfo *info,
                                void **made) {
  (void)op;
  Kernel kernel = {.api = api, .instructions = chosen()}, *kept;
  if (!kernel.instructions)
    return ORT(api, CreateStatus)(ORT_FAIL, "this CPU has not SPECSPLIT_INSTRUCTIONS");
  TRY(ORT(api, KernelInfoGetAttributeInt)(info, "num_heads", &kernel.num_heads));
  if (kernel.num_heads < 1) return refuse(api, "heads", kernel.num_heads, 1);
  TRY(ORT(api, KernelInfoGetAttributeFloat)(info, "scale", &kernel.scale));
  TRY(ORT(api, KernelInfoGetAttributeFloat)(info, "softcap", &kernel.softcap));
  if (!(kept = malloc(sizeof *kept))) return ORT(api, CreateStatus)(ORT_FAIL, "got no memory");
  *kept = kernel;
  *made = kept;
  return 0;
}

typedef struct {
  Attention attention;
  const Instructions *instructions;
  float *y;
  int64_t queries, step, chunks;  // rows and heads that read a key/value head; those of a task; tasks
  int is_short_of_memory;
} Call;

static void attend_some(void *data, size_t task) {
  Call *call = data;
  int64_t g = task / call->chunks, first = task % call->chunks * call->step;
  int64_t end = first + call->step < call->queries ? first + call->step : call->queries;
  if (!call->instructions->attend(&call->attention, g, first, end, call->y))
    __atomic_store_n(&call->is_short_of_memory, 1, __ATOMIC_RELAXED);
}

// Reads a tensor of float; its sizes have to be those of `expected` that are not -1.
static OrtStatus *sized(OrtApi api, OrtKernelContext *context, size_t index, size_t dimensions,
                        const int64_t *expected, int64_t *sizes, const float **data) {
  size_t count = 0;
  TRY(tensor(api, context, index, FLOAT, -1, sizes, &count, (const void **)data));
  if (count != dimensions) return refuse(api, "dimensions", count, dimensions);
  for (size_t i = 0; i < count; i++)
    if (expected[i] >= 0 && sizes[i] != expected[i])
      return refuse(api, "a size of an input:", sizes[i], expected[i]);
  return 0;
}

// Writes new rows to their slots of a cache, which becomes an output.
static OrtStatus *write_rows(OrtApi api, OrtKernelContext *context, const Attention *a, size_t index,
                             const int64_t *shape, const float **cache) {
  int64_t sizes[MOST_SIZES];
  size_t count;
  const float *rows;
  const int64_t *slots;
  float *to;
  TRY(tensor(api, context, SLOTS, INT64, a->N, sizes, &count, (const void **)&slots));
  TRY(tensor(api, context, NEW_KEY + index, FLOAT, a->N * a->G * a->D, sizes, &count, (const void **)&rows));
  TRY(output(api, context, 1 + index, shape, 4, &to));
  if (to != *cache) memmove(to, *cache, a->G * a->S * a->D * sizeof *to);
  *cache = to;
  for (int64_t n = 0; n < a->N; n++) {
    const int64_t slot = slots[n];
    if (slot < 0 || slot >= a->S) return refuse(api, "a slot", slot, a->S - 1);
    for (int64_t g = 0; g < a->G; g++, rows += a->D)
      memcpy(to + (g * a->S + slot) * a->D, rows, a->D * sizeof *to);
  }
  return 0;
}

static OrtStatus *compute(void *data, OrtKernelContext *context) {
  const Kernel *k = data;
  OrtApi api = k->api;
  Call call = {.instructions = k->instructions};
  Attention *a = &call.attention;
  int64_t query[MOST_SIZES], cache[MOST_SIZES], sizes[MOST_SIZES], H = k->num_heads;
  size_t inputs;
  TRY(sized(api, context, QUERY, 3, (int64_t[]){1, -1, -1}, query, &a->query));
  TRY(sized(api, context, KEY, 4, (int64_t[]){1, -1, -1, -1}, cache, &a->key));
  TRY(sized(api, context, VALUE, 4, cache, sizes, &a->value));
  TRY(sized(api, context, BIAS, 4, (int64_t[]){1, 1, query[1], -1}, sizes, &a->bias));
  a->N = query[1], a->H = H, a->G = cache[1], a->S = cache[2], a->D = cache[3], a->W = sizes[3];
  if (a->W > a->S) return refuse(api, "columns of a bias", a->W, a->S);
  if (a->G < 1 || H % a->G) return refuse(api, "heads", H, a->G);
  if (query[2] % H || query[2] / H != a->D)  // a product might be too large for its type
    return refuse(api, "values a row", query[2], (int64_t)((uint64_t)H * a->D));
  TRY(ORT(api, KernelContextGetInputCount)(context, &inputs));
  const OrtValue *sinks = 0;
  if (inputs > SINKS) TRY(ORT(api, KernelContextGetInput)(context, SINKS, &sinks));
  if (sinks) TRY(sized(api, context, SINKS, 1, &H, sizes, &a->sinks));
  if (inputs > SLOTS) {
    TRY(write_rows(api, context, a, 0, cache, &a->key));
    TRY(write_rows(api, context, a, 1, cache, &a->value));
  }
  a->scale = k->scale != 0 ? k->scale : 1 / sqrtf((float)a->D), a->softcap = k->softcap;
  TRY(output(api, context, 0, query, 3, &call.y));
  if (a->N == 0 || a->D == 0) return 0;
  call.queries = a->N * H / a->G;
  call.step = (call.queries * a->G / LEAST_TASKS / AT_ONCE + 1) * AT_ONCE;
  if (call.step > MOST_QUERIES) call.step = MOST_QUERIES;
  call.chunks = (call.queries + call.step - 1) / call.step;
  int is_small = a->N * H * a->D * a->W < FEW_TERMS;
  OrtStatus *status = run(api, context, attend_some, a->G * call.chunks, is_small, &call);
  if (!status && call.is_short_of_memory)
    return ORT(api, CreateStatus)(ORT_FAIL, "got no memory");
  return status;
}

// -------------------------------------------------------------------------- the declaration

static const char *name(const OrtCustomOp *op) { return (void)op, "TreeAttention"; }
static int type_of(const OrtCustomOp *op, size_t i) { return (void)op, i == SLOTS ? INT64 : FLOAT; }
static size_t num_inputs(const OrtCustomOp *op) { return (void)op, NUM_INPUTS; }
static size_t num_outputs(const OrtCustomOp *op) { return (void)op, NUM_OUTPUTS; }
static int input_kind(const OrtCustomOp *op, size_t i) {
  return (void)op, i >= SINKS ? IS_OPTIONAL : IS_REQUIRED;
}
static int output_kind(const OrtCustomOp *op, size_t i) {
  return (void)op, i ? IS_OPTIONAL : IS_REQUIRED;
}

const OrtCustomOp TREE_ATTENTION = {
    SHARED_DECLARATION,
    .GetName = name,
    .GetInputType = type_of,
    .GetInputCount = num_inputs,
    .GetOutputType = type_of,
    .GetOutputCount = num_outputs,
    .GetInputKind = input_kind,
    .GetOutputKind = output_kind,
    .CreateKernelV2 = create_kernel,
    .ComputeV2 = compute,
};
