#include "state/eviction.hpp"

namespace tidelock::state {

void EvictionOrder::insert(Id id, std::size_t bytes, Segment segment) {
  std::list<Id>& to = queue(segment);
  to.push_back(id);
  if (segment == Segment::probation) probation_used_ += bytes;
  entries_[id] = {segment, bytes, std::prev(to.end())};
}

void EvictionOrder::touch(Id id) {
  Entry& entry = entries_.at(id);
  if (entry.segment == Segment::probation) probation_used_ -= entry.bytes;
  protected_.splice(protected_.end(), queue(entry.segment), entry.place);
  entry.segment = Segment::protected_use;
}

void EvictionOrder::erase(Id id) {
  const auto found = entries_.find(id);
  if (found->second.segment == Segment::probation) probation_used_ -= found->second.bytes;
  queue(found->second.segment).erase(found->second.place);
  entries_.erase(found);
}

std::optional<EvictionOrder::Id> EvictionOrder::victim() const {
  if (over() || (protected_.empty() && !probation_.empty())) return probation_.front();
  if (!protected_.empty()) return protected_.front();
  return std::nullopt;
}

}  // namespace tidelock::state
