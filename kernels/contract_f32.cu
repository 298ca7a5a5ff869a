// Cores of float32 to factors of float32.
#include "contract.cuh"

extern "C" __global__ void __launch_bounds__(256, 2)
contract_f32(const Half* halves, const int* blocks, const float* gates,
             ARGUMENTS(Factors) factors) {
  contract<float, float>(halves, blocks, gates, factors);
}
extern "C" __global__ void __launch_bounds__(256, 2)
contract_back_last_f32(const Half* halves, const int* blocks, const float* gates,
                       ARGUMENTS(Factors) grads, float* core_grads, float* shares) {
  contract_back_last<float, float>(halves, blocks, gates, grads, core_grads, shares);
}
extern "C" __global__ void __launch_bounds__(256, 2)
contract_back_first_f32(const Half* halves, const float* gates, ARGUMENTS(Factors) grads,
                        const float* shares, float* core_grads, float* gate_grads) {
  contract_back_first<float, float>(halves, gates, grads, shares, core_grads, gate_grads);
}
