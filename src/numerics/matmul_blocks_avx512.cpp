#include "numerics/matmul_blocks.inl"

namespace tidelock::numerics {
const BlockKernel kBlocksAvx512 = &TIDELOCK_ISA_NAMESPACE::run_blocks;
}  // namespace tidelock::numerics
