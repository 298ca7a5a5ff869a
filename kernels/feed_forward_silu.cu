// With silu between the layers.
#include "common.cuh"
typedef bf16 Number;
constexpr int R = 32;
#include "feed_forward.cuh"
typedef Silu Act;
#include "feed_forward_16.cuh"
#include "feed_forward_32.cuh"
#include "feed_forward_64.cuh"
#include "feed_forward_sums.cuh"
