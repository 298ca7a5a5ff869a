// A whole feed-forward of two tensor-train layers whose hidden activation is never stored. The file that
// includes this says what a Number is, bf16 or float, whose products are of tf32, and R, ranks padded.
//   t1 = x . L1, h = t1 . R1, a = act(h), t2 = a . L2, y = t2 . R2
//   x [M, I]  L1 [I, rank 1]  R1 [rank 1, H]  L2 [H, rank 2]  R2 [rank 2, O]
// Beside a bias the last columns of t1 and t2 are ones. Ranks are multiples of eight up to R, widths
// of 128.
//   forward      t1, t2, y
//   back_rows    u2 = dy . R2^T, u1 = (u2 . L2^T * act'(t1 . R1)) . R1^T, dx = u1 . L1^T
//   back_hidden  shares of dL2 = a^T . u2 and of dR1 = t1^T . (u2 . L2^T * act'), a made once more
//   back_sums    those added up
// dL1 = x^T . u1 and dR2 = t2^T . dy are products of their own.
//
// Blocks have BM rows. Numbers come to shared memory three stages ahead; where a sum is shared out
// among warps it is added up there, always in one order. The sums of one mma are the operand of the
// next as they lie: so the hidden activation is in registers alone, 16 x 32 of a warp at a time.
//
// In shared memory stages lie behind two thin tiles; those of the first sum begin in the second tile, which
// is written when they are over.
#include "tiles.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, STAGES = 3;
constexpr int PIECE = 16 / sizeof(Number);  // numbers of 16 bytes
constexpr int KC = 16 * PIECE;              // numbers along a sum that a stage holds
constexpr int HC = 16 * PIECE;              // hidden columns of a stage
constexpr int NC = 4 * PIECE;               // columns of a result that a warp makes at once
constexpr int WORDS = OPERAND<Number>;
template <int ROWS>
constexpr int THIN = TILE<Number, R, ROWS>;  // of a tile as wide as a bond
template <int ROWS>
constexpr int WIDE = TILE<Number, KC, ROWS>;  // of one as wide as a stage

struct Sizes {
  int M, I, H, O, rank1, rank2, bias;
};

// Value and derivative. Gelu is exact to 3e-7 with one exponential (Abramowitz and Stegun 7.1.26),
// which the derivative needs anyway.
struct Gelu {
  static constexpr bool TAKES_TIME = true;
  static __device__ __forceinline__ void both(float x, float& value, float& slope) {
    const float k = fast_inverse(1.f + 0.2316419f * (x < 0.f ? -x : x));
    const float e = fast_exp2(x * x * -0.72134752f);
    float tail = 0.530702715f;
    tail = tail * k - 0.726576013f;
    tail = tail * k + 0.710706871f;
    tail = tail * k - 0.142248368f;
    tail = tail * k + 0.127414796f;
    tail = tail * k * e;
    const float p = x < 0.f ? tail : 1.f - tail;
    value = x * p;
    slope = p + x * 0.39894228f * e;
  }
};
struct Silu {
  static constexpr bool TAKES_TIME = true;
  static __device__ __forceinline__ void both(float x, float& value, float& slope) {
    const float p = fast_inverse(1.f + fast_exp2(x * -1.44269504f));
    value = x * p;
    slope = p * (1.f + x * (1.f - p));
  }
};
struct Relu {
  static constexpr bool TAKES_TIME = false;
  static __device__ __forceinline__ void both(float x, float& value, float& slope) {
    value = x < 0.f ? 0.f : x;  // NaN stays
    slope = x <= 0.f ? 0.f : 1.f;
  }
};

// How warps share out BM rows, and a sum.
template <int BM>
struct Split {
  static constexpr int ALONG_M = BM / 16, ALONG_K = WARPS / ALONG_M;
};

