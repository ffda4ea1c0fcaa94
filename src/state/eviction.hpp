// Which kept state goes first when memory is short. Pure bookkeeping over ids and bytes: no clocks, no memory of its
// own to free. Private to state/.
//
// Two queues (spec of the state room, section 1.4): states that are likely to be wanted again (a request's end, a
// junction) live in the protected queue, by last use; those kept on the chance (inside a long prompt) wait in
// probation, which is bounded, and move up when they are first hit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <unordered_map>

namespace tidelock::state {

enum class Segment { protected_use, probation };

class EvictionOrder {
 public:
  using Id = std::uint64_t;
  // Probation may hold `probation_bytes`, and always one state.
  explicit EvictionOrder(std::size_t probation_bytes) : probation_bytes_(probation_bytes) {}

  void insert(Id id, std::size_t bytes, Segment segment);
  // It was used: last to go in the protected queue, whatever it was in.
  void touch(Id id);
  void erase(Id id);
  // The next to go: the oldest in probation while probation is over its bound or nothing else is left, else the one
  // that was not used for longest. Nothing when empty.
  std::optional<Id> victim() const;
  // Whether probation holds more than it may.
  bool over() const { return probation_.size() > 1 && probation_used_ > probation_bytes_; }

 private:
  struct Entry {
    Segment segment;
    std::size_t bytes;
    std::list<Id>::iterator place;
  };
  std::list<Id>& queue(Segment segment) { return segment == Segment::probation ? probation_ : protected_; }

  const std::size_t probation_bytes_;
  std::size_t probation_used_ = 0;
  std::list<Id> protected_, probation_;  // the next to go in front
  std::unordered_map<Id, Entry> entries_;
};

}  // namespace tidelock::state
