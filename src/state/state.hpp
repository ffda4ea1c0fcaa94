// state/: what a sequence has computed, and where it lives.
//
// A Pool owns blocks (64 tokens of every MLA layer) and recurrent slots (every KDA layer) of one layout and hands them
// out; a SequenceState is one sequence's block table and slot, with the position that they stand for. All of it is
// copied together.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "model/state_layout.hpp"

namespace tidelock::state {

// Thread-safe. Must outlive the sequences it serves.
class Pool {
 public:
  explicit Pool(const model::StateLayout& layout) : layout_(layout) {}
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  const model::StateLayout& layout() const { return layout_; }
  std::byte* take_block();  // content undefined
  std::byte* take_slot();   // zeroed: the empty sequence
  void give_block(std::byte* block);
  void give_slot(std::byte* slot);
  // Bytes allocated, used or not.
  std::size_t allocated_bytes() const;

 private:
  const model::StateLayout layout_;
  mutable std::mutex mutex_;
  std::vector<std::byte*> free_blocks_, free_slots_;
  std::size_t blocks_ = 0, slots_ = 0;
};

class SequenceState {
 public:
  explicit SequenceState(Pool& pool);
  ~SequenceState();
  SequenceState(const SequenceState&) = delete;
  SequenceState& operator=(const SequenceState&) = delete;
  SequenceState(SequenceState&& other) noexcept;
  SequenceState& operator=(SequenceState&& other) noexcept;

  std::int64_t position() const { return position_; }
  // The view for a pass over `tokens` more tokens; blocks are added as needed. Valid until the next call.
  model::SequenceView extend(std::int64_t tokens);
  // To be called when that pass has run.
  void advance(std::int64_t tokens) { position_ += tokens; }
  // A deep copy at the same position.
  SequenceState fork() const;
  // Back to the empty sequence; keeps its memory.
  void reset();

 private:
  Pool* pool_;
  std::vector<std::byte*> blocks_;
  std::byte* slot_ = nullptr;
  std::int64_t position_ = 0;
};

}  // namespace tidelock::state
