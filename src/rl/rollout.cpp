#include "rl/rollout.hpp"

#include <algorithm>
#include <chrono>
#include <map>

#include "base/base.hpp"
#include "model/chat.hpp"
#include "model/toolcall.hpp"
#include "rl/conversation.hpp"
#include "rl/hands.hpp"
#include "rl/tool.hpp"

namespace tidelock::rl {
namespace {

using Clock = std::chrono::steady_clock;

// One trajectory under way. Only the driving thread touches it, except that a job owns `box` between post and report.
struct Actor {
  const RolloutGroup* group = nullptr;
  std::size_t slot = 0;  // in the result
  Trajectory record;
  std::unique_ptr<sandbox::Sandbox> box;
  bool box_ready = false;
  engine::SequenceId sequence = 0;
  std::unique_ptr<model::AssistantParser> parser;
  std::vector<std::int32_t> turn_tokens;
  std::vector<float> turn_logprobs;
  std::vector<model::ToolCall> calls;  // of the turn that waits for its tools
  enum class Wants { nothing, tools, grade, close } wants = Wants::nothing;
  Clock::time_point started;
};

// What a tool call returns when the tool is switched off (a control).
constexpr const char* kToolDisabled = "tool disabled";

}  // namespace

RolloutStats& RolloutStats::operator+=(const RolloutStats& other) {
  wall_s += other.wall_s;
  waiting_s += other.waiting_s;
  sampled_tokens += other.sampled_tokens;
  prompt_tokens += other.prompt_tokens;
  set_back += other.set_back;
  written_out += other.written_out;
  loaded += other.loaded;
  sandbox_alive_s += other.sandbox_alive_s;
  sandbox_busy_s += other.sandbox_busy_s;
  sandbox_frozen_s += other.sandbox_frozen_s;
  return *this;
}

struct Rollout::Impl {
  const model::Model& model;
  const model::Tokenizer& tokenizer;
  sandbox::Runtime& runtime;
  Team& team;
  RolloutOptions options;
  std::int32_t end_of_message;

  // Of one run.
  std::unique_ptr<engine::Engine> engine;
  std::unique_ptr<Hands> hands;
  std::map<engine::SequenceId, Actor*> by_sequence;
  std::vector<std::unique_ptr<Actor>> actors;
  std::vector<Trajectory>* out = nullptr;
  std::uint64_t version = 0;
  std::size_t done = 0, open = 0;
  RolloutStats stats;

  Impl(const model::Model& m, const model::Tokenizer& t, sandbox::Runtime& r, Team& team_, const RolloutOptions& o)
      : model(m), tokenizer(t), runtime(r), team(team_), options(o), end_of_message(model::end_of_turn(t)) {}

  // ---- the sandbox's side: each job does one thing on a hand and reports back

  void open_box(Actor& a) {
    hands->post([this, &a]() -> Hands::Done {
      std::string failure;
      try {
        a.box = open_sandbox(runtime, a.group->episode);
        if (options.freeze) a.box->freeze();
      } catch (const std::exception& error) {
        failure = error.what();
      }
      return [this, &a, failure] {
        a.box_ready = true;
        if (a.wants == Actor::Wants::close) return close_box(a);
        if (!failure.empty()) return fail_actor(a, failure);
        if (a.wants == Actor::Wants::tools) run_tools(a);
        if (a.wants == Actor::Wants::grade) grade_answer(a);
      };
    });
  }

  void run_tools(Actor& a) {
    a.wants = Actor::Wants::tools;
    if (!a.box_ready) return;
    a.wants = Actor::Wants::nothing;
    hands->post([this, &a]() -> Hands::Done {
      std::vector<ToolResult> results;
      std::string failure;
      try {
        for (const auto& call : a.calls) results.push_back(use_tool(a, call));
        if (options.freeze) a.box->freeze();
      } catch (const std::exception& error) {
        failure = error.what();
      }
      return [this, &a, results, failure] { failure.empty() ? continue_with(a, results) : fail_actor(a, failure); };
    });
  }

  ToolResult use_tool(Actor& a, const model::ToolCall& call) const {
    ToolResult result;
    if (!options.tool_enabled) {
      result.text = kToolDisabled;
    } else if (call.name != "shell") {
      result.text = fmt::format("no tool named {}", call.name);
    } else {
      return run_shell_tool(*a.box, a.group->episode, call.arguments_json, options.tool_output_limit);
    }
    return result;
  }

