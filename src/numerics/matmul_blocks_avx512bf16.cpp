#include "numerics/matmul_blocks.inl"

namespace tidelock::numerics {
constinit const QuantKernels kQuantAvx512Bf16{&TIDELOCK_ISA_NAMESPACE::run_blocks,
                                              &TIDELOCK_ISA_NAMESPACE::quantize_rows};
}  // namespace tidelock::numerics
