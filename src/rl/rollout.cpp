#include "rl/rollout.hpp"

#include <algorithm>

#include "base/base.hpp"
#include "model/chat.hpp"
#include "rl/conversation.hpp"
#include "rl/rollout_impl.hpp"

namespace tidelock::rl {

RolloutStats& RolloutStats::operator+=(const RolloutStats& other) {
  wall_s += other.wall_s;
  waiting_s += other.waiting_s;
  sampled_tokens += other.sampled_tokens;
  prompt_tokens += other.prompt_tokens;
  set_back += other.set_back;
  written_out += other.written_out;
  loaded += other.loaded;
  set_aside += other.set_aside;
  continued += other.continued;
  sandbox_alive_s += other.sandbox_alive_s;
  sandbox_busy_s += other.sandbox_busy_s;
  sandbox_frozen_s += other.sandbox_frozen_s;
  return *this;
}

Rollout::Impl::Impl(const model::Model& m, const model::Tokenizer& t, sandbox::Runtime& r, Team& team_,
                    const RolloutOptions& o)
    : model(m), tokenizer(t), runtime(r), team(team_), options(o), end_of_message(model::end_of_turn(t)) {}

engine::SamplingParams Rollout::Impl::sampling(std::uint64_t seed, std::int64_t sampled_before) const {
  engine::SamplingParams p;
  p.temperature = options.temperature;
  p.top_p = options.top_p;
  p.top_k = options.top_k;
  p.seed = seed;
  p.max_tokens = options.max_tokens;
  p.sampled_before = sampled_before;
  p.stop_tokens = {end_of_message};
  return p;
}

void Rollout::Impl::start_group(GroupUnderWay& g) {
  const RolloutGroup& group = *g.group;
  const auto prompt = episode_prompt(tokenizer, group.episode, options.thinking);
  std::vector<engine::SamplingParams> params;
  for (const std::uint64_t seed : group.seeds) params.push_back(sampling(seed, 0));
  const auto ids = engine->add(prompt, params, adapter);
  stats.prompt_tokens += std::ssize(prompt);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Actor& a = *g.members[i];
    a.record.task_id = group.episode.id;
    a.record.family = group.episode.family;
    a.record.group = group.group;
    a.record.member = static_cast<std::int64_t>(i);
    a.record.seed = group.seeds[i];
    a.record.append_prompt(prompt);
    start(a, ids[i]);
  }
}

void Rollout::Impl::start(Actor& a, engine::SequenceId sequence) {
  a.sequence = sequence;
  by_sequence[sequence] = &a;
  a.parser = std::make_unique<model::AssistantParser>(tokenizer, options.thinking);
  a.sampled_earlier = a.record.logprobs.size();
  a.started = Clock::now();
  a.stage = Actor::Stage::under_way;
  ++open;
  if (!a.box_ready) open_box(a);
}

void Rollout::Impl::go_on(Actor& a) {
  const auto params = sampling(a.record.seed, std::ssize(a.record.logprobs));
  const auto ids = engine->add(a.record.tokens, std::span(&params, 1), adapter);
  stats.prompt_tokens += std::ssize(a.record.tokens);
  ++stats.continued;
  start(a, ids.front());
  std::int64_t turn = 0;  // where the turn begins that was cut
  for (const Span& span : a.record.spans)
    if (span.source != Source::sampled) turn = span.end;
  for (auto i = static_cast<std::size_t>(turn); i < a.record.tokens.size(); ++i) a.parser->feed(a.record.tokens[i]);
}

void Rollout::Impl::take(const engine::Event& event) {
  const auto found = by_sequence.find(event.sequence);
  if (found == by_sequence.end()) return;
  Actor& a = *found->second;
  a.turn_tokens.push_back(event.token);
  a.turn_logprobs.push_back(event.logprob);
  ++stats.sampled_tokens;
  a.parser->feed(event.token);
  if (event.status != engine::Status::decode || a.parser->turn().malformed) {
    write_down(a);
    end_turn(a, event.status);
  } else if (used_up(a)) {
    set_aside(a);
  }
}

