// Reads rows of a table from its two factors, and sums of rows over bags; with their gradients.
//
// Row H + v * W + w is left[v] [P, R] . right[w] [R, Q], its first D numbers; rows before H are
// stored as they are, in hot [H, D]. All sizes are fixed before the indices are known, so that a
// CUDA graph can hold it. Products are summed in float32; what many entries add to one place is
// summed in pieces, with what rounding takes off carried along, or in float64.
#include "common.cuh"

struct Table {
  int64_t rows;  // all there are
  int num_hot;   // H
  int V, W, P, Q, R, D;
};

struct alignas(16) Four {
  float x[4];
};
__device__ __forceinline__ Four four(const float* place) {
  return *reinterpret_cast<const Four*>(place);
}

__device__ __forceinline__ int up_to_four(int n) { return (n + 3) / 4 * 4; }
// Rows so far apart that eight neighbours' groups of four lie in different banks.
__device__ __forceinline__ int stride_of(int n) {
  const int fours = (n + 3) / 4;
  return 4 * (fours + (fours % 2 == 0));
}

// The bag of an entry: the last one that begins at it or before.
__device__ int bag_of(const int64_t* offsets, int bags, int entry) {
  if (!offsets) return entry;
  int low = 0, high = bags;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (offsets[middle] <= entry)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__device__ __forceinline__ int end_of(const int64_t* offsets, int bags, int bag, int entries) {
  if (!offsets) return bag + 1;
  return bag + 1 < bags ? (int)offsets[bag + 1] : entries;
}

constexpr int DEPTH = 32;  // of the bond at a time
constexpr int PIECE = 32;  // entries of a bag that one block sums

// Adds a row to a tile of 4 x 4 numbers a thread; called by the whole block.
template <typename T>
__device__ void add_row(const Table& table, int64_t row, float weight, const T* left,
                        const T* right, const T* hot, bool active, int p0, int q0,
                        float (&sum)[4][4]) {
  if (row < 0 || row >= table.rows) __trap();
  const int P = table.P, Q = table.Q, R = table.R;
  if (row < table.num_hot) {
    if (!active) return;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = (p0 + i) * Q + q0 + j;
        if (q0 + j < Q && column < table.D)
          sum[i][j] += weight * wide(hot[row * table.D + column]);
      }
    return;
  }
  DYNAMIC_SHARED(float, shared);
  const int p_stride = stride_of(P), q_stride = stride_of(Q);
  float* l = shared;                     // [DEPTH][p_stride], weighted
  float* r = shared + DEPTH * p_stride;  // [DEPTH][q_stride]
  const int64_t cold = row - table.num_hot;
  left += cold / table.W * P * R;
  right += cold % table.W * R * Q;
  float made[4][4] = {};  // a long sum would round off each of the products by itself
#pragma unroll 1
  for (int k0 = 0; k0 < R; k0 += DEPTH) {
    const int depth = R - k0 < DEPTH ? R - k0 : DEPTH;
    __syncthreads();  // nobody reads what was here before
#pragma unroll 2
    for (int e = threadIdx.x; e < up_to_four(P) * DEPTH; e += blockDim.x) {
      const int p = e / DEPTH, k = e % DEPTH;
      const bool inside = p < P && k < depth;
      l[k * p_stride + p] = inside ? weight * wide(left[p * R + k0 + k]) : 0.f;
    }
#pragma unroll 2
    for (int e = threadIdx.x; e < depth * up_to_four(Q); e += blockDim.x) {
      const int k = e / up_to_four(Q), q = e % up_to_four(Q);
      r[k * q_stride + q] = q < Q ? wide(right[(k0 + k) * Q + q]) : 0.f;
    }
    __syncthreads();
    if (!active) continue;
#pragma unroll 4
    for (int k = 0; k < depth; ++k) {
      const Four a = four(l + k * p_stride + p0), b = four(r + k * q_stride + q0);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) made[i][j] += a.x[i] * b.x[j];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[i][j] += made[i][j];
}

// By these entries are sorted before gradients are summed: a hot row is its own key, behind them row
// v * W + w has the key w * V + v.
__device__ int64_t key_of(const Table& table, int64_t row) {
  const int64_t cold = row - table.num_hot;
  return cold < 0 ? row : table.num_hot + cold % table.W * table.V + cold / table.W;
}

// One block for each multiple of PIECE: what the bag that began before it has in the entries from
// there to the next multiple. Nothing where a bag begins just there.
template <typename T>
__device__ void pieces(const Table& table, const int64_t* indices, const int64_t* offsets,
                       const T* weights, const T* left, const T* right, const T* hot,
                       float* partial, int entries, int bags) {
  const int first = (blockIdx.x + 1) * PIECE, bag = bag_of(offsets, bags, first);
  if (offsets[bag] == first) return;
  const int bag_end = end_of(offsets, bags, bag, entries);
  const int end = first + PIECE < bag_end ? first + PIECE : bag_end;
  const int across = up_to_four(table.Q) / 4, tiles = up_to_four(table.P) / 4 * across;
#pragma unroll 1
  for (int tile0 = 0; tile0 < tiles; tile0 += blockDim.x) {
    const int tile = tile0 + threadIdx.x, p0 = tile / across * 4, q0 = tile % across * 4;
    const bool active = tile < tiles;
    float sum[4][4] = {};
#pragma unroll 1
    for (int entry = first; entry < end; ++entry)
      add_row(table, indices[entry], weights ? wide(weights[entry]) : 1.f, left, right, hot,
              active, p0, q0, sum);
    if (!active) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = (p0 + i) * table.Q + q0 + j;
        if (q0 + j < table.Q && column < table.D)
          partial[(int64_t)blockIdx.x * table.D + column] = sum[i][j];
      }
  }
}

