// Supervised training of a model from scratch on demonstrations that the recipe generates: `tidelock train`.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "base/settings.hpp"

namespace tidelock::rl {

// Every key of a training recipe.
Schema pretrain_schema();

struct PretrainProgress {
  std::int64_t step, steps;
  double loss, index_loss, grad_norm, learning_rate, tokens_per_s, elapsed_s;
  std::string weights_sha256;  // over all float32 masters after the step; empty between log lines
};

// Trains and writes config.json, model.safetensors and the tokenizer files to `out`. A pure function of the recipe:
// machine, thread count and instruction set change no bit. Throws Error; a partial run leaves `out` untouched.
void pretrain(const Settings& settings, const std::filesystem::path& out, int threads,
              const std::function<void(const PretrainProgress&)>& progress);

}  // namespace tidelock::rl
