// Cores of float32 to factors of float32.
#include "contract.cuh"

extern "C" __global__ void __launch_bounds__(256, 2)
contract_f32(const Descriptor* descriptors, const int* blocks, const float* gates,
             ARGUMENTS(Factors) factors) {
  contract<float, float>(descriptors, blocks, gates, factors);
}
extern "C" __global__ void __launch_bounds__(256, 2)
contract_back_last_f32(const Descriptor* descriptors, const int* blocks, const float* gates,
                       ARGUMENTS(Factors) grads, float* core_grads, float* shares) {
  contract_back_last<float, float>(descriptors, blocks, gates, grads, core_grads, shares);
}
extern "C" __global__ void __launch_bounds__(256, 2)
contract_back_first_f32(const Descriptor* descriptors, const float* gates,
                        ARGUMENTS(Factors) grads, const float* shares, float* core_grads,
                        float* gate_grads) {
  contract_back_first<float, float>(descriptors, gates, grads, shares, core_grads, gate_grads);
}
