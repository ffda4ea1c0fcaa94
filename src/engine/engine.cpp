#include "engine/engine.hpp"

#include <algorithm>
#include <map>

#include "base/base.hpp"
#include "base/clock.hpp"
#include "model/content_hash.hpp"

namespace tidelock::engine {
namespace {

struct Sequence {
  SequenceId id;
  std::vector<std::int32_t> tokens;
  state::SequenceState state;
  std::shared_ptr<const model::Adapter> adapter;
  SamplingParams params;
  std::int64_t sampled = 0;
  Status status = Status::prefill;
  std::vector<SequenceId> clones = {};  // wait for this sequence's prompt; they fork from it
  state::Digest lineage = {};
  std::vector<KeepPoint> keep = {};  // still ahead, ascending
  std::int64_t cached = 0;
  bool waits = false;                                // for room to start, or to start again after it was set back
  std::shared_ptr<state::StateLoad> load = nullptr;  // its state is on its way from disk
  std::int64_t known = 0;                            // see state::KeptStates::Hit

  std::int64_t pending() const { return static_cast<std::int64_t>(tokens.size()) - state.position(); }
  bool runs() const { return status == Status::prefill || status == Status::decode; }
  // Tokens of the next step, at most: it ends where a state is to be kept.
  std::int64_t next() const {
    return keep.empty() ? pending() : std::min(pending(), keep.front().position - state.position());
  }
};

// One pass over some of the step's sequences, with its own working memory.
struct Shard {
  std::vector<Sequence*> sequences;
  std::vector<std::int64_t> counts;
  std::int64_t rows = 0;
  model::Workspace workspace;
  std::vector<float> hidden, logits;
  std::vector<std::size_t> finished;  // indices into sequences whose logits stand in `logits`, in order
};

}  // namespace

struct Engine::Impl {
  const model::Model& model;
  Team& team;
  EngineOptions options;
  model::StateLayout layout;
  state::Pool pool;
  state::KeptStates cache;
  std::map<SequenceId, Sequence> sequences;
  // Adapters by the hash of their values, for the lineage; computed once as long as the adapter lives.
  std::map<const model::Adapter*, std::pair<std::weak_ptr<const model::Adapter>, std::string>> adapter_hashes;
  SequenceId next_id = 1;
  std::vector<std::unique_ptr<Shard>> shards;
  Counters counters;
  std::int64_t prefilled = 0;
  double prefill_seconds = 0;

  Impl(const model::Model& m, Team& t, const EngineOptions& o)
      : model(m), team(t), options(o), layout(m.config()), pool(layout, o.state_limit), cache(pool, disk_options()) {
    const bool sharded = m.weight_bytes() <= o.shard_weights_limit;
    for (int i = 0; i < (sharded ? t.threads() : 1); ++i) shards.push_back(std::make_unique<Shard>());
  }

  std::optional<state::DiskOptions> disk_options() const {
    if (options.disk_folder.empty()) return std::nullopt;
    if (!options.reuse) fail(ErrorCode::invalid_argument, "a folder for kept states needs states to be kept");
    return state::DiskOptions{options.disk_folder, options.disk_limit, identity(), options.disk_io};
  }

  // What the bits of a state depend on beside its lineage: weights, contract, and how it lies in memory.
  state::Digest identity() const {
    const std::string weights = model::content_hash(model, team),
                      form = fmt::format("{} {} {}", layout.block_bytes(), layout.recurrent_bytes(),
                                         numerics::kBlockTokens);
    const std::array<std::string_view, 3> parts{std::string_view(numerics::kContractName), weights, form};
    return state::lineage(parts);
  }

  Sequence& at(SequenceId id) {
    const auto it = sequences.find(id);
    if (it == sequences.end()) fail(ErrorCode::not_found, "no sequence {}", id);
    return it->second;
  }

  std::vector<StepPlanItem> plan() {
    std::vector<PlanInput> inputs;
    for (const auto& [id, s] : sequences)
      if (s.runs() && s.pending() > 0 && !s.waits && !s.load) inputs.push_back({id, s.next()});
    return plan_step(inputs, options.step_tokens);
  }

