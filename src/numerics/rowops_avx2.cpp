#include "numerics/rowops_backward.inl"

namespace tidelock::numerics {

const RowKernels& row_kernels_avx2() {
  static constexpr RowKernels kernels = isa_avx2::make_kernels("avx2");
  return kernels;
}

}  // namespace tidelock::numerics
