// Kernels: what a program registers at its start, and launches that do nothing but are named.
#include "standin.h"

#include <cxxabi.h>

#include <cstdlib>
#include <cstring>
#include <unordered_map>

using namespace standin;

namespace {

struct CallConfiguration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};

// What `kernel<<<…>>>` puts down for the launch that follows on the same thread.
thread_local CallConfiguration configuration;

std::unordered_map<const void *, std::string> &names() {
  static auto *all = new std::unordered_map<const void *, std::string>;
  return *all;
}

// Returns a kernel's name as C++ has it. Names are made readable when a kernel is first launched,
// because tens of thousands are registered.
const std::string &readable_name(const void *function) {
  static auto *all = new std::unordered_map<const void *, std::string>;
  std::string &result = (*all)[function];
  if (result.empty()) {
    const auto found = names().find(function);
    const std::string name = found == names().end() ? "(unknown)" : found->second;
    int status = 0;
    char *text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
    result = status == 0 ? text : name;
    std::free(text);
  }
  return result;
}

void launch_named(const char *name, cudaStream_t stream) {
  log("kernel %s %s", where(stream), name);
  Operation operation;
  operation.run = [] {};
  operation.is_kernel = true;
  enqueue(stream, std::move(operation));
}

cudaError_t launch(const void *function, cudaStream_t stream) {
  Guard guard(lock());
  launch_named(readable_name(function).c_str(), stream);
  return cudaSuccess;
}

}  // namespace

extern "C" {

// Launches the kernel that a function of cuBLAS would launch; called by its stand-in.
void standin_library_kernel(const char *name, void *stream) {
  Guard guard(lock());
  launch_named(name, static_cast<cudaStream_t>(stream));
}

// ---- what nvcc's code calls ----

void **__cudaRegisterFatBinary(void *) {
  static void *handle;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void **) {}

void __cudaUnregisterFatBinary(void **) {}

void __cudaRegisterFunction(void **, const char *function, char *, const char *name, int, uint3 *,
                            uint3 *, dim3 *, dim3 *, int *) {
  Guard guard(lock());
  names()[function] = name;
}

void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                     cudaStream_t stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes,
                                       void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *static_cast<cudaStream_t *>(stream) = configuration.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void *>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **, size_t,
                               cudaStream_t stream) {
  return launch(kernel, stream);
}

// ---- launches ----

cudaError_t cudaLaunchKernel(const void *function, dim3, dim3, void **, size_t,
                             cudaStream_t stream) {
  return launch(function, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3, dim3, void **, size_t,
                                        cudaStream_t stream) {
  return launch(function, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **) {
  return launch(function, config->stream);
}

// ---- libraries of kernels, and attributes ----

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *, cudaJitOption *, void **,
                                unsigned, cudaLibraryOption *, void **, unsigned) {
  static char only_library;
  *library = reinterpret_cast<cudaLibrary_t>(&only_library);
  return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t, const char *name) {
  Guard guard(lock());
  char *handle = strdup(name);  // a handle of its own for every kernel
  names()[handle] = name;
  *kernel = reinterpret_cast<cudaKernel_t>(handle);
  return cudaSuccess;
}

cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) {
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = 90;
  attributes->ptxVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 99 * 1024;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *, int,
                                                                   size_t, unsigned) {
  *count = 2;
  return cudaSuccess;
}
}
