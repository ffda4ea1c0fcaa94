// Which kept state goes first when memory (or the disk) is short. Pure bookkeeping over ids and bytes: no clocks, no
// memory of its own to free. Private to state/.
//
// Two queues (spec of the state room, section 1.4): states that are likely to be wanted again (a request's end, a
// junction) live in the protected queue, by last use; those kept on the chance (inside a long prompt) wait in
// probation, which is bounded, and move up when they are first hit. Beside them, which protected states have a copy
// below ("clean"): the others are written in the order in which they would go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <unordered_map>

#include "state/segment.hpp"

namespace tidelock::state {

class EvictionOrder {
 public:
  using Id = std::uint64_t;
  static constexpr std::size_t kNoBound = std::numeric_limits<std::size_t>::max();
  // Probation may hold `probation_bytes`, and always one state.
  explicit EvictionOrder(std::size_t probation_bytes) : probation_bytes_(probation_bytes) {}

  void insert(Id id, std::size_t bytes, Segment segment);
  // It was used: last to go in the protected queue, whatever it was in.
  void touch(Id id);
  void erase(Id id);
  // The next to go: the oldest in probation while probation is over its bound or nothing else is left, else the one
  // that was not used for longest. Nothing when empty or all are held.
  std::optional<Id> victim() const;
  // Whether probation holds more than it may.
  bool over() const { return probation_.size() > 1 && probation_used_ > probation_bytes_; }

  // While held (it is being written) a state is no victim. It keeps its place.
  void hold(Id id);
  void release(Id id);
  std::size_t held() const { return held_; }
  // Whether a copy lies below.
  void set_clean(Id id, bool clean);
  // The protected one that goes first among those without a copy that are not held.
  std::optional<Id> oldest_dirty() const;
  std::size_t clean_bytes() const { return clean_bytes_; }  // of all that have one
  Segment segment(Id id) const { return entries_.at(id).segment; }
  bool contains(Id id) const { return entries_.contains(id); }
  std::size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    Segment segment;
    std::size_t bytes;
    std::uint64_t turn;  // order of use
    bool held = false, clean = false;
  };
  using Queue = std::map<std::uint64_t, Id>;  // by turn
  Queue& queue(Segment segment) { return segment == Segment::probation ? probation_ : protected_; }
  void enter(Id id, const Entry& entry);
  void leave(const Entry& entry);

  const std::size_t probation_bytes_;
  std::size_t probation_used_ = 0, clean_bytes_ = 0, held_ = 0;
  std::uint64_t next_turn_ = 1;
  Queue protected_, probation_;  // the next to go in front; none that is held
  Queue dirty_;                  // the protected ones without a copy
  std::unordered_map<Id, Entry> entries_;
};

}  // namespace tidelock::state
