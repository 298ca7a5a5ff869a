// Contracts the chains of tensor-train layers, gates applied on the way: all layers of a model in
// one launch forward and two backward (CoMERA, arXiv 2405.14377, section 4).
//
// A layer is a chain of cores [bond k, mode k, bond k+1]; its first `split` cores contract to
// left [I, width], the others to right [width, O], where width >= the middle bond. Columns of left
// and rows of right beyond that bond are zero, but for the last row of right, which holds a bias.
//
// Both factors are walked from their outer end, the "head", towards the middle bond. A stage s of
// this walk takes a core from its outer bond `in` to its inner bond `out`; for the right factor both
// are mirrored. With rows(s) = modes 1..s multiplied, and h a value of the head's mode,
//   P_0[h] (1, out 0)        = core_0[h] * gate_0
//   P_s[h] (rows(s), out s)  = P_s-1[h] (rows(s-1), in) . core_s (in, modes * out) * gate_s
// and the last P is the factor. Rows of P_s run with the newest mode fastest in the left factor and
// slowest in the right one, as the factors lie in memory. Everything is summed in float32.
#include "common.cuh"

constexpr int MOST_GROUPS = 16;
constexpr int MOST_POINTERS = 1536;
constexpr int MOST_CORES = 16;

// Layers of one shape. `first_pointer` is the place of the first layer's cores, then gates, then
// bias, after which those of the second follow.
struct Group {
  int first_block, first_tile;           // of the kernels that work on factors, and on cores
  int layers, length, split, gated, bias_width, width, first_pointer;
  float threshold;                       // a gate at or below it is a pruned rank
  int mode[MOST_CORES], bond[MOST_CORES + 1];
  int kept[2], work[2];                  // numbers a factor keeps of P, and needs in all
  void *left, *right;                    // factors, or their gradients: [layers, I, width] and so on
  int64_t first_work, first_core_grad, first_gate_grad;
};

struct Model {
  int groups;
  Group group[MOST_GROUPS];
  const void* pointer[MOST_POINTERS];
};

// A step of the walk through a factor: a core as a matrix of `in` rows. Its columns are (mode, bond)
// or, mirrored, (bond, mode), so that neighbours in memory are neighbours in a row, or a column.
template <typename T>
struct Stage {
  const T* numbers;
  const float* gate;  // of the inner bond, or null
  float threshold;
  int modes, in, out, rows;  // rows of the P before it
  bool right;

  __device__ int columns() const { return modes * out; }
  __device__ int column(int j, int c) const { return right ? c * modes + j : j * out + c; }
  __device__ int mode_of(int column) const { return right ? column % modes : column / out; }
  __device__ int bond_of(int column) const { return right ? column / modes : column % out; }
  __device__ int place(int k, int column) const {
    return right ? column * in + k : k * columns() + column;
  }
  __device__ float number(int k, int column) const { return wide(numbers[place(k, column)]); }
  __device__ float gated(float x, int c) const {
    if (!gate) return x;
    return gate[c] > threshold ? x * gate[c] : 0.f;
  }
  // Where a row of the P before and a mode come to stand.
  __device__ int row(int before, int j) const {
    return right ? j * rows + before : before * modes + j;
  }
};

// Where P[row, c] lies.
struct Places {
  int64_t first, row, bond;
  __device__ int64_t at(int r, int c) const { return first + r * row + c * bond; }
};

// One factor of one layer.
template <typename T>
struct Factor {
  const Group& group;
  const void* const* pointer;
  int layer;
  bool right;

  __device__ Factor(const Model& model, const Group& group, int layer, bool right)
      : group(group), layer(layer), right(right) {
    const int gates = group.gated ? group.length - 1 : 0;
    const int each = group.length + gates + (group.bias_width > 0);
    pointer = model.pointer + group.first_pointer + layer * each;
  }

