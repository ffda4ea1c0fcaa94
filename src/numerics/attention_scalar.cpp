#include "numerics/attention_backward.inl"

namespace tidelock::numerics {

const AttentionKernels& attention_kernels_scalar() {
  static constexpr AttentionKernels kernels{"scalar", &isa_scalar::mla_attention, &isa_scalar::mla_attention_backward,
                                            &isa_scalar::index_scores, &isa_scalar::index_scores_backward};
  return kernels;
}

}  // namespace tidelock::numerics
