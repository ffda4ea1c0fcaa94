// The architecture config in GGUF's terms (spec/model.md 5.1): architectures kimi-linear and kimi-k3, the latter with
// the indexer keys of K3.1.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "model/config.hpp"
#include "model/gguf.hpp"

namespace tidelock::model {

// Reads the config from the keys; two things that no key says (an output gate of MLA layers, a norm of the expert
// latent) from the presence of their tensors. Missing, contradictory, unknown or unsupported keys are refused by name
// with Error{corrupt_data, not_supported}; no weight is read. As llama.cpp does, every norm takes the one epsilon that
// the file has, unless gguf_metadata wrote others.
Config gguf_config(const GgufModel& file);

// The keys that gguf_config reads back to the same config, but for end_tokens: those are keys of the vocabulary, which
// come from elsewhere. Throws Error{not_supported} naming what the architecture cannot say.
std::vector<std::pair<std::string, GgufValue>> gguf_metadata(const Config& config, const std::string& name);

}  // namespace tidelock::model
