// A reinforcement-learning run: `tidelock rl`, and the evaluation that `tidelock eval` shares with it.
//
// Per step: episodes -> rollouts -> advantages -> gradient -> update -> hand-over. The trainer's log-probability of
// every sampled token is compared by bits with the rollout's, in every step.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "rl/recipe.hpp"
#include "rl/statistics.hpp"
#include "rl/view.hpp"

namespace tidelock::rl {

struct RunOptions {
  std::filesystem::path directory;  // of the run; made when missing
  bool resume = false;              // continue from the newest checkpoint in it, with the recipe it holds
  std::int64_t stop_after = 0;      // end after this step, as if killed behind its checkpoint; 0: run all
  int threads = 2;
  std::function<void(const ViewState&)> watch;  // called often from the run's thread; may be empty
};

struct RunSummary {
  std::int64_t steps = 0;
  std::int64_t compared_tokens = 0, mismatch_tokens = 0;
  std::vector<ViewEvaluation> evaluations;
  std::string adapter_sha256;
  double elapsed_s = 0;
};

// Writes into the run's folder: lock, recipe.toml, metrics.jsonl, tensorboard/, trajectories/step_N.jsonl (ATIF),
// checkpoints/, adapter/. The folder is locked to this process; a new run starts only where none of these is. Throws
// Error: {invalid_argument} for a folder that is in use or holds a run already, {io} when every grading of a step
// failed, {mismatch} when a compared token differs and the recipe says rl.mismatch = "error".
RunSummary run_rl(const Settings& settings, const RunOptions& options);

// Held-out evaluation of a model, with an adapter folder or none.
struct EvaluationResult {
  Evaluation evaluation;
  std::vector<std::pair<std::string, Evaluation>> by_family;
  double tool_rate = 0, seconds = 0;
  std::int64_t failed = 0;  // trajectories whose grading failed; counted with reward 0
};
EvaluationResult run_evaluation(const Settings& settings, const std::filesystem::path& adapter, int threads);

}  // namespace tidelock::rl
