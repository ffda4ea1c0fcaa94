#include "numerics/attention_backward.inl"

namespace tidelock::numerics {

const AttentionKernels& attention_kernels_avx512() {
  static constexpr AttentionKernels kernels{"avx512", &isa_avx512::mla_attention, &isa_avx512::mla_attention_backward,
                                            &isa_avx512::index_scores, &isa_avx512::index_scores_backward};
  return kernels;
}

}  // namespace tidelock::numerics
