// Multiplies a batch by thin matrices: t = x . left, y = t . right, for one or several pairs of
// factors that share x, in one launch; their gradients in two.
//
//   x [M, I]   left [I, R]   right [R, O]   t, u [M, R]   y [M, O]
//   forward          t = x . left, ones in its last column for a bias, which is the last row of
//                    right; y = t . right
//   back_rows        u = dy . right^T and dx = u . left^T, which add up over the pairs
//   back_columns     dleft = x^T . u, dright = t^T . dy, the gradient of a bias in its last row
//
// dy is read twice: a single pass over it would have to add every block's share of dleft and
// dright to memory. A pair without right has no y: its t is what was wanted, its u is given.
//
// All of it is one product of 32 lines by 32 lines, a warp's, whose operands come straight from
// where they lie. Nobody else in a block reads the same numbers of the thin factors, and four
// lanes side by side read 64 bytes, so that shared memory would only be a detour.
#include "common.cuh"

constexpr int MOST_PAIRS = 4, MOST_PANELS = 8;
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int TILE = 32;
constexpr int PART_ROW = TILE + 4;  // of a warp's sum in shared memory; see shared_bytes in low_rank.py
constexpr int THIN_PAD = 8;         // of a row of t or u there, past its panels

struct Pair {
  const void *left, *right;  // right is null where only t is wanted
  void *t, *u, *y;           // y is its gradient backward
  void *left_grad, *right_grad;
  int rank, out;
  int left_row, right_row, t_row, u_row, y_row;  // how far apart rows lie
};

// Columns of all t side by side, in panels of 32 that belong to one pair each.
struct Layer {
  int pairs, panels, rows, in, x_row, ones;
  const void* x;
  void* x_grad;  // null where it is not wanted
  int pair_of[MOST_PANELS], column_of[MOST_PANELS], panel_of[MOST_PAIRS];
  Pair pair[MOST_PAIRS];
};

// One way to multiply: plain float32, or tensor cores with tf32 or bf16. EACH numbers along the
// sum make the four registers that a lane gives for one line.
struct Float32 {
  using T = float;
  static constexpr int EACH = 4;
};
struct TensorFloat32 {
  using T = float;
  static constexpr int EACH = 4;
};
struct BFloat16 {
  using T = bf16;
  static constexpr int EACH = 8;
};
template <typename Math>
constexpr bool PLAIN = false;
template <>
constexpr bool PLAIN<Float32> = true;

// Numbers per line and along the sum: neighbours along the sum lie side by side, or the lines do.
template <typename T>
struct Operand {
  const T* numbers;
  int stride, lines;  // that there are
  bool aligned;

  __device__ Operand(const void* from, int64_t offset, int stride, int lines)
      : numbers(static_cast<const T*>(from) + offset), stride(stride), lines(lines),
        aligned((reinterpret_cast<uint64_t>(numbers) | (uint64_t)stride * sizeof(T)) % 16 == 0) {}
  // One of no more than 32 lines.
  __device__ const T* at(int line, int k) const { return numbers + (line * stride + k); }
  __device__ const T* at_number(int k, int line) const {
    return numbers + (int64_t)k * stride + line;
  }
};

struct alignas(16) Words4 {
  uint32_t x[4];
};
struct alignas(8) Words2 {
  uint32_t x[2];
};

__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint32_t bits_of(bf16 x) { return x.bits; }

