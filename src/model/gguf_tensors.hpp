// How GGUF's tensors and a model's parameters correspond (spec/model.md 5.1): one table, which the reader and the
// writer walk in opposite directions.
#pragma once

#include <string>
#include <vector>

#include "model/model.hpp"

namespace tidelock::model {

enum class GgufRole : std::uint8_t {
  matrix,   // the parameter's rows
  vector,   // float32 values
  conv,     // [4, 1, channels, 1]: per channel the four taps, oldest first
  decay,    // -exp(A_log)
  score,    // a block residual's norm times its projection, one vector; read as norm = 1, projection = score
  experts,  // one parameter per expert, stacked
  keys,     // the key halves of an absorbed parameter, head after head, as its parts have them: [nope, latent, heads]
  values,   // and the value halves: [latent, value, heads]
};

struct GgufEntry {
  std::string name;
  std::vector<std::int64_t> ne;  // as llama.cpp declares it, the fastest dimension first
  GgufRole role;
  std::vector<ParameterId> parameters;  // score: norm, projection; experts: by expert; else one
};

// In the order in which files are written: embedding, layers, head.
std::vector<GgufEntry> gguf_entries(const Model& model);

// The same memory layout: equal but for dimensions of size 1, which files of different age place differently.
bool same_gguf_shape(const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b);

}  // namespace tidelock::model
