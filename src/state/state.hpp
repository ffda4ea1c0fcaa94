// state/: what a sequence has computed, and where it lives.
//
// A Pool owns blocks (64 tokens of every MLA layer) and recurrent slots (every KDA layer) of one layout and hands them
// out; a SequenceState is one sequence's block table and slot, with the position that they stand for. The two parts
// move together. Blocks that are full never change, so sequences share them by reference; a block that is still
// written, and the recurrent slot, belong to one sequence. prefix_cache.hpp keeps states for sequences to come.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "model/state_layout.hpp"

namespace tidelock::state {

// Thread-safe. Must outlive the sequences it serves.
class Pool {
 public:
  static constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

  // `limit`: bytes that callers mean to stay below. The pool hands out more when asked: who decides what has to go is
  // above it. It only gives memory that lies idle back to the system rather than grow past the limit.
  explicit Pool(const model::StateLayout& layout, std::size_t limit = kNoLimit) : layout_(layout), limit_(limit) {}
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  const model::StateLayout& layout() const { return layout_; }
  std::size_t limit() const { return limit_; }
  std::byte* take_block();     // content undefined; one reference
  std::byte* take_slot();      // zeroed: the empty sequence
  std::byte* take_raw_slot();  // content undefined
  std::byte* copy_slot(const std::byte* slot);
  void share_block(std::byte* block);  // one reference more
  void give_block(std::byte* block);   // one less; the last one frees it
  void give_slot(std::byte* slot);
  bool shared(const std::byte* block) const;  // more than one reference
  // Gives what lies idle back to the system.
  void give_back();
  // Bytes allocated, used or not.
  std::size_t allocated_bytes() const;
  // Bytes handed out; shared blocks count once.
  std::size_t used_bytes() const;

 private:
  std::byte* take(std::vector<std::byte*>& free, std::size_t bytes);  // locks
  void release_idle(std::size_t most);

  const model::StateLayout layout_;
  const std::size_t limit_;
  mutable std::mutex mutex_;
  std::vector<std::byte*> free_blocks_, free_slots_;
  std::unordered_map<const std::byte*, int> extra_;  // references beyond the first, where there are any
  std::size_t allocated_ = 0;
};

class SequenceState {
 public:
  explicit SequenceState(Pool& pool) : pool_(&pool) {}  // takes no memory before extend()
  // Of memory that the caller took from the pool: one reference of each block, and a slot or null.
  SequenceState(Pool& pool, std::vector<std::byte*> blocks, std::byte* slot, std::int64_t position)
      : pool_(&pool), blocks_(std::move(blocks)), slot_(slot), position_(position) {}
  ~SequenceState();
  SequenceState(const SequenceState&) = delete;
  SequenceState& operator=(const SequenceState&) = delete;
  SequenceState(SequenceState&& other) noexcept;
  SequenceState& operator=(SequenceState&& other) noexcept;

  std::int64_t position() const { return position_; }
  // The view for a pass over `tokens` more tokens; blocks are added as needed, and a shared one that would be written
  // is copied first. Valid until the next call.
  model::SequenceView extend(std::int64_t tokens);
  // To be called when that pass has run.
  void advance(std::int64_t tokens) { position_ += tokens; }
  // Another sequence at the same position. Neither sees what the other does later.
  SequenceState fork() const;
  // Back to the empty sequence. What it shared it lets go of; the rest of its memory it keeps.
  void reset();
  // Back to the empty sequence, without memory.
  void release();

  std::span<std::byte* const> blocks() const { return blocks_; }
  std::byte* slot() const { return slot_; }  // null: none
  // Gives back blocks beyond the position, which a pass took for itself.
  void trim();
  // `block` stands in for the i-th, which holds the same: shared from now on.
  void replace_block(std::size_t i, std::byte* block);

  // Bytes that extend(tokens) takes from the pool, at most.
  std::size_t bytes_to_extend(std::int64_t tokens) const;
  // Bytes of this sequence alone, as if it shared nothing.
  std::size_t bytes() const;

 private:
  Pool* pool_;
  std::vector<std::byte*> blocks_;
  std::byte* slot_ = nullptr;
  std::int64_t position_ = 0;
};

}  // namespace tidelock::state
