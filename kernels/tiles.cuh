// Numbers brought to shared memory while other work goes on.
#pragma once
#include "common.cuh"

__device__ __forceinline__ uint32_t shared_address(const void* place) {
#ifdef COMERA_EMULATION
  return 0;
#else
  return (uint32_t)__cvta_generic_to_shared(place);
#endif
}
// Four bytes, on their way until arrived() says that they are there.
__device__ __forceinline__ void copy4(void* to, const void* from) {
#ifdef COMERA_EMULATION
  std::memcpy(to, from, 4);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
#endif
}
// Ends a group of copies.
__device__ __forceinline__ void commit() {
#ifndef COMERA_EMULATION
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until all groups but the newest N are there; other threads' copies after a barrier, too.
template <int N>
__device__ __forceinline__ void arrived() {
#ifndef COMERA_EMULATION
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}
