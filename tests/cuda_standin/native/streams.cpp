// Streams, events, and graphs that are captured and launched.
//
// Whatever is put on a stream happens at once, in the order of the calls: with memory of the host
// and kernels that do nothing, nobody can tell the difference. What is put on a stream that is
// being captured happens when the graph is launched, as on a device.
#include "standin.h"

#include <cstring>
#include <set>

namespace standin {

namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

std::set<CUstream_st *> &streams() {
  static auto *all = new std::set<CUstream_st *>;
  return *all;
}

// The default streams have no object: their handles are null, 1 and 2.
bool is_default(cudaStream_t stream) { return reinterpret_cast<size_t>(stream) <= 2; }

int number(cudaStream_t stream) { return is_default(stream) ? 0 : stream->number; }

// Returns the stream whose capture forbids this thread potentially unsafe calls, or null. The rules
// are those of cudaThreadExchangeStreamCaptureMode.
CUstream_st *forbidding_capture() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) {
    return nullptr;
  }
  for (CUstream_st *stream : streams()) {
    if (stream->capture == nullptr) {
      continue;
    }
    const Capture &capture = *stream->capture;
    const bool is_own = capture.thread == std::this_thread::get_id();
    if (is_own ? capture.mode != cudaStreamCaptureModeRelaxed
               : capture.mode == cudaStreamCaptureModeGlobal &&
                     thread_mode == cudaStreamCaptureModeGlobal) {
      return stream;
    }
  }
  return nullptr;
}

// Refuses a call that can never be made on a stream that is being captured.
cudaError_t refuse_on_captured_stream(const char *call, cudaStream_t stream) {
  Capture *capture = capture_of(stream);
  if (capture == nullptr) {
    return cudaSuccess;
  }
  capture->is_valid = false;
  violation("%s on stream %d, which is being captured", call, number(stream));
  return remember(cudaErrorStreamCaptureUnsupported);
}

// Refuses a call on the legacy default stream while a stream that waits for it is being captured.
cudaError_t refuse_on_default_stream(const char *call, cudaStream_t stream) {
  if (!is_default(stream)) {
    return cudaSuccess;
  }
  for (CUstream_st *other : streams()) {
    if (other->capture != nullptr && (other->flags & cudaStreamNonBlocking) == 0) {
      other->capture->is_valid = false;
      violation("%s on the default stream, for which the captured stream %d waits", call,
                other->number);
      return remember(cudaErrorStreamCaptureImplicit);
    }
  }
  return cudaSuccess;
}

void require_unchanged_source(const Operation &operation) {
  if (operation.host_source != nullptr &&
      std::memcmp(operation.host_source, operation.host_content.data(),
                  operation.host_content.size()) != 0) {
    violation("a captured copy reads %zu bytes of the host that changed since the capture",
              operation.host_content.size());
  }
}

}  // namespace

cudaError_t remember(cudaError_t error) { return last_error = error; }

Capture *capture_of(cudaStream_t stream) {
  return is_default(stream) ? nullptr : stream->capture.get();
}

const char *where(cudaStream_t stream) {
  return capture_of(stream) != nullptr ? "captured" : "eager";
}

void enqueue(cudaStream_t stream, Operation operation) {
  Guard guard(lock());
  if (Capture *capture = capture_of(stream)) {
    capture->operations.push_back(std::move(operation));
    return;
  }
  for (CUstream_st *other : streams()) {
    if (other->capture != nullptr && other->capture->thread == std::this_thread::get_id()) {
      // CUDA allows this, but the work would be missing from the graph.
      violation("work on stream %d while its thread captures stream %d", number(stream),
                other->number);
    }
  }
  operation.run();
}