// Adds rows of partial to a tile, in their order, each with what rounding took off before.
__device__ void add_pieces(const Table& table, const float* partial, int begin, int end, int p0,
                           int q0, float (&sum)[4][4]) {
  float lost[4][4] = {};
#pragma unroll 1
  for (int piece = begin; piece < end; ++piece)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = (p0 + i) * table.Q + q0 + j;
        if (q0 + j >= table.Q || column >= table.D) continue;
        const float more = partial[(int64_t)piece * table.D + column] - lost[i][j];
        const float total = sum[i][j] + more;
        lost[i][j] = (total - sum[i][j]) - more;
        sum[i][j] = total;
      }
}

// One block for each row or bag: out [bags, D]; and every entry's key and number, [entries]. Of a
// bag it sums the entries before the first multiple of PIECE in it, and adds what pieces has made
// of the others, so that how many there are neither costs digits nor keeps one block busy.
template <typename T>
__device__ void rows(const Table& table, const int64_t* indices, const int64_t* offsets,
                     const T* weights, const T* left, const T* right, const T* hot,
                     const float* partial, T* out, int64_t* keys, int64_t* order, int entries,
                     int bags) {
  const int bag = blockIdx.x, across = up_to_four(table.Q) / 4;
  const int tiles = up_to_four(table.P) / 4 * across;
  const int first = offsets ? (int)offsets[bag] : bag;
  const int end = end_of(offsets, bags, bag, entries), next = first / PIECE + 1;
  const int head = offsets && next * PIECE < end ? next * PIECE : end;
  for (int entry = first + threadIdx.x; entry < end; entry += blockDim.x) {
    keys[entry] = key_of(table, indices[entry]);
    order[entry] = entry;
  }
#pragma unroll 1
  for (int tile0 = 0; tile0 < tiles; tile0 += blockDim.x) {
    const int tile = tile0 + threadIdx.x, p0 = tile / across * 4, q0 = tile % across * 4;
    const bool active = tile < tiles;
    float sum[4][4] = {};
#pragma unroll 1
    for (int entry = first; entry < head; ++entry)
      add_row(table, indices[entry], weights ? wide(weights[entry]) : 1.f, left, right, hot,
              active, p0, q0, sum);
    if (!active) continue;
    if (head < end) add_pieces(table, partial, next - 1, (end - 1) / PIECE, p0, q0, sum);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = (p0 + i) * table.Q + q0 + j;
        if (q0 + j < table.Q && column < table.D)
          out[(int64_t)bag * table.D + column] = narrow<T>(sum[i][j]);
      }
  }
}

// One block for each entry: the gradient of its weight, its row times its bag's gradient.
template <typename T>
__device__ void back_weights(const Table& table, const int64_t* indices, const int64_t* offsets,
                             const T* grad, const T* left, const T* right, const T* hot,
                             T* weight_grads, int bags) {
  const int entry = blockIdx.x, across = up_to_four(table.Q) / 4;
  const int tiles = up_to_four(table.P) / 4 * across;
  grad += (int64_t)bag_of(offsets, bags, entry) * table.D;
  float product = 0.f;
#pragma unroll 1
  for (int tile0 = 0; tile0 < tiles; tile0 += blockDim.x) {
    const int tile = tile0 + threadIdx.x, p0 = tile / across * 4, q0 = tile % across * 4;
    const bool active = tile < tiles;
    float sum[4][4] = {};
    add_row(table, indices[entry], 1.f, left, right, hot, active, p0, q0, sum);
    if (!active) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = (p0 + i) * table.Q + q0 + j;
        if (q0 + j < table.Q && column < table.D) product += sum[i][j] * wide(grad[column]);
      }
  }
  for (int mask = 16; mask; mask /= 2) product += __shfl_xor_sync(~0u, product, mask);
  DYNAMIC_SHARED(float, shared);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = product;
  __syncthreads();
  if (threadIdx.x) return;
  float sum = 0.f;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += shared[warp];
  weight_grads[entry] = narrow<T>(sum);
}