// Four lines from `line` on, and EACH numbers along the sum from `k` on: registers [line][number],
// two bf16 each.
template <typename Math, bool ALONG>
__device__ __forceinline__ void load(uint32_t (&to)[4][4], const Operand<typename Math::T>& from,
                                     int line, int k, int end) {
  using T = typename Math::T;
  constexpr int EACH = Math::EACH, PACKED = EACH / 4;
  if (from.aligned && k + EACH <= end && (ALONG || line + 4 <= from.lines)) {
    if (ALONG) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Words4 words = {};
        if (line + i < from.lines)
          words = *reinterpret_cast<const Words4*>(from.at(line + i, k));
#pragma unroll
        for (int j = 0; j < 4; ++j) to[i][j] = words.x[j];
      }
    } else if (PACKED == 1) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Words4 words = *reinterpret_cast<const Words4*>(from.at_number(k + j, line));
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i][j] = words.x[i];
      }
    } else {
      const T* place = from.at_number(k, line);
#pragma unroll
      for (int j = 0; j < 4; ++j, place += 2 * from.stride) {
        const Words2 one = *reinterpret_cast<const Words2*>(place);
        const Words2 two = *reinterpret_cast<const Words2*>(place + from.stride);
#pragma unroll
        for (int i = 0; i < 4; ++i)  // the lower or the upper half of both
          to[i][j] = __byte_perm(one.x[i / 2], two.x[i / 2], i % 2 ? 0x7632 : 0x5410);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      asm volatile("" ::: "memory");  // one after the other, for want of registers
      to[i][j] = 0;
#pragma unroll
      for (int p = 0; p < PACKED; ++p) {
        const int number = k + PACKED * j + p;
        if (line + i < from.lines && number < end)
          to[i][j] |= bits_of(*(ALONG ? from.at(line + i, number) : from.at_number(number, line + i)))
                      << 16 * p;
      }
    }
}

// sum[i][c] += the product of lines 4 g + i of a and 8 t + c of b, g and t being the lane's place
// in mma's fragments, over k from `begin` on in steps of `step` lanes' worth. Which line or number
// is which inside of an instruction is free, as long as a and b agree: a lane takes neighbours.
template <typename Math, bool A_ALONG, bool B_ALONG>
__device__ __forceinline__ void multiply(float (&sum)[4][8],
                                         const Operand<typename Math::T>& a,
                                         const Operand<typename Math::T>& b, int begin, int end,
                                         int step) {
  constexpr int EACH = Math::EACH;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int k = begin; k < end; k += step) {
    uint32_t x[4][4];
    if constexpr (PLAIN<Math>) {
      // Each lane takes the same numbers along the sum, 16 of them in turn.
#pragma unroll 1
      for (int n = k; n < k + 4 * EACH && n < end; n += EACH) {
        load<Math, A_ALONG>(x, a, 4 * g, n, end);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t y[4][4];
          load<Math, B_ALONG>(y, b, 8 * t + 4 * half, n, end);
#pragma unroll
          for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
              for (int c = 0; c < 4; ++c)
                sum[i][4 * half + c] += __uint_as_float(x[i][j]) * __uint_as_float(y[c][j]);
        }
      }
    } else {
      uint32_t y[4][4];
      load<Math, A_ALONG>(x, a, 4 * g, k + EACH * t, end);
      load<Math, B_ALONG>(y, b, 4 * g, k + EACH * t, end);
      if constexpr (Math::EACH == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            x[i][j] = to_tf32(__uint_as_float(x[i][j]));
            y[i][j] = to_tf32(__uint_as_float(y[i][j]));
          }
      }
#pragma unroll
      for (int j = 0; j < 4; j += 2)
#pragma unroll
        for (int i = 0; i < 4; i += 2)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float d[4] = {sum[i][c], sum[i][4 + c], sum[i + 1][c], sum[i + 1][4 + c]};
            const uint32_t of_a[4] = {x[i][j], x[i + 1][j], x[i][j + 1], x[i + 1][j + 1]};
            const uint32_t of_b[2] = {y[c][j], y[c][j + 1]};
            if constexpr (Math::EACH == 4)
              mma_tf32(d, of_a, of_b);
            else
              mma_bf16(d, of_a, of_b);
            sum[i][c] = d[0], sum[i][4 + c] = d[1], sum[i + 1][c] = d[2], sum[i + 1][4 + c] = d[3];
          }
    }
  }
}

// A sum over k from begin to end of a's lines by b's.
template <typename T>
struct Product {
  Operand<T> a, b;
  int begin, end;
};

// The sums of 32 lines by several panels of 32, by all warps of a block: each takes a panel, and
// where there are fewer panels than warps a slice of the steps along the sum.
template <typename Math, bool A_ALONG, bool B_ALONG, typename ProductOf>
__device__ void sum_panels(float* parts, int panels, ProductOf product_of) {
  constexpr int STEP = 4 * Math::EACH;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int slices = WARPS / panels, slice = warp / panels;
  if (slice >= slices) return;
  float sum[4][8] = {};
  const Product<typename Math::T> product = product_of(warp % panels);
  multiply<Math, A_ALONG, B_ALONG>(sum, product.a, product.b, product.begin + slice * STEP,
                                   product.end, slices * STEP);
  float* part = parts + warp * TILE * PART_ROW;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int c = 0; c < 8; ++c) part[(4 * g + i) * PART_ROW + 8 * t + c] = sum[i][c];
}

