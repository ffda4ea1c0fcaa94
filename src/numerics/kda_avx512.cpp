#include "numerics/kda_backward.inl"

namespace tidelock::numerics {

const KdaKernels& kda_kernels_avx512() {
  static constexpr KdaKernels kernels{"avx512", &isa_avx512::kda_forward, &isa_avx512::kda_backward};
  return kernels;
}

}  // namespace tidelock::numerics