void Rollout::Impl::end_turn(Actor& a, engine::Status status) {
  const model::AssistantTurn turn = a.parser->finish();
  a.record.answer = turn.content;
  a.record.turns.push_back({turn.content, {}});
  const double timeout = std::chrono::duration<double>(a.episode().agent_timeout).count();
  const bool late = timeout > 0 && a.agent_seconds() > timeout;
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

void Rollout::Impl::continue_with(Actor& a, const std::vector<ToolResult>& results) {
  std::vector<model::Message> messages;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const model::ToolCall& call = a.calls[i];
    a.record.turns.back().calls.push_back(
        {call.id, call.name, call.arguments_json, results[i].text, results[i].seconds});
    messages.push_back({.role = "tool", .content = results[i].text, .tool_call_id = call.id, .name = call.name});
  }
  const auto observation = model::render_tool_results(tokenizer, messages, agent_chat(options.thinking), true, a.calls);
  engine->append(a.sequence, observation);
  if (engine->status(a.sequence) == engine::Status::length) {  // no room for what the tool said
    a.record.status = Status::truncated;
    end_actor(a);
    return grade_answer(a);
  }
  stats.prompt_tokens += std::ssize(observation);
  a.record.append_tool(observation);
  if (used_up(a)) return set_aside(a);
  a.parser = std::make_unique<model::AssistantParser>(tokenizer, options.thinking);
}

bool Rollout::Impl::used_up(const Actor& a) const {
  return iteration_tokens > 0 &&
         a.record.logprobs.size() + a.turn_logprobs.size() >= a.sampled_earlier + iteration_tokens;
}

void Rollout::Impl::set_aside(Actor& a) {
  write_down(a);
  end_actor(a);
  a.wants = Actor::Wants::rest;
  if (a.box_ready) rest(a);
}

void Rollout::Impl::rest(Actor& a) {
  a.wants = Actor::Wants::nothing;
  a.agent_s = a.agent_seconds();
  a.stage = Actor::Stage::set_aside;
  --open;
}

void Rollout::Impl::write_down(Actor& a) {
  a.record.append_sampled(a.turn_tokens, a.turn_logprobs, version);
  a.turn_tokens.clear();
  a.turn_logprobs.clear();
}

void Rollout::Impl::end_actor(Actor& a) {
  by_sequence.erase(a.sequence);
  retired.push_back(a.sequence);
}

void Rollout::Impl::fail_actor(Actor& a, const std::string& reason) {
  a.record.status = Status::failed;
  a.record.failure = reason;
  a.record.reward = 0;
  write_down(a);
  if (by_sequence.contains(a.sequence)) end_actor(a);
  spdlog::warn("trajectory {}/{} of {} failed: {}", a.record.group, a.record.member, a.record.task_id, reason);
  close_box(a);
}

void Rollout::Impl::finish(Actor& a) {
  stats.sandbox_alive_s += a.record.sandbox.alive;
  stats.sandbox_busy_s += a.record.sandbox.busy;
  stats.sandbox_frozen_s += a.record.sandbox.frozen;
  a.stage = Actor::Stage::finished;
  --open;
}

engine::EngineOptions Rollout::Impl::engine_options(std::size_t lent) const {
  engine::EngineOptions o;
  if (options.state_memory > 0) o.state_limit = options.state_memory + lent;
  o.reuse = !options.state_folder.empty();
  o.disk_folder = options.state_folder;
  o.disk_limit = options.state_disk;
  return o;
}

void Rollout::Impl::count_states() {
  const auto counted = engine->counters();
  stats.set_back = counted.set_back;
  stats.written_out = counted.written_out;
  stats.loaded = engine->disk_counters().loads;
}

void Rollout::Impl::tidy() {
  for (const auto id : retired) engine->remove(id);
  retired.clear();
}

// Starts the next group, or goes on with what was set aside of it, if there is room for its trajectories.
bool Rollout::Impl::start_next(std::size_t& next) {
  while (next < groups.size() && groups[next].whole()) ++next;
  if (next == groups.size()) return false;
  GroupUnderWay& g = groups[next];
  const auto wanted = g.members.size() - static_cast<std::size_t>(g.count(Actor::Stage::finished));
  if (open > 0 && open + wanted > static_cast<std::size_t>(options.concurrent)) return false;
  ++next;
  if (g.count(Actor::Stage::waiting) == std::ssize(g.members)) {
    start_group(g);
  } else {
    for (auto& a : g.members)
      if (a->stage == Actor::Stage::set_aside) go_on(*a);
  }
  return true;
}

void Rollout::Impl::drive(const Progress& progress) {
  std::size_t next = 0;
  while (open > 0 || next < groups.size()) {
    while (start_next(next)) {
    }
    for (const engine::Event& event : engine->step()) take(event);
    tidy();
    const bool idle = !engine->has_work();
    const auto wait_start = Clock::now();
    hands->collect(idle);
    if (idle) stats.waiting_s += seconds_since(wait_start);
    tidy();
    if (!progress) continue;
    std::int64_t over = 0, all = 0;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const GroupUnderWay& g = groups[i];
      all += std::ssize(g.members);
      over += g.count(Actor::Stage::finished);
      if (i < next) over += g.count(Actor::Stage::set_aside);  // others go on yet
    }
    progress(static_cast<std::size_t>(over), static_cast<std::size_t>(all));
  }
}

