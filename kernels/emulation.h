// CUDA C++ on a CPU: one fiber for each thread of a block, one block at a time.
//
// Here are threadIdx and its like, __syncthreads, __syncwarp, shuffles, mma.sync, ldmatrix, cp.async,
// atomicAdd, __trap and dynamic shared memory, which is NaN when a block starts and behind which nobody
// may write. The order in which fibers run between two barriers is chosen by the caller: where a barrier
// is missing, results depend on it. What cp.async brings is there when it is waited for, not before. How
// banks of shared memory serve a warp is counted where a test asks for it.
//
// Not seen: a plain += where an atomic is needed, races between barriers that no order of whole
// fibers shows, a barrier of a warp just before its ldmatrix or mma, inline assembly, speed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(emulation::dynamic_shared)
#define ARGUMENTS(T) const T&
using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;

inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

namespace emulation {

struct Index {
  unsigned x = 1, y = 1, z = 1;
};
enum State { RUNS, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };
enum Problem { NONE, BAD_LAUNCH, DEADLOCK, LEFT_BEFORE_BARRIER, TRAPPED, WROTE_BEHIND };

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  Index thread;
  int number = 0;
  State state = RUNS;
};

// What cp.async brings comes as late as it may: when its group is waited for.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  bool there;
};
struct Copies {
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

constexpr size_t STACK = 64 << 10;
constexpr size_t MOST_THREADS = 1024;
constexpr size_t MOST_SHARED = 99 << 10;  // of the cards that have least
constexpr size_t BEHIND = 4 << 10;        // bytes that nobody may write

inline Copies copies[MOST_THREADS];
inline Fiber* current;
inline Index block, block_size, grid_size;
inline unsigned char* dynamic_shared;
inline void* scheduler;
inline bool trapped;
inline const std::function<void()>* body;

// Saves the registers that a call must keep, and takes those of another stack.
extern "C" void emulation_switch(void** save, void* to);
#if defined(__x86_64__)
asm(".text\n.weak emulation_switch\n.type emulation_switch,@function\nemulation_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
    ".size emulation_switch,.-emulation_switch\n");
constexpr size_t FRAME = 64, RETURN_TO = 6;
#elif defined(__aarch64__)
asm(".text\n.weak emulation_switch\n.type emulation_switch,%function\nemulation_switch:\n"
    "sub sp,sp,#160\nstp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\n"
    "stp x25,x26,[sp,#48]\nstp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\n"
    "stp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\nstp d12,d13,[sp,#128]\nstp d14,d15,[sp,#144]\n"
    "mov x9,sp\nstr x9,[x0]\nmov sp,x1\n"
    "ldp x19,x20,[sp]\nldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\n"
    "ldp x25,x26,[sp,#48]\nldp x27,x28,[sp,#64]\nldp x29,x30,[sp,#80]\n"
    "ldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\nldp d12,d13,[sp,#128]\nldp d14,d15,[sp,#144]\n"
    "add sp,sp,#160\nret\n.size emulation_switch,.-emulation_switch\n");
constexpr size_t FRAME = 160, RETURN_TO = 11;
#else
#error "the emulation of CUDA knows x86-64 and aarch64 only"
#endif

inline void leave(State state) {
  current->state = state;
  emulation_switch(&current->stack_pointer, scheduler);
}

// What warps do to shared memory, counted where a test asks for it. Lanes of a warp are taken to do the
// same as each other, in the same order: what one does n-th is part of the n-th instruction.
enum Access { LOAD, STORE, COPY, MATRIX };
struct Request {
  uintptr_t places[32];
  int lanes = 0;
  size_t bytes;
  Access kind;
};
struct Requests {
  std::deque<Request> open;
  size_t done = 0, of_lane[32] = {};
};
inline Requests requests[MOST_THREADS / 32];
inline size_t shared_bytes;
extern "C" {
inline int emulation_counts_banks = 0;
// Of each kind of access how many instructions there were, and how many steps banks took beyond those that
// they must; then how many instructions were not of a whole warp, or of several kinds.
inline int64_t emulation_banks[9];
}

// Steps in which 32 banks of four bytes serve a warp, beyond one for each 128 bytes that lanes ask for: 32 of
// them, 16 or eight, in order. What several ask of one word is served at once.
inline int64_t conflicts(const Request& request) {
  int64_t found = 0;
  const int together = request.bytes > 4 ? int(128 / request.bytes) : 32;
  for (int first = 0; first < 32; first += together) {
    std::set<uintptr_t> words;
    size_t in_bank[32] = {}, most = 1;
    for (int lane = first; lane < first + together; ++lane)
      for (size_t byte = 0; byte < request.bytes; byte += 4) {
        const uintptr_t word = (request.places[lane] + byte) / 4;
        if (words.insert(word).second && ++in_bank[word % 32] > most) most = in_bank[word % 32];
      }
    found += most - 1;
  }
  return found;
}
inline bool is_shared(const void* place, size_t bytes) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(place) - reinterpret_cast<uintptr_t>(dynamic_shared);
  return at < shared_bytes && at + bytes <= shared_bytes;
}
inline void demand(bool right) {
  if (right) return;
  trapped = true;
  leave(DONE);
}
inline void touch(const void* place, size_t bytes, Access kind) {
  demand(reinterpret_cast<uintptr_t>(place) % bytes == 0);
  if (!emulation_counts_banks || !is_shared(place, bytes)) return;
  const uintptr_t at = reinterpret_cast<uintptr_t>(place);
  Requests& warp = requests[current->number / 32];
  const size_t number = warp.of_lane[current->number % 32]++ - warp.done;
  if (number == warp.open.size()) {
    warp.open.emplace_back();
    warp.open.back().bytes = bytes;
    warp.open.back().kind = kind;
  }
  Request& request = warp.open[number];
  emulation_banks[8] += request.bytes != bytes || request.kind != kind;
  request.places[current->number % 32] = at;
  if (++request.lanes < 32) return;
  ++emulation_banks[2 * kind];
  emulation_banks[2 * kind + 1] += conflicts(request);
  warp.open.pop_front();
  ++warp.done;
}
inline void forget_requests() {
  for (Requests& warp : requests) {
    emulation_banks[8] += warp.open.size();
    warp = {};
  }
}

