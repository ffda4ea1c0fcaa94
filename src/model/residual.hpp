// The residual stream: plain, or block attention residuals (spec/model.md 3.3). Private to model/.
#pragma once

#include "model/layers.hpp"

namespace tidelock::model {

// One mix of the stream's sources, and the norm behind it.
struct MixTape {
  std::size_t blocks = 0;  // how many banked blocks were sources, before the live prefix
  float *mixed = nullptr, *probs = nullptr, *inv_rms = nullptr;
};

struct LayerTape {
  float *prefix_in = nullptr, *prefix_mid = nullptr;  // the stream before attention and before the feed-forward
  MixTape attention_mix, ffn_mix;
  KdaTape kda;
  MlaTape mla{};
  FfnTape ffn;
};

struct Tape {
  TapeMode mode = TapeMode::none;
  std::vector<LayerTape> layers;
  std::vector<float*> blocks;  // banked streams, in order
  float* prefix_out = nullptr;
  MixTape output_mix;
};

inline bool banks(const Config& c, int layer) {
  return c.residual_block != 0 && layer % c.residual_block == 0;
}

// normed = rms_norm(mix(blocks..., prefix)): [rows, hidden] from `arena`. proj_id kNone: no mix, the prefix itself.
float* mix_forward(const Pass& pass, std::span<float* const> blocks, float* prefix, ParameterId mix_norm,
                   ParameterId mix_proj, ParameterId norm, Arena& arena, MixTape& tape);
// d_normed -> adds to d_blocks and d_prefix.
void mix_backward(const Pass& pass, std::span<float* const> blocks, float* prefix, ParameterId mix_norm,
                  ParameterId mix_proj, ParameterId norm, const MixTape& tape, const float* d_normed,
                  std::span<float* const> d_blocks, float* d_prefix, Gradients& gradients);

// One half layer: out = f(norm(mix)). They fill the tape when `keep`.
void attention_half(const Pass& pass, int layer, std::span<float* const> blocks, float* prefix, float* out,
                    LayerTape& tape, bool keep);
void ffn_half(const Pass& pass, int layer, std::span<float* const> blocks, float* prefix, float* out, LayerTape& tape,
              bool keep);

}  // namespace tidelock::model
