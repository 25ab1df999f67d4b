// Registers the operators with ONNX Runtime, and says which instruction sets the CPU has.
#include <stdlib.h>
#include <string.h>

#include "few_rows.h"
#include "ort.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#define EXPORT __attribute__((visibility("default")))
extern const OrtCustomOp FEW_ROWS, TREE_ATTENTION;

#if defined(__x86_64__)
// Says whether the CPU has these bits of cpuid's leaf 7, and the system keeps these registers.
static int has(int subleaf, unsigned eax, unsigned ebx, unsigned ecx, unsigned registers) {
  unsigned a, b, c, d, state, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & 0x18001000) != 0x18001000) return 0;  // XSAVE, AVX, FMA
  __asm__("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
  if ((state & registers) != registers || !__get_cpuid_count(7, subleaf, &a, &b, &c, &d)) return 0;
  return (a & eax) == eax && (b & ebx) == ebx && (c & ecx) == ecx;
}
#endif

// Returns the instruction sets that this CPU has, best first, and null at the end.
static const Instructions *const *all_here(void) {
  static const Instructions *here[5];
  const Instructions *found[5] = {0};
  int n = 0;
#if defined(__x86_64__)
  int has_avx2 = has(0, 0, 1u << 5, 0, 6);
  if (has_avx2 && has(0, 0, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, 1u << 11, 0xE6))
    found[n++] = &avx512_vnni;
  if (has_avx2 && has(1, 1u << 4, 0, 0, 6)) found[n++] = &avx_vnni;
  if (has_avx2) found[n++] = &avx2;
#elif defined(__aarch64__) && defined(__linux__)
  if (getauxval(AT_HWCAP) & 1u << 20) found[n++] = &neon;
#elif defined(__aarch64__)
  found[n++] = &neon;
#endif
  found[n] = &portable;
  memcpy(here, found, sizeof here);  // the same whoever writes it
  return here;
}

// Returns the names of the instruction sets that this CPU has, best first.
EXPORT const char *specsplit_instructions(void) {
  static char names[80];
  char text[80] = "";
  for (const Instructions *const *each = all_here(); *each; each++) {
    if (each != all_here()) strcat(text, " ");
    strcat(text, (*each)->name);
  }
  memcpy(names, text, sizeof names);
  return names;
}

const Instructions *chosen(void) {
  const char *name = getenv("SPECSPLIT_INSTRUCTIONS");
  const Instructions *const *each = all_here();
  while (name && *each && strcmp((*each)->name, name)) each++;
  return *each;
}

// Called by SessionOptions.register_custom_ops_library.
EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  static OrtCustomOpDomain *domain;  // sessions keep a pointer to it
  static char is_taken;
  OrtApi api = base->GetApi(VERSION);
  if (!api) return 0;  // an older ONNX Runtime, which then knows no operator
  OrtStatus *status = 0;
  while (__atomic_test_and_set(&is_taken, __ATOMIC_ACQUIRE)) {
  }
  if (!domain) {
    status = ORT(api, CreateCustomOpDomain)("specsplit", &domain);
    if (!status) status = ORT(api, CustomOpDomainAdd)(domain, &FEW_ROWS);
    if (!status) status = ORT(api, CustomOpDomainAdd)(domain, &TREE_ATTENTION);
  }
  __atomic_clear(&is_taken, __ATOMIC_RELEASE);
  return status ? status : ORT(api, AddCustomOpDomain)(options, domain);
}
