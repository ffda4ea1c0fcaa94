// Rollouts: groups of multi-turn trajectories, sampled by the engine and acted out in sandboxes.
//
// One thread drives the engine; a few hands run what waits for sandboxes (opening, tools, grading), so decoding never
// stops for a tool while any other trajectory can go on. A trajectory's tokens depend on its episode, its seed and the
// weights alone - not on the order in which tools return.
//
// Partial rollouts: an iteration may give every trajectory a number of tokens, after which it is set aside with its
// sandbox; the next iteration goes on with it under its own weights. A group is handed out when all its members are
// finished. Which tokens were sampled with which weights depends on that number alone, not on how fast anything was.
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
  std::int64_t group = 0;            // its number among those of its step
  std::vector<std::uint64_t> seeds;  // one trajectory each
  std::int64_t step = 0;             // that it was drawn for
};

struct RolloutStats {
  double wall_s = 0;
  double waiting_s = 0;  // of it, the engine had nothing to do because every trajectory waited for its sandbox
  std::int64_t sampled_tokens = 0, prompt_tokens = 0;
  std::int64_t set_back = 0, written_out = 0, loaded = 0;  // states: taken away, of these written, read again
  std::int64_t set_aside = 0, continued = 0;  // trajectories: left for the next iteration, taken up from an earlier one
  double sandbox_alive_s = 0, sandbox_busy_s = 0, sandbox_frozen_s = 0;  // summed over sandboxes
  RolloutStats& operator+=(const RolloutStats& other);
  // Share of the sandboxes' life in which they waited for the model.
  double wait_fraction() const { return sandbox_alive_s > 0 ? 1.0 - sandbox_busy_s / sandbox_alive_s : 0; }
  double frozen_fraction() const { return sandbox_alive_s > 0 ? sandbox_frozen_s / sandbox_alive_s : 0; }
};

// Trajectories in the order of groups and members; Trajectory::group is the index into `groups`.
struct RolloutResult {
  std::vector<std::shared_ptr<const RolloutGroup>> groups;
  std::vector<Trajectory> trajectories;
  RolloutStats stats;
};

struct IterationOptions {
  std::int64_t tokens = 0;     // of one trajectory in this iteration, after which it is set aside; 0: no limit
  std::size_t lent_bytes = 0;  // for states beyond state_memory, which something else does without meanwhile
};

// What iterations left: a group of which at least one trajectory is set aside.
struct UnfinishedMember {
  Trajectory trajectory;  // so far
  bool finished = false;
  double agent_s = 0;  // seconds under way
};
struct UnfinishedGroup {
  std::shared_ptr<const RolloutGroup> group;
  std::vector<UnfinishedMember> members;
};

class Rollout {
 public:
  // All references must outlive the object. Throws Error{not_supported} when the tokenizer has no chat
  // protocol.
  Rollout(const model::Model& model, const model::Tokenizer& tokenizer, sandbox::Runtime& runtime, Team& team,
          const RolloutOptions& options);
  ~Rollout();

  using Progress = std::function<void(std::size_t done, std::size_t all)>;
  // All of these groups to their end; what is set aside stays so.
  RolloutResult run(std::span<const RolloutGroup> groups, std::shared_ptr<const model::Adapter> adapter,
                    std::uint64_t weight_version, const Progress& progress = nullptr);
  // Goes on with what is set aside, then with these; returns the groups that are finished, in the order in which they
  // were given. There is at least one: where none would be, every trajectory gets its tokens again. An Error loses what
  // was set aside.
  RolloutResult run_iteration(std::vector<RolloutGroup> groups, std::shared_ptr<const model::Adapter> adapter,
                              std::uint64_t weight_version, const IterationOptions& options,
                              const Progress& progress = nullptr);
  // What is set aside, in order. Restoring it in another process runs the recorded tool calls again, in a new sandbox,
  // when the trajectory goes on.
  std::vector<UnfinishedGroup> unfinished() const;
  void restore(std::vector<UnfinishedGroup> groups);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tidelock::rl
