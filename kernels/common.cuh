// What every kernel here uses; pasted into each file in place of its #include before compiling.
// No header is needed: not by NVRTC, which has no include path, and not by nvcc. Compiled by g++
// with COMERA_EMULATION defined, the same text runs on a CPU (emulation.h).
#pragma once
#ifdef COMERA_EMULATION
#include "emulation.h"
#else
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
#define DYNAMIC_SHARED(T, name)                                    \
  extern __shared__ __align__(16) unsigned char dynamic_shared[];  \
  T* name = reinterpret_cast<T*>(dynamic_shared)
// A structure of arguments, read where the driver put it and copied nowhere.
#define ARGUMENTS(T) const __grid_constant__ T
#endif

struct bf16 {
  uint16_t bits;
};

__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ float wide(bf16 x) { return __uint_as_float((uint32_t)x.bits << 16); }

// To the nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ uint16_t to_bf16(float x) {
#ifdef COMERA_EMULATION
  const uint32_t bits = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#else
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
#endif
}

template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 narrow<bf16>(float x) {
  return bf16{to_bf16(x)};
}
