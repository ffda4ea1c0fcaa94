#include "numerics/matmul_kernels.inl"

namespace tidelock::numerics {
const MatmulKernels kMatmulAvx2 = TIDELOCK_ISA_NAMESPACE::kKernels;
}  // namespace tidelock::numerics
