#include <algorithm>

#include "base/error.hpp"
#include "model/residual.hpp"

namespace tidelock::model {
namespace {

// Spans over fresh recurrent state, for running a layer's forward again: blocks keep what they hold (the same bits are
// stored once more).
std::vector<Span> fresh_spans(const Pass& pass) {
  std::vector<Span> spans(pass.spans.begin(), pass.spans.end());
  const std::size_t bytes = pass.layout.recurrent_bytes();
  for (Span& span : spans)
    span.state.recurrent = bytes == 0 ? nullptr : pass.scratch.take_zeroed<std::byte>(static_cast<std::int64_t>(bytes));
  return spans;
}

// Runs both halves of a layer again with a full tape.
void recompute_layer(const Pass& pass, int layer, std::span<float* const> before, std::span<float* const> after,
                     LayerTape& tape) {
  const std::vector<Span> spans = fresh_spans(pass);
  Pass again = pass;
  again.spans = spans;
  float* discard = pass.scratch.take<float>(pass.rows * pass.model.config().hidden);
  attention_half(again, layer, before, tape.prefix_in, discard, tape, true);
  ffn_half(again, layer, after, tape.prefix_mid, discard, tape, true);
}

void layer_ffn_backward(const Pass& pass, int layer, const Tape& tape, std::span<float* const> d_blocks,
                        float* d_prefix, Gradients& gradients) {
  const ArenaScope scope(pass.scratch);
  const LayerIds& ids = pass.model.layers[static_cast<std::size_t>(layer)];
  const LayerTape& t = tape.layers[static_cast<std::size_t>(layer)];
  float* d_normed = pass.scratch.take_zeroed<float>(pass.rows * pass.model.config().hidden);
  ffn_backward(pass, layer, t.ffn, d_prefix, d_normed, gradients);
  mix_backward(pass, tape.blocks, t.prefix_mid, ids.ffn_mix_norm, ids.ffn_mix_proj, ids.ffn_norm, t.ffn_mix, d_normed,
               d_blocks, d_prefix, gradients);
}

void layer_attention_backward(const Pass& pass, int layer, const Tape& tape, std::span<float* const> d_blocks,
                              const float* d_out, float* d_prefix, Gradients& gradients) {
  const ArenaScope scope(pass.scratch);
  const LayerIds& ids = pass.model.layers[static_cast<std::size_t>(layer)];
  const LayerTape& t = tape.layers[static_cast<std::size_t>(layer)];
  float* d_normed = pass.scratch.take_zeroed<float>(pass.rows * pass.model.config().hidden);
  if (pass.model.config().layers[static_cast<std::size_t>(layer)] == LayerKind::kda)
    kda_layer_backward(pass, layer, t.kda, d_out, d_normed, gradients);
  else
    mla_layer_backward(pass, layer, t.mla, d_out, d_normed, gradients);
  mix_backward(pass, tape.blocks, t.prefix_in, ids.attention_mix_norm, ids.attention_mix_proj, ids.attention_norm,
               t.attention_mix, d_normed, d_blocks, d_prefix, gradients);
}

void embedding_backward(const Pass& pass, const float* d_prefix, Gradients& gradients) {
  float* d_table = parameter_gradient(gradients, pass.model.embedding);
  if (d_table == nullptr) return;
  const std::int64_t hidden = pass.model.config().hidden;
  for (const Span& span : pass.spans)
    for (const auto token : span.tokens) {
      numerics::axpy(1.0F, d_prefix, hidden, d_table + token * hidden);
      d_prefix += hidden;
    }
}

}  // namespace

void backward(const Model& model, const StateLayout& layout, std::span<const Span> spans, const ForwardOptions& options,
              const float* d_hidden, Gradients& gradients, Workspace& workspace, Team& team) {
  Tape& tape = *workspace.tape;
  if (!model.for_training()) fail(ErrorCode::internal, "backward needs a model that was made for training");
  if (tape.mode == TapeMode::none || tape.mode != options.tape)
    fail(ErrorCode::internal, "backward without the tape of its forward");
  workspace.scratch.release({});
  const Pass pass = make_pass(model, layout, spans, options, workspace, team);
  const Config& c = model.config();
  const std::int64_t n = pass.rows * c.hidden;

  std::vector<float*> d_blocks;
  for (std::size_t i = 0; i < tape.blocks.size(); ++i) d_blocks.push_back(pass.scratch.take_zeroed<float>(n));
  float* d_prefix = pass.scratch.take_zeroed<float>(n);
  mix_backward(pass, tape.blocks, tape.prefix_out, model.output_mix_norm, model.output_mix_proj, model.final_norm,
               tape.output_mix, d_hidden, d_blocks, d_prefix, gradients);
  for (int layer = c.layer_count() - 1; layer >= 0; --layer) {
    const ArenaScope kept(pass.keep);
    const bool bank = banks(c, layer);
    if (tape.mode == TapeMode::recompute) {
      const ArenaScope scope(pass.scratch);
      const std::span<float* const> after = tape.blocks;
      recompute_layer(pass, layer, bank ? after.first(after.size() - 1) : after, after,
                      tape.layers[static_cast<std::size_t>(layer)]);
    }
    layer_ffn_backward(pass, layer, tape, d_blocks, d_prefix, gradients);
    const float* d_out = d_prefix;
    if (bank) {  // the stream started anew: what came before it lives on only as the banked block
      d_prefix = d_blocks.back();
      d_blocks.pop_back();
      tape.blocks.pop_back();
    }
    layer_attention_backward(pass, layer, tape, d_blocks, d_out, d_prefix, gradients);
  }
  embedding_backward(pass, d_prefix, gradients);
  tape.mode = TapeMode::none;
}

}  // namespace tidelock::model