  state::Digest lineage(const std::shared_ptr<const model::Adapter>& adapter, const std::string& salt) {
    std::string hash;
    if (adapter) {
      auto& [alive, known] = adapter_hashes[adapter.get()];
      if (alive.lock() != adapter) {
        alive = adapter;
        known = adapter->values().sha256(model);
      }
      hash = known;
      std::erase_if(adapter_hashes, [](const auto& entry) { return entry.second.first.expired(); });
    }
    const std::array<std::string_view, 2> parts{hash, salt};
    return state::lineage(parts);
  }

  // Starts a sequence's tokens from the deepest kept state, or begins to bring that up from disk.
  void start(Sequence& s) {
    s.waits = false;
    if (!options.reuse) return;
    state::KeptStates::Hit hit = cache.lookup(s.lineage, s.tokens);
    s.known = hit.known;
    s.load = std::move(hit.load);
    if (!s.load) begin_at(s, std::move(hit.state));
  }

  void begin_at(Sequence& s, state::SequenceState state) {
    s.state = std::move(state);
    s.keep = keep_points(s.state.position(), s.known, static_cast<std::int64_t>(s.tokens.size()), interior());
    if (s.sampled != 0) return;
    s.cached = s.state.position();
    for (const SequenceId id : s.clones)
      if (sequences.contains(id)) at(id).cached = s.cached;
  }

  // Sequences whose state has come go on with it, and it is kept in memory, too; one that failed looks again.
  void finish_loads() {
    for (auto& [id, s] : sequences)
      while (s.load && state::KeptStates::done(*s.load)) {
        const auto load = std::move(s.load);
        s.load = nullptr;
        auto state = cache.finish(*load, static_cast<std::int64_t>(s.tokens.size()));
        if (!state) {
          start(s);
          continue;
        }
        const auto done = std::span(s.tokens).first(static_cast<std::size_t>(state->position()));
        if (make_room(layout.recurrent_bytes()))
          cache.insert(s.lineage, done, state->fork(), state::Segment::protected_use);
        begin_at(s, std::move(*state));
      }
  }

  // Whether there was a load to wait for.
  bool wait_for_load() {
    for (auto& [id, s] : sequences) {
      if (!s.load) continue;
      cache.wait(*s.load);
      return true;
    }
    return false;
  }

  // Between kept states inside a prompt: as many tokens as weigh 0.6 of a recurrent part (state/ spec, 1.4).
  std::int64_t interior() const {
    if (layout.recurrent_bytes() == 0 || layout.block_bytes() == 0) return 0;
    const double blocks =
        0.6 * static_cast<double>(layout.recurrent_bytes()) / static_cast<double>(layout.block_bytes());
    return std::max<std::int64_t>(static_cast<std::int64_t>(blocks) * numerics::kBlockTokens, 1024);
  }

  void keep_state(Sequence& s) {
    if (s.keep.empty() || s.state.position() != s.keep.front().position) return;
    const auto done = std::span(s.tokens).first(static_cast<std::size_t>(s.state.position()));
    if (make_room(layout.recurrent_bytes())) cache.insert(s.lineage, done, s.state.fork(), s.keep.front().segment);
    s.keep.erase(s.keep.begin());
  }

  // How fast prompts are computed: of steps that were mostly prefill.
  void count_time(std::span<const StepPlanItem> items, double seconds) {
    std::int64_t tokens = 0;
    for (const auto& item : items) tokens += item.tokens;
    if (tokens < 4 * std::ssize(items)) return;
    prefilled += tokens;
    prefill_seconds += seconds;
  }
  double tokens_per_second() const {
    return prefill_seconds > 0 ? static_cast<double>(prefilled) / prefill_seconds : 0;
  }

  // What one sequence takes at most: its blocks, another one where it leaves a shared one, and its recurrent part.
  std::size_t bytes_of(std::int64_t tokens) const {
    return static_cast<std::size_t>(model::StateLayout::blocks_for(tokens)) * layout.block_bytes() + fork_bytes();
  }
  // What another member of its group takes when its prompt is done.
  std::size_t fork_bytes() const { return layout.block_bytes() + layout.recurrent_bytes(); }

