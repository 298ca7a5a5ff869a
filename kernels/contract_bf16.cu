// Cores of bfloat16 to factors of bfloat16.
#include "contract.cuh"

extern "C" __global__ void __launch_bounds__(256, 2)
contract_bf16(const Descriptor* descriptors, const int* blocks, const float* gates,
              ARGUMENTS(Factors) factors) {
  contract<bf16, bf16>(descriptors, blocks, gates, factors);
}
extern "C" __global__ void __launch_bounds__(256, 2)
contract_back_last_bf16(const Descriptor* descriptors, const int* blocks, const float* gates,
                        ARGUMENTS(Factors) grads, bf16* core_grads, float* shares) {
  contract_back_last<bf16, bf16>(descriptors, blocks, gates, grads, core_grads, shares);
}
extern "C" __global__ void __launch_bounds__(256, 2)
contract_back_first_bf16(const Descriptor* descriptors, const float* gates,
                         ARGUMENTS(Factors) grads, const float* shares, bf16* core_grads,
                         float* gate_grads) {
  contract_back_first<bf16, bf16>(descriptors, gates, grads, shares, core_grads, gate_grads);
}