  __device__ int last() const { return (right ? group.length - group.split : group.split) - 1; }
  __device__ int core(int s) const { return right ? group.length - 1 - s : s; }
  __device__ int heads() const { return group.mode[core(0)]; }
  __device__ T* numbers() const { return static_cast<T*>(right ? group.right : group.left); }
  __device__ const T* bias() const {
    return static_cast<const T*>(pointer[group.length + (group.gated ? group.length - 1 : 0)]);
  }
  // Number of the gate on the inner bond of a stage; the middle bond's belongs to the left factor.
  __device__ int gate_number(int s) const {
    if (!group.gated || (right && s == last())) return -1;
    return right ? core(s) - 1 : core(s);
  }

  __device__ Stage<T> stage(int s) const {
    const int k = core(s), gate = gate_number(s);
    Stage<T> stage;
    stage.numbers = static_cast<const T*>(pointer[k]);
    stage.gate = gate < 0 ? nullptr : static_cast<const float*>(pointer[group.length + gate]);
    stage.threshold = group.threshold;
    stage.modes = group.mode[k];
    stage.in = group.bond[right ? k + 1 : k];
    stage.out = group.bond[right ? k : k + 1];
    stage.rows = 1;
#pragma unroll 1
    for (int t = 1; t < s; ++t) stage.rows *= group.mode[core(t)];
    stage.right = right;
    return stage;
  }

  // Scratch memory holds P_1 ... P_{last-1}, then the gradients of P_0 ... P_{last-1}.
  __device__ Places kept(int s, int head, bool gradient) const {
    int64_t first = group.first_work + (int64_t)layer * (group.work[0] + group.work[1]);
    if (right) first += group.work[0];
    if (gradient) first += group.kept[right ? 1 : 0];
    int rows = 1;
#pragma unroll 1
    for (int t = 0;; ++t) {
      if (t > 0) rows *= group.mode[core(t)];
      const int size = rows * group.bond[right ? core(t) : core(t) + 1];
      if (t == s) return {first + (int64_t)head * size, size / rows, 1};
      if (t > 0 || gradient) first += (int64_t)heads() * size;
    }
  }
  // The last P, in the factor as the caller sees it.
  __device__ Places in_factor(int head, int rows) const {
    const int64_t size = (int64_t)rows * heads(), width = group.width;
    if (right) return {layer * width * size + head, heads(), size};
    return {(layer * size + (int64_t)head * rows) * width, width, 1};
  }
};

// P_s[head][row, c] of all but the last stage.
template <typename T>
struct Product {
  const float* work;
  Places places;
  Stage<T> first;
  int head;
  bool is_first;

  __device__ Product(const Factor<T>& factor, int s, int head, const float* work)
      : work(work), places(factor.kept(s, head, false)), first(factor.stage(0)), head(head),
        is_first(s == 0) {}
  __device__ float operator()(int row, int c) const {
    if (is_first) return first.gated(first.number(0, first.column(head, c)), c);
    return work[places.at(row, c)];
  }
};

constexpr int THREADS = 128;
constexpr int ROWS = 16, COLUMNS = 64, DEPTH = 32;  // of a tile; see shared_bytes in contract_kernel.py
constexpr int EACH = ROWS / (THREADS / 32);         // rows a thread sums, and columns
constexpr int PAIRS = COLUMNS / 32;

