// A stand-in for libcuda.so.1 that starts nothing and writes down what it was asked to: one line a
// launch, and one for each call that is of interest.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" {
typedef int Result;
typedef void* Handle;

static char context, library, kernels[64];
static char names[64][128];
static int count;
static thread_local Handle current;  // a new thread has none, as with the real driver

static void say(const char* what) {
  std::fprintf(stderr, "CALL %s\n", what);
}

Result cuInit(unsigned) { return 0; }
Result cuDriverGetVersion(int* version) { return *version = 13000, 0; }
Result cuDeviceGet(int* device, int number) { return *device = number, 0; }
Result cuDevicePrimaryCtxRetain(Handle* out, int) { return *out = &context, 0; }
Result cuCtxGetCurrent(Handle* out) { return *out = current, 0; }
Result cuCtxSetCurrent(Handle given) {
  current = given;
  say("cuCtxSetCurrent");
  return 0;
}
Result cuLibraryLoadData(Handle* out, const void* code, void*, void*, unsigned, void*, void*,
                         unsigned) {
  *out = &library;
  const bool elf = !std::memcmp(code, "\x7f" "ELF", 4);
  say(elf ? "cuLibraryLoadData cubin" : "cuLibraryLoadData something else");
  return 0;
}
Result cuLibraryGetKernel(Handle* out, Handle, const char* name) {
  std::strncpy(names[count], name, 127);
  *out = &kernels[count++];
  return 0;
}
Result cuKernelGetFunction(Handle* out, Handle kernel) { return *out = kernel, 0; }
Result cuFuncSetAttribute(Handle, int attribute, int value) {
  std::fprintf(stderr, "CALL cuFuncSetAttribute %d=%d\n", attribute, value);
  return 0;
}
// STAND_IN_ARGUMENTS says what to read: p a pointer, i an int, f a float, s the first int of a
// structure.
Result cuLaunchKernel(Handle kernel, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                      unsigned bz, unsigned shared, Handle stream, void** arguments, void**) {
  if (!current) return 201;  // CUDA_ERROR_INVALID_CONTEXT
  std::fprintf(stderr, "LAUNCH %s %u,%u,%u %u,%u,%u %u %p",
               names[static_cast<char*>(kernel) - kernels], x, y, z, bx, by, bz, shared, stream);
  const char* kinds = std::getenv("STAND_IN_ARGUMENTS");
  for (int i = 0; kinds && kinds[i]; ++i) {
    if (kinds[i] == 'p') std::fprintf(stderr, " %p", *static_cast<void**>(arguments[i]));
    if (kinds[i] == 'f') std::fprintf(stderr, " %g", *static_cast<float*>(arguments[i]));
    if (std::strchr("is", kinds[i])) std::fprintf(stderr, " %d", *static_cast<int*>(arguments[i]));
  }
  std::fputc('\n', stderr);
  return 0;
}
Result cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR_STAND_IN", 0; }
Result cuGetErrorString(int, const char** text) { return *text = "stand-in", 0; }

static Result not_here() { return 801; }  // CUDA_ERROR_NOT_SUPPORTED
Result cuGetProcAddress_v2(const char* name, Handle* out, int, unsigned long long, int* status) {
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&cuInit), &self);
  Handle found = dlsym(dlopen(self.dli_fname, RTLD_LAZY), name);
  *out = found ? found : reinterpret_cast<Handle>(&not_here);
  if (status) *status = 0;
  return 0;
}
}