// Part of a matrix into a tile, zeros beyond its rows and columns; by so many threads.
template <int ROWS, int COLUMNS, int BY = THREADS>
__device__ __forceinline__ void fetch(Number* tile, const Number* from, int row, int rows, int columns) {
  constexpr int PER_ROW = COLUMNS / PIECE, ALL = ROWS * PER_ROW;
  // Threads that all go down by eights of rows add what is known before: registers are few.
  constexpr bool DOWN = BY % (8 * PER_ROW) == 0;
#pragma unroll
  for (int i = 0; i < ALL; i += BY) {
    if (ALL % BY != 0 && (int)threadIdx.x + i >= ALL) break;
    const int e = threadIdx.x + (DOWN ? 0 : i), down = DOWN ? i / PER_ROW : 0;
    const int r = e / PER_ROW + down, c = e % PER_ROW * PIECE;
    const bool there = r < rows && c < columns;
    copy16(tile + below<Number, COLUMNS>(down) + place<Number, COLUMNS>(e * PIECE),
           from + (there ? r * row + c : 0), there);
  }
}

template <int BM, bool TURNED>
constexpr int THIN_STAGE = WIDE<BM> + (TURNED ? WIDE<R> : THIN<KC>);

// sum += wide [BM, K] . thin, thin [K, rank], or [rank, K] if TURNED. A warp has 16 rows and its part
// of every stage's numbers along the sum.
template <int BM, bool TURNED>
__device__ void thin_product(const Number* wide, int rows, int K, const Number* thin, int rank,
                             Number* shared, float (&sum)[R / 8][4]) {
  using S = Split<BM>;
  constexpr int EACH = KC / S::ALONG_K;
  const int warp = threadIdx.x / 32, m = warp % S::ALONG_M * 16, k0 = warp / S::ALONG_M * EACH;
  const int chunks = K / KC;
  auto issue = [&](int chunk) {
    if (chunk < chunks) {
      Number* stage = shared + chunk % STAGES * THIN_STAGE<BM, TURNED>;
      fetch<BM, KC>(stage, wide + chunk * KC, K, rows, KC);
      if (TURNED)
        fetch<R, KC>(stage + WIDE<BM>, thin + chunk * KC, K, rank, KC);
      else
        fetch<KC, R>(stage + WIDE<BM>, thin + (int64_t)chunk * KC * rank, rank, KC, rank);
    }
    commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) issue(s);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    arrived<STAGES - 2>();
    __syncthreads();  // the stage is there, and nobody reads the one that is filled next
    issue(chunk + STAGES - 1);
    const Number* x = shared + chunk % STAGES * THIN_STAGE<BM, TURNED>;
    const Number* f = x + WIDE<BM>;
#pragma unroll
    for (int k = 0; k < EACH; k += 16) {
      uint32_t a[WORDS];
      load_a<KC>(a, x, m, k0 + k);
#pragma unroll
      for (int n = 0; n < R; n += 16) {
        uint32_t b[WORDS];
        if (TURNED)
          load_b_turned<KC>(b, f, k0 + k, n);
        else
          load_b<R>(b, f, k0 + k, n);
        mma2<Number>(sum[n / 8], sum[n / 8 + 1], a, b);
      }
    }
  }
  __syncthreads();  // the stages are free
}

