// Contracts the chains of tensor-train layers, gates applied on the way: all layers of a model in
// one launch forward and two backward (CoMERA, arXiv 2405.14377, section 4).
//
// A layer is a chain of cores [bond k, mode k, bond k+1]; its first cores contract to
// left [I, width], the others to right [width, O], where width >= the middle bond. Columns of left
// and rows of right beyond that bond are zero, but for the last row of right, which holds a bias.
//
// Both factors are walked from their outer end towards the middle bond. With h a value of the outer
// mode, bond[s] the inner bond of the s-th core of the walk, and rows(s) = modes 0..s multiplied,
//   P_0 (rows(0), bond[0])  = core_0 * gate_0
//   P_s (rows(s), bond[s])  = P_s-1 . core_s * gate_s
// and the last P is the factor; there bonds are the columns (left) or the rows (right).
//   left:   core_0 [h][c]   core_s [k][mode][c]   row = row before * modes + mode
//   right:  core_0 [c][h]   core_s [c][mode][k]   row = mode * rows before + row before
// A block has one factor and 64 columns (mode, bond) of its last core, and makes for itself what
// comes before: less work than passing it on. Its columns of that core's gradient are whole then,
// and of the gradient of what comes before it has a share; a second launch adds shares up.
//
// What makes it quick: descriptors lie on the card, so that three loads follow each other, not ten;
// no division in a loop; every operand of a sum is read as four neighbours, conflict-free or by all
// lanes alike, for 16 multiplications each. Everything is summed in float32, always in one order.
#include "tiles.cuh"

constexpr int MOST_CORES = 8, MOST_FACTORS = 64;

// One factor of one layer. What differs from call to call, the factors and gradients, is beside it.
struct Descriptor {
  const void* core[MOST_CORES];
  const void* bias;
  int64_t gate_at[MOST_CORES];  // numbers from the address that all gates are counted from
  int64_t core_grad[MOST_CORES], gate_grad[MOST_CORES];  // places of gradients
  int64_t place;  // of its first number in its factor, which holds several layers
  int64_t share;  // of its first share
  int mode[MOST_CORES], bond[MOST_CORES];
  int room[MOST_CORES], room_back[MOST_CORES];  // where each P lies, and behind the last what is staged
  int at_once[MOST_CORES - 2], at_once_back[MOST_CORES - 2];  // values of a mode staged together, from core 1
  int cores, right, factor, width;
  int bias_width, blocks;
  int gated;        // a bit for each gate that there is
  float threshold;  // a gate at or below it is a pruned rank
};
struct Factors {
  void* of[MOST_FACTORS];
};

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int MOST_BOND = 64;
constexpr int COLUMNS = 64, ROW = COLUMNS + 4;  // of the last core, and how far apart their rows lie
constexpr int ALONE = 4096;                     // numbers of a core that has no other beside it

// Rows of P at a time, and how far apart they lie: for bonds up to 32, and up to 64.
template <int BOND>
struct Sizes {
  static constexpr int ROWS = BOND == 32 ? 128 : 64, P_ROW = BOND + 4;
};

struct alignas(16) Four {
  float x[4];
};
__device__ __forceinline__ Four four(const float* p) { return *reinterpret_cast<const Four*>(p); }
__device__ __forceinline__ int up_to_four(int n) { return (n + 3) / 4 * 4; }

__device__ __forceinline__ float opened(const float* gate, int c, float threshold) {
  if (!gate) return 1.f;
  return gate[c] > threshold ? gate[c] : 0.f;
}
template <typename C>
__device__ __forceinline__ const C* core(const Descriptor& d, int s) {
  const C* from = static_cast<const C*>(d.core[s]);
#ifndef COMERA_EMULATION
  __builtin_assume(__isGlobal(from));
#endif
  return from;
}
template <typename C>
__device__ __forceinline__ float read(const Descriptor& d, int s, int64_t at) {
  return wide(core<C>(d, s)[at]);
}
__device__ __forceinline__ int rows_of(const Descriptor& d, int s) {
  int rows = 1;
  for (int t = 0; t <= s; ++t) rows *= d.mode[t];
  return rows;
}
__device__ __forceinline__ int row_of(const Descriptor& d, int s, int before, int rows_before,
                                      int mode) {
  return d.right ? mode * rows_before + before : before * d.mode[s] + mode;
}
__device__ __forceinline__ int at_least_one(int n) { return n ? n : 1; }