// One number of what sum_panels left, after a barrier.
__device__ __forceinline__ float number_of(const float* parts, int panels, int line, int column) {
  float sum = 0.f;
  const int panel = column / TILE;
#pragma unroll 1
  for (int warp = panel; warp < WARPS / panels * panels; warp += panels)
    sum += parts[(warp * TILE + line) * PART_ROW + column % TILE];
  return sum;
}

// Eight neighbours of a row: at once where they lie so.
template <typename T>
__device__ __forceinline__ void store(T* to, const float (&from)[8], int count) {
  if (count >= 8 && reinterpret_cast<uint64_t>(to) % 16 == 0) {
    T narrowed[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) narrowed[c] = narrow<T>(from[c]);
#pragma unroll
    for (int part = 0; part < 8 * sizeof(T) / 16; ++part) {
      Words4 words;
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int j = 0; j < 4; ++j) words.x[j] = bits_of(narrowed[4 * part + j]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          words.x[j] = bits_of(narrowed[2 * j]) | bits_of(narrowed[2 * j + 1]) << 16;
      }
      reinterpret_cast<Words4*>(to)[part] = words;
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < 8; ++c)
    if (c < count) to[c] = narrow<T>(from[c]);
}

// Shared memory: the warps' sums, then 32 rows of t or u.
template <typename T>
struct Shared {
  float* parts;
  T* thin;
  int thin_row;

  __device__ Shared(const Layer& layer) {
    DYNAMIC_SHARED(float, shared);
    parts = shared;
    thin = reinterpret_cast<T*>(shared + WARPS * TILE * PART_ROW);
    thin_row = layer.panels * TILE + THIN_PAD;
  }
  __device__ Operand<T> of_pair(const Layer& layer, int p) const {
    return Operand<T>(thin, layer.panel_of[p] * TILE, thin_row, TILE);
  }
};

// t or u of 32 rows from what the warps have summed: value(pair, row, column, sum) says what is
// kept of it; columns past a rank are zero.
template <typename T, typename Value>
__device__ void keep_thin(const Layer& layer, const Shared<T>& shared, bool is_u, Value value) {
  const int row0 = blockIdx.x * TILE, width = layer.panels * TILE;
  for (int e = threadIdx.x; e < TILE * width; e += THREADS) {
    const int line = e / width, column = e % width, panel = column / TILE;
    const Pair& pair = layer.pair[layer.pair_of[panel]];
    const int r = layer.column_of[panel] + column % TILE, row = row0 + line;
    T kept = narrow<T>(0.f);
    if (r < pair.rank && row < layer.rows) {
      const float sum = number_of(shared.parts, layer.panels, line, column);
      kept = value(pair, row, r, sum);
      T* to = static_cast<T*>(is_u ? pair.u : pair.t);
      if (!is_u || pair.right) to[(int64_t)row * (is_u ? pair.u_row : pair.t_row) + r] = kept;
    }
    shared.thin[line * shared.thin_row + column] = kept;
  }
}

// The sum of a lane, 32 rows of a batch by 32 columns, to where it belongs.
template <typename T>
__device__ void store_rows(T* to, int64_t to_row, int rows, int columns, const float (&sum)[4][8]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (4 * g + i < rows && 8 * t < columns)
      store(to + (4 * g + i) * to_row + 8 * t, sum[i], columns - 8 * t);
}

