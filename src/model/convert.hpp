// Checkpoints from one file format into another, and into coarser numbers.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "model/weight_source.hpp"

namespace tidelock::model {

struct ConvertOptions {
  bool to_gguf = true;  // else safetensors
  // The numbers of matrices. q8_0 (GGUF only) and the two plain ones: of every matrix; mxfp4: of the routed experts,
  // the rest stays as it is. None: each stays as it is. Vectors, convolutions and routers are float32 always.
  std::optional<Format> type = std::nullopt;
  std::uint64_t shard_bytes = 5'000'000'000;  // of one safetensors file, as Hugging Face's own tools write them
};

struct ConvertReport {
  std::uint64_t bytes = 0;  // of the tensors written
  std::size_t tensors = 0, files = 1;
  std::size_t kept = 0;              // matrices whose rows are no whole blocks of `type`; they kept their numbers
  std::vector<std::string> notices;  // what the new file cannot say, or what was left behind
};

// Writes `out`: a .gguf file, or a new folder with config.json, model.safetensors (or shards and their index) and the
// tokenizer's files. Whole or not at all: an interrupted conversion leaves no model.safetensors, no index of shards and
// no .gguf. Throws Error{not_supported} for what the target cannot hold, before anything is written.
ConvertReport convert_model(const std::filesystem::path& in, const std::filesystem::path& out,
                            const ConvertOptions& options);

}  // namespace tidelock::model
