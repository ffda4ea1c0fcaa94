// States kept for sequences to come. A state is found by the tokens that led to it: whoever asks with a prompt gets the
// deepest kept state that the prompt passes through, and computes the rest.
//
// Tokens are looked up by blocks of 64 in a chain of hashes, h(i) = SHA-256(h(i-1), tokens of block i), which starts at
// the lineage: model, adapter, tenant - whatever else decides a state's bits or who may have it. What can be continued
// is a checkpoint: blocks, recurrent slot and position together, at any position. A hit is at most at N - 1 of N
// tokens, since the last one has to run for its logits. States of one chain share their blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "state/eviction.hpp"
#include "state/state.hpp"

namespace tidelock::state {

using Digest = std::array<std::byte, 32>;
struct DigestHash {
  std::size_t operator()(const Digest& digest) const;
};

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
  // Keeps a state after `tokens`, all of which it has computed (state.position() of them). One that is there already is
  // only used again.
  void insert(const Digest& lineage, std::span<const std::int32_t> tokens, SequenceState state, Segment segment);
  // Lets go of the state that is worth least, and of the blocks that no other leads through. False when empty.
  bool evict();
  void clear();

  PrefixCacheCounters counters() const;
  // Every count agrees with what is there; throws Error{internal} naming what does not. For tests.
  void check() const;

 private:
  struct Node {  // one block of tokens in a chain; of a lineage itself, none
    Node* parent = nullptr;
    Digest digest{};
    std::byte* block = nullptr;  // of the states below, which hold it
    std::int64_t below = 0;      // checkpoints here and further down
    std::vector<EvictionOrder::Id> here;
  };
  struct Checkpoint {
    Node* node;
    std::vector<std::int32_t> tail;  // tokens behind the last whole block
    SequenceState state;
  };
  Node& node_at(const Digest& digest, Node* parent);
  std::vector<Node*> walk(const Digest& lineage, std::span<const std::int32_t> tokens);
  SequenceState from_blocks(const std::vector<Node*>& path);
  void erase(EvictionOrder::Id id);

  Pool& pool_;
  EvictionOrder order_;
  std::unordered_map<Digest, Node, DigestHash> nodes_;
  std::unordered_map<EvictionOrder::Id, Checkpoint> checkpoints_;
  EvictionOrder::Id next_id_ = 1;
  PrefixCacheCounters counters_;  // but what is now
};

// The lineage of states: everything beside the tokens that their bits, or the right to use them, depend on.
Digest lineage(std::span<const std::string_view> parts);

}  // namespace tidelock::state