  void grade_answer(Actor& a) {
    a.wants = Actor::Wants::grade;
    if (!a.box_ready) return;
    a.wants = Actor::Wants::nothing;
    hands->post([this, &a]() -> Hands::Done {
      GradeResult result;
      try {
        result = grade(*a.box, a.group->episode, a.record.answer);
      } catch (const std::exception& error) {
        result.reason = error.what();
      }
      return [this, &a, result] {
        if (!result.graded) return fail_actor(a, result.reason);
        a.record.reward = result.reward;
        a.record.reward_detail = result.detail;
        close_box(a);
      };
    });
  }

  // Last job of every trajectory: the sandbox's times are read and it goes.
  void close_box(Actor& a) {
    hands->post([this, &a]() -> Hands::Done {
      if (a.box != nullptr) {
        const sandbox::Times times = a.box->times();
        a.record.sandbox = {times.alive, times.busy, times.frozen};
        a.box.reset();
      }
      return [this, &a] { finish(a); };
    });
  }

  // ---- the model's side

  void start_group(const RolloutGroup& group, std::size_t first_slot,
                   const std::shared_ptr<const model::Adapter>& adapter) {
    const auto prompt = episode_prompt(tokenizer, group.episode, options.thinking);
    std::vector<engine::SamplingParams> params;
    for (const std::uint64_t seed : group.seeds) {
      engine::SamplingParams p;
      p.temperature = options.temperature;
      p.top_p = options.top_p;
      p.top_k = options.top_k;
      p.seed = seed;
      p.max_tokens = options.max_tokens;
      p.stop_tokens = {end_of_message};
      params.push_back(p);
    }
    const auto ids = engine->add(prompt, params, adapter);
    stats.prompt_tokens += static_cast<std::int64_t>(prompt.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      auto actor = std::make_unique<Actor>();
      Actor& a = *actor;
      a.group = &group;
      a.slot = first_slot + i;
      a.sequence = ids[i];
      a.started = Clock::now();
      a.record.task_id = group.episode.id;
      a.record.family = group.episode.family;
      a.record.group = group.group;
      a.record.member = static_cast<std::int64_t>(i);
      a.record.seed = group.seeds[i];
      a.record.append_prompt(prompt);
      a.parser = std::make_unique<model::AssistantParser>(tokenizer, options.thinking);
      by_sequence[a.sequence] = &a;
      ++open;
      open_box(a);
      actors.push_back(std::move(actor));
    }
  }

  void take(const engine::Event& event) {
    const auto found = by_sequence.find(event.sequence);
    if (found == by_sequence.end()) return;
    Actor& a = *found->second;
    a.turn_tokens.push_back(event.token);
    a.turn_logprobs.push_back(event.logprob);
    ++stats.sampled_tokens;
    a.parser->feed(event.token);
    if (event.status == engine::Status::decode && !a.parser->turn().malformed) return;
    a.record.append_sampled(a.turn_tokens, a.turn_logprobs, version);
    a.turn_tokens.clear();
    a.turn_logprobs.clear();
    end_turn(a, event.status);
  }

  // The model ended its turn, ran out of tokens, or wrote something that is no turn.
  void end_turn(Actor& a, engine::Status status) {
    const model::AssistantTurn turn = a.parser->finish();
    Turn record{turn.content, {}};
    a.record.answer = turn.content;
    a.record.turns.push_back(record);
    const bool late = a.group->episode.agent_timeout.count() > 0 &&
                      seconds_since(a.started) > std::chrono::duration<double>(a.group->episode.agent_timeout).count();
    if (turn.malformed) {
      a.record.status = Status::malformed;
      a.record.failure = turn.problem;
      end_actor(a);
      return close_or_wait(a);
    }
    if (status == engine::Status::length || late ||
        (!turn.calls.empty() && static_cast<int>(a.record.turns.size()) >= options.max_turns)) {
      a.record.status = Status::truncated;
      end_actor(a);
      return grade_answer(a);
    }
    if (turn.calls.empty()) {
      end_actor(a);
      return grade_answer(a);
    }
    a.calls = turn.calls;
    a.record.tool_calls += static_cast<std::int64_t>(turn.calls.size());
    run_tools(a);
  }

  void continue_with(Actor& a, const std::vector<ToolResult>& results) {
    std::vector<model::Message> messages;
    for (std::size_t i = 0; i < results.size(); ++i) {
      const model::ToolCall& call = a.calls[i];
      a.record.turns.back().calls.push_back(
          {call.id, call.name, call.arguments_json, results[i].text, results[i].seconds});
      messages.push_back({.role = "tool", .content = results[i].text, .tool_call_id = call.id, .name = call.name});
    }
    const auto observation =
        model::render_tool_results(tokenizer, messages, agent_chat(options.thinking), true, a.calls);
    engine->append(a.sequence, observation);
    if (engine->status(a.sequence) == engine::Status::length) {  // no room for what the tool said
      a.record.status = Status::truncated;
      end_actor(a);
      return grade_answer(a);
    }
    stats.prompt_tokens += static_cast<std::int64_t>(observation.size());
    a.record.append_tool(observation);
    a.parser = std::make_unique<model::AssistantParser>(tokenizer, options.thinking);
  }