  std::size_t free_bytes() const {
    const std::size_t used = pool.used_bytes();
    return used < pool.limit() ? pool.limit() - used : 0;
  }

  // Lets kept states go until `bytes` are free, as far as there are any.
  bool make_room(std::size_t bytes) {
    while (free_bytes() < bytes && cache.evict()) {
    }
    return free_bytes() >= bytes;
  }

  // What the plan takes from the pool.
  std::size_t bytes_for(std::span<const StepPlanItem> items) {
    std::size_t bytes = 0;
    for (const auto& item : items) {
      const Sequence& s = at(item.sequence);
      bytes += s.state.bytes_to_extend(item.tokens);
    }
    return bytes;
  }

  // Starts what waits, in order, as far as there is room beside a block for each that runs: else it would be set back
  // again at once.
  void start_waiting() {
    for (auto& [id, s] : sequences) {
      if (!s.runs() || !s.waits) continue;
      const auto holders =
          static_cast<std::size_t>(std::count_if(sequences.begin(), sequences.end(), [](const auto& entry) {
            return entry.second.state.position() > 0 || entry.second.load;
          }));
      if (!make_room(bytes_of(static_cast<std::int64_t>(s.tokens.size())) + holders * layout.block_bytes())) return;
      start(s);
    }
  }

  // Takes the state of the sequence that came last, if there is one behind `but`.
  bool set_back_youngest(SequenceId but) {
    const auto youngest = std::find_if(sequences.rbegin(), sequences.rend(), [](const auto& entry) {
      return entry.second.state.position() > 0 || (entry.second.runs() && !entry.second.waits);
    });
    if (youngest == sequences.rend() || youngest->first == but) return false;
    Sequence& s = youngest->second;
    if (s.load) {  // it holds memory until it has ended
      cache.abandon(*s.load);
      s.load = nullptr;
    }
    if (s.state.position() > 0) {
      ++counters.set_back;
      const auto done = std::span(s.tokens).first(static_cast<std::size_t>(s.state.position()));
      if (options.reuse) cache.set_aside(s.lineage, done, std::move(s.state), tokens_per_second());
    }
    s.state.release();
    s.keep.clear();
    s.waits = s.runs();
    return true;
  }

  // The next step, for which there is room: kept states go first, then the youngest sequence is set back. The oldest
  // that runs never is, so the engine gets on.
  std::vector<StepPlanItem> plan_within_limit() {
    if (options.state_limit == state::Pool::kNoLimit) return plan();
    start_waiting();
    while (true) {
      auto items = plan();
      SequenceId oldest = 0;
      for (const auto& item : items) oldest = oldest == 0 ? item.sequence : std::min(oldest, item.sequence);
      bool waiting = false, loading = false;
      for (const auto& [id, s] : sequences) {
        waiting = waiting || (s.runs() && s.waits);
        loading = loading || s.load;
      }
      // Nothing runs, and nothing is on its way that will.
      const bool stuck = items.empty() && waiting && !loading;
      if (!stuck && make_room(bytes_for(items))) return items;
      if (!set_back_youngest(oldest)) return items;
      if (stuck) start_waiting();
    }
  }

