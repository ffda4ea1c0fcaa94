// States kept for sequences to come. A state is found by the tokens that led to it: whoever asks with a prompt gets the
// deepest kept state that the prompt passes through, and computes the rest.
//
// Tokens are looked up by blocks of 64 in a chain of hashes, h(i) = SHA-256(h(i-1), tokens of block i), which starts at
// the lineage: model, adapter, tenant - whatever else decides a state's bits or who may have it. What can be continued
// is a checkpoint: blocks, recurrent slot and position together, at any position. A hit is at most at N - 1 of N
// tokens, since the last one has to run for its logits. States of one chain share their blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "state/chain_index.hpp"
#include "state/eviction.hpp"
#include "state/state.hpp"

namespace tidelock::state {

struct PrefixCacheCounters {
  std::int64_t lookups = 0, hits = 0;
  std::int64_t asked_tokens = 0, hit_tokens = 0;
  // Tokens that some kept state has in its blocks, but no checkpoint to continue from stood at their end.
  std::int64_t lost_no_checkpoint_tokens = 0;
  std::int64_t inserted = 0, evicted = 0;
  std::int64_t checkpoints = 0, blocks = 0;  // now
};

// Not thread-safe: one thread owns it. The pool must outlive it.
class PrefixCache {
 public:
  // Room that interior checkpoints may take, as a share of the pool's limit.
  static constexpr double kProbationShare = 0.05;

  explicit PrefixCache(Pool& pool);

  struct Hit {
    SequenceState state;     // at the position to go on from; 0 when nothing was found
    std::int64_t known = 0;  // tokens of the prompt, in whole blocks, that kept states have passed through: where this
                             // lies beyond the state, a checkpoint would have helped (a junction)
  };
  Hit lookup(const Digest& lineage, std::span<const std::int32_t> prompt);
  // Tokens that lookup() would find, and the blocks that lead there or further. Changes nothing.
  struct Reach {
    std::int64_t position = 0;
    std::vector<std::byte*> blocks;  // of whole blocks, in order; null where the model has none
  };
  Reach reach(const Digest& lineage, std::span<const std::int32_t> prompt);
  // Keeps a state after `tokens`, all of which it has computed (state.position() of them). One that is there already is
  // only used again: then, and for no tokens, nothing is returned.
  std::optional<CheckpointId> insert(const Digest& lineage, std::span<const std::int32_t> tokens, SequenceState state,
                                     Segment segment);
  // Lets go of the state that is worth least, and of the blocks that no other leads through. False when there is none,
  // or all are held.
  bool evict();
  void clear();

  // For copies below. What a kept state is, root first; the state stays as it is for as long as it is held by anybody.
  struct View {
    std::vector<Digest> chain;  // of the lineage, then of every whole block
    std::vector<std::int32_t> tail;
    Segment segment;
    std::shared_ptr<const SequenceState> state;
  };
  View view(CheckpointId id) const;
  std::optional<CheckpointId> find(const Digest& node, std::span<const std::int32_t> tail) const {
    return index_.find(node, tail);
  }
  // Which of them have copies, and which are being written: see there.
  EvictionOrder& order() { return order_; }

  PrefixCacheCounters counters() const;
  // Every count agrees with what is there; throws Error{internal} naming what does not. For tests.
  void check() const;

 private:
  using Index = ChainIndex<std::byte*>;  // the blocks belong to the states behind them
  struct Found {
    Index::Path path;
    std::optional<Index::Best> best;
    std::int64_t known = 0, position = 0;
    bool by_blocks = false;  // there is no recurrent part: every block's end is a place to go on from
  };
  Found look(const Digest& lineage, std::span<const std::int32_t> prompt);
  SequenceState from_blocks(const Index::Path& path);
  void erase(CheckpointId id);

  Pool& pool_;
  EvictionOrder order_;
  Index index_;
  std::unordered_map<CheckpointId, std::shared_ptr<SequenceState>> states_;
  CheckpointId next_id_ = 1;
  PrefixCacheCounters counters_;  // but what is now
};

}  // namespace tidelock::state
