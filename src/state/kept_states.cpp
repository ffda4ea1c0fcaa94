#include "state/kept_states.hpp"

#include <algorithm>

#include "state/disk_tier.hpp"

namespace tidelock::state {

bool clean_another(const CleaningInput& input, const CleaningRule& rule) {
  if (input.limit == Pool::kNoLimit || input.queued >= rule.queue_bytes) return false;
  const auto limit = static_cast<double>(input.limit);
  return static_cast<double>(input.used) > rule.watermark * limit &&
         static_cast<double>(input.clean) < rule.reserve * limit;
}

bool cheaper_to_write(std::size_t bytes, std::int64_t tokens, const Ledger& ledger) {
  // A disk that was not measured yet is taken for a slow one; a model, for one that is worth it.
  constexpr double kSlowDisk = 100e6;
  const auto rate = [](double known) { return known > 0 ? known : kSlowDisk; };
  const double transfer =
      static_cast<double>(bytes) * (1 / rate(ledger.write_bytes_per_second) + 1 / rate(ledger.read_bytes_per_second));
  return ledger.tokens_per_second <= 0 || transfer < static_cast<double>(tokens) / ledger.tokens_per_second;
}

KeptStates::KeptStates(Pool& pool, const std::optional<DiskOptions>& disk)
    : pool_(pool), memory_(pool), disk_(disk ? std::make_unique<DiskTier>(pool, *disk) : nullptr) {}
KeptStates::~KeptStates() = default;

KeptStates::Depth KeptStates::depth(const Digest& lineage, std::span<const std::int32_t> prompt) {
  Depth out;
  if (prompt.empty()) return out;
  out.memory = memory_.reach(lineage, prompt).position;
  if (!disk_) return out;
  take_news();
  const std::int64_t below = disk_->reach(lineage, prompt.first(prompt.size() - 1));
  // Less than a block more is computed sooner than it is read.
  if (below > 0 && (out.memory == 0 || below >= out.memory + static_cast<std::int64_t>(kBlockTokens))) out.disk = below;
  return out;
}

std::shared_ptr<StateLoad> KeptStates::bring_up(const Digest& lineage, std::span<const std::int32_t> prompt) {
  return disk_->load(lineage, prompt.first(prompt.size() - 1), memory_.reach(lineage, prompt).blocks);
}

bool KeptStates::keep(const Digest& lineage, std::span<const std::int32_t> prompt, StateLoad& load) {
  auto state = disk_->finish(load);
  if (!state) return false;
  const auto tokens = prompt.first(static_cast<std::size_t>(state->position()));
  insert(lineage, tokens, std::move(*state), Segment::protected_use);
  return true;
}

KeptStates::Hit KeptStates::lookup(const Digest& lineage, std::span<const std::int32_t> prompt) {
  if (const Depth found = depth(lineage, prompt); found.disk > 0) {
    const std::size_t blocks =
        std::max(memory_.reach(lineage, prompt).blocks.size(), static_cast<std::size_t>(found.disk) / kBlockTokens);
    return {SequenceState(pool_), static_cast<std::int64_t>(blocks * kBlockTokens), bring_up(lineage, prompt)};
  }
  PrefixCache::Hit hit = memory_.lookup(lineage, prompt);
  return {std::move(hit.state), hit.known, nullptr};
}

std::int64_t KeptStates::reach(const Digest& lineage, std::span<const std::int32_t> prompt) {
  if (prompt.empty()) return 0;
  const std::int64_t below = disk_ ? disk_->reach(lineage, prompt.first(prompt.size() - 1)) : 0;
  return std::max(memory_.reach(lineage, prompt).position, below);
}

bool KeptStates::done(const StateLoad& load) {
  return load.done();
}

std::int64_t KeptStates::position_of(const StateLoad& load) {
  return load.position();
}

void KeptStates::wait(const StateLoad& load) {
  disk_->wait(load);
}

std::optional<SequenceState> KeptStates::finish(StateLoad& load, std::int64_t asked_tokens) {
  auto state = disk_->finish(load);
  if (!state) return state;
  ++loaded_.lookups;
  ++loaded_.hits;
  loaded_.asked_tokens += asked_tokens;
  loaded_.hit_tokens += state->position();
  return state;
}

void KeptStates::abandon(StateLoad& load) {
  disk_->wait(load);
  disk_->finish(load);
}

PrefixCacheCounters KeptStates::counters() const {
  PrefixCacheCounters all = memory_.counters();
  all.lookups += loaded_.lookups;
  all.hits += loaded_.hits;
  all.asked_tokens += loaded_.asked_tokens;
  all.hit_tokens += loaded_.hit_tokens;
  return all;
}

void KeptStates::insert(const Digest& lineage, std::span<const std::int32_t> tokens, SequenceState state,
                        Segment segment) {
  const auto id = memory_.insert(lineage, tokens, std::move(state), segment);
  if (!id || !disk_) return;
  const PrefixCache::View view = memory_.view(*id);
  if (disk_->has(view.chain.back(), view.tail)) memory_.order().set_clean(*id, true);
}

void KeptStates::take_news() {
  if (!disk_) return;
  const DiskTier::News news = disk_->poll();
  for (const auto& [id, ok] : news.stored) {
    const bool kept = memory_.order().contains(id);
    if (kept) memory_.order().release(id);
    if (ok) {
      pause_ = std::chrono::milliseconds(0);
    } else if (kept) {  // else it was forgotten meanwhile
      memory_.order().set_clean(id, false);
      pause_ = std::clamp(2 * pause_, std::chrono::milliseconds(1000), std::chrono::milliseconds(60000));
      pause_until_ = std::chrono::steady_clock::now() + pause_;
    }
  }
  for (const auto& [node, tail] : news.gone)
    if (const auto id = memory_.find(node, tail)) memory_.order().set_clean(*id, false);
}

// Begins to write a state, which stays where it is until that is done. False when it cannot go down.
bool KeptStates::write(CheckpointId id) {
  memory_.order().set_clean(id, true);
  if (!disk_->store(memory_.view(id), id)) return false;
  memory_.order().hold(id);
  return true;
}

void KeptStates::tend() {
  if (!disk_) return;
  take_news();
  while (!backs_off() &&
         clean_another({pool_.used_bytes(), pool_.limit(), memory_.order().clean_bytes(), disk_->queued_bytes()})) {
    const auto next = memory_.order().oldest_dirty();
    if (!next) return;
    write(*next);
  }
}

bool KeptStates::evict() {
  take_news();
  while (!memory_.evict()) {
    if (memory_.order().held() == 0) return false;
    disk_->wait_for_news();
    take_news();
  }
  return true;
}

std::optional<WriteChoice> KeptStates::set_aside(const Digest& lineage, std::span<const std::int32_t> tokens,
                                                 SequenceState state, double tokens_per_second) {
  if (!disk_ || tokens.empty() || backs_off()) return std::nullopt;
  const DiskCounters counters = disk_->counters();
  const auto rate = [](std::int64_t bytes, double seconds) {
    return seconds > 0 ? static_cast<double>(bytes) / seconds : 0;
  };
  WriteChoice choice{state.bytes(), std::ssize(tokens)};
  choice.ledger = {rate(counters.stored_bytes, counters.store_seconds),
                   rate(counters.loaded_bytes, counters.load_seconds), tokens_per_second};
  choice.write = cheaper_to_write(choice.bytes, choice.tokens, choice.ledger);
  if (!choice.write) return choice;
  const auto id = memory_.insert(lineage, tokens, std::move(state), Segment::protected_use);
  if (id && write(*id)) ++written_out_;
  return choice;
}

void KeptStates::write_back() {
  if (!disk_) return;
  take_news();
  while (const auto next = memory_.order().oldest_dirty()) {
    if (backs_off()) break;
    write(*next);
    while (disk_->queued_bytes() >= CleaningRule{}.queue_bytes) {
      disk_->wait_for_news();
      take_news();
    }
  }
  while (disk_->queued_bytes() > 0) {
    disk_->wait_for_news();
    take_news();
  }
}

void KeptStates::leave_memory() {
  write_back();
  while (evict()) {
  }
}

void KeptStates::forget() {
  memory_.clear();
  if (disk_) disk_->clear();
}

DiskCounters KeptStates::disk_counters() const {
  return disk_ ? disk_->counters() : DiskCounters{};
}

void KeptStates::check() const {
  memory_.check();
  if (disk_) disk_->check();
}

}  // namespace tidelock::state
