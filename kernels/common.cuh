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
typedef unsigned long long uint64_t;
#define DYNAMIC_SHARED(T, name)                                    \
  extern __shared__ __align__(16) unsigned char dynamic_shared[];  \
  T* name = reinterpret_cast<T*>(dynamic_shared)
// A structure of arguments, read where the driver put it and copied nowhere.
#define ARGUMENTS(T) const __grid_constant__ T
#endif

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ float wide(bf16 x) { return __uint_as_float((uint32_t)x.bits << 16); }

__device__ __forceinline__ float wide(f16 x) {
#ifdef COMERA_EMULATION
  return emulation::from_f16(x.bits);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#endif
}

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

__device__ __forceinline__ uint16_t to_f16(float x) {
#ifdef COMERA_EMULATION
  return emulation::to_f16(x);
#else
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
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

template <>
__device__ __forceinline__ f16 narrow<f16>(float x) {
  return f16{to_f16(x)};
}

// To tf32, ten bits after the point, to the nearest.
__device__ __forceinline__ uint32_t to_tf32(float x) {
#ifdef COMERA_EMULATION
  return x == x ? (__float_as_uint(x) + 0x1000u) & ~0x1fffu : 0x7fffffffu;
#else
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
#endif
}

// d [16, 8] += a [16, 8 of tf32 or 16 of bf16 or f16] . b, a warp's together. Which lane holds what
// is said in the PTX manual, "Matrix Fragments for mma.m16n8k8" and "mma.m16n8k16". Nothing else is
// done by it, so that the compiler may set other instructions between.
#ifdef COMERA_EMULATION
#define MMA(shape, numbers) emulation::mma(d, a, b, emulation::numbers)
#else
#define MMA(shape, numbers)                                                                \
  asm("mma.sync.aligned." shape ".row.col.f32." #numbers "." #numbers                      \
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                         \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                     \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#endif
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
__device__ __forceinline__ void mma<float>(float (&d)[4], const uint32_t (&a)[4],
                                           const uint32_t (&b)[2]) {
  MMA("m16n8k8", tf32);
}
template <>
__device__ __forceinline__ void mma<bf16>(float (&d)[4], const uint32_t (&a)[4],
                                          const uint32_t (&b)[2]) {
  MMA("m16n8k16", bf16);
}
template <>
__device__ __forceinline__ void mma<f16>(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  MMA("m16n8k16", f16);
}
