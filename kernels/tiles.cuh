// Numbers brought to shared memory while other work goes on, and operands of mma from there.
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
  emulation::copy(to, from, 4, true);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
#endif
}
// 16 bytes likewise; zeros where there is nothing to read.
__device__ __forceinline__ void copy16(void* to, const void* from, bool there) {
#ifdef COMERA_EMULATION
  emulation::copy(to, from, 16, there);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 16 : 0) : "memory");
#endif
}
// Ends a group of copies.
__device__ __forceinline__ void commit() {
#ifdef COMERA_EMULATION
  emulation::commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until all groups but the newest N are there; other threads' copies after a barrier, too.
template <int N>
__device__ __forceinline__ void arrived() {
#ifdef COMERA_EMULATION
  emulation::wait(N);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// What a lane reads or writes at once.
template <typename Word>
__device__ __forceinline__ Word read(const void* from) {
#ifdef COMERA_EMULATION
  emulation::touch(from, sizeof(Word), emulation::LOAD);
#endif
  return *static_cast<const Word*>(from);
}
template <typename Word>
__device__ __forceinline__ void write(void* to, Word word) {
#ifdef COMERA_EMULATION
  emulation::touch(to, sizeof(Word), emulation::STORE);
#endif
  *static_cast<Word*>(to) = word;
}

// Four 8 x 8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix(uint32_t (&to)[4], const void* row) {
#ifdef COMERA_EMULATION
  emulation::ldmatrix(to, row, false);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
#endif
}
__device__ __forceinline__ void ldmatrix_turned(uint32_t (&to)[4], const void* row) {
#ifdef COMERA_EMULATION
  emulation::ldmatrix(to, row, true);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
#endif
}

// In tiles of COLUMNS rows follow each other; behind such as end with 128 bytes, one or two or four of them, 16
// bytes are left out, or 32 of float, but not of float behind every fourth time. So lanes of a warp meet in no
// bank, whether they go along rows or along columns, and copies do not either (tests/kernels/test_banks.py).
template <typename T, int COLUMNS>
constexpr int TO_END = COLUMNS * sizeof(T) % 128 == 0 ? 1 : COLUMNS * sizeof(T) % 64 == 0 ? 2 : 4;
template <typename T>
__device__ __forceinline__ constexpr int left_out(int ends) {
  return (sizeof(T) == 4 ? 2 * (ends - ends / 4) : ends) * (16 / (int)sizeof(T));
}
// Where one of its numbers lies, by row and column or in order.
template <typename T, int COLUMNS>
__device__ __forceinline__ constexpr int place(int row, int column) {
  static_assert(COLUMNS * sizeof(T) % 32 == 0, "four rows would not end with 128 bytes");
  return row * COLUMNS + column + left_out<T>(row / TO_END<T, COLUMNS>);
}
template <typename T, int COLUMNS>
__device__ __forceinline__ constexpr int place(int number) {
  return number + left_out<T>(number / (COLUMNS * TO_END<T, COLUMNS>));
}
// What eight rows or a multiple of eight take, wherever they begin.
template <typename T, int COLUMNS>
__device__ __forceinline__ constexpr int below(int rows) {
  return rows * (place<T, COLUMNS>(8, 0) / 8);
}
template <typename T, int COLUMNS, int ROWS>
constexpr int TILE = below<T, COLUMNS>(ROWS);

// Operands of 16 numbers along a sum, from tiles in shared memory. They are those of one mma.m16n8k16, or, of
// float, of two mma.m16n8k8 in tf32. There a lane's places q and q + 4 along the sum are given the numbers 2q
// and 2q + 1, in either operand: so sums are operands as they lie.
template <typename T>
constexpr int OPERAND = sizeof(T) == 4 ? 8 : 4;  // words
// a: rows m..m+15, columns k..k+15 of a tile that holds rows.
template <int COLUMNS, typename T>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const T* tile, int m, int k) {
  const int lane = threadIdx.x % 32;
  ldmatrix(a, tile + below<T, COLUMNS>(m) + k + place<T, COLUMNS>(lane % 16, lane / 16 * 8));
}
// a: the same of a tile that holds columns, that is [k][m].
template <int COLUMNS, typename T>
__device__ __forceinline__ void load_a_turned(uint32_t (&a)[4], const T* tile, int m, int k) {
  const int lane = threadIdx.x % 32;
  tile += below<T, COLUMNS>(k) + m;
  ldmatrix_turned(a, tile + place<T, COLUMNS>(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8));
}
// b: numbers k..k+15 of columns n..n+15, two mma's worth: b[0], b[1] of the first eight columns. From
// a tile [k][n] ...
template <int COLUMNS, typename T>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], const T* tile, int k, int n) {
  const int lane = threadIdx.x % 32;
  ldmatrix_turned(b, tile + below<T, COLUMNS>(k) + n + place<T, COLUMNS>(lane % 16, lane / 16 * 8));
}
// ... or from a tile [n][k].
template <int COLUMNS, typename T>
__device__ __forceinline__ void load_b_turned(uint32_t (&b)[4], const T* tile, int k, int n) {
  const int lane = threadIdx.x % 32;
  tile += below<T, COLUMNS>(n) + k;
  ldmatrix(b, tile + place<T, COLUMNS>(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8));
}
// The same of float: numbers that are neighbours along the sum are read at once where they lie so.
struct alignas(8) Eight {
  float x[2];
};
template <int COLUMNS>
__device__ __forceinline__ void load_a(uint32_t (&a)[8], const float* tile, int m, int k) {
  tile += below<float, COLUMNS>(m) + k + place<float, COLUMNS>(threadIdx.x % 32 / 4, threadIdx.x % 4 * 2);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Eight two = read<Eight>(tile + place<float, COLUMNS>(i % 2 * 8, i / 2 * 8));
    a[i / 2 * 4 + i % 2] = to_tf32(two.x[0]);
    a[i / 2 * 4 + i % 2 + 2] = to_tf32(two.x[1]);
  }
}
template <int COLUMNS>
__device__ __forceinline__ void load_b_turned(uint32_t (&b)[8], const float* tile, int k, int n) {
  tile += below<float, COLUMNS>(n) + k + place<float, COLUMNS>(threadIdx.x % 32 / 4, threadIdx.x % 4 * 2);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Eight two = read<Eight>(tile + place<float, COLUMNS>(i / 2 * 8, i % 2 * 8));
    b[2 * i] = to_tf32(two.x[0]);
    b[2 * i + 1] = to_tf32(two.x[1]);
  }
}
// Those of columns start in an even row, whose distance to the next one is always the same.
template <int COLUMNS>
__device__ __forceinline__ void load_a_turned(uint32_t (&a)[8], const float* tile, int m, int k) {
  tile += below<float, COLUMNS>(k) + m + place<float, COLUMNS>(threadIdx.x % 4 * 2, threadIdx.x % 32 / 4);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    a[i] = to_tf32(read<float>(tile + place<float, COLUMNS>(i / 4 * 8 + i / 2 % 2, i % 2 * 8)));
}
template <int COLUMNS>
__device__ __forceinline__ void load_b(uint32_t (&b)[8], const float* tile, int k, int n) {
  tile += below<float, COLUMNS>(k) + n + place<float, COLUMNS>(threadIdx.x % 4 * 2, threadIdx.x % 32 / 4);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    b[i] = to_tf32(read<float>(tile + place<float, COLUMNS>(i / 2 % 2 * 8 + i % 2, i / 4 * 8)));
}
// sum0 and sum1 += a . both columns of b.
template <typename T>
__device__ __forceinline__ void mma2(float (&sum0)[4], float (&sum1)[4], const uint32_t (&a)[OPERAND<T>],
                                     const uint32_t (&b)[OPERAND<T>]) {
#pragma unroll
  for (int j = 0; j < OPERAND<T>; j += 4) {
    const uint32_t part[4] = {a[j], a[j + 1], a[j + 2], a[j + 3]};
    const uint32_t b0[2] = {b[j / 2], b[j / 2 + 1]};
    const uint32_t b1[2] = {b[OPERAND<T> / 2 + j / 2], b[OPERAND<T> / 2 + j / 2 + 1]};
    mma<T>(sum0, part, b0);
    mma<T>(sum1, part, b1);
  }
}

