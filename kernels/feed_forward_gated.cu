// A gated feed-forward in bf16.
#include "common.cuh"
typedef bf16 Number;
constexpr int R = 32;
#include "feed_forward_gated.cuh"

extern "C" __global__ void __launch_bounds__(256, 2)
feed_forward_gated_16(ARGUMENTS(GatedSizes) sizes, const bf16* tg, const bf16* tu, const bf16* Rg,
                      const bf16* Ru, const bf16* L2, bf16* t2) {
  gated_rows<16>(sizes, tg, tu, Rg, Ru, L2, t2);
}
extern "C" __global__ void __launch_bounds__(256, 2)
feed_forward_gated_back_rows_16(ARGUMENTS(GatedSizes) sizes, const bf16* tg, const bf16* tu, const bf16* u2,
                                const bf16* Rg, const bf16* Ru, const bf16* L2, bf16* ug, bf16* uu) {
  gated_back_rows<16>(sizes, tg, tu, u2, Rg, Ru, L2, ug, uu);
}
extern "C" __global__ void __launch_bounds__(256, 2)
feed_forward_gated_32(ARGUMENTS(GatedSizes) sizes, const bf16* tg, const bf16* tu, const bf16* Rg,
                      const bf16* Ru, const bf16* L2, bf16* t2) {
  gated_rows<32>(sizes, tg, tu, Rg, Ru, L2, t2);
}
extern "C" __global__ void __launch_bounds__(256, 2)
feed_forward_gated_back_rows_32(ARGUMENTS(GatedSizes) sizes, const bf16* tg, const bf16* tu, const bf16* u2,
                                const bf16* Rg, const bf16* Ru, const bf16* L2, bf16* ug, bf16* uu) {
  gated_back_rows<32>(sizes, tg, tu, u2, Rg, Ru, L2, ug, uu);
}
extern "C" __global__ void __launch_bounds__(256, 2)
feed_forward_gated_64(ARGUMENTS(GatedSizes) sizes, const bf16* tg, const bf16* tu, const bf16* Rg,
                      const bf16* Ru, const bf16* L2, bf16* t2) {
  gated_rows<64>(sizes, tg, tu, Rg, Ru, L2, t2);
}
extern "C" __global__ void __launch_bounds__(256, 2)
feed_forward_gated_back_rows_64(ARGUMENTS(GatedSizes) sizes, const bf16* tg, const bf16* tu, const bf16* u2,
                                const bf16* Rg, const bf16* Ru, const bf16* L2, bf16* ug, bf16* uu) {
  gated_back_rows<64>(sizes, tg, tu, u2, Rg, Ru, L2, ug, uu);
}
extern "C" __global__ void __launch_bounds__(128, 4)
feed_forward_gated_back_hidden(ARGUMENTS(GatedSizes) sizes, const bf16* tg, const bf16* tu, const bf16* u2,
                               const bf16* Rg, const bf16* Ru, const bf16* L2, float* shares) {
  gated_back_hidden(sizes, tg, tu, u2, Rg, Ru, L2, shares);
}
extern "C" __global__ void __launch_bounds__(256)
feed_forward_gated_back_sums(ARGUMENTS(GatedSizes) sizes, const float* shares, bf16* left2_grad,
                             bf16* gate_grad, bf16* up_grad, int parts) {
  gated_back_sums(sizes, shares, left2_grad, gate_grad, up_grad, parts);
}