inline void copy(void* to, const void* from, size_t bytes, bool there) {
  touch(to, bytes, COPY);
  demand(is_shared(to, bytes) && reinterpret_cast<uintptr_t>(from) % bytes == 0);
  copies[current->number].open.push_back({to, from, bytes, there});
}
inline void commit() {
  Copies& mine = copies[current->number];
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
}
inline void wait(size_t newest) {
  auto& groups = copies[current->number].groups;
  for (; groups.size() > newest; groups.pop_front())
    for (const Copy& copy : groups.front()) {
      if (copy.there)
        std::memcpy(copy.to, copy.from, copy.bytes);
      else
        std::memset(copy.to, 0, copy.bytes);
    }
}

inline void run_body() {
  (*body)();
  leave(DONE);
  std::abort();  // nothing comes back to a fiber that is done
}

inline void prepare(Fiber& fiber) {
  const uintptr_t top = (reinterpret_cast<uintptr_t>(fiber.stack) + STACK) & ~uintptr_t(63);
  void** frame = reinterpret_cast<void**>(top - FRAME);
  std::memset(frame, 0, FRAME);
  frame[RETURN_TO] = reinterpret_cast<void*>(&run_body);
  fiber.stack_pointer = frame;
  fiber.state = RUNS;
  copies[fiber.number] = {};
}

// Threads in the order in which they run until the next barrier: 0 ascending, 1 descending, a warp
// as far ahead of the others as it may be, else drawn anew each time, all warps abreast.
struct Order {
  unsigned kind;
  uint64_t random;

  explicit Order(unsigned kind) : kind(kind), random(kind * 0x9E3779B97F4A7C15ull + 1) {}

  void fill(std::vector<int>& order) {
    const size_t count = order.size();
    for (size_t t = 0; t < count; ++t) order[t] = int(kind == 1 ? count - 1 - t : t);
    if (kind < 2) return;
    for (size_t t = count; t > 1; --t) {
      random ^= random << 13;
      random ^= random >> 7;
      random ^= random << 17;
      std::swap(order[t - 1], order[random % t]);
    }
  }
};

// Lets a warp go on whose threads all wait at a warp barrier or are done.
inline bool release_warp(std::vector<Fiber>& fibers, size_t first) {
  const size_t end = first + 32 < fibers.size() ? first + 32 : fibers.size();
  bool waits = false, others = false;
  for (size_t t = first; t < end; ++t) {
    waits |= fibers[t].state == AT_WARP_BARRIER;
    others |= fibers[t].state == RUNS || fibers[t].state == AT_BLOCK_BARRIER;
  }
  if (!waits || others) return false;
  for (size_t t = first; t < end; ++t)
    if (fibers[t].state == AT_WARP_BARRIER) fibers[t].state = RUNS;
  return true;
}
inline bool release_warps(std::vector<Fiber>& fibers) {
  bool released = false;
  for (size_t first = 0; first < fibers.size(); first += 32) released |= release_warp(fibers, first);
  return released;
}

