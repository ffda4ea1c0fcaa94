// The learner: trajectories in, an updated adapter out; and the comparison by bits with what the rollout saw. Private
// to rl/.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "base/settings.hpp"
#include "rl/advantage.hpp"
#include "rl/loss.hpp"
#include "rl/trajectory.hpp"
#include "train/train.hpp"

namespace tidelock::rl {

struct Comparison {
  std::int64_t compared = 0, mismatched = 0;
  double max_abs = 0;
  std::string first = {};  // where the first mismatch is
};

// Adds one trajectory's tokens: bits of the rollout's log-probabilities against the trainer's.
void compare_bits(const Trajectory& trajectory, std::span<const float> trainer, Comparison& comparison);

// A comparison that compared nothing proves nothing: Error{mismatch}, as is a token with other bits unless
// `report_only`.
void check_comparison(const Comparison& comparison, std::int64_t step, bool report_only);

// The SHA-256 that the trainer's values and those that the rollout's forward pass will read share. Error{mismatch} when
// they differ.
std::string check_hand_over(const model::AdapterValues& sent, const model::Adapter& received, std::uint64_t version);

struct Update {
  Comparison compared;
  double loss = 0, grad_norm = 0, kl = 0;  // kl: mean k3 to the base per token, when it is in the loss
  double clip_fraction = 0;
  double entropy_estimate = 0;  // mean of -logprob over sampled tokens
  std::int64_t tokens = 0;      // that went through a forward pass
};

class Learner {
 public:
  Learner(const model::Model& model, Team& team, const Settings& settings);

  Advantages advantages(std::span<const Trajectory> trajectories, std::uint64_t seed) const;
  // Compares every sampled token, then takes rl.epochs optimizer steps. `adapter` is the one that sampled.
  Update update(std::span<const Trajectory> trajectories, const Advantages& advantages, const model::Adapter* adapter);

  // Moves what only update() needs to a file in `folder` (train::AdamW::put_away); returns the bytes of memory that
  // this gives back. update() brings it back by itself, optimizer() does not.
  std::size_t put_away(const std::filesystem::path& folder);
  void retrieve() { optimizer_.retrieve(); }

  train::LoraParameters& parameters() { return parameters_; }
  train::AdamW& optimizer() { return optimizer_; }
  model::AdapterValues adapter_values() const { return parameters_.adapter_values(); }

 private:
  struct Batch;
  train::GradientResult gradient(const Batch& batch, const model::Adapter* adapter, LossValue& total);

  const model::Model& model_;
  const Settings& s_;
  train::LoraParameters parameters_;
  train::AdamW optimizer_;
  train::GradientWorker worker_;
  train::GradientOptions options_;
  std::vector<float> gradient_;
};

}  // namespace tidelock::rl