constexpr int CHUNK = 16;  // sorted entries of a block

// One block for each chunk of sorted entries. Gradients of equal rows are summed before they meet a
// factor; the gradient of a slice of the right factor is summed in shared memory for as long as entries
// stay in it. What a block has is added to what others have, in no fixed order: in float64, for a
// frequent row has thousands of blocks. The keys are sorted, `at` says where they were, and `order`
// which entries had them there.
template <typename T>
__device__ void back_rows(const Table& table, const int64_t* keys, const int64_t* at, const int64_t* order,
                          const int64_t* offsets, const T* weights, const T* grad, const T* left,
                          const T* right, double* left_grad, double* right_grad, double* hot_grad,
                          int entries, int bags) {
  DYNAMIC_SHARED(float, shared);
  const int P = table.P, Q = table.Q, R = table.R, D = table.D;
  const int wide_P = up_to_four(P), wide_Q = up_to_four(Q), wide_R = up_to_four(R);
  const int q_stride = stride_of(Q), r_stride = stride_of(R);
  float* g = shared;                  // [wide_P][q_stride], the gradient of a row
  float* l = g + wide_P * q_stride;   // [wide_P][r_stride]
  float* r = l + wide_P * r_stride;   // [wide_R][q_stride]
  float* dr = r + wide_R * q_stride;  // [wide_R][q_stride], of the slice in r
  float* weight_of = dr + wide_R * q_stride;
  int* bag = reinterpret_cast<int*>(weight_of + CHUNK);
  const int thread = threadIdx.x, threads = blockDim.x;
  const int begin = blockIdx.x * CHUNK;
  const int end = begin + CHUNK < entries ? begin + CHUNK : entries;
  for (int e = thread; e < end - begin; e += threads) {
    const int entry = (int)order[at[begin + e]];
    bag[e] = bag_of(offsets, bags, entry);
    weight_of[e] = weights ? wide(weights[entry]) : 1.f;
  }
  for (int e = thread; e < wide_R * q_stride; e += threads) dr[e] = 0.f;

  int64_t slice = -1;
  auto flush = [&] {
    if (slice < 0) return;
    for (int e = thread; e < R * Q; e += threads) {
      float* sum = dr + e / Q * q_stride + e % Q;
      atomicAdd(right_grad + slice * R * Q + e, (double)*sum);
      *sum = 0.f;
    }
  };
#pragma unroll 1
  for (int first = begin, next; first < end; first = next) {
    const int64_t key = keys[first], cold = key - table.num_hot;
    next = first + 1;
    while (next < end && keys[next] == key) ++next;
    __syncthreads();  // nobody reads the row before, or still adds to dr
    for (int e = thread; e < wide_P * wide_Q; e += threads) {
      const int p = e / wide_Q, q = e % wide_Q, column = p * Q + q;
      float sum = 0.f;
      if (p < P && q < Q && column < D) {
        for (int i = first - begin; i < next - begin; ++i)
          sum += weight_of[i] * wide(grad[(int64_t)bag[i] * D + column]);
        if (cold < 0) atomicAdd(hot_grad + key * D + column, (double)sum);
      }
      g[p * q_stride + q] = sum;
    }
    if (cold < 0) continue;
    const int64_t v = cold % table.V, w = cold / table.V;
    if (w != slice) {
      flush();
      slice = w;
      for (int e = thread; e < wide_R * wide_Q; e += threads) {
        const int k = e / wide_Q, q = e % wide_Q;
        r[k * q_stride + q] = k < R && q < Q ? wide(right[(w * R + k) * Q + q]) : 0.f;
      }
    }
    for (int e = thread; e < wide_P * wide_R; e += threads) {
      const int p = e / wide_R, k = e % wide_R;
      l[p * r_stride + k] = p < P && k < R ? wide(left[(v * P + p) * R + k]) : 0.f;
    }
    __syncthreads();
    const int q_tiles = wide_Q / 4, k_tiles = wide_R / 4;
#pragma unroll 1
    for (int tile = thread; tile < k_tiles * q_tiles; tile += threads) {  // dr += l^T . g
      const int k0 = tile / q_tiles * 4, q0 = tile % q_tiles * 4;
      float sum[4][4] = {};
#pragma unroll 2
      for (int p = 0; p < P; ++p) {
        const Four a = four(l + p * r_stride + k0), b = four(g + p * q_stride + q0);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i][j] += a.x[i] * b.x[j];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) dr[(k0 + i) * q_stride + q0 + j] += sum[i][j];
    }
#pragma unroll 1
    for (int tile = thread; tile < wide_P / 4 * k_tiles; tile += threads) {  // dl = g . r^T
      const int p0 = tile / k_tiles * 4, k0 = tile % k_tiles;  // and every k_tiles-th from there
      float sum[4][4] = {};
#pragma unroll 1
      for (int q = 0; q < wide_Q; q += 4) {
        Four a[4], b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[i] = four(g + (p0 + i) * q_stride + q);
          b[i] = four(r + (k0 + i * k_tiles) * q_stride + q);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) sum[i][j] += a[i].x[c] * b[j].x[c];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int p = p0 + i, k = k0 + j * k_tiles;
          if (p < P && k < R) atomicAdd(left_grad + (v * P + p) * R + k, (double)sum[i][j]);
        }
    }
  }
  __syncthreads();  // dr is whole
  flush();
}

