// With relu between the layers, in tf32, at bonds up to 48.
#include "common.cuh"
typedef float Number;
constexpr int R = 48;
#include "feed_forward.cuh"
typedef Relu Act;
#include "feed_forward_32.cuh"
#include "feed_forward_sums.cuh"
