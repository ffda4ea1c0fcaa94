#include "engine/engine.hpp"

#include <algorithm>
#include <map>

#include "base/base.hpp"

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
  std::vector<SequenceId> clones;  // wait for this sequence's prompt; they fork from it

  std::int64_t pending() const { return static_cast<std::int64_t>(tokens.size()) - state.position(); }
  bool runs() const { return status == Status::prefill || status == Status::decode; }
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
  std::map<SequenceId, Sequence> sequences;
  SequenceId next_id = 1;
  std::vector<std::unique_ptr<Shard>> shards;
  Counters counters;

  Impl(const model::Model& m, Team& t, const EngineOptions& o)
      : model(m), team(t), options(o), layout(m.config()), pool(layout) {
    const bool sharded = m.weight_bytes() <= o.shard_weights_limit;
    for (int i = 0; i < (sharded ? t.threads() : 1); ++i) shards.push_back(std::make_unique<Shard>());
  }

  Sequence& at(SequenceId id) {
    const auto it = sequences.find(id);
    if (it == sequences.end()) fail(ErrorCode::not_found, "no sequence {}", id);
    return it->second;
  }

  std::vector<StepPlanItem> plan() {
    std::vector<PlanInput> inputs;
    for (const auto& [id, s] : sequences)
      if (s.runs() && s.pending() > 0) inputs.push_back({id, s.pending()});
    return plan_step(inputs, options.step_tokens);
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
                                    std::shared_ptr<const model::Adapter> adapter) {
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
  std::vector<SequenceId> ids;
  for (const auto& p : params) {
    const SequenceId id = impl_->next_id++;
    impl_->sequences.emplace(
        id,
        Sequence{
            id, {prompt.begin(), prompt.end()}, state::SequenceState(impl_->pool), held, p, 0, Status::prefill, {}});
    ids.push_back(id);
  }
  for (std::size_t i = 1; i < ids.size(); ++i) {
    impl_->at(ids[0]).clones.push_back(ids[i]);
    impl_->at(ids[i]).status = Status::stopped;  // until the first one's prompt is done
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

void Engine::remove(SequenceId id) {
  Sequence& s = impl_->at(id);
  std::erase_if(s.clones, [&](SequenceId clone) { return !impl_->sequences.contains(clone); });
  if (!s.clones.empty()) {  // the next of its group takes the prompt over
    Sequence& heir = impl_->at(s.clones.front());
    heir.clones.assign(s.clones.begin() + 1, s.clones.end());
    heir.state = std::move(s.state);
    heir.status = Status::prefill;
  }
  impl_->sequences.erase(id);
}

std::vector<Event> Engine::step() {
  Impl& impl = *impl_;
  const auto plan = impl.plan();
  std::vector<Event> events;
  if (plan.empty()) return events;
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
const Engine::Counters& Engine::counters() const {
  return impl_->counters;
}
std::size_t Engine::state_bytes() const {
  return impl_->pool.allocated_bytes();
}

}  // namespace tidelock::engine