// What warps have along a sum, added up and rounded: to a tile [BM][R], and to memory [rows, rank].
template <int BM>
__device__ void gather(const float (&sum)[R / 8][4], float* parts, Number* tile, Number* to, int rows,
                       int rank, bool ones) {
  using S = Split<BM>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* part = parts + below<float, R>(warp / S::ALONG_M * BM + warp % S::ALONG_M * 16);
#pragma unroll
  for (int n = 0; n < R / 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store2(part + below<float, R>(8 * half) + place<float, R>(g, 8 * n + 2 * t), sum[n][2 * half],
             sum[n][2 * half + 1]);
  __syncthreads();  // all parts are there
#pragma unroll
  for (int e = threadIdx.x; e < BM * R / 2; e += THREADS) {
    const int r = e / (R / 2), c = e % (R / 2) * 2;
    float x = 0.f, y = 0.f;
#pragma unroll
    for (int k = 0; k < S::ALONG_K; ++k) {
      const Eight part = read<Eight>(parts + below<float, R>(k * BM) + place<float, R>(2 * e));
      x += part.x[0];
      y += part.x[1];
    }
    if (ones && c == rank - 2) y = 1.f;
    store2(tile + place<Number, R>(2 * e), x, y);
    if (r < rows && c < rank) store2(to + (int64_t)r * rank + c, x, y);
  }
  __syncthreads();  // the tile is there, the parts are free
}

template <bool TURNED>
constexpr int SPREAD_TILE = TURNED ? THIN<NC> : TILE<Number, NC, R>;
template <bool TURNED>
constexpr int SPREAD = 2 * SPREAD_TILE<TURNED> + TILE<Number, NC, 16>;  // numbers of a warp

// out [rows, N] = tile [BM, rank] . factor, factor [rank, N], or [N, rank] if TURNED. A warp makes
// every eighth 32 columns for itself: it alone reads that part of the factor, without barriers.
template <int BM, bool TURNED>
__device__ void spread(const Number* t, const Number* factor, int rank, int N, Number* shared, Number* out,
                       int rows) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, warp = threadIdx.x / 32;
  Number* mine = shared + warp * SPREAD<TURNED>;
  Number* stage = mine + 2 * SPREAD_TILE<TURNED>;  // 16 rows of the result
  auto issue = [&](int number) {
    const int column = (number * WARPS + warp) * NC;
    if (column < N) {
      Number* tile = mine + number % 2 * SPREAD_TILE<TURNED>;
      constexpr int COLUMNS = TURNED ? R : NC, PER_ROW = COLUMNS / PIECE, ROWS = TURNED ? NC : R;
#pragma unroll
      for (int e = lane; e < ROWS * PER_ROW; e += 32) {
        const int r = e / PER_ROW, c = e % PER_ROW * PIECE;
        const bool there = TURNED ? c < rank : r < rank;
        const int64_t from = TURNED ? (int64_t)(column + r) * rank + c : (int64_t)r * N + column + c;
        copy16(tile + place<Number, COLUMNS>(e * PIECE), factor + (there ? from : 0), there);
      }
    }
    commit();
  };
  issue(0);
#pragma unroll 1
  for (int number = 0;; ++number) {
    const int column = (number * WARPS + warp) * NC;
    if (column >= N) break;
    arrived<0>();
    __syncwarp();
    issue(number + 1);
    const Number* tile = mine + number % 2 * SPREAD_TILE<TURNED>;
    // Forward two steps at a time: with four of them ptxas runs out of registers for sm_100.
#pragma unroll(TURNED ? BM : 2)
    for (int m = 0; m < BM; m += 16) {
      float sum[NC / 8][4] = {};
#pragma unroll
      for (int k = 0; k < R; k += 16) {
        uint32_t a[WORDS];
        load_a<R>(a, t, m, k);
#pragma unroll
        for (int n = 0; n < NC; n += 16) {
          uint32_t b[WORDS];
          if (TURNED)
            load_b_turned<R>(b, tile, k, n);
          else
            load_b<NC>(b, tile, k, n);
          mma2<Number>(sum[n / 8], sum[n / 8 + 1], a, b);
        }
      }
#pragma unroll
      for (int n = 0; n < NC / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          store2(stage + below<Number, NC>(8 * half) + place<Number, NC>(g, 8 * n + 2 * q), sum[n][2 * half],
                 sum[n][2 * half + 1]);
      __syncwarp();
#pragma unroll
      for (int e = lane; e < 16 * NC / PIECE; e += 32) {
        const int r = e / (NC / PIECE), c = e % (NC / PIECE) * PIECE;
        const Sixteen piece = read<Sixteen>(stage + place<Number, NC>(e * PIECE));
        if (m + r < rows) *reinterpret_cast<Sixteen*>(out + (int64_t)(m + r) * N + column + c) = piece;
      }
      __syncwarp();
    }
  }
}

constexpr int HIDDEN_STAGE = WIDE<R> + THIN<HC>;

// sum += act(t1 . R1) . L2, or backward += (u2 . L2^T * act'(t1 . R1)) . R1^T. A warp has 16 rows and
// its part of every stage's hidden columns.
template <int BM, bool BACK, typename Act>
__device__ void through_hidden(const Number* t1, const Number* u2, const Number* R1, const Number* L2,
                               const Sizes& sizes, Number* shared, float (&sum)[R / 8][4]) {
  using S = Split<BM>;
  constexpr int EACH = HC / S::ALONG_K;
  // One's products run while the other's exponential does, where there is one.
  constexpr int AT_ONCE = EACH >= 32 && Act::TAKES_TIME ? 2 : 1;
  const int warp = threadIdx.x / 32, m = warp % S::ALONG_M * 16, h0 = warp / S::ALONG_M * EACH;
  const int chunks = sizes.H / HC;
  auto issue = [&](int chunk) {
    if (chunk < chunks) {
      Number* stage = shared + chunk % STAGES * HIDDEN_STAGE;
      fetch<R, HC>(stage, R1 + chunk * HC, sizes.H, sizes.rank1, HC);
      fetch<HC, R>(stage + WIDE<R>, L2 + (int64_t)chunk * HC * sizes.rank2, sizes.rank2, HC, sizes.rank2);
    }
    commit();
  };
  uint32_t a[R / 16][WORDS], u[R / 16][WORDS];
#pragma unroll
  for (int k = 0; k < R; k += 16) {
    load_a<R>(a[k / 16], t1, m, k);
    if (BACK) load_a<R>(u[k / 16], u2, m, k);
  }
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) issue(s);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    arrived<STAGES - 2>();
    __syncthreads();  // the hidden stage is there, and nobody reads the one that is filled next
    issue(chunk + STAGES - 1);
    const Number* r1 = shared + chunk % STAGES * HIDDEN_STAGE;
    const Number* l2 = r1 + WIDE<R>;
#pragma unroll(Act::TAKES_TIME ? HC : 1)
    for (int h = 0; h < EACH; h += 16 * AT_ONCE) {
      float pre[2 * AT_ONCE][4] = {}, da[2 * AT_ONCE][4] = {};
#pragma unroll
      for (int k = 0; k < R; k += 16)
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
          uint32_t b[WORDS];
          load_b<HC>(b, r1, k, h0 + h + 16 * n);
          mma2<Number>(pre[2 * n], pre[2 * n + 1], a[k / 16], b);
          if (BACK) {
            load_b_turned<R>(b, l2, k, h0 + h + 16 * n);
            mma2<Number>(da[2 * n], da[2 * n + 1], u[k / 16], b);
          }
        }
#pragma unroll
      for (int n = 0; n < 2 * AT_ONCE; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float value, slope;
          Act::both(pre[n][e], value, slope);
          pre[n][e] = BACK ? da[n][e] * slope : value;
        }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        uint32_t act[WORDS];
        as_a<Number>(act, pre[2 * i], pre[2 * i + 1]);
#pragma unroll
        for (int n = 0; n < R; n += 16) {
          uint32_t b[WORDS];
          if (BACK)
            load_b_turned<HC>(b, r1, h0 + h + 16 * i, n);
          else
            load_b<R>(b, l2, h0 + h + 16 * i, n);
          mma2<Number>(sum[n / 8], sum[n / 8 + 1], act, b);
        }
      }
    }
  }
  __syncthreads();  // the hidden stages are free
}

