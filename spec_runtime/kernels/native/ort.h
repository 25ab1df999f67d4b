// Declares what is used of ONNX Runtime's C interface, whose wheel has no header.
//
// The functions stand in one table, OrtApi, whose places never change once a version is out; each
// is named here by its place. VERSION is the first version that has all of them.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct OrtStatus OrtStatus;
typedef struct OrtValue OrtValue;
typedef struct OrtShape OrtShape;  // OrtTensorTypeAndShapeInfo
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtShapeInferContext OrtShapeInferContext;
typedef void (*const *OrtApi)(void);
typedef struct {
  OrtApi (*GetApi)(uint32_t version);
  const char *(*GetVersionString)(void);
} OrtApiBase;

enum { VERSION = 17 };
enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };
enum { ANY_TYPE = 0, FLOAT = 1, UINT8 = 2, INT8 = 3, INT64 = 7 };
enum { IS_REQUIRED = 0, IS_OPTIONAL = 1 };

#define ORT_FUNCTION(name, place, result, ...) \
  typedef result (*name##Type)(__VA_ARGS__);   \
  enum { name##Place = place };
ORT_FUNCTION(CreateStatus, 0, OrtStatus *, int code, const char *message)
ORT_FUNCTION(CreateCustomOpDomain, 26, OrtStatus *, const char *name, OrtCustomOpDomain **)
ORT_FUNCTION(CustomOpDomainAdd, 27, OrtStatus *, OrtCustomOpDomain *, const void *op)
ORT_FUNCTION(AddCustomOpDomain, 28, OrtStatus *, OrtSessionOptions *, OrtCustomOpDomain *)
ORT_FUNCTION(GetTensorMutableData, 51, OrtStatus *, OrtValue *, void **)
ORT_FUNCTION(GetTensorElementType, 60, OrtStatus *, const OrtShape *, int *)
ORT_FUNCTION(GetDimensionsCount, 61, OrtStatus *, const OrtShape *, size_t *)
ORT_FUNCTION(GetDimensions, 62, OrtStatus *, const OrtShape *, int64_t *, size_t count)
ORT_FUNCTION(GetTensorTypeAndShape, 65, OrtStatus *, const OrtValue *, OrtShape **)
ORT_FUNCTION(KernelInfoGetAttributeFloat, 85, OrtStatus *, const OrtKernelInfo *, const char *,
             float *)
ORT_FUNCTION(KernelInfoGetAttributeInt, 86, OrtStatus *, const OrtKernelInfo *, const char *,
             int64_t *)
ORT_FUNCTION(KernelContextGetInputCount, 88, OrtStatus *, const OrtKernelContext *, size_t *)
ORT_FUNCTION(KernelContextGetInput, 90, OrtStatus *, const OrtKernelContext *, size_t index,
             const OrtValue **)
ORT_FUNCTION(KernelContextGetOutput, 91, OrtStatus *, OrtKernelContext *, size_t index,
             const int64_t *sizes, size_t count, OrtValue **)
ORT_FUNCTION(ReleaseShape, 99, void, OrtShape *)
ORT_FUNCTION(KernelInfoGetInputCount, 230, OrtStatus *, const OrtKernelInfo *, size_t *)
ORT_FUNCTION(KernelInfoGetInputName, 232, OrtStatus *, const OrtKernelInfo *, size_t index,
             char *, size_t *size)
ORT_FUNCTION(KernelInfoGetConstantInput, 249, OrtStatus *, const OrtKernelInfo *, size_t index,
             int *is_constant, const OrtValue **)
ORT_FUNCTION(KernelContextParallelFor, 274, OrtStatus *, const OrtKernelContext *,
             void (*)(void *, size_t), size_t total, size_t num_batches, void *)
#undef ORT_FUNCTION
#define ORT(api, name) ((name##Type)(api)[name##Place])

typedef struct OrtCustomOp {
  uint32_t version;
  void *(*CreateKernel)(const struct OrtCustomOp *, OrtApi, const OrtKernelInfo *);
  const char *(*GetName)(const struct OrtCustomOp *);
  const char *(*GetProvider)(const struct OrtCustomOp *);
  int (*GetInputType)(const struct OrtCustomOp *, size_t index);
  size_t (*GetInputCount)(const struct OrtCustomOp *);
  int (*GetOutputType)(const struct OrtCustomOp *, size_t index);
  size_t (*GetOutputCount)(const struct OrtCustomOp *);
  void (*Compute)(void *kernel, OrtKernelContext *);
  void (*DestroyKernel)(void *kernel);
  int (*GetInputKind)(const struct OrtCustomOp *, size_t index);
  int (*GetOutputKind)(const struct OrtCustomOp *, size_t index);
  int (*GetInputMemory)(const struct OrtCustomOp *, size_t index);
  int (*GetVariadicInputLeast)(const struct OrtCustomOp *);
  int (*GetVariadicInputIsUniform)(const struct OrtCustomOp *);
  int (*GetVariadicOutputLeast)(const struct OrtCustomOp *);
  int (*GetVariadicOutputIsUniform)(const struct OrtCustomOp *);
  OrtStatus *(*CreateKernelV2)(const struct OrtCustomOp *, OrtApi, const OrtKernelInfo *, void **);
  OrtStatus *(*ComputeV2)(void *kernel, OrtKernelContext *);
  OrtStatus *(*InferShape)(const struct OrtCustomOp *, OrtShapeInferContext *);
  int (*GetStartVersion)(const struct OrtCustomOp *);
  int (*GetEndVersion)(const struct OrtCustomOp *);
} OrtCustomOp;