  void end_actor(Actor& a) {
    by_sequence.erase(a.sequence);
    retired.push_back(a.sequence);
  }

  void fail_actor(Actor& a, const std::string& reason) {
    a.record.status = Status::failed;
    a.record.failure = reason;
    a.record.reward = 0;
    if (by_sequence.contains(a.sequence)) {
      if (!a.turn_tokens.empty()) a.record.append_sampled(a.turn_tokens, a.turn_logprobs, version);
      end_actor(a);
    }
    spdlog::warn("trajectory {}/{} of {} failed: {}", a.record.group, a.record.member, a.record.task_id, reason);
    close_box(a);
  }

  // A malformed turn needs no grading, but its sandbox may still be opening.
  void close_or_wait(Actor& a) {
    a.wants = Actor::Wants::close;
    if (a.box_ready) close_box(a);
  }

  void finish(Actor& a) {
    stats.sandbox_alive_s += a.record.sandbox.alive;
    stats.sandbox_busy_s += a.record.sandbox.busy;
    stats.sandbox_frozen_s += a.record.sandbox.frozen;
    (*out)[a.slot] = std::move(a.record);
    ++done;
    --open;
  }

  std::vector<engine::SequenceId> retired;

  engine::EngineOptions engine_options(std::size_t lent) const {
    engine::EngineOptions o;
    if (options.state_memory > 0) o.state_limit = options.state_memory + lent;
    o.reuse = !options.state_folder.empty();
    o.disk_folder = options.state_folder;
    o.disk_limit = options.state_disk;
    return o;
  }

  void count_states() {
    const auto counted = engine->counters();
    stats.set_back = counted.set_back;
    stats.written_out = counted.written_out;
    stats.loaded = engine->disk_counters().loads;
  }

  void tidy() {
    for (const auto id : retired) engine->remove(id);
    retired.clear();
  }
};

Rollout::Rollout(const model::Model& model, const model::Tokenizer& tokenizer, sandbox::Runtime& runtime, Team& team,
                 const RolloutOptions& options)
    : impl_(std::make_unique<Impl>(model, tokenizer, runtime, team, options)) {}
Rollout::~Rollout() = default;

RolloutResult Rollout::run(std::span<const RolloutGroup> groups, std::shared_ptr<const model::Adapter> adapter,
                           std::uint64_t weight_version, const Progress& progress, std::size_t lent) {
  Impl& r = *impl_;
  const std::shared_ptr<const model::Adapter> held = std::move(adapter);
  RolloutResult result;
  std::size_t all = 0;
  for (const auto& group : groups) all += group.seeds.size();
  result.trajectories.resize(all);
  r.engine = std::make_unique<engine::Engine>(r.model, r.team, r.engine_options(lent));
  r.hands = std::make_unique<Hands>(r.options.hands);
  r.out = &result.trajectories;
  r.version = weight_version;
  r.done = r.open = 0;
  r.stats = {};
  // Whatever happens, hands stop before what they work on goes.
  struct Cleanup {
    Impl& impl;
    ~Cleanup() {
      impl.hands.reset();
      impl.engine.reset();
      impl.actors.clear();
      impl.by_sequence.clear();
      impl.retired.clear();
    }
  } const cleanup{r};
  const auto start = Clock::now();
  std::size_t next_group = 0, next_slot = 0;
  while (r.done < all) {
    while (next_group < groups.size() && (r.open == 0 || r.open + groups[next_group].seeds.size() <=
                                                             static_cast<std::size_t>(r.options.concurrent))) {
      r.start_group(groups[next_group], next_slot, held);
      next_slot += groups[next_group++].seeds.size();
    }
    for (const engine::Event& event : r.engine->step()) r.take(event);
    r.tidy();
    const bool idle = !r.engine->has_work();
    const auto wait_start = Clock::now();
    r.hands->collect(idle);
    if (idle) r.stats.waiting_s += seconds_since(wait_start);
    r.tidy();
    if (progress) progress(r.done, all);
  }
  r.count_states();
  r.stats.wall_s = seconds_since(start);
  result.stats = r.stats;
  return result;
}

}  // namespace tidelock::rl