// One block for 32 rows.
template <typename Math>
__device__ void forward(const Layer& layer) {
  using T = typename Math::T;
  const Shared<T> shared(layer);
  const int row0 = blockIdx.x * TILE, rows = layer.rows - row0;
  sum_panels<Math, true, false>(shared.parts, layer.panels, [&](int panel) {
    const Pair& pair = layer.pair[layer.pair_of[panel]];
    const int r = layer.column_of[panel];
    return Product<T>{Operand<T>(layer.x, (int64_t)row0 * layer.x_row, layer.x_row, rows),
                      Operand<T>(pair.left, r, pair.left_row, pair.rank - r), 0, layer.in};
  });
  __syncthreads();  // all warps have summed
  keep_thin(layer, shared, false, [&](const Pair& pair, int, int r, float sum) {
    return narrow<T>(layer.ones && r == pair.rank - 1 ? 1.f : sum);
  });
  __syncthreads();  // t is whole
  int tile = threadIdx.x / 32;
#pragma unroll 1
  for (int p = 0; p < layer.pairs; ++p) {
    const Pair& pair = layer.pair[p];
    if (!pair.right) continue;
    const int tiles = (pair.out + TILE - 1) / TILE;
#pragma unroll 1
    for (; tile < tiles; tile += WARPS) {
      const int column = tile * TILE;
      float sum[4][8] = {};
      multiply<Math, true, false>(
          sum, shared.of_pair(layer, p),
          Operand<T>(pair.right, column, pair.right_row, pair.out - column), 0, pair.rank,
          4 * Math::EACH);
      store_rows(static_cast<T*>(pair.y) + (int64_t)row0 * pair.y_row + column, pair.y_row, rows,
                 pair.out - column, sum);
    }
    tile -= tiles;
  }
}

// The same blocks. Also sets the counters to zero that back_columns counts with.
template <typename Math>
__device__ void back_rows(const Layer& layer, int* counters, int num_counters) {
  using T = typename Math::T;
  if (blockIdx.x == 0)
    for (int e = threadIdx.x; e < num_counters; e += THREADS) counters[e] = 0;
  const Shared<T> shared(layer);
  const int row0 = blockIdx.x * TILE, rows = layer.rows - row0;
  sum_panels<Math, true, true>(shared.parts, layer.panels, [&](int panel) {
    const Pair& pair = layer.pair[layer.pair_of[panel]];
    const int r = layer.column_of[panel];
    return Product<T>{
        Operand<T>(pair.y, (int64_t)row0 * pair.y_row, pair.y_row, rows),
        Operand<T>(pair.right, (int64_t)r * pair.right_row, pair.right_row, pair.rank - r), 0,
        pair.right ? pair.out : 0};
  });
  __syncthreads();  // all warps have summed
  keep_thin(layer, shared, true, [&](const Pair& pair, int row, int r, float sum) {
    if (pair.right) return narrow<T>(sum);
    return static_cast<const T*>(pair.u)[(int64_t)row * pair.u_row + r];
  });
  if (!layer.x_grad) return;
  __syncthreads();  // u is whole
#pragma unroll 1
  for (int column = threadIdx.x / 32 * TILE; column < layer.in; column += WARPS * TILE) {
    float sum[4][8] = {};
#pragma unroll 1
    for (int p = 0; p < layer.pairs; ++p) {
      const Pair& pair = layer.pair[p];
      multiply<Math, true, true>(
          sum, shared.of_pair(layer, p),
          Operand<T>(pair.left, (int64_t)column * pair.left_row, pair.left_row, layer.in - column),
          0, pair.rank, 4 * Math::EACH);
    }
    store_rows(static_cast<T*>(layer.x_grad) + (int64_t)row0 * layer.in + column, layer.in, rows,
               layer.in - column, sum);
  }
}