// Runs threads until they wait for others; false after a __trap.
template <typename Threads>
bool run_threads(std::vector<Fiber>& fibers, Threads begin, Threads end) {
  for (; begin != end; ++begin) {
    if (fibers[*begin].state != RUNS) continue;
    current = &fibers[*begin];
    emulation_switch(&scheduler, current->stack_pointer);
    if (trapped) return false;
  }
  return true;
}

inline Problem run_block(std::vector<Fiber>& fibers, Order& order) {
  std::vector<int> threads(fibers.size());
  for (;;) {
    order.fill(threads);
    if (order.kind < 2) {  // a warp goes to the next barrier of the block before others begin
      for (size_t at = 0, next; at < threads.size(); at = next) {
        const int warp = threads[at] / 32;
        for (next = at; next < threads.size() && threads[next] / 32 == warp;) ++next;
        do
          if (!run_threads(fibers, threads.begin() + at, threads.begin() + next)) return TRAPPED;
        while (release_warp(fibers, 32 * warp));
      }
    } else {
      do
        if (!run_threads(fibers, threads.begin(), threads.end())) return TRAPPED;
      while (release_warps(fibers));
    }
    size_t waiting = 0, done = 0;
    for (const Fiber& fiber : fibers) {
      waiting += fiber.state == AT_BLOCK_BARRIER;
      done += fiber.state == DONE;
    }
    if (done == fibers.size()) return NONE;
    if (waiting + done < fibers.size()) return DEADLOCK;
    if (done) return LEFT_BEFORE_BARRIER;
    for (Fiber& fiber : fibers) fiber.state = RUNS;
  }
}

inline Problem run(Index grid, Index threads, size_t shared, unsigned kind,
                   const std::function<void()>& kernel) {
  const size_t count = size_t(threads.x) * threads.y * threads.z;
  const size_t blocks = size_t(grid.x) * grid.y * grid.z;
  if (!count || !blocks || count > MOST_THREADS || shared > MOST_SHARED) return BAD_LAUNCH;
  std::vector<char> stacks((count + 1) * STACK);
  std::vector<unsigned char> memory(shared + BEHIND + 64);
  dynamic_shared = reinterpret_cast<unsigned char*>(
      (reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
  std::vector<Fiber> fibers(count);
  Order order(kind);
  body = &kernel;
  block_size = threads;
  grid_size = grid;
  trapped = false;
  shared_bytes = shared;
  for (size_t number = 0; number < blocks; ++number) {
    const size_t b = kind == 1 ? blocks - 1 - number : number;
    block = {unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / grid.x / grid.y)};
    std::memset(dynamic_shared, 0xff, shared + BEHIND);
    for (size_t t = 0; t < count; ++t) {
      fibers[t].stack = stacks.data() + t * STACK;
      fibers[t].number = int(t);
      fibers[t].thread = {unsigned(t % threads.x), unsigned(t / threads.x % threads.y),
                          unsigned(t / threads.x / threads.y)};
      prepare(fibers[t]);
    }
    const Problem problem = run_block(fibers, order);
    if (emulation_counts_banks) forget_requests();
    if (problem) return problem;
    const unsigned char* behind = dynamic_shared + shared;
    if (std::any_of(behind, behind + BEHIND, [](unsigned char x) { return x != 0xff; })) return WROTE_BEHIND;
  }
  return NONE;
}

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*reinterpret_cast<std::remove_reference_t<A>*>(arguments[I])...);
}

// Takes its arguments as cuLaunchKernel does.
template <typename... A>
int launch(void (*kernel)(A...), const unsigned* grid, const unsigned* threads, size_t shared,
           unsigned order, void** arguments) {
  return run({grid[0], grid[1], grid[2]}, {threads[0], threads[1], threads[2]}, shared, order,
             [=] { call(kernel, arguments, std::index_sequence_for<A...>{}); });
}

struct Exchange {
  uint32_t bits[32];
};
inline Exchange exchanges[MOST_THREADS / 32];

template <typename T>
T shuffle(T value, int from) {
  static_assert(sizeof(T) == 4, "shuffles take four bytes");
  const int lane = current->number & 31;
  Exchange& warp = exchanges[current->number >> 5];
  std::memcpy(&warp.bits[lane], &value, 4);
  leave(AT_WARP_BARRIER);
  T found;
  std::memcpy(&found, &warp.bits[from & 31], 4);
  leave(AT_WARP_BARRIER);
  return found;
}

