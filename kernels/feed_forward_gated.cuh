// The middle of a gated feed-forward of tensor-train layers, as LLaMA has it, whose hidden activations are
// never stored; of Numbers as the file that includes this says:
//   g = tg . Rg, u = tu . Ru, a = silu(g) * u, t2 = a . L2
//   tg [M, rank g]  Rg [rank g, H]  tu [M, rank u]  Ru [rank u, H]  L2 [H, rank 2]
// What lies around, x . Lg, x . Lu and t2 . R2, are thin products of their own, as are all gradients of
// their factors. Ranks are multiples of eight up to 32, H is one of 128.
//   rows         t2
//   back_rows    du = u2 . L2^T * silu(g), dg = u2 . L2^T * u * silu'(g), ug = dg . Rg^T, uu = du . Ru^T
//   back_hidden  shares of dL2 = a^T . u2, of dRg = tg^T . dg and of dRu = tu^T . du
//   back_sums    those added up
#include "feed_forward.cuh"

struct GatedSizes {
  int M, H, rankg, ranku, rank2;
};

constexpr int GATED_STAGE = 2 * WIDE<R> + THIN<HC>;

// A thin tile [BM][R] from memory [rows, rank].
template <int BM>
__device__ __forceinline__ void fetch_thin(Number* tile, const Number* from, int row0, int rows, int rank) {
  fetch<BM, R>(tile, from + (int64_t)row0 * rank, rank, rows, rank);
}

// A warp has 16 rows and its part of every stage's hidden columns. Forward sum += a . L2; backward
// sum += dg . Rg^T and other += du . Ru^T.
template <int BM, bool BACK>
__device__ void through_gated(const GatedSizes& s, const Number* tg, const Number* tu, const Number* u2,
                              const Number* Rg, const Number* Ru, const Number* L2, Number* shared,
                              float (&sum)[R / 8][4], float (&other)[R / 8][4]) {
  using S = Split<BM>;
  constexpr int EACH = HC / S::ALONG_K;
  const int warp = threadIdx.x / 32, m = warp % S::ALONG_M * 16, h0 = warp / S::ALONG_M * EACH;
  const int chunks = s.H / HC;
  auto issue = [&](int chunk) {
    if (chunk < chunks) {
      Number* stage = shared + chunk % STAGES * GATED_STAGE;
      fetch<R, HC>(stage, Rg + chunk * HC, s.H, s.rankg, HC);
      fetch<R, HC>(stage + WIDE<R>, Ru + chunk * HC, s.H, s.ranku, HC);
      fetch<HC, R>(stage + 2 * WIDE<R>, L2 + (int64_t)chunk * HC * s.rank2, s.rank2, HC, s.rank2);
    }
    commit();
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) issue(stage);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    arrived<STAGES - 2>();
    __syncthreads();  // the gated stage is there, and nobody reads the one that is filled next
    issue(chunk + STAGES - 1);
    const Number* rg = shared + chunk % STAGES * GATED_STAGE;
    const Number* ru = rg + WIDE<R>;
    const Number* l2 = ru + WIDE<R>;
#pragma unroll 1
    for (int h = h0; h < h0 + EACH; h += 16) {
      float of_g[2][4] = {}, of_u[2][4] = {}, da[2][4] = {};
      // Rows are read anew, and one step at a time: they would take the last registers.
#pragma unroll(BACK ? 1 : R)
      for (int k = 0; k < R; k += 16) {
        uint32_t a[WORDS], b[WORDS];
        load_a<R>(a, tg, m, k);
        load_b<HC>(b, rg, k, h);
        mma2<Number>(of_g[0], of_g[1], a, b);
        load_a<R>(a, tu, m, k);
        load_b<HC>(b, ru, k, h);
        mma2<Number>(of_u[0], of_u[1], a, b);
        if (BACK) {
          load_a<R>(a, u2, m, k);
          load_b_turned<R>(b, l2, k, h);
          mma2<Number>(da[0], da[1], a, b);
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float value, slope;
          Silu::both(of_g[n][e], value, slope);
          if (BACK) {
            of_g[n][e] = da[n][e] * of_u[n][e] * slope;
            of_u[n][e] = da[n][e] * value;
          } else {
            of_g[n][e] = value * of_u[n][e];
          }
        }
      uint32_t a[WORDS], c[WORDS];
      as_a<Number>(a, of_g[0], of_g[1]);
      as_a<Number>(c, of_u[0], of_u[1]);
#pragma unroll
      for (int n = 0; n < R; n += 16) {
        uint32_t b[WORDS];
        if (BACK) {
          load_b_turned<HC>(b, rg, h, n);
          mma2<Number>(sum[n / 8], sum[n / 8 + 1], a, b);
          load_b_turned<HC>(b, ru, h, n);
          mma2<Number>(other[n / 8], other[n / 8 + 1], c, b);
        } else {
          load_b<R>(b, l2, h, n);
          mma2<Number>(sum[n / 8], sum[n / 8 + 1], a, b);
        }
      }
    }
  }
  __syncthreads();  // the gated stages are free
}

