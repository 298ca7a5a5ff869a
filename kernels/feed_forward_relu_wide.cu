// With relu between the layers, at bonds up to 48.
#include "common.cuh"
typedef bf16 Number;
constexpr int R = 48;
#include "feed_forward.cuh"

extern "C" __global__ void __launch_bounds__(256)
feed_forward_relu_wide_16(ARGUMENTS(Sizes) sizes, const bf16* x, const bf16* left1, const bf16* right1,
                          const bf16* left2, const bf16* right2, bf16* t1, bf16* t2, bf16* y) {
  forward<16, Relu>(sizes, x, left1, right1, left2, right2, t1, t2, y);
}
extern "C" __global__ void __launch_bounds__(256)
feed_forward_back_rows_relu_wide_16(ARGUMENTS(Sizes) sizes, const bf16* dy, const bf16* left1,
                                    const bf16* right1, const bf16* left2, const bf16* right2,
                                    const bf16* t1, bf16* u1, bf16* u2, bf16* dx) {
  back_rows<16, Relu>(sizes, dy, left1, right1, left2, right2, t1, u1, u2, dx);
}
extern "C" __global__ void __launch_bounds__(256, 2)
feed_forward_relu_wide_32(ARGUMENTS(Sizes) sizes, const bf16* x, const bf16* left1, const bf16* right1,
                          const bf16* left2, const bf16* right2, bf16* t1, bf16* t2, bf16* y) {
  forward<32, Relu>(sizes, x, left1, right1, left2, right2, t1, t2, y);
}
extern "C" __global__ void __launch_bounds__(256, 2)
feed_forward_back_rows_relu_wide_32(ARGUMENTS(Sizes) sizes, const bf16* dy, const bf16* left1,
                                    const bf16* right1, const bf16* left2, const bf16* right2,
                                    const bf16* t1, bf16* u1, bf16* u2, bf16* dx) {
  back_rows<32, Relu>(sizes, dy, left1, right1, left2, right2, t1, u1, u2, dx);
}
extern "C" __global__ void __launch_bounds__(128, 3)
feed_forward_back_hidden_relu_wide(ARGUMENTS(Sizes) sizes, const bf16* t1, const bf16* u2,
                                   const bf16* right1, const bf16* left2, float* shares) {
  back_hidden<Relu>(sizes, t1, u2, right1, left2, shares);
}
extern "C" __global__ void __launch_bounds__(256)
feed_forward_back_sums_relu_wide(ARGUMENTS(Sizes) sizes, const float* shares, bf16* left2_grad,
                                 bf16* right1_grad, int parts) {
  back_sums(sizes, shares, left2_grad, right1_grad, parts);
}
