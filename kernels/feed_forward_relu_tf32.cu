// With relu between the layers, in tf32.
#include "common.cuh"
typedef float Number;
constexpr int R = 32;
#include "feed_forward.cuh"

extern "C" __global__ void __launch_bounds__(256, 2)
feed_forward_relu_tf32_32(ARGUMENTS(Sizes) sizes, const float* x, const float* left1, const float* right1,
                          const float* left2, const float* right2, float* t1, float* t2, float* y) {
  forward<32, Relu>(sizes, x, left1, right1, left2, right2, t1, t2, y);
}
extern "C" __global__ void __launch_bounds__(256, 2)
feed_forward_back_rows_relu_tf32_32(ARGUMENTS(Sizes) sizes, const float* dy, const float* left1,
                                    const float* right1, const float* left2, const float* right2,
                                    const float* t1, float* u1, float* u2, float* dx) {
  back_rows<32, Relu>(sizes, dy, left1, right1, left2, right2, t1, u1, u2, dx);
}
extern "C" __global__ void __launch_bounds__(256)
feed_forward_relu_tf32_64(ARGUMENTS(Sizes) sizes, const float* x, const float* left1, const float* right1,
                          const float* left2, const float* right2, float* t1, float* t2, float* y) {
  forward<64, Relu>(sizes, x, left1, right1, left2, right2, t1, t2, y);
}
extern "C" __global__ void __launch_bounds__(256)
feed_forward_back_rows_relu_tf32_64(ARGUMENTS(Sizes) sizes, const float* dy, const float* left1,
                                    const float* right1, const float* left2, const float* right2,
                                    const float* t1, float* u1, float* u2, float* dx) {
  back_rows<64, Relu>(sizes, dy, left1, right1, left2, right2, t1, u1, u2, dx);
}
extern "C" __global__ void __launch_bounds__(128, 4)
feed_forward_back_hidden_relu_tf32(ARGUMENTS(Sizes) sizes, const float* t1, const float* u2,
                                   const float* right1, const float* left2, float* shares) {
  back_hidden<Relu>(sizes, t1, u2, right1, left2, shares);
}
extern "C" __global__ void __launch_bounds__(256)
feed_forward_back_sums_relu_tf32(ARGUMENTS(Sizes) sizes, const float* shares, float* left2_grad,
                                 float* right1_grad, int parts) {
  back_sums(sizes, shares, left2_grad, right1_grad, parts);
}
