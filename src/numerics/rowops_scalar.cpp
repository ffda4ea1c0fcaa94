#include "numerics/rowops_backward.inl"

namespace tidelock::numerics {

const RowKernels& row_kernels_scalar() {
  static constexpr RowKernels kernels = isa_scalar::make_kernels("scalar");
  return kernels;
}

}  // namespace tidelock::numerics
