#include "engine/engine.hpp"

#include <algorithm>
#include <chrono>

#include "base/base.hpp"
#include "base/clock.hpp"
#include "engine/impl.hpp"

namespace tidelock::engine {

Engine::Impl::Impl(const model::Model& m, Team& t, const EngineOptions& o)
    : model(m),
      team(t),
      options(o),
      layout(m.config()),
      pool(layout, o.state_limit),
      cache(pool, disk_options()),
      budget(o.step_seconds, o.step_tokens) {
  const bool sharded = m.weight_bytes() <= o.shard_weights_limit;
  for (int i = 0; i < (sharded ? t.threads() : 1); ++i) shards.push_back(std::make_unique<Shard>());
}

void Engine::Impl::count_time(std::span<const StepPlanItem> items, double seconds) {
  std::int64_t tokens = 0;
  for (const auto& item : items) tokens += item.tokens;
  if (tokens < 4 * std::ssize(items)) return;
  const StepBudget::Memory before = budget.memory();
  budget.ran(tokens, seconds);
  if (options.observer != nullptr) options.observer->budgeted(before, tokens, seconds, budget.tokens());
  prefilled += tokens;
  prefill_seconds += seconds;
}

void Engine::Impl::assign(std::vector<StepPlanItem> items) {
  for (auto& shard : shards) {
    shard->sequences.clear();
    shard->counts.clear();
    shard->finished.clear();
    shard->rows = 0;
  }
  std::stable_sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.tokens > b.tokens; });
  for (const auto& item : items) {
    Shard& shard = **std::min_element(shards.begin(), shards.end(),
                                      [](const auto& a, const auto& b) { return a->rows < b->rows; });
    shard.sequences.push_back(&at(item.sequence));
    shard.counts.push_back(item.tokens);
    shard.rows += item.tokens;
  }
}

void Engine::Impl::run(Shard& shard, Team& inner) {
  if (shard.sequences.empty()) return;
  std::vector<model::Span> spans;
  for (std::size_t i = 0; i < shard.sequences.size(); ++i) {
    Sequence& s = *shard.sequences[i];
    const auto view = s.state.extend(shard.counts[i]);
    spans.push_back({view, s.state.position(),
                     std::span(s.tokens).subspan(static_cast<std::size_t>(s.state.position()),
                                                 static_cast<std::size_t>(shard.counts[i])),
                     s.adapter.get()});
  }
  const float* hidden = model::forward(model, layout, spans, {}, shard.workspace, inner);
  const std::int64_t width = model.config().hidden;
  shard.hidden.clear();
  std::int64_t row = 0;
  for (std::size_t i = 0; i < shard.sequences.size(); ++i) {
    row += shard.counts[i];
    shard.sequences[i]->state.advance(shard.counts[i]);
    if (shard.sequences[i]->pending() != 0) continue;
    shard.finished.push_back(i);
    shard.hidden.insert(shard.hidden.end(), hidden + (row - 1) * width, hidden + row * width);
  }
  shard.logits.resize(shard.finished.size() * static_cast<std::size_t>(model.config().vocab));
  if (!shard.finished.empty())
    model::head_forward(model, shard.hidden.data(), static_cast<std::int64_t>(shard.finished.size()),
                        shard.logits.data(), shard.workspace, inner);
}

Event Engine::Impl::sample_next(Sequence& s, const float* logits) {
  const std::int64_t vocab = model.config().vocab;
  const auto& constraint = s.params.constraint;
  const std::int32_t token = sample(logits, vocab, s.params, static_cast<std::uint64_t>(s.sampled_in_life()),
                                    constraint ? constraint->allowed() : std::span<const std::uint32_t>{});
  if (constraint) constraint->accept(token);
  const float logprob = model::token_logprob(logits, vocab, token);
  s.tokens.push_back(token);
  ++s.sampled;
  const bool stop =
      std::find(s.params.stop_tokens.begin(), s.params.stop_tokens.end(), token) != s.params.stop_tokens.end();
  const bool full = s.sampled_in_life() >= s.params.max_tokens || std::ssize(s.tokens) >= model.config().max_context;
  s.status = stop ? Status::stopped : full ? Status::length : Status::decode;
  return {s.id, token, logprob, s.status, top_logprobs(logits, vocab, s.params.top_logprobs)};
}

void Engine::Impl::collect(const Shard& shard, std::vector<Event>& events) {
  for (std::size_t i = 0; i < shard.finished.size(); ++i) {
    Sequence& s = *shard.sequences[shard.finished[i]];
    const float* logits = shard.logits.data() + i * static_cast<std::size_t>(model.config().vocab);
    for (const SequenceId id : s.clones) {
      if (!sequences.contains(id)) continue;  // removed while it waited
      Sequence& clone = at(id);
      if (!make_room(fork_bytes())) {  // it computes the prompt itself, later
        clone.status = Status::prefill;
        clone.waits = true;
        continue;
      }
      clone.state = s.state.fork();
      events.push_back(sample_next(clone, logits));
    }
    s.clones.clear();
    events.push_back(sample_next(s, logits));
  }
}

