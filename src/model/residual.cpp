#include "model/residual.hpp"

#include <algorithm>

namespace tidelock::model {
namespace {

constexpr std::size_t kMaxSources = 33;

float* mix_weight(const Pass& pass, ParameterId mix_norm, ParameterId mix_proj) {
  const std::int64_t hidden = pass.model.config().hidden;
  float* w = pass.scratch.take<float>(hidden);
  for (std::int64_t i = 0; i < hidden; ++i) w[i] = pass.model.vector(mix_norm)[i] * pass.model.vector(mix_proj)[i];
  return w;
}

}  // namespace

float* mix_forward(const Pass& pass, std::span<float* const> blocks, float* prefix, ParameterId mix_norm,
                   ParameterId mix_proj, ParameterId norm, Arena& arena, MixTape& tape) {
  const Config& c = pass.model.config();
  const std::int64_t rows = pass.rows, hidden = c.hidden;
  const auto n_sources = static_cast<std::int64_t>(blocks.size()) + 1;
  tape.blocks = blocks.size();
  tape.mixed = prefix;
  float* normed = arena.take<float>(rows * hidden);
  tape.inv_rms = arena.take<float>(rows);
  const bool mixes = mix_proj != kNone && !blocks.empty();
  const float* w = nullptr;
  if (mixes) {
    w = mix_weight(pass, mix_norm, mix_proj);
    tape.mixed = arena.take<float>(rows * hidden);
    tape.probs = arena.take<float>(rows * n_sources);
  }
  for_rows(pass, rows, 16, [&](std::int64_t begin, std::int64_t end) {
    if (mixes) {
      const float* sources[kMaxSources];
      for (std::size_t i = 0; i < blocks.size(); ++i) sources[i] = blocks[i] + begin * hidden;
      sources[blocks.size()] = prefix + begin * hidden;
      numerics::block_mix(sources, static_cast<int>(n_sources), w, end - begin, hidden, c.rms_eps,
                          tape.mixed + begin * hidden, tape.probs + begin * n_sources);
    }
    numerics::rms_norm(tape.mixed + begin * hidden, pass.model.vector(norm), end - begin, hidden, c.rms_eps,
                       normed + begin * hidden, tape.inv_rms + begin);
  });
  return normed;
}

void mix_backward(const Pass& pass, std::span<float* const> blocks, float* prefix, ParameterId mix_norm,
                  ParameterId mix_proj, ParameterId norm, const MixTape& tape, const float* d_normed,
                  std::span<float* const> d_blocks, float* d_prefix, Gradients& gradients) {
  const ArenaScope scope(pass.scratch);
  const Config& c = pass.model.config();
  const std::int64_t rows = pass.rows, hidden = c.hidden;
  const bool mixes = mix_proj != kNone && tape.blocks != 0;
  float* d_mixed = mixes ? pass.scratch.take_zeroed<float>(rows * hidden) : d_prefix;
  numerics::rms_norm_backward(tape.mixed, pass.model.vector(norm), tape.inv_rms, d_normed, rows, hidden, d_mixed,
                              parameter_gradient(gradients, norm));
  if (!mixes) return;
  const float* sources[kMaxSources];
  float* d_sources[kMaxSources];
  for (std::size_t i = 0; i < tape.blocks; ++i) {
    sources[i] = blocks[i];
    d_sources[i] = d_blocks[i];
  }
  sources[tape.blocks] = prefix;
  d_sources[tape.blocks] = d_prefix;
  float* d_norm = parameter_gradient(gradients, mix_norm);
  float* d_proj = parameter_gradient(gradients, mix_proj);
  float* d_w = d_norm != nullptr || d_proj != nullptr ? pass.scratch.take_zeroed<float>(hidden) : nullptr;
  numerics::block_mix_backward(sources, static_cast<int>(tape.blocks) + 1, mix_weight(pass, mix_norm, mix_proj),
                               tape.probs, d_mixed, rows, hidden, c.rms_eps, d_sources, d_w);
  for (std::int64_t i = 0; d_w != nullptr && i < hidden; ++i) {
    if (d_norm != nullptr) d_norm[i] += d_w[i] * pass.model.vector(mix_proj)[i];
    if (d_proj != nullptr) d_proj[i] += d_w[i] * pass.model.vector(mix_norm)[i];
  }
}

void attention_half(const Pass& pass, int layer, std::span<float* const> blocks, float* prefix, float* out,
                    LayerTape& tape, bool keep) {
  const LayerIds& ids = pass.model.layers[static_cast<std::size_t>(layer)];
  Arena& arena = keep ? pass.keep : pass.scratch;
  float* normed = mix_forward(pass, blocks, prefix, ids.attention_mix_norm, ids.attention_mix_proj, ids.attention_norm,
                              arena, tape.attention_mix);
  const Signal x = make_signal(pass, normed, pass.rows, pass.model.config().hidden, arena);
  if (pass.model.config().layers[static_cast<std::size_t>(layer)] == LayerKind::kda)
    kda_layer_forward(pass, layer, x, out, keep ? &tape.kda : nullptr);
  else
    mla_layer_forward(pass, layer, x, out, keep ? &tape.mla : nullptr);
}

void ffn_half(const Pass& pass, int layer, std::span<float* const> blocks, float* prefix, float* out, LayerTape& tape,
              bool keep) {
  const LayerIds& ids = pass.model.layers[static_cast<std::size_t>(layer)];
  const std::int64_t hidden = pass.model.config().hidden;
  Arena& arena = keep ? pass.keep : pass.scratch;
  float* normed =
      mix_forward(pass, blocks, prefix, ids.ffn_mix_norm, ids.ffn_mix_proj, ids.ffn_norm, arena, tape.ffn_mix);
  const float* router_in = normed;  // float32, unrounded
  if (ids.ffn.router != kNone && pass.model.config().format != Format::f32) {
    float* copy = arena.take<float>(pass.rows * hidden);
    std::copy_n(normed, pass.rows * hidden, copy);
    router_in = copy;
  }
  const Signal x = make_signal(pass, normed, pass.rows, hidden, arena);
  ffn_forward(pass, layer, x, router_in, out, keep ? &tape.ffn : nullptr);
}

}  // namespace tidelock::model
