// The log: one line a call, in the file that CUDA_STANDIN_LOG names.
#include "standin.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace standin {

namespace {

bool is_paused = false;

FILE *open_log() {
  const char *path = std::getenv("CUDA_STANDIN_LOG");
  FILE *file = path != nullptr && *path != '\0' ? std::fopen(path, "a") : nullptr;
  if (file != nullptr) {
    // A process that crashes has its lines written up to the crash.
    std::setvbuf(file, nullptr, _IOLBF, 1 << 16);
  }
  return file;
}

void write(const char *prefix, const char *format, va_list values) {
  Guard guard(lock());
  static FILE *file = open_log();
  if (file == nullptr || is_paused) {
    return;
  }
  std::fputs(prefix, file);
  std::vfprintf(file, format, values);
  std::fputc('\n', file);
}

}  // namespace

std::recursive_mutex &lock() {
  // Never destroyed: threads of ONNX Runtime may outlive the destructors of this library.
  static auto *mutex = new std::recursive_mutex;
  return *mutex;
}

void log(const char *format, ...) {
  va_list values;
  va_start(values, format);
  write("", format, values);
  va_end(values);
}

void violation(const char *format, ...) {
  va_list values;
  va_start(values, format);
  write("violation ", format, values);
  va_end(values);
}

}  // namespace standin

extern "C" {

// Writes a line of the caller's own, by which a test knows which calls belong to which run.
void standin_mark(const char *text) { standin::log("mark %s", text); }

// Pauses the log (1) or goes on with it (0), so that writing it is in nobody's way while a test
// takes the time.
void standin_pause_log(int is_paused) {
  standin::Guard guard(standin::lock());
  standin::is_paused = is_paused != 0;
}
}