// store(m, n, sum over k < K of a(m, k) b(k, n)) for all m < M and n < N, by all threads of a
// block. The flags say whether numbers of neighbouring k lie together, or those of neighbouring m
// and n.
template <typename A, typename B, typename Store>
__device__ void multiply(int M, int N, int K, bool a_along_k, bool b_along_k, A a, B b,
                         Store store) {
  DYNAMIC_SHARED(float, shared);
  float* a_tile = shared;                         // [ROWS][DEPTH + 1]
  float* b_tile = shared + ROWS * (DEPTH + 1);    // [DEPTH][COLUMNS + 1]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int m0 = 0; m0 < M; m0 += ROWS) {
#pragma unroll 1
    for (int n0 = 0; n0 < N; n0 += COLUMNS) {
      float sum[EACH][PAIRS] = {};
#pragma unroll 1
      for (int k0 = 0; k0 < K; k0 += DEPTH) {
        __syncthreads();  // nobody reads the tiles before, or still writes what they are made of
#pragma unroll 2
        for (int e = threadIdx.x; e < ROWS * DEPTH; e += THREADS) {
          const int m = a_along_k ? e / DEPTH : e % ROWS, k = a_along_k ? e % DEPTH : e / ROWS;
          const bool inside = m0 + m < M && k0 + k < K;
          a_tile[m * (DEPTH + 1) + k] = inside ? a(m0 + m, k0 + k) : 0.f;
        }
#pragma unroll 2
        for (int e = threadIdx.x; e < DEPTH * COLUMNS; e += THREADS) {
          const int k = b_along_k ? e % DEPTH : e / COLUMNS;
          const int n = b_along_k ? e / DEPTH : e % COLUMNS;
          const bool inside = n0 + n < N && k0 + k < K;
          b_tile[k * (COLUMNS + 1) + n] = inside ? b(k0 + k, n0 + n) : 0.f;
        }
        __syncthreads();
        const int depth = K - k0 < DEPTH ? K - k0 : DEPTH;
#pragma unroll 4
        for (int k = 0; k < depth; ++k) {
          float column[PAIRS];
#pragma unroll
          for (int j = 0; j < PAIRS; ++j) column[j] = b_tile[k * (COLUMNS + 1) + lane + 32 * j];
#pragma unroll
          for (int i = 0; i < EACH; ++i) {
            const float row = a_tile[(warp * EACH + i) * (DEPTH + 1) + k];
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) sum[i][j] += row * column[j];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
          const int m = m0 + warp * EACH + i, n = n0 + lane + 32 * j;
          if (m < M && n < N) store(m, n, sum[i][j]);
        }
      }
    }
  }
}

// The group of a block, and its number inside of it.
__device__ const Group& group_of(const Model& model, bool tiles, int& number) {
  int g = 0;
#pragma unroll 1
  while (g + 1 < model.groups &&
         (tiles ? model.group[g + 1].first_tile : model.group[g + 1].first_block) <= number)
    ++g;
  number -= tiles ? model.group[g].first_tile : model.group[g].first_block;
  return model.group[g];
}

// The factor of a block that works on one value of its head's mode.
template <typename T>
__device__ Factor<T> factor_of(const Model& model, int& head) {
  head = blockIdx.x;
  const Group& group = group_of(model, false, head);
  const int left = group.mode[0], each = left + group.mode[group.length - 1];
  const int layer = head / each;
  head -= layer * each;
  const bool right = head >= left;
  if (right) head -= left;
  return Factor<T>(model, group, layer, right);
}

// P_s[head] from P_{s-1}[head], into scratch memory or, at the last stage, into the factor.
template <typename T>
__device__ void advance(const Factor<T>& factor, int s, int head, float* work) {
  const bool last = s == factor.last();
  const Stage<T> stage = factor.stage(s);
  const Product<T> before(factor, s - 1, head, work);
  const Places to =
      last ? factor.in_factor(head, stage.rows * stage.modes) : factor.kept(s, head, false);
  T* numbers = factor.numbers();
  multiply(
      stage.rows, stage.columns(), stage.in, true, factor.right,
      [&](int m, int k) { return before(m, k); },
      [&](int k, int n) { return stage.number(k, n); },
      [&](int m, int n, float sum) {
        const int c = stage.bond_of(n);
        const int64_t place = to.at(stage.row(m, stage.mode_of(n)), c);
        if (last)
          numbers[place] = narrow<T>(stage.gated(sum, c));
        else
          work[place] = stage.gated(sum, c);
      });
}