// Shared memory of a block: this, opened gates of all but the last bond, then what a kernel takes of it,
// as sizes in contract_walk.py say.
struct Shared {
  Descriptor descriptor;
  const float* gate[MOST_CORES];  // of the inner bonds, or null
};
static_assert(sizeof(Shared) == 552, "see contract_walk.py");
static_assert(sizeof(Descriptor) <= 4 * THREADS, "a thread for each word: all are loaded in the time of one");
struct Block {
  const Descriptor& d;
  const float* const* given;       // gates as they are
  const float (*gate)[MOST_BOND];  // opened
  float* room;

  __device__ float* take(int numbers) {
    float* first = room;
    room += up_to_four(numbers);
    return first;
  }
  __device__ float opened(int s, int c) const { return ::opened(given[s], c, d.threshold); }
};

__device__ Block begin(const Descriptor* descriptors, int number, const float* gates) {
  DYNAMIC_SHARED(float, memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int* from = reinterpret_cast<const int*>(descriptors + number);
  if (threadIdx.x < sizeof(Descriptor) / 4)
    reinterpret_cast<int*>(&shared.descriptor)[threadIdx.x] = from[threadIdx.x];
  __syncthreads();
  const Descriptor& d = shared.descriptor;
  float* opened_gates = memory + (sizeof(Shared) + 15) / 16 * 4;
  for (int e = threadIdx.x; e < d.cores * MOST_BOND; e += THREADS) {
    const int s = e / MOST_BOND, c = e % MOST_BOND;
    const float* gate = d.gated >> s & 1 ? gates + d.gate_at[s] : nullptr;
    if (c == 0) shared.gate[s] = gate;
    if (s + 1 < d.cores && c < d.bond[s]) opened_gates[e] = opened(gate, c, d.threshold);
  }
  __syncthreads();
  return {d, shared.gate, reinterpret_cast<const float (*)[MOST_BOND]>(opened_gates),
          opened_gates + (d.cores - 1) * MOST_BOND};
}

// P_0, [bond][rows up to four]; zeros where there are no rows.
template <typename C>
__device__ void make_first(const Block& block, float* p) {
  const Descriptor& d = block.d;
  const int bond = d.bond[0], rows = d.mode[0], apart = up_to_four(rows);
  for (int k = threadIdx.x / 32; k < bond; k += WARPS)
    for (int i = threadIdx.x % 32; i < apart; i += 32)
      p[k * apart + i] =
          i < rows ? read<C>(d, 0, d.right ? k * rows + i : i * bond + k) * block.gate[0][k] : 0.f;
}

// Some values of the mode of core s, as they lie; to the right one number more between values of the
// inner bond, by which lanes differ.
template <typename C>
__device__ void stage(const Descriptor& d, int s, int first, int modes, float* to) {
  const int outer = d.right ? d.bond[s] : d.bond[s - 1], inner = d.right ? d.bond[s - 1] : d.bond[s];
  const int apart = modes * inner + d.right, lane = threadIdx.x % 32;
  for (int c = threadIdx.x / 32; c < outer; c += WARPS) {
    const C* from = core<C>(d, s) + ((int64_t)c * d.mode[s] + first) * inner;
#pragma unroll 4
    for (int i = lane; i < modes * inner; i += 32) {
      if constexpr (sizeof(C) == 4)
        copy4(to + c * apart + i, from + i);
      else
        to[c * apart + i] = wide(from[i]);
    }
  }
  commit();
}

// Where a staged core has its numbers for a mode and a value of the inner bond, and how far apart
// those of neighbouring outer ones lie.
__device__ __forceinline__ int staged_at(const Descriptor& d, int s, int modes, int mode, int c) {
  const int in = d.bond[s - 1], out = d.bond[s];
  return d.right ? c * (modes * in + 1) + mode * in : mode * out + c;
}
__device__ __forceinline__ int staged_step(const Descriptor& d, int s, int modes) {
  return d.right ? 1 : modes * d.bond[s];
}

// sum[i] = sum over k of before[k][first + i] * staged[k].
__device__ __forceinline__ void four_rows(const float* before, int apart, const float* staged,
                                          int step, int in, float (&sum)[4]) {
#pragma unroll 4
  for (int k = 0; k < in; ++k) {
    const Four p = four(before + k * apart);
    const float x = staged[k * step];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += p.x[i] * x;
  }
}

// P_s from P_s-1, as many values of the mode at a time as are staged. A warp has a mode and four rows of
// P_s-1 at a time, a lane a value of the bond; store(row, c, value) for all values of the bond up to a
// whole 32. Called by the whole block, which may still be at work with what was there.
template <typename C, typename Wanted, typename Store>
__device__ void advance(const Block& block, int s, const float* before, float* staged, bool is_staged,
                        int at_once, Wanted wanted, Store store) {
  const Descriptor& d = block.d;
  const int in = d.bond[s - 1], out = d.bond[s], rows = rows_of(d, s - 1), apart = up_to_four(rows);
  const int spans = (out + 31) / 32;
#pragma unroll 1
  for (int first = 0; first < d.mode[s]; first += at_once) {
    const int modes = first + at_once < d.mode[s] ? at_once : d.mode[s] - first;
    __syncthreads();  // nobody reads what is replaced
    if (!is_staged) stage<C>(d, s, first, modes, staged);
    arrived<0>();
    __syncthreads();  // P_s-1 and the staged core are whole
    const int step = staged_step(d, s, modes);
    for (int item = threadIdx.x / 32; item < modes * spans * (apart / 4); item += WARPS) {
      const int r = item % (apart / 4) * 4, rest = item / (apart / 4);
      const int mode = rest / spans, c = rest % spans * 32 + threadIdx.x % 32;
      const int last = r + 3 < rows ? r + 3 : rows - 1;
      if (!wanted(row_of(d, s, r, rows, first + mode), row_of(d, s, last, rows, first + mode))) continue;
      float sum[4] = {};
      if (c < out) four_rows(before + r, apart, staged + staged_at(d, s, modes, mode, c), step, in, sum);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (r + i < rows)
          store(row_of(d, s, r + i, rows, first + mode), c, c < out ? sum[i] * block.gate[s][c] : 0.f);
    }
  }
}

// P_0 to P_end, [bond][rows up to four], each where `room` says. P_end is whole after the next barrier.
template <typename C>
__device__ const float* make(const Block& block, int end, const int* room, float* staged, const int* at_once) {
  const Descriptor& d = block.d;
  float* p = block.room + room[0];
  make_first<C>(block, p);
#pragma unroll 1
  for (int s = 1; s <= end; ++s) {
    const float* before = p;
    const int out = d.bond[s], apart = up_to_four(rows_of(d, s));
    p = block.room + room[s];
    advance<C>(
        block, s, before, staged, false, at_once[s - 1], [](int, int) { return true; },
        [&](int row, int c, float x) {
          if (c < out) p[c * apart + row] = x;
        });
  }
  return p;
}

// Rows of the P that the last core is multiplied by, [row][P_ROW], ROWS of them from the first on.
template <typename C, int BOND>
struct Before {
  const Block& block;
  int s;  // of which stage they are
  float* staged;
  const float* p_before = nullptr;
  bool is_staged = false;

  __device__ explicit Before(const Block& block)
      : block(block), s(block.d.cores - 2), staged(block.room + block.d.room[s]) {
    if (s > 0) p_before = make<C>(block, s - 1, block.d.room, staged, block.d.at_once);
  }

  // Called by the whole block; others may still read what lies there.
  __device__ void rows(int row0, float* p, bool keeps_staged) {
    using S = Sizes<BOND>;
    const Descriptor& d = block.d;
    if (s == 0) {
      __syncthreads();
      const int bond = d.bond[0], mode = d.mode[0];
      const C* from = core<C>(d, 0);
      const int c = threadIdx.x % BOND, by_row = d.right ? 1 : bond;
      from += d.right ? c * mode : c;
      const float gate = c < bond ? block.gate[0][c] : 0.f;
      constexpr int EACH = S::ROWS * BOND / THREADS;
      float x[EACH];
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const int row = row0 + threadIdx.x / BOND + i * (THREADS / BOND);
        x[i] = c < bond && row < mode ? wide(from[row * by_row]) : 0.f;
      }
#pragma unroll
      for (int i = 0; i < EACH; ++i)
        p[(threadIdx.x / BOND + i * (THREADS / BOND)) * S::P_ROW + c] = x[i] * gate;
    } else {
      const int at_once = d.at_once[s - 1];
      advance<C>(
          block, s, p_before, staged, is_staged, at_once,
          [&](int low, int high) { return low < row0 + S::ROWS && high >= row0; },
          [&](int row, int c, float x) {
            if (row >= row0 && row < row0 + S::ROWS) p[(row - row0) * S::P_ROW + c] = x;
          });
      is_staged = keeps_staged && at_once >= d.mode[s];
    }
    __syncthreads();
  }
};