template <int BM>
__device__ void gated_rows(const GatedSizes& s, const Number* tg, const Number* tu, const Number* Rg,
                           const Number* Ru, const Number* L2, Number* t2) {
  DYNAMIC_SHARED(Number, shared);
  Number* g_tile = shared;
  Number* u_tile = g_tile + THIN<BM>;
  Number* stages = shared + 3 * THIN<BM>;
  const int row0 = blockIdx.x * BM, rows = s.M - row0;
  fetch_thin<BM>(g_tile, tg, row0, rows, s.rankg);
  fetch_thin<BM>(u_tile, tu, row0, rows, s.ranku);
  commit();
  float sum[R / 8][4] = {}, none[R / 8][4];
  through_gated<BM, false>(s, g_tile, u_tile, nullptr, Rg, Ru, L2, stages, sum, none);
  gather<BM>(sum, reinterpret_cast<float*>(stages), g_tile, t2 + (int64_t)row0 * s.rank2, rows, s.rank2, false);
}

template <int BM>
__device__ void gated_back_rows(const GatedSizes& s, const Number* tg, const Number* tu, const Number* u2,
                                const Number* Rg, const Number* Ru, const Number* L2, Number* ug, Number* uu) {
  DYNAMIC_SHARED(Number, shared);
  Number* g_tile = shared;
  Number* u_tile = g_tile + THIN<BM>;
  Number* d_tile = u_tile + THIN<BM>;
  Number* stages = d_tile + THIN<BM>;
  const int row0 = blockIdx.x * BM, rows = s.M - row0;
  fetch_thin<BM>(g_tile, tg, row0, rows, s.rankg);
  fetch_thin<BM>(u_tile, tu, row0, rows, s.ranku);
  fetch_thin<BM>(d_tile, u2, row0, rows, s.rank2);
  commit();
  float sum[R / 8][4] = {}, other[R / 8][4] = {};
  through_gated<BM, true>(s, g_tile, u_tile, d_tile, Rg, Ru, L2, stages, sum, other);
  float* parts = reinterpret_cast<float*>(stages);
  gather<BM>(sum, parts, g_tile, ug + (int64_t)row0 * s.rankg, rows, s.rankg, false);
  gather<BM>(other, parts, u_tile, uu + (int64_t)row0 * s.ranku, rows, s.ranku, false);
}

// As back_hidden in feed_forward.cuh; a share is [3][H][R], of dL2, of dRg^T and of dRu^T. Factors stay in
// registers in tf32, where they are read in many pieces; of bf16 they are read anew each time, so that more
// blocks run at once.
__device__ void gated_back_hidden(const GatedSizes& s, const Number* tg, const Number* tu, const Number* u2,
                                  const Number* Rg, const Number* Ru, const Number* L2, float* shares) {
  DYNAMIC_SHARED(Number, shared);
  constexpr bool KEPT = sizeof(Number) == 4;
  constexpr int ROWS = 8 * PIECE, STAGE = 3 * THIN<ROWS>, BY = 32 * HIDDEN_WARPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, q = lane % 4;
  const int h0 = blockIdx.x * BH, parts = gridDim.y;
  const int each = (s.M + parts * ROWS - 1) / (parts * ROWS) * ROWS, begin = blockIdx.y * each;
  const int end = begin + each < s.M ? begin + each : s.M;
  const int chunks = end > begin ? (end - begin + ROWS - 1) / ROWS : 0;
  // The factors of this block, Rg and Ru [R][BH] and L2 [BH][R], lie before the stages, or where those come.
  Number* Rg_tile = shared;
  Number* Ru_tile = Rg_tile + TILE<Number, BH, R>;
  Number* L2_tile = Ru_tile + TILE<Number, BH, R>;
  Number* stages = KEPT ? shared : L2_tile + THIN<BH>;
  fetch<R, BH, BY>(Rg_tile, Rg + h0, s.H, s.rankg, BH);
  fetch<R, BH, BY>(Ru_tile, Ru + h0, s.H, s.ranku, BH);
  fetch<BH, R, BY>(L2_tile, L2 + (int64_t)h0 * s.rank2, s.rank2, BH, s.rank2);
  commit();
  uint32_t fg[KEPT ? R / 16 : 1][WORDS], fu[KEPT ? R / 16 : 1][WORDS], fd[KEPT ? R / 16 : 1][WORDS];
  auto read_factors = [&](int k) {
    const int at = KEPT ? k / 16 : 0;
    load_a_turned<BH>(fg[at], Rg_tile, 16 * warp, k);
    load_a_turned<BH>(fu[at], Ru_tile, 16 * warp, k);
    load_a<R>(fd[at], L2_tile, 16 * warp, k);
  };
  if (KEPT) {
    arrived<0>();
    __syncthreads();  // the factors of this block are there
#pragma unroll
    for (int k = 0; k < R; k += 16) read_factors(k);
    __syncthreads();  // nobody reads the factors of this block there any more
  }
  auto issue = [&](int chunk) {
    if (chunk < chunks) {
      Number* stage = stages + chunk % STAGES * STAGE;
      const int64_t m0 = begin + chunk * ROWS;
      const int rows = end - (int)m0;
      fetch<ROWS, R, BY>(stage, tg + m0 * s.rankg, s.rankg, rows, s.rankg);
      fetch<ROWS, R, BY>(stage + THIN<ROWS>, tu + m0 * s.ranku, s.ranku, rows, s.ranku);
      fetch<ROWS, R, BY>(stage + 2 * THIN<ROWS>, u2 + m0 * s.rank2, s.rank2, rows, s.rank2);
    }
    commit();
  };
  float of_a[R / 8][4] = {}, of_g[R / 8][4] = {}, of_u[R / 8][4] = {};
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) issue(stage);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    arrived<STAGES - 2>();
    __syncthreads();  // the rows are there, and nobody reads the stage that is filled next
    issue(chunk + STAGES - 1);
    const Number* g_rows = stages + chunk % STAGES * STAGE;
    const Number* u_rows = g_rows + THIN<ROWS>;
    const Number* d_rows = u_rows + THIN<ROWS>;