template <int BM, typename Act>
__device__ void forward(const Sizes& s, const Number* x, const Number* L1, const Number* R1, const Number* L2,
                        const Number* R2, Number* t1, Number* t2, Number* y) {
  DYNAMIC_SHARED(Number, shared);
  Number* tile = shared;
  Number* stages = shared + 2 * THIN<BM>;
  const int row0 = blockIdx.x * BM, rows = s.M - row0;
  {
    float sum[R / 8][4] = {};
    thin_product<BM, false>(x + (int64_t)row0 * s.I, rows, s.I, L1, s.rank1, shared + THIN<BM>, sum);
    gather<BM>(sum, reinterpret_cast<float*>(stages), tile, t1 + (int64_t)row0 * s.rank1, rows, s.rank1, s.bias);
  }
  {
    float sum[R / 8][4] = {};
    through_hidden<BM, false, Act>(tile, nullptr, R1, L2, s, stages, sum);
    gather<BM>(sum, reinterpret_cast<float*>(stages), tile, t2 + (int64_t)row0 * s.rank2, rows, s.rank2, s.bias);
  }
  spread<BM, false>(tile, R2, s.rank2, s.O, stages, y + (int64_t)row0 * s.O, rows);
}

template <int BM, typename Act>
__device__ void back_rows(const Sizes& s, const Number* dy, const Number* L1, const Number* R1,
                          const Number* L2, const Number* R2, const Number* t1, Number* u1, Number* u2,
                          Number* dx) {
  DYNAMIC_SHARED(Number, shared);
  Number* t_tile = shared;
  Number* u_tile = t_tile + THIN<BM>;
  Number* stages = u_tile + THIN<BM>;
  const int row0 = blockIdx.x * BM, rows = s.M - row0;
  fetch<BM, R>(t_tile, t1 + (int64_t)row0 * s.rank1, s.rank1, rows, s.rank1);
  commit();
  {
    float sum[R / 8][4] = {};
    thin_product<BM, true>(dy + (int64_t)row0 * s.O, rows, s.O, R2, s.rank2, u_tile, sum);
    gather<BM>(sum, reinterpret_cast<float*>(stages), u_tile, u2 + (int64_t)row0 * s.rank2, rows, s.rank2, false);
  }
  {
    float sum[R / 8][4] = {};
    through_hidden<BM, true, Act>(t_tile, u_tile, R1, L2, s, stages, sum);
    gather<BM>(sum, reinterpret_cast<float*>(stages), u_tile, u1 + (int64_t)row0 * s.rank1, rows, s.rank1, false);
  }
  spread<BM, true>(u_tile, L1, s.rank1, s.I, stages, dx + (int64_t)row0 * s.I, rows);
}