// Columns of the last core, [k][ROW], gated to the left; zeros where there are none.
template <typename C, int BOND>
__device__ void take_last(const Block& block, int j0, int columns, float* tile) {
  const Descriptor& d = block.d;
  const int s = d.cores - 1, in = d.bond[s - 1];
  if (d.right) {
    const C* from = core<C>(d, s) + (int64_t)j0 * in;
#pragma unroll
    for (int k = threadIdx.x % 32; k < BOND; k += 32) {
      float x[COLUMNS / WARPS];
#pragma unroll
      for (int i = 0; i < COLUMNS / WARPS; ++i) {
        const int j = threadIdx.x / 32 + i * WARPS;
        x[i] = j0 + j < columns && k < in ? wide(from[j * in + k]) : 0.f;
      }
#pragma unroll
      for (int i = 0; i < COLUMNS / WARPS; ++i) tile[k * ROW + threadIdx.x / 32 + i * WARPS] = x[i];
    }
  } else {
    const int j = threadIdx.x % COLUMNS;
    const float gate = j0 + j < columns ? block.opened(s, (j0 + j) % d.bond[s]) : 0.f;
    const C* from = core<C>(d, s) + j0 + j;
    constexpr int EACH = BOND * COLUMNS / THREADS, STEP = THREADS / COLUMNS;
    float x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int k = threadIdx.x / COLUMNS + i * STEP;
      x[i] = k < in && j0 + j < columns ? wide(from[(int64_t)k * columns]) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) tile[(threadIdx.x / COLUMNS + i * STEP) * ROW + j] = x[i] * gate;
  }
}

