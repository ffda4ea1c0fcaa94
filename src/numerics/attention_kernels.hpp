// Private: one table of attention kernels per instruction set; attention.cpp calls through the one that isa() names.
#pragma once

#include "numerics/attention.hpp"
#include "numerics/isa.hpp"

namespace tidelock::numerics {

struct AttentionKernels {
  const char* name;  // the instruction set that the table was compiled for
  decltype(&numerics::mla_attention) mla_attention;
  decltype(&numerics::mla_attention_backward) mla_attention_backward;
  decltype(&numerics::index_scores) index_scores;
  decltype(&numerics::index_scores_backward) index_scores_backward;
};

// Where row `position` of a view begins.
inline std::byte* row_address(const BlockView& view, std::int64_t position) {
  return view.blocks[position / kBlockTokens] + view.offset +
         static_cast<std::size_t>(position % kBlockTokens) * view.row_bytes;
}

const AttentionKernels& attention_kernels_scalar();
const AttentionKernels& attention_kernels_avx2();
const AttentionKernels& attention_kernels_avx512();

// The table in use. avx512bf16 uses that of avx512: keys are widened to float32.
const AttentionKernels& attention_kernels();

}  // namespace tidelock::numerics