constexpr int HIDDEN_WARPS = 4, BH = 16 * HIDDEN_WARPS, MC = 64;  // hidden columns of a block, rows of a stage

// Everything turned: a warp keeps R1^T and L2 of 16 hidden columns in registers and walks over its
// block's part of the batch, 16 rows a step; a^T and dh^T come out as the operands of the two sums.
// A share is [2][H][R], of dL2 and of dR1^T.
template <typename Act>
__device__ void back_hidden(const Sizes& s, const Number* t1, const Number* u2, const Number* R1,
                            const Number* L2, float* shares) {
  DYNAMIC_SHARED(Number, shared);
  constexpr int STAGE = 2 * THIN<MC>, BY = 32 * HIDDEN_WARPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int h0 = blockIdx.x * BH, parts = gridDim.y;
  const int each = (s.M + parts * MC - 1) / (parts * MC) * MC, begin = blockIdx.y * each;
  const int end = begin + each < s.M ? begin + each : s.M;
  const int chunks = end > begin ? (end - begin + MC - 1) / MC : 0;
  // The factors of this block, R1 [R][BH] and L2 [BH][R], through the first stage's place.
  fetch<R, BH, BY>(shared, R1 + h0, s.H, s.rank1, BH);
  fetch<BH, R, BY>(shared + TILE<Number, BH, R>, L2 + (int64_t)h0 * s.rank2, s.rank2, BH, s.rank2);
  commit();
  arrived<0>();
  __syncthreads();  // the factors are there
  uint32_t f1[R / 16][WORDS], f2[R / 16][WORDS];
#pragma unroll
  for (int k = 0; k < R; k += 16) {
    load_a_turned<BH>(f1[k / 16], shared, 16 * warp, k);
    load_a<R>(f2[k / 16], shared + TILE<Number, BH, R>, 16 * warp, k);
  }
  __syncthreads();  // nobody reads them there any more
  auto issue = [&](int chunk) {
    if (chunk < chunks) {
      Number* stage = shared + chunk % STAGES * STAGE;
      const int64_t m0 = begin + chunk * MC;
      fetch<MC, R, BY>(stage, t1 + m0 * s.rank1, s.rank1, end - (int)m0, s.rank1);
      fetch<MC, R, BY>(stage + THIN<MC>, u2 + m0 * s.rank2, s.rank2, end - (int)m0, s.rank2);
    }
    commit();
  };
  float of_a[R / 8][4] = {}, of_h[R / 8][4] = {};
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) issue(stage);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    arrived<STAGES - 2>();
    __syncthreads();  // the rows are there, and nobody reads the stage that is filled next
    issue(chunk + STAGES - 1);
    const Number* t = shared + chunk % STAGES * STAGE;
    const Number* u = t + THIN<MC>;
