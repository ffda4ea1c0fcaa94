#include "numerics/kda_backward.inl"

namespace tidelock::numerics {

const KdaKernels& kda_kernels_scalar() {
  static constexpr KdaKernels kernels{"scalar", &isa_scalar::kda_forward, &isa_scalar::kda_backward};
  return kernels;
}

}  // namespace tidelock::numerics
