// States kept for sequences to come, wherever they live: in memory (prefix_cache.hpp) and, where there is one, in the
// tier on disk below (disk_tier.hpp).
//
// Write-back: a state is written when it is about to be evicted from memory, not when it is made. While memory is
// nearly full, those that would go first are written ahead, so that an eviction finds its copy made and nobody waits;
// a state whose turn comes before it was written is dropped. States in probation are never written.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>

#include "state/disk_options.hpp"
#include "state/prefix_cache.hpp"

namespace tidelock::state {

class DiskTier;
class StateLoad;

// How much to write ahead. A pure decision.
struct CleaningInput {
  std::size_t used = 0, limit = 0;  // bytes of the pool
  std::size_t clean = 0;            // bytes of kept states that have a copy
  std::uint64_t queued = 0;         // bytes being written
};
struct CleaningRule {
  double watermark = 0.7;                  // share of the pool in use from which on states are written
  double reserve = 0.15;                   // share of the pool that is to be ready to go
  std::uint64_t queue_bytes = 256U << 20;  // most that may be under way
};
bool clean_another(const CleaningInput& input, const CleaningRule& rule = {});

// Whether a sequence that must give up its memory is better written out and read back than computed again.
struct Ledger {
  double write_bytes_per_second = 0, read_bytes_per_second = 0, tokens_per_second = 0;  // 0: not known yet
};
bool cheaper_to_write(std::size_t bytes, std::int64_t tokens, const Ledger& ledger);
struct WriteChoice {  // one that was made, and from what
  std::size_t bytes = 0;
  std::int64_t tokens = 0;
  Ledger ledger = {};
  bool write = false;
};

// Not thread-safe: one thread owns it. The pool must outlive it.
class KeptStates {
 public:
  // Throws Error when the tier on disk cannot be opened (disk_tier.hpp).
  explicit KeptStates(Pool& pool, const std::optional<DiskOptions>& disk = std::nullopt);
  ~KeptStates();
  KeptStates(const KeptStates&) = delete;
  KeptStates& operator=(const KeptStates&) = delete;

  struct Hit {
    SequenceState state;              // to go on from; at 0 when nothing was found, or while it is on its way
    std::int64_t known = 0;           // see PrefixCache::Hit
    std::shared_ptr<StateLoad> load;  // not null: a deeper state is brought up from disk
  };
  Hit lookup(const Digest& lineage, std::span<const std::int32_t> prompt);
  // How deep states for this prompt lie: in memory, and on disk where that is worth a load. Changes nothing.
  struct Depth {
    std::int64_t memory = 0, disk = 0;
  };
  Depth depth(const Digest& lineage, std::span<const std::int32_t> prompt);
  // Begins to bring up what depth() says of the disk, which is not 0, before anybody asks for it.
  std::shared_ptr<StateLoad> bring_up(const Digest& lineage, std::span<const std::int32_t> prompt);
  // Keeps what such a load brought, once it has ended, as a state in memory. False: it failed.
  bool keep(const Digest& lineage, std::span<const std::int32_t> prompt, StateLoad& load);
  // Tokens that lookup() would find, in memory or below. Changes nothing.
  std::int64_t reach(const Digest& lineage, std::span<const std::int32_t> prompt);
  // Of a load: whether it has ended; to wait for that; and, then, what it brought for a prompt of so many tokens.
  // Nothing: it failed, look up again.
  static bool done(const StateLoad& load);
  static std::int64_t position_of(const StateLoad& load);  // of the state that it brings
  void wait(const StateLoad& load);
  std::optional<SequenceState> finish(StateLoad& load, std::int64_t asked_tokens);
  void abandon(StateLoad& load);  // waits; its memory is free then

  // See PrefixCache::insert.
  void insert(const Digest& lineage, std::span<const std::int32_t> tokens, SequenceState state, Segment segment);
  // Lets go of the state in memory that is worth least. False when there is none. Waits only where every other one is
  // being written.
  bool evict();
  // Keeps a sequence's state by writing it, if it pays; else drops it. Nothing where there is nowhere to write to.
  std::optional<WriteChoice> set_aside(const Digest& lineage, std::span<const std::int32_t> tokens, SequenceState state,
                                       double tokens_per_second);
  // Writes ahead. To be called between steps; does not wait.
  void tend();
  // Writes every protected state, the least used first, and waits for it: for an orderly end.
  void write_back();
  // Leaves no state in memory: protected ones go to disk, where there is one.
  void leave_memory();
  void forget();  // everything, on disk too

  PrefixCacheCounters counters() const;  // states found in memory and on disk
  DiskCounters disk_counters() const;
  std::int64_t written_out() const { return written_out_; }  // times that set_aside() wrote
  void check() const;                                        // for tests

 private:
  void take_news();
  bool write(CheckpointId id);
  bool backs_off() const { return std::chrono::steady_clock::now() < pause_until_; }

  Pool& pool_;
  PrefixCache memory_;
  std::unique_ptr<DiskTier> disk_;  // null: none
  std::int64_t written_out_ = 0;
  PrefixCacheCounters loaded_;  // what memory_ does not count
  // After a write that failed, none is begun for a while: twice as long each time, until one succeeds.
  std::chrono::steady_clock::time_point pause_until_{};
  std::chrono::milliseconds pause_{0};
};

}  // namespace tidelock::state