// Where the numbers of a column of the last core come to stand in the factor, and its rows.
__device__ __forceinline__ int64_t column_at(const Descriptor& d, int column, int rows) {
  const int bond = at_least_one(d.bond[d.cores - 1]);
  return d.right ? (int64_t)column * rows : (int64_t)(column / bond) * d.width + column % bond;
}
__device__ __forceinline__ int64_t row_step(const Descriptor& d) {
  return d.right ? 1 : (int64_t)d.mode[d.cores - 1] * d.width;
}

template <typename C, typename T, int BOND>
__device__ void forward(Block& block, int number, T* out) {
  using S = Sizes<BOND>;
  const Descriptor& d = block.d;
  const int s = d.cores - 1, rows = rows_of(d, s - 1), columns = d.mode[s] * d.bond[s];
  const int j0 = number * COLUMNS, in = d.bond[s - 1];
  float* tile = block.take(BOND * ROW);
  float* p = block.take(S::ROWS * S::P_ROW);
  Before<C, BOND> before(block);
  take_last<C, BOND>(block, j0, columns, tile);
  const int a = threadIdx.x % 16 * 4, b = threadIdx.x / 16 * 4;
  const int row_in = d.right ? a : b, column_in = d.right ? b : a;  // neighbours in memory in lanes
  int64_t place[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) place[j] = column_at(d, j0 + column_in + j, rows);
  const int64_t step = row_step(d);
#pragma unroll 1
  for (int r0 = 0; r0 < rows; r0 += S::ROWS) {
    before.rows(r0, p, true);
#pragma unroll 1
    for (int r1 = r0; r1 < r0 + S::ROWS && r1 < rows; r1 += 64) {
      float sum[4][4] = {};
      const float* x_at = p + (r1 - r0 + row_in) * S::P_ROW;
#pragma unroll 1
      for (int k = 0; k < in; k += 4) {
        Four x[4], y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = four(x_at + i * S::P_ROW + k);
          y[i] = four(tile + (k + i) * ROW + column_in);
        }
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i][j] += x[i].x[q] * y[q].x[j];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (r1 + row_in + i < rows && j0 + column_in + j < columns)
            out[(r1 + row_in + i) * step + place[j]] = narrow<T>(sum[i][j]);
    }
  }
}

// A core without others, gated: a part of it.
template <typename C, typename T>
__device__ void alone(const Block& block, int number, T* out) {
  const Descriptor& d = block.d;
  const int columns = d.mode[0] * d.bond[0], end = (number + 1) * ALONE;
  for (int e = number * ALONE + threadIdx.x; e < end && e < columns; e += THREADS)
    out[column_at(d, e, 1)] = narrow<T>(read<C>(d, 0, e) * (d.right ? 1.f : block.opened(0, e % d.bond[0])));
}

