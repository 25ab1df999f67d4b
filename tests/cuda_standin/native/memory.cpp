// Memory of the device and pinned memory, both of them the host's, and copies between them.
#include "standin.h"

#include <sys/mman.h>

#include <cstring>
#include <map>

using namespace standin;

namespace {

struct Allocation {
  size_t num_bytes;
  bool is_device;
};

std::map<const char *, Allocation> &allocations() {
  static auto *all = new std::map<const char *, Allocation>;
  return *all;
}

size_t device_bytes = 0;
size_t peak_device_bytes = 0;

// Memory comes from the kernel, and not from malloc, so that it is zero without being touched, and
// that whoever uses it after it was freed crashes.
cudaError_t allocate(void **address, size_t num_bytes, bool is_device) {
  Guard guard(lock());
  void *memory = mmap(nullptr, num_bytes > 0 ? num_bytes : 1, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return remember(cudaErrorMemoryAllocation);
  }
  *address = memory;
  allocations()[static_cast<const char *>(memory)] = {num_bytes, is_device};
  if (is_device) {
    device_bytes += num_bytes;
    peak_device_bytes = device_bytes > peak_device_bytes ? device_bytes : peak_device_bytes;
  }
  log("allocate %s %zu total %zu peak %zu", is_device ? "device" : "pinned", num_bytes,
      device_bytes, peak_device_bytes);
  return cudaSuccess;
}

cudaError_t release(const char *call, void *address, bool is_device) {
  Guard guard(lock());
  if (address == nullptr) {
    return cudaSuccess;
  }
  const auto found = allocations().find(static_cast<const char *>(address));
  if (found == allocations().end() || found->second.is_device != is_device) {
    violation("%s of an address that was never allocated", call);
    return remember(cudaErrorInvalidValue);
  }
  const size_t num_bytes = found->second.num_bytes;
  allocations().erase(found);
  munmap(address, num_bytes > 0 ? num_bytes : 1);
  device_bytes -= is_device ? num_bytes : 0;
  log("free %s %zu total %zu", is_device ? "device" : "pinned", num_bytes, device_bytes);
  return cudaSuccess;
}

// Returns the allocation that holds an address, or null for memory that is not ours.
const Allocation *allocation_of(const void *address) {
  const char *byte = static_cast<const char *>(address);
  auto found = allocations().upper_bound(byte);
  if (found == allocations().begin()) {
    return nullptr;
  }
  --found;
  return byte < found->first + found->second.num_bytes ? &found->second : nullptr;
}

// Returns the direction of a copy as the log has it. It goes by where the memory is, so that
// cudaMemcpyDefault is told apart too.
const char *direction(const void *to, const void *from) {
  const Allocation *target = allocation_of(to);
  const Allocation *source = allocation_of(from);
  const bool to_device = target != nullptr && target->is_device;
  const bool from_device = source != nullptr && source->is_device;
  return to_device ? (from_device ? "D2D" : "H2D") : (from_device ? "D2H" : "H2H");
}

void copy(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
          size_t height) {
  for (size_t row = 0; row < height; ++row) {
    std::memmove(static_cast<char *>(to) + row * to_pitch,
                 static_cast<const char *>(from) + row * from_pitch, width);
  }
}

}  // namespace

