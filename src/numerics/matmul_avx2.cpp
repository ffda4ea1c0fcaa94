#include "numerics/matmul_kernels.inl"

namespace tidelock::numerics {
constinit const DenseKernels kMatmulAvx2 = TIDELOCK_ISA_NAMESPACE::kDenseKernels;
}  // namespace tidelock::numerics
