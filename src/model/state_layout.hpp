// Where a sequence's state stands in memory: the layout only; state/ and the callers own the bytes.
//
// Blocks hold 64 tokens each: for every MLA layer the 64 latent rows, then the 64 index-key rows. The recurrent part
// holds, for every KDA layer, the heads' states (numerics/kda.hpp) and the three rows of the convolution tails of q, k,
// v. Blocks and the recurrent part belong together: a sequence at position p is both of them after p tokens. All zeros
// is the empty sequence.
#pragma once

#include <cstddef>
#include <vector>

#include "model/config.hpp"

namespace tidelock::model {

struct SequenceView {
  std::byte* const* blocks = nullptr;  // block i holds tokens [64 i, 64 i + 64)
  std::byte* recurrent = nullptr;      // recurrent_bytes, 64-byte aligned
};

class StateLayout {
 public:
  explicit StateLayout(const Config& config);

  std::size_t block_bytes() const { return block_bytes_; }          // 0 when the model has no MLA layer
  std::size_t recurrent_bytes() const { return recurrent_bytes_; }  // 0 when the model has no KDA layer
  static std::int64_t blocks_for(std::int64_t tokens) {
    return (tokens + numerics::kBlockTokens - 1) / numerics::kBlockTokens;
  }

  numerics::BlockView latents(const SequenceView& sequence, int layer) const;
  numerics::BlockView index_keys(const SequenceView& sequence, int layer) const;
  float* kda_state(const SequenceView& sequence, int layer) const;   // [heads, head state]
  float* conv_tails(const SequenceView& sequence, int layer) const;  // [3 (q, k, v), 3 rows, channels]

 private:
  Format format_;
  int latent_dim_, index_dim_;
  std::size_t latent_row_, index_row_, block_bytes_ = 0, recurrent_bytes_ = 0;
  std::vector<std::size_t> offsets_;  // by layer: in the block (MLA) or in the recurrent part (KDA)
  std::size_t kda_state_bytes_;
};

}  // namespace tidelock::model
