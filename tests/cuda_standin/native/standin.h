// What the parts of the stand-in share: one lock, one log, streams and captured graphs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace standin {

// Guards all state of the stand-in. It is recursive, so that every function may take it.
std::recursive_mutex &lock();
using Guard = std::lock_guard<std::recursive_mutex>;

// Writes one line to the log, unless it is paused or nobody asked for one.
void log(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Logs a violation: a call that CUDA would refuse, or a result that would be wrong.
void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Keeps an error for cudaGetLastError, and returns it.
cudaError_t remember(cudaError_t error);

// One thing that a captured graph does whenever it is launched.
struct Operation {
  std::function<void()> run;
  const void *host_source = nullptr;  // memory of the host that it reads at every launch …
  std::string host_content;           // … and what that memory held when it was captured.
  bool is_kernel = false;
};

// A stream that is being captured, and since when by whom.
struct Capture {
  std::thread::id thread;
  cudaStreamCaptureMode mode;
  bool is_valid = true;
  std::vector<Operation> operations;
};

// Returns the capture of a stream, or null if it is not being captured.
Capture *capture_of(cudaStream_t stream);

// Returns the word by which the log says where an operation goes: "captured" or "eager".
const char *where(cudaStream_t stream);

// Runs an operation at once, or adds it to the graph that is being captured on the stream.
void enqueue(cudaStream_t stream, Operation operation);

// Returns an error, and logs a violation, if CUDA forbids this thread the call now because a stream
// is being captured (CUDA calls such calls "potentially unsafe": those that allocate, for example).
cudaError_t refuse_during_capture(const char *call);

}  // namespace standin

// CUDA's header leaves what is behind these handles to its implementation.
struct CUstream_st {
  int number;
  unsigned flags;
  std::unique_ptr<standin::Capture> capture;
};
struct CUgraph_st {
  std::vector<standin::Operation> operations;
};
struct CUgraphExec_st {
  std::vector<standin::Operation> operations;
};
