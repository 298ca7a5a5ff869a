// Rows of a table from its two factors by the tensor cores, and gradients of these in a fixed order.
//
// Row v * W + w is left[v] [P, R] . right[w] [R, Q], its first D numbers; the right factor is given
// turned, [W, Q, R]. Numbers are 16 bits wide; Q, R and D are multiples of eight, so that all is read
// and written 16 bytes at a time. A warp has a row: no shared memory, no barrier.
//
// Backward, entries are sorted twice, by v and by w, so that those of one slice of a factor follow
// each other, and shared out in pieces of 32. A warp sums what its piece has of a tile of a slice's
// gradient, one slice after the other. A slice that lies in one piece is whole then; of others each
// piece leaves a share, which a second launch adds up in the order of the pieces.
#include "tiles.cuh"

struct Table {
  int64_t rows;  // all there are
  int V, W, P, Q, R, D;
};

__device__ __forceinline__ Sixteen sixteen(const void* from, bool there) {
  return there ? read<Sixteen>(from) : Sixteen{{0u, 0u, 0u, 0u}};
}

// One warp for each entry: out [entries, D]; keys, by which entries of one slice of the right factor
// are neighbours, and their numbers. Which number is which along the bond and among the columns is
// free: so every lane reads 16 bytes, and writes eight neighbours. CHUNKS times 32 numbers of the bond
// are enough.
template <typename T, int CHUNKS>
__device__ void row(const Table& table, const int64_t* indices, const T* left, const T* right, T* out,
                    int64_t* keys, int64_t* order, int entries) {
  const int entry = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;  // a thread number would wrap
  if (entry >= entries) return;  // the whole warp
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int P = table.P, Q = table.Q, R = table.R;
  const int64_t index = indices[entry];
  if (index < 0 || index >= table.rows) __trap();
  const int64_t v = index / table.W, w = index % table.W;
  if (lane == 0) {
    keys[entry] = w * table.V + v;
    order[entry] = entry;
  }
  left += v * P * R;
  right += w * Q * R;
  out += (int64_t)entry * table.D;
#pragma unroll 1
  for (int p0 = 0; p0 < P; p0 += 16) {
    uint32_t a[CHUNKS][2][4];
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
      const int at = 32 * k + 8 * t, p = p0 + g;
      const Sixteen low = sixteen(left + p * R + at, at < R && p < P);
      const Sixteen high = sixteen(left + (p + 8) * R + at, at < R && p + 8 < P);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        a[k][e / 2][e % 2 * 2] = low.x[e];
        a[k][e / 2][e % 2 * 2 + 1] = high.x[e];
      }
    }
#pragma unroll 2
    for (int q0 = 0; q0 < Q; q0 += 32) {
      float sum[4][4] = {};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int q = q0 + 8 * (g / 2) + 2 * n + g % 2;
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
          const int at = 32 * k + 8 * t;
          const Sixteen b = sixteen(right + q * R + at, at < R && q < Q);
          const uint32_t b0[2] = {b.x[0], b.x[1]}, b1[2] = {b.x[2], b.x[3]};
          mma<T>(sum[n], a[k][0], b0);
          mma<T>(sum[n], a[k][1], b1);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int p = p0 + g + 8 * half, q = q0 + 8 * t, column = p * Q + q;
        if (p >= P || q >= Q || column >= table.D) continue;
        Sixteen eight;
#pragma unroll
        for (int n = 0; n < 4; ++n) eight.x[n] = pack<T>(sum[n][2 * half], sum[n][2 * half + 1]);
        *reinterpret_cast<Sixteen*>(out + column) = eight;
      }
    }
  }
}
// Rows, by which entries of one slice of the left factor are neighbours, then keys for the right one.
extern "C" __global__ void __launch_bounds__(256)
ttm_warps_keys(ARGUMENTS(Table) table, const int64_t* indices, int* keys, int entries) {
  const int entry = blockIdx.x * blockDim.x + threadIdx.x;
  if (entry >= entries) return;
  const int row = (int)indices[entry];
  keys[entry] = row;
  keys[(int64_t)entries + entry] = row % table.W * table.V + row / table.W;
}

constexpr int WARPS = 4, PIECE = 32;          // of a block; sorted entries of a warp
constexpr int TILE_M = 16, TILE_R = 32;       // of a slice's gradient, a warp's
constexpr int STAGES = 4;                     // products under way
constexpr int GRAD = TILE<bf16, 16, 16>, STAGE = GRAD + TILE<bf16, TILE_R, 16>;

// Entries sorted by the slice of the factor whose gradient is made; of the other one the products
// need a slice, too. A slice is [M, R], and sums run over K.
template <typename T>
struct Side {
  const int *keys, *order;
  const T* other;
  T* grad;
  float* shares;  // [piece][first, last][M, R]
  int others, M, K;
  bool right;

