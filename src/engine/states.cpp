// Where the states of sequences come from and go to: started from kept ones, kept for others, set back when memory is
// short.
#include <algorithm>
#include <array>

#include "base/base.hpp"
#include "engine/impl.hpp"
#include "model/content_hash.hpp"

namespace tidelock::engine {

std::optional<state::DiskOptions> Engine::Impl::disk_options() const {
  if (options.disk_folder.empty()) return std::nullopt;
  if (!options.reuse) fail(ErrorCode::invalid_argument, "a folder for kept states needs states to be kept");
  return state::DiskOptions{options.disk_folder, options.disk_limit, identity(), options.disk_io};
}

state::Digest Engine::Impl::identity() const {
  const std::string weights = model::content_hash(model, team),
                    form =
                        fmt::format("{} {} {}", layout.block_bytes(), layout.recurrent_bytes(), numerics::kBlockTokens);
  const std::array<std::string_view, 3> parts{std::string_view(numerics::kContractName), weights, form};
  return state::lineage(parts);
}

Sequence& Engine::Impl::at(SequenceId id) {
  const auto it = sequences.find(id);
  if (it == sequences.end()) fail(ErrorCode::not_found, "no sequence {}", id);
  return it->second;
}

std::vector<StepPlanItem> Engine::Impl::plan() {
  std::vector<PlanInput> inputs;
  for (const auto& [id, s] : sequences)
    if (s.runs() && s.pending() > 0 && !s.waits && !s.load) inputs.push_back({id, s.next(), s.prompt, s.priority});
  const StepPlanner::Memory before = planner.memory();
  auto items = planner.plan(inputs, budget.tokens());
  if (options.observer != nullptr) options.observer->planned(before, inputs, budget.tokens(), items);
  return items;
}

state::Digest Engine::Impl::lineage(const model::Adapter* adapter, const std::string& salt) {
  const std::string hash = adapter != nullptr ? adapter->sha256() : "";
  const std::array<std::string_view, 2> parts{hash, salt};
  return state::lineage(parts);
}

std::shared_ptr<state::StateLoad> Engine::Impl::take_prefetch(const Sequence& s) {
  for (auto it = prefetches.begin(); it != prefetches.end(); ++it) {
    const std::int64_t position = state::KeptStates::position_of(*it->load);
    if (it->lineage != s.lineage || position >= std::ssize(s.tokens) ||
        !std::equal(it->prompt.begin(), it->prompt.begin() + position, s.tokens.begin()) ||
        position < cache.reach(s.lineage, s.tokens))
      continue;
    auto load = std::move(it->load);
    prefetches.erase(it);
    ++counters.prefetches_late;
    return load;
  }
  return nullptr;
}

void Engine::Impl::finish_prefetches() {
  std::erase_if(prefetches, [&](Prefetch& one) {
    if (!state::KeptStates::done(*one.load)) return false;
    const std::int64_t tokens = state::KeptStates::position_of(*one.load);
    if (cache.keep(one.lineage, one.prompt, *one.load)) counters.prefetched_tokens += tokens;
    return true;
  });
}

void Engine::Impl::abandon_prefetches() {
  for (Prefetch& one : prefetches) cache.abandon(*one.load);
  prefetches.clear();
}

Engine::Prefetched Engine::prefetch(std::span<const std::int32_t> prompt,
                                    const std::shared_ptr<const model::Adapter>& adapter, const std::string& salt) {
  constexpr std::size_t kMost = 8;         // at once
  constexpr std::size_t kLargestPart = 4;  // of the memory for states: a hint must not push everything out
  Impl& impl = *impl_;
  if (!impl.options.reuse || prompt.empty()) return {};
  impl.finish_prefetches();
  const state::Digest lineage = Impl::lineage(adapter.get(), salt);
  const auto depth = impl.cache.depth(lineage, prompt);
  const Prefetched no{depth.memory, depth.memory};
  if (depth.disk == 0) return no;
  for (const Prefetch& one : impl.prefetches)
    if (one.lineage == lineage && std::ranges::equal(one.prompt, prompt))
      return {depth.memory, state::KeptStates::position_of(*one.load)};
  const std::size_t bytes = impl.bytes_of(depth.disk);
  if (impl.prefetches.size() >= kMost || bytes > impl.pool.limit() / kLargestPart || !impl.make_room(bytes)) return no;
  if (impl.cache.depth(lineage, prompt).disk != depth.disk) return no;  // making room has changed what there is
  impl.prefetches.push_back({lineage, {prompt.begin(), prompt.end()}, impl.cache.bring_up(lineage, prompt)});
  ++impl.counters.prefetches;
  return {depth.memory, depth.disk};
}

void Engine::Impl::start(Sequence& s) {
  s.waits = false;
  if (!options.reuse) return;
  s.load = take_prefetch(s);
  if (s.load) {
    s.known = state::KeptStates::position_of(*s.load) / numerics::kBlockTokens * numerics::kBlockTokens;
    return;
  }
  state::KeptStates::Hit hit = cache.lookup(s.lineage, s.tokens);
  s.known = hit.known;
  s.load = std::move(hit.load);
  if (!s.load) begin_at(s, std::move(hit.state), false);
}

void Engine::Impl::begin_at(Sequence& s, state::SequenceState state, bool from_disk) {
  s.state = std::move(state);
  s.prompt = class_of(s.pending());
  s.keep = keep_points(s.state.position(), s.known, static_cast<std::int64_t>(s.tokens.size()), interior());
  if (options.observer != nullptr) options.observer->started(s.id, std::ssize(s.tokens), s.state.position(), from_disk);
  if (s.sampled != 0) return;
  s.cached = s.state.position();
  for (const SequenceId id : s.clones)
    if (sequences.contains(id)) at(id).cached = s.cached;
}

void Engine::Impl::finish_loads() {
  finish_prefetches();
  for (auto& [id, s] : sequences)
    while (s.load && state::KeptStates::done(*s.load)) {
      const auto load = std::move(s.load);
      s.load = nullptr;
      auto state = cache.finish(*load, static_cast<std::int64_t>(s.tokens.size()));
      if (!state) {
        start(s);
        continue;
      }
      begin_at(s, std::move(*state), true);
      keep_copy(s, state::Segment::protected_use);
    }
}

bool Engine::Impl::wait_for_load() {
  for (auto& [id, s] : sequences) {
    if (!s.load) continue;
    cache.wait(*s.load);
    return true;
  }
  return false;
}

std::int64_t Engine::Impl::interior() const {
  if (layout.recurrent_bytes() == 0 || layout.block_bytes() == 0) return 0;
  const double blocks = 0.6 * static_cast<double>(layout.recurrent_bytes()) / static_cast<double>(layout.block_bytes());
  return std::max<std::int64_t>(static_cast<std::int64_t>(blocks) * numerics::kBlockTokens, 1024);
}

void Engine::Impl::keep_state(Sequence& s) {
  if (s.keep.empty() || s.state.position() != s.keep.front().position) return;
  keep_copy(s, s.keep.front().segment);
  s.keep.erase(s.keep.begin());
}

void Engine::Impl::keep_copy(Sequence& s, state::Segment segment) {
  if (make_room(layout.recurrent_bytes())) cache.insert(s.lineage, s.done(), s.state.fork(), segment);
}

double Engine::Impl::tokens_per_second() const {
  return prefill_seconds > 0 ? static_cast<double>(prefilled) / prefill_seconds : 0;
}

std::size_t Engine::Impl::bytes_of(std::int64_t tokens) const {
  return static_cast<std::size_t>(model::StateLayout::blocks_for(tokens)) * layout.block_bytes() + fork_bytes();
}

std::size_t Engine::Impl::free_bytes() const {
  const std::size_t used = pool.used_bytes();
  return used < pool.limit() ? pool.limit() - used : 0;
}

bool Engine::Impl::make_room(std::size_t bytes) {
  while (free_bytes() < bytes && cache.evict()) {
  }
  return free_bytes() >= bytes;
}

std::size_t Engine::Impl::bytes_for(std::span<const StepPlanItem> items) {
  std::size_t bytes = 0;
  for (const auto& item : items) {
    const Sequence& s = at(item.sequence);
    bytes += s.state.bytes_to_extend(item.tokens);
  }
  return bytes;
}

void Engine::Impl::start_waiting() {
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

bool Engine::Impl::set_back_youngest(SequenceId but) {
  std::vector<Holding> held;
  for (const auto& [id, one] : sequences) held.push_back({id, one.state.position() > 0 || (one.runs() && !one.waits)});
  const std::optional<SequenceId> youngest = choose_to_set_back(held, but);
  if (!youngest) return false;
  Sequence& s = at(*youngest);
  std::optional<state::WriteChoice> weighed;
  if (s.load) {  // it holds memory until it has ended
    cache.abandon(*s.load);
    s.load = nullptr;
  }
  if (s.state.position() > 0) {
    ++counters.set_back;
    const auto done = s.done();  // before its state goes
    if (options.reuse) weighed = cache.set_aside(s.lineage, done, std::move(s.state), tokens_per_second());
  }
  s.state.release();
  s.keep.clear();
  s.waits = s.runs();
  if (options.observer != nullptr) options.observer->set_back(held, but, s.id, weighed);
  return true;
}

std::vector<StepPlanItem> Engine::Impl::plan_within_limit() {
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

}  // namespace tidelock::engine
