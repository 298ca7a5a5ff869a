// Gradients that are summed over the batch; Act is the activation between the layers.
#include "feed_forward.cuh"

extern "C" __global__ void __launch_bounds__(128, R > 32 ? 3 : 4)
feed_forward_back_hidden(ARGUMENTS(Sizes) sizes, const Number* t1, const Number* u2, const Number* right1,
                         const Number* left2, float* shares) {
  back_hidden<Act>(sizes, t1, u2, right1, left2, shares);
}
extern "C" __global__ void __launch_bounds__(256)
feed_forward_back_sums(ARGUMENTS(Sizes) sizes, const float* shares, Number* left2_grad, Number* right1_grad,
                       int parts) {
  back_sums(sizes, shares, left2_grad, right1_grad, parts);
}