// What lies beyond the middle bond: zeros, and a bias.
template <typename T>
__device__ void pad(const Factor<T>& factor, int head, int rows, int bond) {
  const int width = factor.group.width, more = width - bond;
  const Places to = factor.in_factor(head, rows);
  T* numbers = factor.numbers();
  for (int e = threadIdx.x; e < rows * more; e += THREADS) {
    const int row = factor.right ? e % rows : e / more;
    const int c = bond + (factor.right ? e / rows : e % more);
    const int column = row * factor.heads() + head;
    const bool in_bias = factor.right && c == width - 1 && column < factor.group.bias_width;
    numbers[to.at(row, c)] = in_bias ? factor.bias()[column] : narrow<T>(0.f);
  }
}

// One block for each factor and each value of its head's mode.
template <typename T>
__device__ void forward(const Model& model, float* work) {
  int head;
  const Factor<T> factor = factor_of<T>(model, head);
  const int last = factor.last();
  const Stage<T> stage = factor.stage(last);
  if (last == 0) {
    const Product<T> first(factor, 0, head, work);
    const Places to = factor.in_factor(head, 1);
    for (int c = threadIdx.x; c < stage.out; c += THREADS)
      factor.numbers()[to.at(0, c)] = narrow<T>(first(0, c));
  }
#pragma unroll 1
  for (int s = 1; s <= last; ++s) advance(factor, s, head, work);
  pad(factor, head, last == 0 ? 1 : stage.rows * stage.modes, stage.out);
}

// The same blocks: P_1 ... and the gradients of P_{last-1} ... P_0, into scratch memory.
template <typename T>
__device__ void back_factors(const Model& model, float* work) {
  int head;
  const Factor<T> factor = factor_of<T>(model, head);
  const int last = factor.last();
  const T* numbers = factor.numbers();
#pragma unroll 1
  for (int s = 1; s < last; ++s) advance(factor, s, head, work);
#pragma unroll 1
  for (int s = last; s >= 1; --s) {
    const Stage<T> stage = factor.stage(s);
    const Places from =
        s == last ? factor.in_factor(head, stage.rows * stage.modes) : factor.kept(s, head, true);
    const Places to = factor.kept(s - 1, head, true);
    multiply(
        stage.rows, stage.in, stage.columns(), !factor.right, !factor.right,
        [&](int m, int k) {
          const int c = stage.bond_of(k);
          const int64_t place = from.at(stage.row(m, stage.mode_of(k)), c);
          return stage.gated(s == last ? wide(numbers[place]) : work[place], c);
        },
        [&](int k, int n) { return stage.number(n, k); },
        [&](int m, int n, float sum) { work[to.at(m, n)] = sum; });
  }
}

constexpr int TILE = 8;  // values of the inner bond of a stage that a block takes; divides 32