  __device__ Side(const Table& t, bool right, const int* keys, const int* order, const T* other, T* grad,
                  float* shares)
      : keys(keys), order(order), other(other), grad(grad), shares(shares),
        others(right ? t.V : t.W), M(right ? t.Q : t.P), K(right ? t.P : t.Q), right(right) {}
  __device__ int slice(int key) const { return key / others; }
  __device__ float* share(int piece, bool last, int R) const {
    return shares + ((int64_t)piece * 2 + last) * M * R;
  }
};

// One warp for each piece and tile.
template <typename T>
__device__ void shares_of(const Table& table, const Side<T>& side, int tile, const T* grad, int entries) {
  DYNAMIC_SHARED(T, shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, piece = blockIdx.x * WARPS + warp;
  const int first = piece * PIECE, count = entries - first < PIECE ? entries - first : PIECE;
  if (count <= 0) return;  // the whole warp
  T* stages = shared + warp * STAGES * STAGE;
  const int R = table.R, across = (R + TILE_R - 1) / TILE_R;
  const int m0 = tile / across * TILE_M, r0 = tile % across * TILE_R;
  const int key = lane < count ? side.keys[first + lane] : 0;
  const int entry = lane < count ? side.order[first + lane] : 0;
  const int steps = (side.K + 15) / 16, all = count * steps;
  auto issue = [&](int step) {
    if (step < all) {
      const int e = step / steps, k0 = step % steps * 16;
      const int of = __shfl_sync(~0u, key, e) % side.others;
      const T* from = grad + (int64_t)__shfl_sync(~0u, entry, e) * table.D;
      T* stage = stages + step % STAGES * STAGE;
      // The gradient of a row, [P, Q]: as rows for the left factor, as columns for the right one.
      const int p = (side.right ? k0 : m0) + lane / 2, q = (side.right ? m0 : k0) + lane % 2 * 8;
      const bool there = p < table.P && q < table.Q && p * table.Q + q < table.D;
      copy16(stage + place<T, 16>(lane / 2, lane % 2 * 8), from + (there ? p * table.Q + q : 0), there);
#pragma unroll
      for (int i = lane; i < 64; i += 32) {
        const int k = k0 + i / 4, r = r0 + i % 4 * 8;
        const bool inside = k < side.K && r < R;
        copy16(stage + GRAD + place<T, TILE_R>(i / 4, i % 4 * 8),
               side.other + (inside ? ((int64_t)of * side.K + k) * R + r : 0), inside);
      }
    }
    commit();
  };
  float sum[TILE_R / 8][4] = {};
  int begin = 0;  // of the entries of the present slice
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) issue(s);
#pragma unroll 1
  for (int step = 0; step < all; ++step) {
    arrived<STAGES - 2>();
    __syncwarp();  // the stage is there, and nobody reads the one before
    issue(step + STAGES - 1);
    const T* stage = stages + step % STAGES * STAGE;
    uint32_t a[4];
    if (side.right)
      load_a_turned<16>(a, stage, 0, 0);
    else
      load_a<16>(a, stage, 0, 0);
#pragma unroll
    for (int n = 0; n < TILE_R; n += 16) {
      uint32_t b[4];
      load_b<TILE_R>(b, stage + GRAD, 0, n);
      mma2<T>(sum[n / 8], sum[n / 8 + 1], a, b);
    }
    const int e = step / steps;
    if (step % steps != steps - 1) continue;
    const int slice = side.slice(__shfl_sync(~0u, key, e));
    const int next = side.slice(__shfl_sync(~0u, key, e + 1 < count ? e + 1 : e));
    if (e + 1 < count && next == slice) continue;
    const bool before = begin == 0 && first > 0 && side.slice(side.keys[first - 1]) == slice;
    const int end = first + count;
    const bool behind = e + 1 == count && end < entries && side.slice(side.keys[end]) == slice;
    float* share = side.share(piece, !before, R);
    T* whole = side.grad + (int64_t)slice * side.M * R;
#pragma unroll
    for (int n = 0; n < TILE_R / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int m = m0 + lane / 4 + i / 2 * 8, r = r0 + 8 * n + lane % 4 * 2 + i % 2;
        if (m < side.M && r < R) {
          if (before || behind)
            share[m * R + r] = sum[n][i];
          else
            whole[m * R + r] = narrow<T>(sum[n][i]);
        }
        sum[n][i] = 0.f;
      }
    begin = e + 1;
  }
}

// How many tiles a slice of a factor has, M high.
__device__ __forceinline__ int tiles_of(int M, int R) {
  return (M + TILE_M - 1) / TILE_M * ((R + TILE_R - 1) / TILE_R);
}
template <typename T>
__device__ Side<T> side_of(const Table& t, bool right, const int* sorted, const T* left_slices,
                           const T* right_slices, T* left_grad, T* right_grad, float* shares,
                           int entries) {
  if (right) {
    sorted += entries;
    shares += ((int64_t)entries + PIECE - 1) / PIECE * 2 * t.P * t.R;
  }
  return Side<T>(t, right, sorted, sorted + 2 * (int64_t)entries, right ? left_slices : right_slices,
                 right ? right_grad : left_grad, shares);
}