void Rollout::Impl::take_whole_groups(RolloutResult& result) {
  for (GroupUnderWay& g : groups) {
    if (!g.whole()) {
      stats.set_aside += g.count(Actor::Stage::set_aside);
      unfinished.push_back(std::move(g));
      continue;
    }
    for (auto& a : g.members) {
      a->record.group = std::ssize(result.groups);
      result.trajectories.push_back(std::move(a->record));
    }
    result.groups.push_back(std::move(g.group));
  }
}

RolloutResult Rollout::Impl::run(const Progress& progress, std::size_t lent) {
  engine = std::make_unique<engine::Engine>(model, team, engine_options(lent));
  hands = std::make_unique<Hands>(options.hands);
  open = 0;
  stats = {};
  // Whatever happens, hands stop before what they work on goes.
  struct Cleanup {
    Impl& impl;
    ~Cleanup() {
      impl.hands.reset();
      impl.engine.reset();
      impl.groups.clear();
      impl.by_sequence.clear();
      impl.retired.clear();
      impl.adapter.reset();
    }
  } const cleanup{*this};
  const auto start = Clock::now();
  do {
    drive(progress);
  } while (std::none_of(groups.begin(), groups.end(), [](const auto& g) { return g.whole(); }) && !groups.empty());
  count_states();
  RolloutResult result;
  take_whole_groups(result);
  stats.wall_s = seconds_since(start);
  result.stats = stats;
  return result;
}

namespace {

GroupUnderWay new_group(RolloutGroup group) {
  GroupUnderWay g{std::make_shared<const RolloutGroup>(std::move(group)), {}};
  for (std::size_t i = 0; i < g.group->seeds.size(); ++i) {
    g.members.push_back(std::make_unique<Actor>());
    g.members.back()->group = g.group;
  }
  return g;
}

}  // namespace

Rollout::Rollout(const model::Model& model, const model::Tokenizer& tokenizer, sandbox::Runtime& runtime, Team& team,
                 const RolloutOptions& options)
    : impl_(std::make_unique<Impl>(model, tokenizer, runtime, team, options)) {}
Rollout::~Rollout() = default;

RolloutResult Rollout::run(std::span<const RolloutGroup> groups, std::shared_ptr<const model::Adapter> adapter,
                           std::uint64_t weight_version, const Progress& progress) {
  for (const RolloutGroup& group : groups) impl_->groups.push_back(new_group(group));
  impl_->adapter = std::move(adapter);
  impl_->version = weight_version;
  impl_->iteration_tokens = 0;
  return impl_->run(progress, 0);
}

RolloutResult Rollout::run_iteration(std::vector<RolloutGroup> groups, std::shared_ptr<const model::Adapter> adapter,
                                     std::uint64_t weight_version, const IterationOptions& options,
                                     const Progress& progress) {
  if (options.tokens < 0)
    fail(ErrorCode::invalid_argument, "{} tokens of a trajectory in an iteration: expected 0 (no limit) or more",
         options.tokens);
  impl_->groups = std::move(impl_->unfinished);
  impl_->unfinished.clear();
  for (RolloutGroup& group : groups) impl_->groups.push_back(new_group(std::move(group)));
  impl_->adapter = std::move(adapter);
  impl_->version = weight_version;
  impl_->iteration_tokens = static_cast<std::size_t>(options.tokens);
  return impl_->run(progress, options.lent_bytes);
}

std::vector<UnfinishedGroup> Rollout::unfinished() const {
  std::vector<UnfinishedGroup> out;
  for (const GroupUnderWay& g : impl_->unfinished) {
    UnfinishedGroup& group = out.emplace_back(UnfinishedGroup{g.group, {}});
    for (const auto& a : g.members)
      group.members.push_back({a->record, a->stage == Actor::Stage::finished, a->agent_s});
  }
  return out;
}

void Rollout::restore(std::vector<UnfinishedGroup> groups) {
  impl_->unfinished.clear();
  for (UnfinishedGroup& group : groups) {
    GroupUnderWay g{group.group, {}};
    if (group.members.size() != g.group->seeds.size())
      fail(ErrorCode::mismatch, "{} unfinished trajectories of {}, whose group has {}", group.members.size(),
           g.group->episode.id, g.group->seeds.size());
    for (UnfinishedMember& member : group.members) {
      auto actor = std::make_unique<Actor>();
      actor->group = g.group;
      actor->record = std::move(member.trajectory);
      actor->stage = member.finished ? Actor::Stage::finished : Actor::Stage::set_aside;
      actor->agent_s = member.agent_s;
      g.members.push_back(std::move(actor));
    }
    impl_->unfinished.push_back(std::move(g));
  }
}

}  // namespace tidelock::rl