#pragma unroll 1
    for (int m = 0; m < ROWS; m += 16) {
      float g[2][4] = {}, u[2][4] = {}, da[2][4] = {};
#pragma unroll
      for (int k = 0; k < R; k += 16) {
        const int at = KEPT ? k / 16 : 0;
        if (!KEPT) read_factors(k);
        uint32_t b[WORDS];
        load_b_turned<R>(b, g_rows, k, m);
        mma2<Number>(g[0], g[1], fg[at], b);
        load_b_turned<R>(b, u_rows, k, m);
        mma2<Number>(u[0], u[1], fu[at], b);
        load_b_turned<R>(b, d_rows, k, m);
        mma2<Number>(da[0], da[1], fd[at], b);
      }
      float at[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float value, slope;
          Silu::both(g[n][e], value, slope);
          at[n][e] = value * u[n][e];
          g[n][e] = da[n][e] * u[n][e] * slope;
          u[n][e] = da[n][e] * value;
        }
      uint32_t a[WORDS], dg[WORDS], du[WORDS];
      as_a<Number>(a, at[0], at[1]);
      as_a<Number>(dg, g[0], g[1]);
      as_a<Number>(du, u[0], u[1]);
#pragma unroll
      for (int n = 0; n < R; n += 16) {
        uint32_t b[WORDS];
        load_b<R>(b, d_rows, m, n);
        mma2<Number>(of_a[n / 8], of_a[n / 8 + 1], a, b);
        load_b<R>(b, g_rows, m, n);
        mma2<Number>(of_g[n / 8], of_g[n / 8 + 1], dg, b);
        load_b<R>(b, u_rows, m, n);
        mma2<Number>(of_u[n / 8], of_u[n / 8 + 1], du, b);
      }
    }
  }
  arrived<0>();  // where there was no row to wait for
  float* share = shares + (int64_t)blockIdx.y * 3 * s.H * R;
#pragma unroll
  for (int n = 0; n < R / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t at = (int64_t)(h0 + 16 * warp + row + e / 2 * 8) * R + 8 * n + 2 * q + e % 2;
      share[at] = of_a[n][e];
      share[(int64_t)s.H * R + at] = of_g[n][e];
      share[2 * (int64_t)s.H * R + at] = of_u[n][e];
    }
}

// One thread for each number of a share: dL2 [H, rank 2], dRg [rank g, H] and dRu [rank u, H].
__device__ void gated_back_sums(const GatedSizes& sizes, const float* shares, Number* left2_grad,
                                Number* gate_grad, Number* up_grad, int parts) {
  const int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, third = (int64_t)sizes.H * R;
  if (e >= 3 * third) return;
  const int of = (int)(e / third);
  const int64_t i = e - of * third;
  // Neighbours in memory in lanes, for what is written to dRg and dRu too.
  const int h = (int)(of == 0 ? i / R : i % sizes.H), r = (int)(of == 0 ? i % R : i / sizes.H);
  if (r >= (of == 0 ? sizes.rank2 : of == 1 ? sizes.rankg : sizes.ranku)) return;
  float sum = 0.f;
#pragma unroll 4
  for (int part = 0; part < parts; ++part) sum += shares[(part * 3 + of) * third + (int64_t)h * R + r];
  if (of == 0)
    left2_grad[(int64_t)h * sizes.rank2 + r] = narrow<Number>(sum);
  else
    (of == 1 ? gate_grad : up_grad)[(int64_t)r * sizes.H + h] = narrow<Number>(sum);
}