// `sorted` has four times as many numbers as there are entries: rows in order, keys in order, then the
// entries that have those rows, and these keys.
template <typename T>
__device__ void back_shares(const Table& table, const int* sorted, const T* grad, const T* left,
                            const T* right, T* left_grad, T* right_grad, float* shares, int entries) {
  const int tile = blockIdx.y, of_left = tiles_of(table.P, table.R);
  const bool is_right = tile >= of_left;
  const Side<T> side =
      side_of(table, is_right, sorted, left, right, left_grad, right_grad, shares, entries);
  shares_of(table, side, tile - (is_right ? of_left : 0), grad, entries);
}

// One block for each slice of either factor: shares added up, or zeros where no entry reads it.
template <typename T>
__device__ void back_sums(const Table& table, const int* sorted, const T* left, const T* right,
                          T* left_grad, T* right_grad, float* shares, int entries) {
  const bool is_right = (int)blockIdx.x >= table.V;
  const Side<T> side =
      side_of(table, is_right, sorted, left, right, left_grad, right_grad, shares, entries);
  const int slice = blockIdx.x - (is_right ? table.V : 0);
  DYNAMIC_SHARED(int, ends);  // first entry of the slice, and of the next one
  if (threadIdx.x < 2) {
    int low = 0, high = entries;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (side.slice(side.keys[middle]) < slice + (int)threadIdx.x)
        low = middle + 1;
      else
        high = middle;
    }
    ends[threadIdx.x] = low;
  }
  __syncthreads();
  const int begin = ends[0], end = ends[1], first = begin / PIECE, last = (end - 1) / PIECE;
  if (begin < end && first == last) return;  // it is whole
  T* whole = side.grad + (int64_t)slice * side.M * table.R;
  for (int i = threadIdx.x; i < side.M * table.R; i += blockDim.x) {
    float sum = begin < end ? side.share(first, true, table.R)[i] : 0.f;
    if (begin < end)
#pragma unroll 4
      for (int piece = first + 1; piece <= last; ++piece) sum += side.share(piece, false, table.R)[i];
    whole[i] = narrow<T>(sum);
  }
}

extern "C" __global__ void __launch_bounds__(256)
ttm_warps_rows_bf16(ARGUMENTS(Table) table, const int64_t* indices, const bf16* left, const bf16* right,
                    bf16* out, int64_t* keys, int64_t* order, int entries) {
  row<bf16, 1>(table, indices, left, right, out, keys, order, entries);
}
extern "C" __global__ void __launch_bounds__(256)
ttm_warps_wide_rows_bf16(ARGUMENTS(Table) table, const int64_t* indices, const bf16* left,
                         const bf16* right, bf16* out, int64_t* keys, int64_t* order, int entries) {
  row<bf16, 4>(table, indices, left, right, out, keys, order, entries);
}
extern "C" __global__ void __launch_bounds__(128)
ttm_warps_back_shares_bf16(ARGUMENTS(Table) table, const int* sorted, const bf16* grad, const bf16* left,
                           const bf16* right, bf16* left_grad, bf16* right_grad, float* shares,
                           int entries) {
  back_shares(table, sorted, grad, left, right, left_grad, right_grad, shares, entries);
}
extern "C" __global__ void __launch_bounds__(256)
ttm_warps_back_sums_bf16(ARGUMENTS(Table) table, const int* sorted, const bf16* left, const bf16* right,
                         bf16* left_grad, bf16* right_grad, float* shares, int entries) {
  back_sums(table, sorted, left, right, left_grad, right_grad, shares, entries);
}
extern "C" __global__ void __launch_bounds__(256)
ttm_warps_rows_f16(ARGUMENTS(Table) table, const int64_t* indices, const f16* left, const f16* right,
                   f16* out, int64_t* keys, int64_t* order, int entries) {
  row<f16, 1>(table, indices, left, right, out, keys, order, entries);
}
extern "C" __global__ void __launch_bounds__(256)
ttm_warps_wide_rows_f16(ARGUMENTS(Table) table, const int64_t* indices, const f16* left,
                        const f16* right, f16* out, int64_t* keys, int64_t* order, int entries) {
  row<f16, 4>(table, indices, left, right, out, keys, order, entries);
}
extern "C" __global__ void __launch_bounds__(128)
ttm_warps_back_shares_f16(ARGUMENTS(Table) table, const int* sorted, const f16* grad, const f16* left,
                          const f16* right, f16* left_grad, f16* right_grad, float* shares,
                          int entries) {
  back_shares(table, sorted, grad, left, right, left_grad, right_grad, shares, entries);
}
extern "C" __global__ void __launch_bounds__(256)
ttm_warps_back_sums_f16(ARGUMENTS(Table) table, const int* sorted, const f16* left, const f16* right,
                        f16* left_grad, f16* right_grad, float* shares, int entries) {
  back_sums(table, sorted, left, right, left_grad, right_grad, shares, entries);
}