  // Largest first onto the emptiest shard.
  void assign(std::vector<StepPlanItem> items) {
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

  void run(Shard& shard, Team& inner) {
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

  Event sample_next(Sequence& s, const float* logits) {
    const std::int64_t vocab = model.config().vocab;
    const std::int32_t token = sample(logits, vocab, s.params, static_cast<std::uint64_t>(s.sampled));
    const float logprob = model::token_logprob(logits, vocab, token);
    s.tokens.push_back(token);
    ++s.sampled;
    const bool stop =
        std::find(s.params.stop_tokens.begin(), s.params.stop_tokens.end(), token) != s.params.stop_tokens.end();
    const bool full =
        s.sampled >= s.params.max_tokens || static_cast<std::int64_t>(s.tokens.size()) >= model.config().max_context;
    s.status = stop ? Status::stopped : full ? Status::length : Status::decode;
    return {s.id, token, logprob, s.status, top_logprobs(logits, vocab, s.params.top_logprobs)};
  }

  void collect(const Shard& shard, std::vector<Event>& events) {
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
};

Engine::Engine(const model::Model& model, Team& team, const EngineOptions& options)
    : impl_(std::make_unique<Impl>(model, team, options)) {}
Engine::~Engine() = default;

std::vector<SequenceId> Engine::add(std::span<const std::int32_t> prompt, std::span<const SamplingParams> params,
                                    std::shared_ptr<const model::Adapter> adapter, const std::string& salt) {
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
  for (const auto& p : params) check(p);
  check_fits(static_cast<std::int64_t>(prompt.size()), params);
  const state::Digest lineage = impl_->options.reuse ? impl_->lineage(held, salt) : state::Digest{};
  std::vector<SequenceId> ids;
  for (const auto& p : params) {
    const SequenceId id = impl_->next_id++;
    impl_->sequences.emplace(
        id,
        Sequence{id, {prompt.begin(), prompt.end()}, state::SequenceState(impl_->pool), held, p, 0, Status::prefill});
    impl_->at(id).lineage = lineage;
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
  if (s.sampled >= s.params.max_tokens ||
      static_cast<std::int64_t>(s.tokens.size() + tokens.size()) >= impl_->model.config().max_context) {
    s.status = Status::length;
    return;
  }
  for (const auto token : tokens)
    if (token < 0 || token >= impl_->model.config().vocab)
      fail(ErrorCode::invalid_argument, "token {} is outside the vocabulary", token);
  s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
  s.status = Status::prefill;
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
  for (const auto& p : params) sampled = std::max(sampled, p.max_tokens);
  const std::int64_t tokens = std::min(prompt_tokens + sampled, impl_->model.config().max_context);
  const std::size_t bytes = impl_->bytes_of(tokens);
  if (bytes > impl_->options.state_limit)
    fail(ErrorCode::invalid_argument,
         "{} tokens, of prompt and to be sampled, may need {} of state; the limit is {}: {} tokens", tokens,
         bytes_text(bytes), bytes_text(impl_->options.state_limit), longest_sequence());
}

bool Engine::has_room(std::int64_t prompt_tokens, std::int64_t sequences) const {
  std::size_t live = 0;
  for (const auto& [id, s] : impl_->sequences) {
    live += std::max(s.state.bytes(), impl_->bytes_of(static_cast<std::int64_t>(s.tokens.size())));
  }
  const std::size_t limit = impl_->options.state_limit,
                    wanted =
                        impl_->bytes_of(prompt_tokens) + static_cast<std::size_t>(sequences - 1) * impl_->fork_bytes();
  return live <= limit && wanted <= limit - live;
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
    const auto done = std::span(s.tokens).first(static_cast<std::size_t>(s.state.position()));
    impl_->cache.insert(s.lineage, done, std::move(s.state), state::Segment::protected_use);
  }
  impl_->sequences.erase(id);
}

std::vector<Event> Engine::step() {
  Impl& impl = *impl_;
  impl.cache.tend();
  impl.finish_loads();
  auto plan = impl.plan_within_limit();
  std::vector<Event> events;
  while (plan.empty() && impl.wait_for_load()) {
    impl.finish_loads();
    plan = impl.plan_within_limit();
  }
  if (plan.empty()) return events;
  const auto start = std::chrono::steady_clock::now();
  for (const auto& item : plan)
    (item.tokens == 1 ? impl.counters.decode_tokens : impl.counters.prefill_tokens) += item.tokens;
  ++impl.counters.steps;
  impl.assign(plan);
  if (impl.shards.size() == 1) {
    impl.run(*impl.shards[0], impl.team);
  } else {
    impl.team.parallel(static_cast<std::int64_t>(impl.shards.size()), 1, [&](std::int64_t i, std::int64_t) {
      impl.run(*impl.shards[static_cast<std::size_t>(i)], solo_team());
    });
  }
  impl.count_time(plan, seconds_since(start));
  if (impl.options.reuse)
    for (const auto& item : plan) impl.keep_state(impl.at(item.sequence));
  for (const auto& shard : impl.shards) impl.collect(*shard, events);
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
  impl_->cache.forget();
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