// What lies beyond the middle bond: zeros, and the bias as the last row of a right factor. Shared
// out among the blocks.
template <typename C, typename T>
__device__ void pad(const Descriptor& d, int block, T* out) {
  const int lines = rows_of(d, d.cores - 1);
  for (int c = d.bond[d.cores - 1]; c < d.width; ++c)
    for (int e = block * THREADS + threadIdx.x; e < lines; e += d.blocks * THREADS) {
      const bool in_bias = d.right && c == d.width - 1 && e < d.bias_width;
      const float x = in_bias ? wide(static_cast<const C*>(d.bias)[e]) : 0.f;
      out[d.right ? (int64_t)c * lines + e : (int64_t)e * d.width + c] = narrow<T>(x);
    }
}

// `blocks` has for each block the number of its factor and, in the low 16 bits, that of its columns.
template <typename C, typename T>
__device__ void contract(const Descriptor* descriptors, const int* blocks, const float* gates,
                         const Factors& factors) {
  const int code = blocks[blockIdx.x], number = code & 0xffff;
  Block block = begin(descriptors, code >> 16, gates);
  const Descriptor& d = block.d;
  T* out = static_cast<T*>(factors.of[d.factor]) + d.place;
  pad<C>(d, number, out);
  if (d.cores == 1)
    alone<C>(block, number, out);
  else if (d.bond[d.cores - 2] <= 32)
    forward<C, T, 32>(block, number, out);
  else
    forward<C, T, 64>(block, number, out);
}

// Numbers of a block's share: of the gradient of the P before, [bond][rows], and of the last gate.
__device__ __forceinline__ int64_t share_size(const Descriptor& d) {
  return (int64_t)d.bond[d.cores - 2] * rows_of(d, d.cores - 2) + COLUMNS;
}

template <typename C, typename T, int BOND>
__device__ void back_last(Block& block, int number, const T* from, C* core_grad, float* share) {
  using S = Sizes<BOND>;
  constexpr int GROUPS = BOND / 4, PARTS = 16 / GROUPS;  // of four bonds, and of the rows
  const Descriptor& d = block.d;
  const int s = d.cores - 1, rows = rows_of(d, s - 1), columns = d.mode[s] * d.bond[s];
  const int j0 = number * COLUMNS, in = d.bond[s - 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* tile = block.take(BOND * ROW);
  float* p = block.take(S::ROWS * S::P_ROW);
  Before<C, BOND> before(block);
  float* grad = before.staged;  // of the factor, [row][ROW], where a core is staged before
  take_last<C, BOND>(block, j0, columns, tile);
  float sum[4][4] = {};  // of the last core: four bonds by four columns, a part of the rows
  const int part = threadIdx.x / (16 * GROUPS), k4 = threadIdx.x / 16 % GROUPS * 4;
  const int j4 = threadIdx.x % 16 * 4;
#pragma unroll 1
  for (int r0 = 0; r0 < rows; r0 += S::ROWS) {
    const int count = rows - r0 < S::ROWS ? rows - r0 : S::ROWS;
    before.rows(r0, p, false);
    if (d.right) {
#pragma unroll 1
      for (int j = warp; j < COLUMNS; j += 2 * WARPS) {
        float x[2][S::ROWS / 32];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < S::ROWS / 32; ++i) {
            const int row = lane + 32 * i, column = j0 + j + n * WARPS;
            x[n][i] = row < count && column < columns ? wide(from[(int64_t)column * rows + r0 + row]) : 0.f;
          }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < S::ROWS / 32; ++i) grad[(lane + 32 * i) * ROW + j + n * WARPS] = x[n][i];
      }
    } else {
      const int j = threadIdx.x % COLUMNS;
      const T* place = from + column_at(d, j0 + j, rows);
      const int64_t step = row_step(d);
#pragma unroll 8
      for (int row = threadIdx.x / COLUMNS; row < count; row += THREADS / COLUMNS)
        grad[row * ROW + j] = j0 + j < columns ? wide(place[(r0 + row) * step]) : 0.f;
    }
    __syncthreads();  // the gradient is whole
#pragma unroll 2
    for (int row = part; row < count; row += PARTS) {
      const Four x = four(p + row * S::P_ROW + k4), y = four(grad + row * ROW + j4);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] += x.x[i] * y.x[j];
    }
    // That of P: a warp has four values of the bond, a lane every 32nd row.
    constexpr int EACH = S::ROWS / 32;
