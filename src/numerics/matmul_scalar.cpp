#include "numerics/matmul_kernels.inl"

namespace tidelock::numerics {
const MatmulKernels kMatmulScalar = TIDELOCK_ISA_NAMESPACE::kKernels;
}  // namespace tidelock::numerics
