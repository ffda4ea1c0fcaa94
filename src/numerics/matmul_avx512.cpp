#include "numerics/matmul_kernels.inl"

namespace tidelock::numerics {
const MatmulKernels kMatmulAvx512 = TIDELOCK_ISA_NAMESPACE::kKernels;
}  // namespace tidelock::numerics
