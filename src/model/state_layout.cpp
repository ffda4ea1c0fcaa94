#include "model/state_layout.hpp"

namespace tidelock::model {
namespace {

std::size_t element_bytes(Format format) {
  return format == Format::bf16 ? 2 : 4;
}
std::size_t align64(std::size_t bytes) {
  return (bytes + 63) & ~std::size_t{63};
}

}  // namespace

StateLayout::StateLayout(const Config& config)
    : format_(config.format),
      latent_dim_(config.mla.key_dim()),
      index_dim_(config.index.dim),
      latent_row_(element_bytes(config.format) * static_cast<std::size_t>(latent_dim_)),
      index_row_(element_bytes(config.format) * static_cast<std::size_t>(index_dim_)) {
  kda_state_bytes_ = align64(static_cast<std::size_t>(config.kda.heads) *
                             numerics::kda_head_state_floats(config.kda.shape()) * sizeof(float));
  const std::size_t tail_bytes = align64(9 * static_cast<std::size_t>(config.kda.channels()) * sizeof(float));
  for (const LayerKind kind : config.layers) {
    if (kind == LayerKind::mla) {
      offsets_.push_back(block_bytes_);
      block_bytes_ += align64(numerics::kBlockTokens * latent_row_) + align64(numerics::kBlockTokens * index_row_);
    } else {
      offsets_.push_back(recurrent_bytes_);
      recurrent_bytes_ += kda_state_bytes_ + tail_bytes;
    }
  }
}

numerics::BlockView StateLayout::latents(const SequenceView& sequence, int layer) const {
  return {sequence.blocks, offsets_[static_cast<std::size_t>(layer)], latent_row_, latent_dim_, format_};
}

numerics::BlockView StateLayout::index_keys(const SequenceView& sequence, int layer) const {
  const std::size_t offset = offsets_[static_cast<std::size_t>(layer)] + align64(numerics::kBlockTokens * latent_row_);
  return {sequence.blocks, offset, index_row_, index_dim_, format_};
}

float* StateLayout::kda_state(const SequenceView& sequence, int layer) const {
  return reinterpret_cast<float*>(sequence.recurrent + offsets_[static_cast<std::size_t>(layer)]);
}

float* StateLayout::conv_tails(const SequenceView& sequence, int layer) const {
  return reinterpret_cast<float*>(sequence.recurrent + offsets_[static_cast<std::size_t>(layer)] + kda_state_bytes_);
}

}  // namespace tidelock::model
