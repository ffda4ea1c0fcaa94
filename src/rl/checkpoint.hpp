// Checkpoints of a run: everything that the rest of it depends on. A checkpoint is a folder that appears whole or not
// at all.
//
//   checkpoints/step_N/adapter_config.json, adapter_model.safetensors   the adapter (PEFT)
//   checkpoints/step_N/optimizer.safetensors                            AdamW moments, float32
//   checkpoints/step_N/unfinished.*, policy_V/                          of partial rollouts (rl/unfinished.hpp)
//   checkpoints/step_N/state.json                                       step, versions, counters, history for the view
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "rl/view.hpp"
#include "train/train.hpp"

namespace tidelock::rl {

struct RunState {
  std::int64_t step = 0;  // finished
  std::uint64_t weight_version = 0;
  std::int64_t compared_tokens = 0, mismatch_tokens = 0;
  double mismatch_max_abs = 0;
  double elapsed_s = 0, rollout_s = 0, sandbox_s = 0, train_s = 0, other_s = 0;
  std::vector<double> rewards;  // mean of every finished step
  std::vector<ViewEvaluation> evaluations;
};

// Writes, syncs and renames into place, then removes all but the newest `keep`. `more` writes into the folder what else
// belongs to the checkpoint. Throws Error{io}; earlier checkpoints stay.
void save_checkpoint(const std::filesystem::path& run, const RunState& state, const model::Model& model,
                     const train::LoraParameters& parameters, train::AdamW& optimizer, const std::string& base_name,
                     std::int64_t keep, const std::function<void(const std::filesystem::path&)>& more = nullptr);

// The newest checkpoint of a run folder, if any.
std::optional<std::filesystem::path> newest_checkpoint(const std::filesystem::path& run);

// Restores parameters and optimizer. Throws Error{corrupt_data, mismatch} naming the file.
RunState load_checkpoint(const std::filesystem::path& checkpoint, const model::Model& model,
                         train::LoraParameters& parameters, train::AdamW& optimizer);

}  // namespace tidelock::rl
