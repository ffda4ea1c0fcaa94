// The learner: trajectories in, an updated adapter out; and the comparison by bits with what the rollout saw. Private
// to rl/.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <set>
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

// Adapters by weight version; the last is the newest.
using Policies = std::map<std::uint64_t, std::shared_ptr<const model::Adapter>>;

// The weight versions that a trajectory's tokens were sampled with.
std::set<std::uint64_t> versions_of(const Trajectory& trajectory);

// Adds those of one trajectory's tokens that were sampled with `version`: bits of the rollout's log-probabilities
// against `trainer`, which are those of all its sampled tokens under that version's weights.
void compare_bits(const Trajectory& trajectory, std::uint64_t version, std::span<const float> trainer,
                  Comparison& comparison);

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
  double entropy_estimate = 0;    // mean of -logprob over sampled tokens
  std::int64_t tokens = 0;        // that went through a forward pass
  std::int64_t older_tokens = 0;  // sampled with weights before the newest
};

class Learner {
 public:
  Learner(const model::Model& model, Team& team, const Settings& settings);

  Advantages advantages(std::span<const Trajectory> trajectories, std::uint64_t seed) const;
  // Compares every sampled token under the weights that sampled it, then takes rl.epochs optimizer steps from the
  // newest. Throws Error{internal} for a token whose weights are not among `policies`.
  Update update(std::span<const Trajectory> trajectories, const Advantages& advantages, const Policies& policies);

  // Moves what only update() needs to a file in `folder` (train::AdamW::put_away); returns the bytes of memory that
  // this gives back. update() brings it back by itself, optimizer() does not.
  std::size_t put_away(const std::filesystem::path& folder);
  void retrieve() { optimizer_.retrieve(); }

  train::LoraParameters& parameters() { return parameters_; }
  train::AdamW& optimizer() { return optimizer_; }
  model::AdapterValues adapter_values() const { return parameters_.adapter_values(); }

 private:
  struct Batch;
  void compare_older(std::span<const Trajectory> trajectories, const Policies& policies, Update& out);
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