#pragma unroll 1
    for (int m = 0; m < MC; m += 16) {
      float pre[2][4] = {}, da[2][4] = {};
#pragma unroll
      for (int k = 0; k < R; k += 16) {
        uint32_t b[WORDS];
        load_b_turned<R>(b, t, k, m);
        mma2<Number>(pre[0], pre[1], f1[k / 16], b);
        load_b_turned<R>(b, u, k, m);
        mma2<Number>(da[0], da[1], f2[k / 16], b);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float value, slope;
          Act::both(pre[n][e], value, slope);
          pre[n][e] = value;
          da[n][e] *= slope;
        }
      uint32_t a[WORDS], d[WORDS];
      as_a<Number>(a, pre[0], pre[1]);
      as_a<Number>(d, da[0], da[1]);
#pragma unroll
      for (int n = 0; n < R; n += 16) {
        uint32_t b[WORDS];
        load_b<R>(b, u, m, n);
        mma2<Number>(of_a[n / 8], of_a[n / 8 + 1], a, b);
        load_b<R>(b, t, m, n);
        mma2<Number>(of_h[n / 8], of_h[n / 8 + 1], d, b);
      }
    }
  }
  float* share = shares + (int64_t)blockIdx.y * 2 * s.H * R;
#pragma unroll
  for (int n = 0; n < R / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t at = (int64_t)(h0 + 16 * warp + g + e / 2 * 8) * R + 8 * n + 2 * q + e % 2;
      share[at] = of_a[n][e];
      share[(int64_t)s.H * R + at] = of_h[n][e];
    }
}

// One thread for each number of a share: dL2 [H, rank 2] and dR1 [rank 1, H].
__device__ void back_sums(const Sizes& s, const float* shares, Number* left2_grad, Number* right1_grad,
                          int parts) {
  const int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, half = (int64_t)s.H * R;
  if (e >= 2 * half) return;
  const bool of_left = e < half;
  // Neighbours in memory in lanes, for what is written to dR1 too.
  const int64_t i = of_left ? e : e - half;
  const int h = (int)(of_left ? i / R : i % s.H), r = (int)(of_left ? i % R : i / s.H);
  if (r >= (of_left ? s.rank2 : s.rank1)) return;
  float sum = 0.f;
#pragma unroll 4
  for (int part = 0; part < parts; ++part)
    sum += shares[part * 2 * half + (of_left ? 0 : half) + (int64_t)h * R + r];
  if (of_left)
    left2_grad[(int64_t)h * s.rank2 + r] = narrow<Number>(sum);
  else
    right1_grad[(int64_t)r * s.H + h] = narrow<Number>(sum);
}

