// With gelu between the layers, in tf32.
#include "common.cuh"
typedef float Number;
constexpr int R = 32;
#include "feed_forward.cuh"
typedef Gelu Act;
#include "feed_forward_32.cuh"
#include "feed_forward_64.cuh"
#include "feed_forward_sums.cuh"
