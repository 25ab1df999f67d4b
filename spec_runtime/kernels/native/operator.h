// Declares what the operators share: refusals, the shapes of tensors, ONNX Runtime's threads.
#pragma once
#include <stdio.h>

#include "few_rows.h"
#include "ort.h"

enum { MOST_SIZES = 16 };

#define TRY(call)                        \
  do {                                   \
    OrtStatus *status_ = (call);         \
    if (status_) return status_;         \
  } while (0)

// Returns the instruction set that SPECSPLIT_INSTRUCTIONS names, or the best one that is here;
// null if this CPU has not the named one.
const Instructions *chosen(void);

static inline OrtStatus *refuse(OrtApi api, const char *what, long long got, long long expected) {
  char message[200];
  snprintf(message, sizeof message, "got %s %lld, expected %lld", what, got, expected);
  return ORT(api, CreateStatus)(ORT_INVALID_ARGUMENT, message);
}

// Reads type and sizes of a tensor.
static inline OrtStatus *shape_of(OrtApi api, const OrtValue *value, int *type, int64_t *sizes,
                           size_t *count) {
  OrtShape *shape;
  TRY(ORT(api, GetTensorTypeAndShape)(value, &shape));
  OrtStatus *status = ORT(api, GetTensorElementType)(shape, type);
  if (!status) status = ORT(api, GetDimensionsCount)(shape, count);
  if (!status && *count > MOST_SIZES) status = refuse(api, "dimensions", *count, MOST_SIZES);
  if (!status) status = ORT(api, GetDimensions)(shape, sizes, *count);
  ORT(api, ReleaseShape)(shape);
  return status;
}

// Reads a tensor that must have as many elements as `expected`, if that is not -1.
static inline OrtStatus *tensor(OrtApi api, OrtKernelContext *context, size_t index, int wanted,
                                int64_t expected, int64_t *sizes, size_t *count, const void **data) {
  const OrtValue *value = 0;
  int64_t got = 1;
  int type;
  TRY(ORT(api, KernelContextGetInput)(context, index, &value));
  if (!value) return refuse(api, "no input of number", index, index);
  TRY(shape_of(api, value, &type, sizes, count));
  for (size_t i = 0; i < *count; i++) got *= sizes[i];
  if (type != wanted) return refuse(api, "an input of type", type, wanted);
  if (expected >= 0 && got != expected) return refuse(api, "elements of an input:", got, expected);
  return ORT(api, GetTensorMutableData)((OrtValue *)value, (void **)data);
}

// Makes an output of a run.
static inline OrtStatus *output(OrtApi api, OrtKernelContext *context, size_t index,
                                const int64_t *sizes, size_t count, float **data) {
  OrtValue *value = 0;
  TRY(ORT(api, KernelContextGetOutput)(context, index, sizes, count, &value));
  if (!value) return refuse(api, "no output of number", index, index);
  return ORT(api, GetTensorMutableData)(value, (void **)data);
}

// Runs the tasks one after another, or on ONNX Runtime's threads.
static inline OrtStatus *run(OrtApi api, OrtKernelContext *context, void (*task)(void *, size_t),
                             size_t total, int is_small, void *call) {
  if (!is_small) return ORT(api, KernelContextParallelFor)(context, task, total, 0, call);
  for (size_t i = 0; i < total; i++) task(call, i);
  return 0;
}

// What all operators say of themselves.
static inline const char *provider(const OrtCustomOp *op) { return (void)op, "CPUExecutionProvider"; }
static inline int zero_at(const OrtCustomOp *op, size_t i) { return (void)op, (void)i, 0; }
static inline int one(const OrtCustomOp *op) { return (void)op, 1; }
#define SHARED_DECLARATION                                                               \
  .version = VERSION, .GetProvider = provider, .DestroyKernel = free,                    \
  .GetInputMemory = zero_at, .GetVariadicInputLeast = one,                               \
  .GetVariadicInputIsUniform = one, .GetVariadicOutputLeast = one,                       \
  .GetVariadicOutputIsUniform = one, .GetStartVersion = one, .GetEndVersion = one