Engine::Engine(const model::Model& model, Team& team, const EngineOptions& options)
    : impl_(std::make_unique<Impl>(model, team, options)) {}
Engine::~Engine() = default;

std::vector<SequenceId> Engine::add(std::span<const std::int32_t> prompt, std::span<const SamplingParams> params,
                                    std::shared_ptr<const model::Adapter> adapter, const std::string& salt,
                                    int priority) {
  const std::shared_ptr<const model::Adapter> held = std::move(adapter);
  if (held && &held->model() != &impl_->model)
    fail(ErrorCode::invalid_argument, "the adapter was made for another model than the engine's");
  if (prompt.empty()) fail(ErrorCode::invalid_argument, "the prompt is empty");
  const auto& config = impl_->model.config();
  if (static_cast<std::int64_t>(prompt.size()) >= config.max_context)
    fail(ErrorCode::invalid_argument, "the prompt has {} tokens, the model's context is {}", prompt.size(),
         config.max_context);
  for (const auto token : prompt)
    if (token < 0 || token >= config.vocab)
      fail(ErrorCode::invalid_argument, "token {} is outside the vocabulary of {}", token, config.vocab);
  for (const auto& p : params) {
    check(p);
    if (p.sampled_before >= std::ssize(prompt))
      fail(ErrorCode::invalid_argument, "sampled_before {}: the prompt has {} tokens", p.sampled_before, prompt.size());
  }
  check_fits(static_cast<std::int64_t>(prompt.size()), params);
  const state::Digest lineage = impl_->options.reuse ? Impl::lineage(held.get(), salt) : state::Digest{};
  std::vector<SequenceId> ids;
  for (const auto& p : params) {
    const SequenceId id = impl_->next_id++;
    impl_->sequences.emplace(
        id,
        Sequence{id, {prompt.begin(), prompt.end()}, state::SequenceState(impl_->pool), held, p, 0, Status::prefill});
    impl_->at(id).lineage = lineage;
    impl_->at(id).priority = priority;
    impl_->at(id).prompt = class_of(std::ssize(prompt));
    ids.push_back(id);
  }
  for (std::size_t i = 1; i < ids.size(); ++i) {
    impl_->at(ids[0]).clones.push_back(ids[i]);
    impl_->at(ids[i]).status = Status::stopped;  // until the first one's prompt is done
  }
  if (ids.empty()) return ids;
  if (impl_->options.state_limit == state::Pool::kNoLimit) {
    impl_->start(impl_->at(ids[0]));
  } else {
    impl_->at(ids[0]).waits = true;
  }
  return ids;
}

void Engine::append(SequenceId id, std::span<const std::int32_t> tokens) {
  Sequence& s = impl_->at(id);
  if (s.status != Status::stopped || s.sampled == 0)
    fail(ErrorCode::invalid_argument, "sequence {} is not at a stop", id);
  if (tokens.empty()) fail(ErrorCode::invalid_argument, "nothing to append to sequence {}", id);
  if (s.sampled_in_life() >= s.params.max_tokens ||
      static_cast<std::int64_t>(s.tokens.size() + tokens.size()) >= impl_->model.config().max_context) {
    s.status = Status::length;
    return;
  }
  for (const auto token : tokens)
    if (token < 0 || token >= impl_->model.config().vocab)
      fail(ErrorCode::invalid_argument, "token {} is outside the vocabulary", token);
  s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
  s.status = Status::prefill;
  s.prompt = class_of(s.pending());
  s.waits = impl_->options.state_limit != state::Pool::kNoLimit && s.state.position() == 0;  // it was set back
}

std::int64_t Engine::uncached_tokens(std::span<const std::int32_t> prompt,
                                     const std::shared_ptr<const model::Adapter>& adapter, const std::string& salt) {
  if (!impl_->options.reuse) return std::ssize(prompt);
  return std::ssize(prompt) - impl_->cache.reach(Impl::lineage(adapter.get(), salt), prompt);
}

std::array<std::int64_t, kPromptClasses> Engine::pending_tokens() const {
  std::array<std::int64_t, kPromptClasses> pending{};
  for (const auto& [id, s] : impl_->sequences)
    if (s.runs() && s.pending() > 1) pending[static_cast<std::size_t>(s.prompt)] += s.pending();
  return pending;
}

double Engine::prefill_tokens_per_second() const {
  return impl_->tokens_per_second();
}