// Half precision: to the nearest, ties to even; beyond its range infinite, below it with fewer bits.
inline float from_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                                    : std::ldexp(float(exponent ? mantissa + 1024 : mantissa),
                                                 (exponent ? exponent : 1) - 25);
  return bits >> 15 ? -size : size;
}
inline uint16_t to_f16(float x) {
  const uint16_t sign = std::signbit(x) << 15;
  if (x != x) return 0x7fff;
  const float size = std::fabs(x);
  if (size >= 65520.f) return sign | 0x7c00;
  int exponent = -14;
  if (size >= std::ldexp(1.f, -14)) exponent = std::ilogb(size);
  const int mantissa = int(std::nearbyint(std::ldexp(size, 10 - exponent)));  // 2048: the next one
  return sign | uint16_t(mantissa + (exponent + 14) * 1024);
}

struct Fragments {
  uint32_t a[32][4], b[32][2];
};
inline Fragments fragments[MOST_THREADS / 32];

// mma.sync m16n8k8 of tf32, or m16n8k16 of pairs: lane 4 g + t gives rows g and g + 8 of a and column
// g of b, of the sum's numbers t and t + 4 (of pairs), and gets columns 2 t and 2 t + 1.
enum Numbers { tf32, bf16, f16 };
inline float low(uint32_t bits, Numbers numbers) {
  return numbers == f16 ? from_f16(bits & 0xffff) : __uint_as_float(bits << 16);
}
inline float high(uint32_t bits, Numbers numbers) {
  if (numbers == f16) return from_f16(bits >> 16);
  return __uint_as_float(bits & (numbers == bf16 ? 0xffff0000u : ~0x1fffu));  // or what tf32 holds
}
inline void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Numbers numbers) {
  const int lane = current->number & 31, g = lane / 4, t = lane % 4;
  Fragments& warp = fragments[current->number >> 5];
  std::memcpy(warp.a[lane], a, sizeof(a));
  std::memcpy(warp.b[lane], b, sizeof(b));
  leave(AT_WARP_BARRIER);
  for (int e = 0; e < 4; ++e) {
    const int column = 2 * t + e % 2;
    for (int k = 0; k < 8; ++k) {
      const uint32_t x = warp.a[4 * g + k % 4][e / 2 + k / 4 * 2], y = warp.b[4 * column + k % 4][k / 4];
      if (numbers != tf32) d[e] += low(x, numbers) * low(y, numbers);
      d[e] += high(x, numbers) * high(y, numbers);
    }
  }
  leave(AT_WARP_BARRIER);
}

// ldmatrix of four 8 x 8 matrices of 16-bit numbers: lane l gives the address of row l % 8 of matrix
// l / 8, and gets two neighbours of each.
inline const void* addresses[MOST_THREADS / 32][32];
inline void ldmatrix(uint32_t (&to)[4], const void* row, bool turned) {
  const int lane = current->number & 31, g = lane / 4, t = lane % 4;
  auto& warp = addresses[current->number >> 5];
  warp[lane] = row;
  touch(row, 16, MATRIX);
  leave(AT_WARP_BARRIER);
  for (int i = 0; i < 4; ++i) {
    auto at = [&](int r, int c) {
      return (uint32_t) static_cast<const uint16_t*>(warp[8 * i + r])[c];
    };
    to[i] = turned ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
  }
  leave(AT_WARP_BARRIER);
}

}  // namespace emulation

#define threadIdx (emulation::current->thread)
#define blockIdx (emulation::block)
#define blockDim (emulation::block_size)
#define gridDim (emulation::grid_size)

inline void __syncthreads() { emulation::leave(emulation::AT_BLOCK_BARRIER); }
inline void __syncwarp(unsigned = ~0u) { emulation::leave(emulation::AT_WARP_BARRIER); }
inline void __trap() {
  emulation::trapped = true;
  emulation::leave(emulation::DONE);
}
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  return emulation::shuffle(value, from);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::shuffle(value, (emulation::current->number & 31) ^ mask);
}
template <typename T>
T added(T* place, T value) {
  const T before = *place;
  *place = before + value;
  return before;
}
inline float atomicAdd(float* place, float value) { return added(place, value); }
inline double atomicAdd(double* place, double value) { return added(place, value); }
inline int atomicAdd(int* place, int value) { return added(place, value); }
inline void __threadfence() {}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned chosen = 0;
  for (int place = 0; place < 32; place += 8)
    chosen |= unsigned(bytes >> (which >> place / 2 & 7) * 8 & 0xff) << place;
  return chosen;
}
#define EXPORT(name)                                                                           \
  extern "C" int emulate_##name(const unsigned* grid, const unsigned* threads, size_t shared, \
                                unsigned order, void** arguments) {                            \
    return emulation::launch(&name, grid, threads, shared, order, arguments);                  \
  }