// Two numbers in one word, the first one low.
template <typename T>
__device__ __forceinline__ uint32_t pack(float first, float second) {
  return narrow<T>(first).bits | (uint32_t)narrow<T>(second).bits << 16;
}
// Two numbers that lie side by side.
template <typename T>
__device__ __forceinline__ void store2(T* to, float first, float second) {
  write(to, pack<T>(first, second));
}
__device__ __forceinline__ void store2(float* to, float first, float second) {
  write(to, Eight{first, second});
}
// What two mma beside each other have added up, as the operand a of the next.
template <typename T>
__device__ __forceinline__ void as_a(uint32_t (&a)[OPERAND<T>], const float (&low)[4], const float (&high)[4]) {
#pragma unroll
  for (int i = 0; i < OPERAND<T>; ++i) {
    const float(&sum)[4] = i < OPERAND<T> / 2 ? low : high;
    if constexpr (sizeof(T) == 4)
      a[i] = to_tf32(sum[i % 2 * 2 + i / 2 % 2]);
    else
      a[i] = pack<T>(sum[i % 2 * 2], sum[i % 2 * 2 + 1]);
  }
}
struct alignas(16) Sixteen {
  uint32_t x[4];
};

__device__ __forceinline__ float fast_exp2(float x) {
#ifdef COMERA_EMULATION
  return std::exp2(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
__device__ __forceinline__ float fast_inverse(float x) {
#ifdef COMERA_EMULATION
  return 1 / x;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
