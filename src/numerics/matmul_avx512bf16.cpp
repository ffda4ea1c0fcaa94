#include "numerics/matmul_kernels.inl"

namespace tidelock::numerics {
const MatmulKernels kMatmulAvx512Bf16 = TIDELOCK_ISA_NAMESPACE::kKernels;
}  // namespace tidelock::numerics
