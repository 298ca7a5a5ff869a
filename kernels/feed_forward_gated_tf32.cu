// A gated feed-forward in tf32.
#include "common.cuh"
typedef float Number;
constexpr int R = 32;
#include "feed_forward_gated.cuh"

extern "C" __global__ void __launch_bounds__(256, 2)
feed_forward_gated_tf32_32(ARGUMENTS(GatedSizes) sizes, const float* tg, const float* tu, const float* Rg,
                           const float* Ru, const float* L2, float* t2) {
  gated_rows<32>(sizes, tg, tu, Rg, Ru, L2, t2);
}
extern "C" __global__ void __launch_bounds__(256, 2)
feed_forward_gated_tf32_back_rows_32(ARGUMENTS(GatedSizes) sizes, const float* tg, const float* tu,
                                     const float* u2, const float* Rg, const float* Ru, const float* L2,
                                     float* ug, float* uu) {
  gated_back_rows<32>(sizes, tg, tu, u2, Rg, Ru, L2, ug, uu);
}
extern "C" __global__ void __launch_bounds__(128, 3)
feed_forward_gated_tf32_back_hidden(ARGUMENTS(GatedSizes) sizes, const float* tg, const float* tu,
                                    const float* u2, const float* Rg, const float* Ru, const float* L2,
                                    float* shares) {
  gated_back_hidden(sizes, tg, tu, u2, Rg, Ru, L2, shares);
}
extern "C" __global__ void __launch_bounds__(256)
feed_forward_gated_tf32_back_sums(ARGUMENTS(GatedSizes) sizes, const float* shares, float* left2_grad,
                                  float* gate_grad, float* up_grad, int parts) {
  gated_back_sums(sizes, shares, left2_grad, gate_grad, up_grad, parts);
}