// A block (job, split) sums over a split of the rows of the batch: 32 rows of dleft, of all pairs,
// or 32 columns of one pair's dright. What splits have summed goes through memory, and the block
// that comes last adds it up, always in the same order.
template <typename Math>
__device__ void back_columns(const Layer& layer, int rows_each, float* partial, int* counters) {
  using T = typename Math::T;
  const Shared<T> shared(layer);
  const int splits = gridDim.y, begin = blockIdx.y * rows_each;
  const int end = begin + rows_each < layer.rows ? begin + rows_each : layer.rows;
  int line0 = blockIdx.x * TILE, p = -1, lines = layer.in;  // p < 0: dleft
  while (line0 >= lines) {
    line0 -= (lines + TILE - 1) / TILE * TILE;
    do ++p;
    while (!layer.pair[p].right);
    lines = layer.pair[p].out;
  }
  const bool of_left = p < 0;
  const int first = of_left ? 0 : layer.panel_of[p];
  const int panels = of_left ? layer.panels : (layer.pair[p].rank + TILE - 1) / TILE;
  sum_panels<Math, false, false>(shared.parts, panels, [&](int panel) {
    const Pair& pair = layer.pair[layer.pair_of[first + panel]];
    const int r = layer.column_of[first + panel];
    const void* wide = of_left ? layer.x : pair.y;
    const int wide_row = of_left ? layer.x_row : pair.y_row;
    const void* thin = of_left ? pair.u : pair.t;
    const int thin_row = of_left ? pair.u_row : pair.t_row;
    return Product<T>{Operand<T>(wide, line0, wide_row, lines - line0),
                      Operand<T>(thin, r, thin_row, pair.rank - r), begin, end};
  });
  __syncthreads();  // all warps have summed

  const int width = panels * TILE, count = TILE * width;
  auto put = [&](int e, float sum) {
    const int line = line0 + (of_left ? e / width : e % TILE);
    const int column = of_left ? e % width : e / TILE, panel = first + column / TILE;
    const Pair& pair = layer.pair[layer.pair_of[panel]];
    const int r = layer.column_of[panel] + column % TILE;
    if (line >= lines || r >= pair.rank) return;
    if (of_left)
      static_cast<T*>(pair.left_grad)[(int64_t)line * pair.rank + r] = narrow<T>(sum);
    else
      static_cast<T*>(pair.right_grad)[(int64_t)r * pair.out + line] = narrow<T>(sum);
  };
  auto mine = [&](int e) {
    return number_of(shared.parts, panels, of_left ? e / width : e % TILE,
                     of_left ? e % width : e / TILE);
  };
  if (splits == 1) {
    for (int e = threadIdx.x; e < count; e += THREADS) put(e, mine(e));
    return;
  }
  const int64_t each = (int64_t)TILE * layer.panels * TILE;
  float* of_job = partial + blockIdx.x * splits * each;
  for (int e = threadIdx.x; e < count; e += THREADS) of_job[blockIdx.y * each + e] = mine(e);
  __threadfence();  // what is written comes before the count
  __syncthreads();
  int* others_follow = reinterpret_cast<int*>(shared.thin);
  if (threadIdx.x == 0) *others_follow = atomicAdd(counters + blockIdx.x, 1) < splits - 1;
  __syncthreads();
  if (*others_follow) return;
  __threadfence();  // and the count before what is read
  for (int e = threadIdx.x; e < count; e += THREADS) {
    float sum = 0.f;
#pragma unroll 4
    for (int split = 0; split < splits; ++split) sum += of_job[split * each + e];
    put(e, sum);
  }
}

extern "C" __global__ void __launch_bounds__(256, 2)
low_rank_forward_f32(ARGUMENTS(Layer) layer) {
  forward<Float32>(layer);
}
extern "C" __global__ void __launch_bounds__(256, 2)
low_rank_forward_tf32(ARGUMENTS(Layer) layer) {
  forward<TensorFloat32>(layer);
}
extern "C" __global__ void __launch_bounds__(256, 2)
low_rank_forward_bf16(ARGUMENTS(Layer) layer) {
  forward<BFloat16>(layer);
}
extern "C" __global__ void __launch_bounds__(256, 2)
low_rank_back_rows_f32(ARGUMENTS(Layer) layer, int* counters, int num_counters) {
  back_rows<Float32>(layer, counters, num_counters);
}
extern "C" __global__ void __launch_bounds__(256, 2)
low_rank_back_rows_tf32(ARGUMENTS(Layer) layer, int* counters, int num_counters) {
  back_rows<TensorFloat32>(layer, counters, num_counters);
}
extern "C" __global__ void __launch_bounds__(256, 2)
low_rank_back_rows_bf16(ARGUMENTS(Layer) layer, int* counters, int num_counters) {
  back_rows<BFloat16>(layer, counters, num_counters);
}
extern "C" __global__ void __launch_bounds__(256, 2)
low_rank_back_columns_f32(ARGUMENTS(Layer) layer, int rows_each, float* partial, int* counters) {
  back_columns<Float32>(layer, rows_each, partial, counters);
}
extern "C" __global__ void __launch_bounds__(256, 2)
low_rank_back_columns_tf32(ARGUMENTS(Layer) layer, int rows_each, float* partial, int* counters) {
  back_columns<TensorFloat32>(layer, rows_each, partial, counters);
}
extern "C" __global__ void __launch_bounds__(256, 2)
low_rank_back_columns_bf16(ARGUMENTS(Layer) layer, int rows_each, float* partial, int* counters) {
  back_columns<BFloat16>(layer, rows_each, partial, counters);
}