#pragma unroll 1
    for (int k0 = 4 * warp; k0 < in; k0 += 4 * WARPS) {
      float of_p[4][EACH] = {};
#pragma unroll 1
      for (int j = 0; j < COLUMNS; j += 4) {
        Four g[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) g[i] = four(grad + (lane + 32 * i) * ROW + j);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const Four y = four(tile + (k0 + k) * ROW + j);
#pragma unroll
          for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int q = 0; q < 4; ++q) of_p[k][i] += g[i].x[q] * y.x[q];
        }
      }
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < EACH; ++i)
          if (k0 + k < in && lane + 32 * i < count)
            share[(int64_t)(k0 + k) * rows + r0 + lane + 32 * i] = of_p[k][i];
    }
  }
  // All parts of the rows, then the gate of a column, through the place of the factor's gradient.
  float* sums = grad;  // [k][ROW]
#pragma unroll
  for (int turn = 0; turn < PARTS; ++turn) {
    __syncthreads();  // nobody reads the gradient any more, or the turn before is written
    if (part == turn)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& total = sums[(k4 + i) * ROW + j4 + j];
          total = turn ? total + sum[i][j] : sum[i][j];
        }
  }
  __syncthreads();
  if (d.right) {
    for (int j = warp; j < COLUMNS; j += WARPS)
      for (int k = lane; k < in; k += 32)
        if (j0 + j < columns) core_grad[(int64_t)(j0 + j) * in + k] = narrow<C>(sums[k * ROW + j]);
    return;  // the whole block
  }
  const int j = threadIdx.x % COLUMNS;
  float products = 0.f;
  if (j0 + j < columns) {
    const float gate = block.opened(s, (j0 + j) % d.bond[s]);
    for (int k = threadIdx.x / COLUMNS; k < in; k += THREADS / COLUMNS) {
      const int64_t at = (int64_t)k * columns + j0 + j;
      products += sums[k * ROW + j] * read<C>(d, s, at);
      core_grad[at] = narrow<C>(sums[k * ROW + j] * gate);
    }
  }
  p[threadIdx.x] = products;
  __syncthreads();  // all products are there
  if (threadIdx.x < COLUMNS)
    share[(int64_t)in * rows + j] = p[j] + p[j + COLUMNS] + p[j + 2 * COLUMNS] + p[j + 3 * COLUMNS];
}

template <typename C, typename T>
__device__ void contract_back_last(const Descriptor* descriptors, const int* blocks,
                                   const float* gates, const Factors& grads, C* core_grads,
                                   float* shares) {
  const int code = blocks[blockIdx.x], number = code & 0xffff;
  Block block = begin(descriptors, code >> 16, gates);
  const Descriptor& d = block.d;
  const T* from = static_cast<const T*>(grads.of[d.factor]) + d.place;
  C* core_grad = core_grads + d.core_grad[d.cores - 1];
  if (d.cores == 1) {
    const int columns = d.mode[0] * d.bond[0], end = (number + 1) * ALONE;
    for (int e = number * ALONE + threadIdx.x; e < end && e < columns; e += THREADS)
      core_grad[e] =
          narrow<C>(wide(from[column_at(d, e, 1)]) * (d.right ? 1.f : block.opened(0, e % d.bond[0])));
    return;  // the whole block
  }
  float* share = shares + d.share + number * share_size(d);
  if (d.bond[d.cores - 2] <= 32)
    back_last<C, T, 32>(block, number, from, core_grad, share);
  else
    back_last<C, T, 64>(block, number, from, core_grad, share);
}

__device__ __forceinline__ float over_lanes(float x) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}
__device__ __forceinline__ void store_gate_grad(const Block& block, int s, int c, float sum, float* grads) {
  grads[block.d.gate_grad[s] + c] = block.given[s][c] > block.d.threshold ? sum : 0.f;
}