extern "C" __global__ void __launch_bounds__(256, 2)
ttm_pieces_f32(ARGUMENTS(Table) table, const int64_t* indices, const int64_t* offsets,
               const float* weights, const float* left, const float* right, const float* hot,
               float* partial, int entries, int bags) {
  pieces(table, indices, offsets, weights, left, right, hot, partial, entries, bags);
}
extern "C" __global__ void __launch_bounds__(256, 2)
ttm_pieces_bf16(ARGUMENTS(Table) table, const int64_t* indices, const int64_t* offsets,
                const bf16* weights, const bf16* left, const bf16* right, const bf16* hot,
                float* partial, int entries, int bags) {
  pieces(table, indices, offsets, weights, left, right, hot, partial, entries, bags);
}
extern "C" __global__ void __launch_bounds__(256, 2)
ttm_rows_f32(ARGUMENTS(Table) table, const int64_t* indices, const int64_t* offsets,
             const float* weights, const float* left, const float* right, const float* hot,
             const float* partial, float* out, int64_t* keys, int64_t* order, int entries,
             int bags) {
  rows(table, indices, offsets, weights, left, right, hot, partial, out, keys, order, entries,
       bags);
}
extern "C" __global__ void __launch_bounds__(256, 2)
ttm_rows_bf16(ARGUMENTS(Table) table, const int64_t* indices, const int64_t* offsets,
              const bf16* weights, const bf16* left, const bf16* right, const bf16* hot,
              const float* partial, bf16* out, int64_t* keys, int64_t* order, int entries,
              int bags) {
  rows(table, indices, offsets, weights, left, right, hot, partial, out, keys, order, entries,
       bags);
}
extern "C" __global__ void __launch_bounds__(256, 2)
ttm_back_weights_f32(ARGUMENTS(Table) table, const int64_t* indices, const int64_t* offsets,
                     const float* grad, const float* left, const float* right, const float* hot,
                     float* weight_grads, int bags) {
  back_weights(table, indices, offsets, grad, left, right, hot, weight_grads, bags);
}
extern "C" __global__ void __launch_bounds__(256, 2)
ttm_back_weights_bf16(ARGUMENTS(Table) table, const int64_t* indices, const int64_t* offsets,
                      const bf16* grad, const bf16* left, const bf16* right, const bf16* hot,
                      bf16* weight_grads, int bags) {
  back_weights(table, indices, offsets, grad, left, right, hot, weight_grads, bags);
}
extern "C" __global__ void __launch_bounds__(128, 4)
ttm_back_rows_f32(ARGUMENTS(Table) table, const int64_t* keys, const int64_t* at, const int64_t* order,
                  const int64_t* offsets, const float* weights, const float* grad,
                  const float* left, const float* right, double* left_grad, double* right_grad,
                  double* hot_grad, int entries, int bags) {
  back_rows(table, keys, at, order, offsets, weights, grad, left, right, left_grad, right_grad,
            hot_grad, entries, bags);
}
extern "C" __global__ void __launch_bounds__(128, 4)
ttm_back_rows_bf16(ARGUMENTS(Table) table, const int64_t* keys, const int64_t* at, const int64_t* order,
                   const int64_t* offsets, const bf16* weights, const bf16* grad, const bf16* left,
                   const bf16* right, double* left_grad, double* right_grad, double* hot_grad,
                   int entries, int bags) {
  back_rows(table, keys, at, order, offsets, weights, grad, left, right, left_grad, right_grad,
            hot_grad, entries, bags);
}
