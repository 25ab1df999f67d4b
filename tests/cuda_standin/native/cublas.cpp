// The functions of cuBLAS and cuBLASLt that the generated stubs leave out, because they answer
// something or have their stream in a place of their own. PART says for which library this is.
#include <cstdlib>
#include <cstring>

extern "C" {

void standin_library_kernel(const char *name, void *stream);

#if PART_CUBLAS

// A handle holds nothing but its stream.
int cublasCreate_v2(void ***handle) {
  *handle = static_cast<void **>(std::calloc(1, sizeof(void *)));
  return 0;
}

int cublasDestroy_v2(void **handle) {
  std::free(handle);
  return 0;
}

int cublasSetStream_v2(void **handle, void *stream) {
  *handle = stream;
  return 0;
}

int cublasSetMathMode(void **, int) { return 0; }

int cublasGetMathMode(void **, int *mode) {
  *mode = 0;
  return 0;
}

const char *cublasGetStatusName(int) { return "stand-in"; }

const char *cublasGetStatusString(int) { return "stand-in"; }

#endif

#if PART_CUBLASLT

int cublasLtMatmul(void *, void *, const void *, const void *, void *, const void *, void *,
                   const void *, const void *, void *, void *, void *, const void *, void *,
                   size_t, void *stream) {
  standin_library_kernel("cublasLtMatmul", stream);
  return 0;
}

int cublasLtMatrixTransform(void *, void *, const void *, const void *, void *, const void *,
                            const void *, void *, void *, void *, void *stream) {
  standin_library_kernel("cublasLtMatrixTransform", stream);
  return 0;
}

// Finds one algorithm, whose description (cublasLtMatmulHeuristicResult_t) is all zero.
int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int,
                                   void *results, int *count) {
  constexpr size_t kResultBytes = 96;
  std::memset(results, 0, kResultBytes);
  *count = 1;
  return 0;
}

#endif
}
