#include "numerics/attention_backward.inl"

namespace tidelock::numerics {

const AttentionKernels& attention_kernels_avx2() {
  static constexpr AttentionKernels kernels{"avx2", &isa_avx2::mla_attention, &isa_avx2::mla_attention_backward,
                                            &isa_avx2::index_scores, &isa_avx2::index_scores_backward};
  return kernels;
}

}  // namespace tidelock::numerics
