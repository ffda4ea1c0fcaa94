#include "state/eviction.hpp"

namespace tidelock::state {

void EvictionOrder::enter(Id id, const Entry& entry) {
  if (entry.held) return;
  queue(entry.segment)[entry.turn] = id;
  if (entry.segment == Segment::protected_use && !entry.clean) dirty_[entry.turn] = id;
}

void EvictionOrder::leave(const Entry& entry) {
  if (entry.held) return;
  queue(entry.segment).erase(entry.turn);
  dirty_.erase(entry.turn);
}

void EvictionOrder::insert(Id id, std::size_t bytes, Segment segment) {
  const Entry entry{segment, bytes, next_turn_++};
  if (segment == Segment::probation) probation_used_ += bytes;
  enter(id, entries_[id] = entry);
}

void EvictionOrder::touch(Id id) {
  Entry& entry = entries_.at(id);
  leave(entry);
  if (entry.segment == Segment::probation) probation_used_ -= entry.bytes;
  entry.segment = Segment::protected_use;
  entry.turn = next_turn_++;
  enter(id, entry);
}

void EvictionOrder::erase(Id id) {
  const auto found = entries_.find(id);
  const Entry& entry = found->second;
  leave(entry);
  if (entry.segment == Segment::probation) probation_used_ -= entry.bytes;
  if (entry.clean) clean_bytes_ -= entry.bytes;
  if (entry.held) --held_;
  entries_.erase(found);
}

std::optional<EvictionOrder::Id> EvictionOrder::victim() const {
  if (!probation_.empty() && (over() || protected_.empty())) return probation_.begin()->second;
  if (!protected_.empty()) return protected_.begin()->second;
  return std::nullopt;
}

void EvictionOrder::hold(Id id) {
  Entry& entry = entries_.at(id);
  if (entry.held) return;
  leave(entry);
  entry.held = true;
  ++held_;
}

void EvictionOrder::release(Id id) {
  Entry& entry = entries_.at(id);
  if (!entry.held) return;
  entry.held = false;
  --held_;
  enter(id, entry);
}

void EvictionOrder::set_clean(Id id, bool clean) {
  Entry& entry = entries_.at(id);
  if (entry.clean == clean) return;
  leave(entry);
  clean_bytes_ += clean ? entry.bytes : -entry.bytes;
  entry.clean = clean;
  enter(id, entry);
}

std::optional<EvictionOrder::Id> EvictionOrder::oldest_dirty() const {
  if (dirty_.empty()) return std::nullopt;
  return dirty_.begin()->second;
}

}  // namespace tidelock::state
