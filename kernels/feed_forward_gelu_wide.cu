// With gelu between the layers, at bonds up to 48.
#include "common.cuh"
typedef bf16 Number;
constexpr int R = 48;
#include "feed_forward.cuh"
typedef Gelu Act;
#include "feed_forward_16.cuh"
#include "feed_forward_32.cuh"
#include "feed_forward_sums.cuh"
