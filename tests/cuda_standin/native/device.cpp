// The one device: its properties, of which the compute capability is the environment's to choose.
#include "standin.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace standin;

namespace {

constexpr int kCudaVersion = 13000;
constexpr size_t kTotalBytes = size_t{16} << 30;
constexpr int kDefaultSharedBytes = 48 * 1024;

struct Capability {
  int major = 9;
  int minor = 0;
};

// Reads CUDA_STANDIN_CAPABILITY, such as "8.9".
Capability capability() {
  Capability result;
  if (const char *text = std::getenv("CUDA_STANDIN_CAPABILITY")) {
    std::sscanf(text, "%d.%d", &result.major, &result.minor);
  }
  return result;
}

// Returns whether a device of this capability is one for data centres, which have more of some
// things than the others.
bool is_large(const Capability &of) {
  return of.major == 9 || of.major == 10 || (of.major == 8 && of.minor == 0);
}

// Returns the shared memory, in bytes, that a multiprocessor of this capability has.
int shared_bytes_per_multiprocessor(const Capability &of) {
  return (!is_large(of) ? 100 : of.major == 8 ? 164 : 228) * 1024;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int *count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int) { return cudaSuccess; }

cudaError_t cudaDriverGetVersion(int *version) {
  *version = kCudaVersion;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = kCudaVersion;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  *free = kTotalBytes;
  *total = kTotalBytes;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
  const Capability of = capability();
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "stand-in");
  properties->major = of.major;
  properties->minor = of.minor;
  properties->totalGlobalMem = kTotalBytes;
  properties->totalConstMem = 64 * 1024;
  properties->sharedMemPerBlock = kDefaultSharedBytes;
  properties->sharedMemPerMultiprocessor = shared_bytes_per_multiprocessor(of);
  properties->sharedMemPerBlockOptin = shared_bytes_per_multiprocessor(of) - 1024;
  properties->l2CacheSize = 40 << 20;
  properties->memPitch = 2147483647;
  properties->textureAlignment = 512;
  properties->regsPerBlock = 65536;
  properties->regsPerMultiprocessor = 65536;
  properties->warpSize = 32;
  properties->multiProcessorCount = 108;
  properties->maxThreadsPerMultiProcessor = is_large(of) ? 2048 : 1536;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsDim[0] = 1024;
  properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = 65535;
  properties->maxGridSize[2] = 65535;
  properties->asyncEngineCount = 3;
  properties->canMapHostMemory = 1;
  properties->concurrentKernels = 1;
  properties->cooperativeLaunch = 1;
  properties->managedMemory = 1;
  properties->memoryPoolsSupported = 1;
  properties->unifiedAddressing = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp of;
  cudaGetDeviceProperties(&of, device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = of.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = of.minor;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = of.multiProcessorCount;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(of.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(of.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(of.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = of.regsPerBlock;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = of.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = of.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = of.maxBlocksPerMultiProcessor;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = of.maxGridSize[0];
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *value = of.maxGridSize[1];
      break;
    case cudaDevAttrWarpSize:
      *value = of.warpSize;
      break;
    case cudaDevAttrL2CacheSize:
      *value = of.l2CacheSize;
      break;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

// The driver has no functions of its own to offer; ONNX Runtime goes on without.
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
  log("driver entry point %s", name);
  *function = nullptr;
  if (result != nullptr) {
    *result = cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
}
