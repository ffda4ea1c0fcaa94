#include "numerics/rowops_backward.inl"

namespace tidelock::numerics {

const RowKernels& row_kernels_avx512() {
  static constexpr RowKernels kernels = isa_avx512::make_kernels("avx512");
  return kernels;
}

}  // namespace tidelock::numerics
