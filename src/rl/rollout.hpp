// Rollouts: groups of multi-turn trajectories, sampled by the engine and acted out in sandboxes.
//
// One thread drives the engine; a few hands run what waits for sandboxes (opening, tools, grading), so decoding never
// stops for a tool while any other trajectory can go on. A trajectory's tokens depend on its episode, its seed and the
// weights alone - not on the order in which tools return.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/engine.hpp"
#include "model/chat.hpp"
#include "rl/task.hpp"
#include "rl/trajectory.hpp"

namespace tidelock::rl {

struct RolloutOptions {
  float temperature = 1, top_p = 1;
  int top_k = 0;
  std::int64_t max_tokens = 192;  // sampled tokens of a trajectory
  int max_turns = 4;              // assistant turns; a call in the last one is not run
  bool thinking = false;
  bool tool_enabled = true;                // off (a control): calls are answered with the text "tool disabled"
  bool freeze = true;                      // sandboxes are frozen while the model decodes
  std::uint64_t tool_output_limit = 2048;  // bytes of each stream shown to the model
  int concurrent = 128;                    // trajectories under way at once
  int hands = 4;                           // threads for sandboxes
  // Bytes of state that all trajectories together stay below (0: no limit). When it is short, the youngest trajectory
  // is set back, those that wait for a tool first of all; its state is computed again, or lies in `state_folder`
  // meanwhile (empty: none; up to state_disk bytes of it), whichever is faster.
  std::size_t state_memory = 0;
  std::filesystem::path state_folder = {};
  std::uint64_t state_disk = 10ULL << 30;
};

struct RolloutGroup {
  Episode episode;
  std::int64_t group = 0;
  std::vector<std::uint64_t> seeds;  // one trajectory each
};

struct RolloutStats {
  double wall_s = 0;
  double waiting_s = 0;  // of it, the engine had nothing to do because every trajectory waited for its sandbox
  std::int64_t sampled_tokens = 0, prompt_tokens = 0;
  std::int64_t set_back = 0, written_out = 0, loaded = 0;  // states: taken away, of these written, read again
  double sandbox_alive_s = 0, sandbox_busy_s = 0, sandbox_frozen_s = 0;  // summed over sandboxes
  RolloutStats& operator+=(const RolloutStats& other);
  // Share of the sandboxes' life in which they waited for the model.
  double wait_fraction() const { return sandbox_alive_s > 0 ? 1.0 - sandbox_busy_s / sandbox_alive_s : 0; }
  double frozen_fraction() const { return sandbox_alive_s > 0 ? sandbox_frozen_s / sandbox_alive_s : 0; }
};

// Trajectories in the order of groups and members.
struct RolloutResult {
  std::vector<Trajectory> trajectories;
  RolloutStats stats;
};

class Rollout {
 public:
  // All references must outlive the object. Throws Error{not_supported} when the tokenizer has no chat
  // protocol.
  Rollout(const model::Model& model, const model::Tokenizer& tokenizer, sandbox::Runtime& runtime, Team& team,
          const RolloutOptions& options);
  ~Rollout();

  using Progress = std::function<void(std::size_t done, std::size_t all)>;
  // `lent`: bytes for states beyond state_memory, which something else does without meanwhile.
  RolloutResult run(std::span<const RolloutGroup> groups, std::shared_ptr<const model::Adapter> adapter,
                    std::uint64_t weight_version, const Progress& progress = nullptr, std::size_t lent = 0);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tidelock::rl
