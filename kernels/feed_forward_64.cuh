// Blocks of 64 rows; Act is the activation between the layers.
#include "feed_forward.cuh"

extern "C" __global__ void __launch_bounds__(256, 2)
feed_forward_64(ARGUMENTS(Sizes) sizes, const Number* x, const Number* left1, const Number* right1,
                const Number* left2, const Number* right2, Number* t1, Number* t2, Number* y) {
  forward<64, Act>(sizes, x, left1, right1, left2, right2, t1, t2, y);
}
extern "C" __global__ void __launch_bounds__(256, 2)
feed_forward_back_rows_64(ARGUMENTS(Sizes) sizes, const Number* dy, const Number* left1, const Number* right1,
                          const Number* left2, const Number* right2, const Number* t1, Number* u1, Number* u2,
                          Number* dx) {
  back_rows<64, Act>(sizes, dy, left1, right1, left2, right2, t1, u1, u2, dx);
}