cudaError_t refuse_during_capture(const char *call) {
  Guard guard(lock());
  CUstream_st *stream = forbidding_capture();
  if (stream == nullptr) {
    return cudaSuccess;
  }
  stream->capture->is_valid = false;
  const bool is_own = stream->capture->thread == std::this_thread::get_id();
  violation("%s while %s captures stream %d", call, is_own ? "its thread" : "another thread",
            stream->number);
  return remember(cudaErrorStreamCaptureUnsupported);
}

}  // namespace standin

using namespace standin;

extern "C" {

// ---- errors ----

cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated:
      return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureImplicit:
      return "cudaErrorStreamCaptureImplicit";
    default:
      return "cudaErrorUnknown";
  }
}

const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    default:
      return "unknown error";
  }
}

// ---- streams ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  Guard guard(lock());
  static int count = 0;
  *stream = new CUstream_st{++count, flags, nullptr};
  streams().insert(*stream);
  log("stream create %d", (*stream)->number);
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Guard guard(lock());
  streams().erase(stream);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Guard guard(lock());
  if (cudaError_t error = refuse_on_captured_stream("cudaStreamSynchronize", stream)) {
    return error;
  }
  if (cudaError_t error = refuse_on_default_stream("cudaStreamSynchronize", stream)) {
    return error;
  }
  log("wait stream %d", number(stream));
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  Guard guard(lock());
  // Waiting for the device is waiting for every stream, whatever the mode of their captures.
  for (CUstream_st *stream : streams()) {
    if (cudaError_t error = refuse_on_captured_stream("cudaDeviceSynchronize", stream)) {
      return error;
    }
  }
  log("wait device");
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  log("hostfunction %s %d", where(stream), number(stream));
  Operation operation;
  operation.run = [=] { function(data); };
  enqueue(stream, std::move(operation));
  return cudaSuccess;
}

// ---- events ----

// An event needs no state but its place in memory: all work is done when a call returns.
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new char);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<char *>(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return cudaSuccess; }

cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

cudaError_t cudaEventSynchronize(cudaEvent_t) {
  if (cudaError_t error = refuse_during_capture("cudaEventSynchronize")) {
    return error;
  }
  log("wait event");
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1.0F;
  return cudaSuccess;
}

// ---- capture ----

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Guard guard(lock());
  if (is_default(stream)) {
    violation("cudaStreamBeginCapture on the default stream");
    return remember(cudaErrorStreamCaptureUnsupported);
  }
  if (cudaError_t error = refuse_on_captured_stream("cudaStreamBeginCapture", stream)) {
    return error;
  }
  static const char *const names[] = {"global", "thread-local", "relaxed"};
  stream->capture = std::make_unique<Capture>(Capture{std::this_thread::get_id(), mode, true, {}});
  log("capture begin %d %s", stream->number, names[mode]);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  Guard guard(lock());
  const Capture *capture = capture_of(stream);
  *status = capture == nullptr   ? cudaStreamCaptureStatusNone
            : capture->is_valid ? cudaStreamCaptureStatusActive
                                : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  Guard guard(lock());
  *graph = nullptr;
  if (capture_of(stream) == nullptr) {
    violation("cudaStreamEndCapture on a stream that is not being captured");
    return remember(cudaErrorInvalidValue);
  }
  const std::unique_ptr<Capture> capture = std::move(stream->capture);
  log("capture end %d %s", stream->number, capture->is_valid ? "valid" : "invalidated");
  if (!capture->is_valid) {
    return remember(cudaErrorStreamCaptureInvalidated);
  }
  *graph = new CUgraph_st{std::move(capture->operations)};
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph,
                                 unsigned long long) {
  *executable = new CUgraphExec_st{graph->operations};
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  Guard guard(lock());
  size_t num_kernels = 0;
  for (const Operation &operation : executable->operations) {
    num_kernels += operation.is_kernel ? 1 : 0;
  }
  log("graph launch %d kernels %zu others %zu", number(stream), num_kernels,
      executable->operations.size() - num_kernels);
  for (const Operation &operation : executable->operations) {
    require_unchanged_source(operation);
    operation.run();
  }
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
}