extern "C" {

// Gives the bytes that cudaMalloc and the memory pools hold now, and the most that they ever held.
void standin_device_bytes(size_t *current, size_t *peak) {
  Guard guard(lock());
  *current = device_bytes;
  *peak = peak_device_bytes;
}

// ---- allocations ----

cudaError_t cudaMalloc(void **address, size_t num_bytes) {
  const cudaError_t error = refuse_during_capture("cudaMalloc");
  return error ? error : allocate(address, num_bytes, true);
}

cudaError_t cudaFree(void *address) {
  const cudaError_t error = refuse_during_capture("cudaFree");
  return error ? error : release("cudaFree", address, true);
}

cudaError_t cudaMallocHost(void **address, size_t num_bytes) {
  const cudaError_t error = refuse_during_capture("cudaMallocHost");
  return error ? error : allocate(address, num_bytes, false);
}

cudaError_t cudaHostAlloc(void **address, size_t num_bytes, unsigned) {
  const cudaError_t error = refuse_during_capture("cudaHostAlloc");
  return error ? error : allocate(address, num_bytes, false);
}

cudaError_t cudaFreeHost(void *address) {
  const cudaError_t error = refuse_during_capture("cudaFreeHost");
  return error ? error : release("cudaFreeHost", address, false);
}

cudaError_t cudaMallocFromPoolAsync(void **address, size_t num_bytes, cudaMemPool_t,
                                    cudaStream_t) {
  return allocate(address, num_bytes, true);
}

cudaError_t cudaFreeAsync(void *address, cudaStream_t) {
  return release("cudaFreeAsync", address, true);
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const cudaMemPoolProps *) {
  static char only_pool;
  *pool = reinterpret_cast<cudaMemPool_t>(&only_pool);
  return cudaSuccess;
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *value) {
  *static_cast<unsigned long long *>(value) = 0;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return cudaSuccess; }

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
  Guard guard(lock());
  *attributes = {};
  const Allocation *found = allocation_of(address);
  attributes->type = found == nullptr     ? cudaMemoryTypeUnregistered
                     : found->is_device ? cudaMemoryTypeDevice
                                        : cudaMemoryTypeHost;
  void *pointer = const_cast<void *>(address);
  attributes->devicePointer = found != nullptr ? pointer : nullptr;
  attributes->hostPointer = found != nullptr && !found->is_device ? pointer : nullptr;
  return cudaSuccess;
}

// ---- copies ----

cudaError_t cudaMemcpy(void *to, const void *from, size_t num_bytes, cudaMemcpyKind) {
  Guard guard(lock());
  if (cudaError_t error = refuse_during_capture("cudaMemcpy")) {
    return error;
  }
  log("copy eager %s %zu waiting", direction(to, from), num_bytes);
  std::memmove(to, from, num_bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  Guard guard(lock());
  log("copy %s %s %zu", where(stream), direction(to, from), width * height);
  Operation operation;
  operation.run = [=] { copy(to, to_pitch, from, from_pitch, width, height); };
  enqueue(stream, std::move(operation));
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t num_bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  Guard guard(lock());
  log("copy %s %s %zu", where(stream), direction(to, from), num_bytes);
  Operation operation;
  operation.run = [=] { copy(to, num_bytes, from, num_bytes, num_bytes, 1); };
  const Allocation *source = allocation_of(from);
  if (capture_of(stream) != nullptr && (source == nullptr || !source->is_device)) {
    operation.host_source = from;
    operation.host_content.assign(static_cast<const char *>(from), num_bytes);
  }
  enqueue(stream, std::move(operation));
  return cudaSuccess;
}

cudaError_t cudaMemcpyFromSymbol(void *to, const void *, size_t num_bytes, size_t,
                                 cudaMemcpyKind) {
  if (cudaError_t error = refuse_during_capture("cudaMemcpyFromSymbol")) {
    return error;
  }
  std::memset(to, 0, num_bytes);
  return cudaSuccess;
}

cudaError_t cudaMemset(void *address, int value, size_t num_bytes) {
  if (cudaError_t error = refuse_during_capture("cudaMemset")) {
    return error;
  }
  log("fill eager %zu", num_bytes);
  std::memset(address, value, num_bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *address, int value, size_t num_bytes, cudaStream_t stream) {
  Guard guard(lock());
  log("fill %s %zu", where(stream), num_bytes);
  Operation operation;
  operation.run = [=] { std::memset(address, value, num_bytes); };
  enqueue(stream, std::move(operation));
  return cudaSuccess;
}
}