// The gradient of some modes of P_s, all blocks' shares added up: g, [mode, row before][apart].
__device__ void gather(const Descriptor& d, int s, const float* shares, int first, int modes,
                       int apart, float* g) {
  constexpr int AT_ONCE = 8;  // loads under way together
  const int rows = rows_of(d, s), before = rows_of(d, s - 1), each = before * modes;
  const int total = d.bond[s] * each;
  const int64_t size = share_size(d);
#pragma unroll 1
  for (int e0 = threadIdx.x; e0 < total; e0 += AT_ONCE * THREADS) {
    float sum[AT_ONCE] = {};
    int from[AT_ONCE], to[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int e = e0 + i * THREADS, c = e / each, rest = e - c * each;
      const int mode = d.right ? rest / before : rest % modes, r = d.right ? rest % before : rest / modes;
      from[i] = e < total ? c * rows + row_of(d, s, r, before, first + mode) : -1;
      to[i] = (mode * before + r) * apart + c;
    }
#pragma unroll 1
    for (int b = 0; b < d.blocks; ++b)
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (from[i] >= 0) sum[i] += shares[b * size + from[i]];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (from[i] >= 0) g[to[i]] = sum[i];
  }
}

// From the gradient of P_s that of P_s-1, [bond][rows up to four], of core s and of its gate. It takes the
// place of P_s, which nobody needs any more. Of the last P there are shares, to be added up.
template <typename C>
__device__ void back_stage(const Block& block, int s, const float* shares, C* core_grads, float* gate_grads) {
  const Descriptor& d = block.d;
  const int in = d.bond[s - 1], out = d.bond[s], before = rows_of(d, s - 1);
  const int before4 = up_to_four(before), rows4 = up_to_four(rows_of(d, s));
  const int spans = at_least_one((out + 31) / 32), apart = 32 * spans + 4, most = d.at_once_back[s - 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = warp % spans * 32 + lane;
  const float gate = c < out ? block.gate[s][c] : 0.f;
  const bool gated = block.given[s];
  const float* p_before = block.room + d.room_back[s - 1];
  float* of_before = block.room + d.room_back[s];
  const float* whole = block.room + d.room_back[s + 1];  // the gradient of P_s, but of the last P
  float* staged = block.room + d.room_back[d.cores - 1];
  float* g = staged + up_to_four((d.right ? out : in) * (most * (d.right ? in : out) + d.right));
  C* core_grad = core_grads + d.core_grad[s];
  float of_gate = 0.f;
  for (int e = threadIdx.x; e < in * before4; e += THREADS) of_before[e] = 0.f;
#pragma unroll 1
  for (int first = 0; first < d.mode[s]; first += most) {
    const int modes = first + most < d.mode[s] ? most : d.mode[s] - first;
    __syncthreads();  // nobody reads the values of the mode before
    stage<C>(d, s, first, modes, staged);
    if (s + 2 < d.cores)
      for (int e = threadIdx.x; e < modes * before * out; e += THREADS) {
        const int r = e / out, k = e % out;
        g[r * apart + k] = whole[k * rows4 + row_of(d, s, r % before, before, first + r / before)];
      }
    else
      gather(d, s, shares, first, modes, apart, g);
    arrived<0>();
    __syncthreads();  // g and the staged core are whole
    const int step = staged_step(d, s, modes);
    // A lane has a value of the bond, a warp some modes of 32 values: P_s once more without its gate,
    // for the gate; then the core's gradient.
#pragma unroll 1
    for (int mode = warp / spans; mode < modes; mode += WARPS / spans) {
      if (c >= out) continue;
      const float* x = staged + staged_at(d, s, modes, mode, c);
      float* y = g + mode * before * apart + c;
#pragma unroll 1
      for (int r = 0; r < before; r += 4) {
        float ungated[4] = {};
        if (gated) four_rows(p_before + r, before4, x, step, in, ungated);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (r + i < before) {
            of_gate += ungated[i] * y[(r + i) * apart];
            y[(r + i) * apart] *= gate;
          }
      }
#pragma unroll 1
      for (int k0 = 0; k0 < in; k0 += 4) {
        float sum[4] = {};
#pragma unroll 4
        for (int r = 0; r < before; ++r) {
          const float of_p = y[r * apart];
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[k] += (k0 + k < in ? p_before[(k0 + k) * before4 + r] : 0.f) * of_p;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if (k0 + k < in) {
            const int64_t left = ((int64_t)(k0 + k) * d.mode[s] + first + mode) * out + c;
            const int64_t right = ((int64_t)c * d.mode[s] + first + mode) * in + k0 + k;
            core_grad[d.right ? right : left] = narrow<C>(sum[k]);
          }
      }
    }
    __syncthreads();  // g is gated
#pragma unroll 1
    for (int k = warp; k < in; k += WARPS)
#pragma unroll 2
      for (int r = 0; r < before; ++r) {
        float sum = 0.f;
#pragma unroll 1
        for (int b = lane; b < out; b += 32)
#pragma unroll 4
          for (int mode = 0; mode < modes; ++mode)
            sum += staged[staged_at(d, s, modes, mode, b) + k * step] * g[(mode * before + r) * apart + b];
        sum = over_lanes(sum);
        if (lane == 0) of_before[k * before4 + r] += sum;
      }
  }
  __syncthreads();  // nobody reads g
  float* of_gates = g;
  of_gates[threadIdx.x] = of_gate;
  __syncthreads();  // all have written theirs
  if (gated)
    for (int b = threadIdx.x; b < out; b += THREADS) {
      float sum = 0.f;
      for (int w = b / 32; w < WARPS; w += spans) sum += of_gates[32 * w + b % 32];
      store_gate_grad(block, s, b, sum, gate_grads);
    }
}

// The rest, a block for each factor: all blocks' shares added up, all cores but the last, all gates.
template <typename C, typename T>
__device__ void contract_back_first(const Descriptor* descriptors, const float* gates,
                                    const Factors& grads, const float* shares, C* core_grads,
                                    float* gate_grads) {
  Block block = begin(descriptors, blockIdx.x, gates);
  const Descriptor& d = block.d;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, last = d.cores - 1;
  if (last == 0) {
    if (!block.given[0]) return;  // the whole block
    const T* from = static_cast<const T*>(grads.of[d.factor]) + d.place;
    for (int c = warp; c < d.bond[0]; c += WARPS) {
      float sum = 0.f;
      for (int mode = lane; mode < d.mode[0]; mode += 32)
        sum += wide(from[(int64_t)mode * d.width + c]) * read<C>(d, 0, (int64_t)mode * d.bond[0] + c);
      sum = over_lanes(sum);
      if (lane == 0) store_gate_grad(block, 0, c, sum, gate_grads);
    }
    return;
  }
  shares += d.share;
  const int bond = d.bond[0], heads = d.mode[0], heads4 = up_to_four(heads);
  float* of_p0 = block.room + d.room_back[1];
  if (last > 1) {
    make<C>(block, last - 2, d.room_back, block.room + d.room_back[last], d.at_once_back);
#pragma unroll 1
    for (int s = last - 1; s > 0; --s) back_stage<C>(block, s, shares, core_grads, gate_grads);
  } else {
    const int64_t size = share_size(d);
    for (int e = threadIdx.x; e < bond * heads; e += THREADS) {
      float sum = 0.f;
#pragma unroll 4
      for (int b = 0; b < d.blocks; ++b) sum += shares[b * size + e];
      of_p0[e / heads * heads4 + e % heads] = sum;
    }
    __syncthreads();
  }
  for (int k = warp; k < bond; k += WARPS) {
    float sum = 0.f;
    for (int i = lane; i < heads; i += 32) {
      const int64_t at = d.right ? k * heads + i : i * bond + k;
      const float x = of_p0[k * heads4 + i];
      sum += x * read<C>(d, 0, at);
      core_grads[d.core_grad[0] + at] = narrow<C>(x * block.gate[0][k]);
    }
    sum = over_lanes(sum);
    if (block.given[0] && lane == 0) store_gate_grad(block, 0, k, sum, gate_grads);
  }
  if (!block.given[last]) return;
  const int64_t size = share_size(d), numbers = size - COLUMNS;
  for (int c = warp; c < d.bond[last]; c += WARPS) {
    float sum = 0.f;
    for (int mode = lane; mode < d.mode[last]; mode += 32) {
      const int j = mode * d.bond[last] + c;
      sum += shares[j / COLUMNS * size + numbers + j % COLUMNS];
    }
    sum = over_lanes(sum);
    if (lane == 0) store_gate_grad(block, last, c, sum, gate_grads);
  }
}

constexpr int AT_ONCE = 16384;  // bytes of a launch's arguments
struct Bytes {
  int of[AT_ONCE / 4];
};
// Descriptors come to the card as arguments, so that a graph can hold that too.
extern "C" __global__ void __launch_bounds__(256)
contract_describe(ARGUMENTS(Bytes) bytes, int* to, int first, int count) {
  for (int e = threadIdx.x; e < count; e += THREADS) to[first + e] = bytes.of[e];
}
