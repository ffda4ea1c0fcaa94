#include "numerics/kda_backward.inl"

namespace tidelock::numerics {

const KdaKernels& kda_kernels_avx2() {
  static constexpr KdaKernels kernels{"avx2", &isa_avx2::kda_forward, &isa_avx2::kda_backward};
  return kernels;
}

}  // namespace tidelock::numerics