// One block for each core and eight values of its inner bond: the core's gradient and its gate's,
// P_{s-1}^T . (gradient of P_s), summed over all values of the head's mode.
template <typename T>
__device__ void back_cores(const Model& model, const float* work, T* core_grads,
                           float* gate_grads) {
  int tile = blockIdx.x;
  const Group& group = group_of(model, true, tile);
  int each = 0;
#pragma unroll 1
  for (int k = 0; k < group.length; ++k)
    each += (group.bond[k + (k < group.split)] + TILE - 1) / TILE;
  const int layer = tile / each;
  tile -= layer * each;
  int number = 0;
#pragma unroll 1
  for (;; ++number) {
    const int tiles = (group.bond[number + (number < group.split)] + TILE - 1) / TILE;
    if (tile < tiles) break;
    tile -= tiles;
  }
  const Factor<T> factor(model, group, layer, number >= group.split);
  const int s = factor.right ? group.length - 1 - number : number;

  int64_t core_size = 0, gate_size = 0, core_at = 0, gate_at = 0;
  const int gate = factor.gate_number(s);
#pragma unroll 1
  for (int k = 0; k < group.length; ++k) {
    if (k == number) core_at = core_size;
    if (k == gate) gate_at = gate_size;
    core_size += (int64_t)group.bond[k] * group.mode[k] * group.bond[k + 1];
    if (k + 1 < group.length) gate_size += group.bond[k + 1];
  }
  T* core_grad = core_grads + group.first_core_grad + layer * core_size + core_at;
  float* gate_grad = gate_grads + group.first_gate_grad + layer * gate_size + gate_at;

  const Stage<T> stage = factor.stage(s);
  const int heads = factor.heads(), out = stage.out, first = tile * TILE;
  const bool last = s == factor.last();
  const T* numbers = factor.numbers();
  const int rows = s == 0 ? 1 : stage.rows * stage.modes;
  const Places from = last ? factor.in_factor(0, rows) : factor.kept(s, 0, true);
  const int64_t next = last ? factor.in_factor(1, rows).first : factor.kept(s, 1, true).first;
  auto grad = [&](int head, int row, int c) {
    if (c >= out) return 0.f;
    const int64_t place = from.at(row, c) + head * (next - from.first);
    return last ? wide(numbers[place]) : work[place];
  };
  float gate_sum = 0.f;
  auto store = [&](int m, int n, float sum) {
    const int c = first + n % TILE;
    if (c >= out) return;
    const int place = stage.place(m, stage.column(n / TILE, c));
    core_grad[place] = narrow<T>(stage.gated(sum, c));
    gate_sum += sum * wide(stage.numbers[place]);
  };
  if (s == 0) {
    multiply(
        1, heads * TILE, 1, true, false, [](int, int) { return 1.f; },
        [&](int, int n) { return grad(n / TILE, 0, first + n % TILE); }, store);
  } else {
    const Product<T> before(factor, s - 1, 0, work);
    const int64_t step = factor.kept(s - 1, 1, false).first - before.places.first;
    auto head_of = [&](int k) { return factor.right ? k % heads : k / stage.rows; };
    auto row_of = [&](int k) { return factor.right ? k / heads : k % stage.rows; };
    multiply(
        stage.in, stage.modes * TILE, heads * stage.rows, false, factor.right,
        [&](int m, int k) {
          Product<T> of_head = before;
          of_head.head = head_of(k);
          of_head.places.first += of_head.head * step;
          return of_head(row_of(k), m);
        },
        [&](int k, int n) {
          return grad(head_of(k), stage.row(row_of(k), n / TILE), first + n % TILE);
        },
        store);
  }
  if (gate < 0) return;  // the whole block
  // A thread has summed columns that are equal modulo 32, hence of one value of the bond.
  DYNAMIC_SHARED(float, shared);
  __syncthreads();
  shared[threadIdx.x] = gate_sum;
  __syncthreads();
  const int c = first + threadIdx.x;
  if (threadIdx.x >= TILE || c >= out) return;
  float sum = 0.f;
#pragma unroll 1
  for (int t = threadIdx.x; t < THREADS; t += TILE) sum += shared[t];
  const float value = static_cast<const float*>(factor.pointer[group.length + gate])[c];
  gate_grad[c] = value > group.threshold ? sum : 0.f;
}

extern "C" __global__ void __launch_bounds__(128, 4)
contract_f32(ARGUMENTS(Model) model, float* work) {
  forward<float>(model, work);
}
extern "C" __global__ void __launch_bounds__(128, 4)
contract_bf16(ARGUMENTS(Model) model, float* work) {
  forward<bf16>(model, work);
}
extern "C" __global__ void __launch_bounds__(128, 4)
contract_back_factors_f32(ARGUMENTS(Model) model, float* work) {
  back_factors<float>(model, work);
}
extern "C" __global__ void __launch_bounds__(128, 4)
contract_back_factors_bf16(ARGUMENTS(Model) model, float* work) {
  back_factors<bf16>(model, work);
}
extern "C" __global__ void __launch_bounds__(128, 4)
contract_back_cores_f32(ARGUMENTS(Model) model, const float* work, float* core_grads,
                     float* gate_grads) {
  back_cores<float>(model, work, core_grads, gate_grads);
}
extern "C" __global__ void __launch_bounds__(128, 4)
contract_back_cores_bf16(ARGUMENTS(Model) model, const float* work, bf16* core_grads,
                      float* gate_grads) {
  back_cores<bf16>(model, work, core_grads, gate_grads);
}
