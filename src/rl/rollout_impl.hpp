// What a rollout is made of. Private to rl/.
#pragma once

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model/toolcall.hpp"
#include "rl/hands.hpp"
#include "rl/rollout.hpp"
#include "rl/tool.hpp"

namespace tidelock::rl {

using Clock = std::chrono::steady_clock;

// One trajectory. Only the driving thread touches it, except that a job owns `box` between post and report.
struct Actor {
  std::shared_ptr<const RolloutGroup> group;
  Trajectory record;
  std::unique_ptr<sandbox::Sandbox> box;  // null: not opened yet, or closed
  bool box_ready = false;
  engine::SequenceId sequence = 0;
  std::unique_ptr<model::AssistantParser> parser;
  std::vector<std::int32_t> turn_tokens;
  std::vector<float> turn_logprobs;
  std::vector<model::ToolCall> calls;  // of the turn that waits for its tools
  enum class Wants { nothing, tools, grade, close, rest } wants = Wants::nothing;
  enum class Stage { waiting, under_way, set_aside, finished } stage = Stage::waiting;
  std::size_t sampled_earlier = 0;  // tokens of it that earlier iterations sampled
  double agent_s = 0;               // under way, before `started`
  Clock::time_point started;

  const Episode& episode() const { return group->episode; }
  double agent_seconds() const { return agent_s + seconds_since(started); }
};

// The trajectories of one episode.
struct GroupUnderWay {
  std::shared_ptr<const RolloutGroup> group;
  std::vector<std::unique_ptr<Actor>> members;
  std::int64_t count(Actor::Stage stage) const {
    return std::count_if(members.begin(), members.end(), [&](const auto& a) { return a->stage == stage; });
  }
  bool whole() const { return count(Actor::Stage::finished) == std::ssize(members); }
};

struct Rollout::Impl {
  const model::Model& model;
  const model::Tokenizer& tokenizer;
  sandbox::Runtime& runtime;
  Team& team;
  RolloutOptions options;
  std::int32_t end_of_message;
  std::vector<GroupUnderWay> unfinished;  // between iterations

  // Of one run.
  std::unique_ptr<engine::Engine> engine;
  std::unique_ptr<Hands> hands;
  std::vector<GroupUnderWay> groups;
  std::map<engine::SequenceId, Actor*> by_sequence;
  std::vector<engine::SequenceId> retired;
  std::shared_ptr<const model::Adapter> adapter;
  std::uint64_t version = 0;
  std::size_t iteration_tokens = 0;  // 0: no limit
  std::size_t open = 0;              // under way
  RolloutStats stats;

  Impl(const model::Model& m, const model::Tokenizer& t, sandbox::Runtime& r, Team& team_, const RolloutOptions& o);

  // ---- the sandboxes' side (rollout_sandboxes.cpp): each job does one thing on a hand and reports back

  // Opens the sandbox, and runs again what the trajectory had run in one that is gone.
  void open_box(Actor& a);
  void run_tools(Actor& a);
  void grade_answer(Actor& a);
  // Last job of every trajectory: the sandbox's times are read and it goes.
  void close_box(Actor& a);
  // A malformed turn needs no grading, but its sandbox may still be opening.
  void close_or_wait(Actor& a);

  // ---- the model's side

  engine::SamplingParams sampling(std::uint64_t seed, std::int64_t sampled_before) const;
  void start_group(GroupUnderWay& g);
  void start(Actor& a, engine::SequenceId sequence);
  // Computes the tokens of what was set aside again, under the weights of now.
  void go_on(Actor& a);
  void take(const engine::Event& event);
  // The model ended its turn, ran out of tokens, or wrote something that is no turn.
  void end_turn(Actor& a, engine::Status status);
  void continue_with(Actor& a, const std::vector<ToolResult>& results);
  bool used_up(const Actor& a) const;
  void set_aside(Actor& a);
  void rest(Actor& a);
  // The tokens of the turn go into the record.
  void write_down(Actor& a);
  void end_actor(Actor& a);
  void fail_actor(Actor& a, const std::string& reason);
  void finish(Actor& a);

  engine::EngineOptions engine_options(std::size_t lent) const;
  void count_states();
  void tidy();
  // Until every trajectory is finished or set aside.
  void drive(const Progress& progress);
  bool start_next(std::size_t& next);
  RolloutResult run(const Progress& progress, std::size_t lent);
  void take_whole_groups(RolloutResult& result);
};

}  // namespace tidelock::rl