std::int64_t Engine::longest_sequence() const {
  const std::int64_t context = impl_->model.config().max_context;
  std::int64_t low = 0, high = context;  // bytes grow with tokens
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (impl_->bytes_of(middle) <= impl_->options.state_limit) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

void Engine::check_fits(std::int64_t prompt_tokens, std::span<const SamplingParams> params) const {
  std::int64_t sampled = 0;
  for (const auto& p : params) sampled = std::max(sampled, p.max_tokens - p.sampled_before);
  const std::int64_t tokens = std::min(prompt_tokens + sampled, impl_->model.config().max_context);
  const std::size_t bytes = impl_->bytes_of(tokens);
  if (bytes > impl_->options.state_limit)
    fail(ErrorCode::invalid_argument,
         "{} tokens, of prompt and to be sampled, may need {} of state; the limit is {}: {} tokens", tokens,
         bytes_text(bytes), bytes_text(impl_->options.state_limit), longest_sequence());
}

Engine::Room Engine::room_for(std::int64_t prompt_tokens, std::int64_t sequences, PromptClass prompt) const {
  std::size_t live = 0;
  std::array<std::size_t, kPromptClasses> held{};
  for (const auto& [id, s] : impl_->sequences) {
    const std::size_t bytes = std::max(s.state.bytes(), impl_->bytes_of(static_cast<std::int64_t>(s.tokens.size())));
    live += bytes;
    held[static_cast<std::size_t>(s.prompt)] += bytes;
  }
  const std::size_t limit = impl_->options.state_limit,
                    wanted =
                        impl_->bytes_of(prompt_tokens) + static_cast<std::size_t>(sequences - 1) * impl_->fork_bytes();
  if (!within_cap(prompt, wanted, held, limit)) return Room::capped;
  return live <= limit && wanted <= limit - live ? Room::enough : Room::none;
}

void Engine::remove(SequenceId id, bool spoilt) {
  Sequence& s = impl_->at(id);
  std::erase_if(s.clones, [&](SequenceId clone) { return !impl_->sequences.contains(clone); });
  if (!s.clones.empty()) {  // the next of its group takes the prompt over
    Sequence& heir = impl_->at(s.clones.front());
    heir.clones.assign(s.clones.begin() + 1, s.clones.end());
    heir.state = std::move(s.state);
    heir.status = Status::prefill;
    heir.keep = std::move(s.keep);
    heir.waits = s.waits;
    heir.load = std::move(s.load);
    heir.known = s.known;
  } else if (impl_->options.reuse && !spoilt && s.state.position() > 0) {
    const auto done = s.done();  // before its state goes
    impl_->cache.insert(s.lineage, done, std::move(s.state), state::Segment::protected_use);
  }
  impl_->sequences.erase(id);
}

std::vector<StepPlanItem> Engine::Impl::next_plan() {
  cache.tend();
  finish_loads();
  return plan_within_limit();
}

void Engine::Impl::run_shards() {
  if (shards.size() == 1) return run(*shards[0], team);
  team.parallel(static_cast<std::int64_t>(shards.size()), 1,
                [&](std::int64_t i, std::int64_t) { run(*shards[static_cast<std::size_t>(i)], solo_team()); });
}

std::vector<Event> Engine::step() {
  using Clock = std::chrono::steady_clock;
  Impl& impl = *impl_;
  Clock::time_point began = Clock::now();
  auto plan = impl.next_plan();
  std::vector<Event> events;
  while (plan.empty() && impl.wait_for_load()) {
    began = Clock::now();
    plan = impl.next_plan();
  }
  if (plan.empty()) return events;
  for (const auto& item : plan)
    (item.tokens == 1 ? impl.counters.decode_tokens : impl.counters.prefill_tokens) += item.tokens;
  ++impl.counters.steps;
  impl.assign(plan);
  const Clock::time_point planned = Clock::now();
  impl.run_shards();
  const Clock::time_point ran = Clock::now();
  impl.count_time(plan, std::chrono::duration<double>(ran - planned).count());
  if (impl.options.reuse)
    for (const auto& item : plan) impl.keep_state(impl.at(item.sequence));
  const Clock::time_point kept = Clock::now();
  for (const auto& shard : impl.shards) impl.collect(*shard, events);
  impl.counters.schedule_seconds += std::chrono::duration<double>(planned - began).count();
  impl.counters.keep_seconds += std::chrono::duration<double>(kept - ran).count();
  impl.counters.step_seconds += seconds_since(began);
  return events;
}

bool Engine::has_work() const {
  return std::any_of(impl_->sequences.begin(), impl_->sequences.end(),
                     [](const auto& s) { return s.second.runs() && s.second.pending() > 0; });
}

const std::vector<std::int32_t>& Engine::tokens(SequenceId id) const {
  return impl_->at(id).tokens;
}
Status Engine::status(SequenceId id) const {
  return impl_->at(id).status;
}
std::int64_t Engine::cached_tokens(SequenceId id) const {
  return impl_->at(id).cached;
}
state::PrefixCacheCounters Engine::reuse_counters() const {
  return impl_->cache.counters();
}
std::size_t Engine::state_bytes_used() const {
  return impl_->pool.used_bytes();
}
void Engine::forget() {
  impl_->abandon_prefetches();
  impl_->cache.forget();
}
void Engine::rest() {
  impl_->abandon_prefetches();
  impl_->cache.leave_memory();
  for (auto& shard : impl_->shards) shard = std::make_unique<Shard>();
  impl_->pool.give_back();
}
Engine::Counters Engine::counters() const {
  Counters now = impl_->counters;
  now.written_out = impl_->cache.written_out();
  return now;
}
state::DiskCounters Engine::disk_counters() const {
  return impl_->cache.disk_counters();
}
void Engine::write_back() {
  impl_->cache.write_back();
}
std::size_t Engine::state_bytes() const {
  return impl_->pool.allocated_bytes();
}

}  // namespace tidelock::engine
