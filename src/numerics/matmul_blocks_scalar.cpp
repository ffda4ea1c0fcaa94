#include "numerics/matmul_blocks.inl"

namespace tidelock::numerics {
const BlockKernel kBlocksScalar = &TIDELOCK_ISA_NAMESPACE::run_blocks;
}  // namespace tidelock::numerics
