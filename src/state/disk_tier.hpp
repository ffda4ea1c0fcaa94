// Kept states on disk: the index of what lies there, and the two threads that write and read it. What prefix_cache.hpp
// is for memory, this is below it: states are found by their tokens in the same way, blocks of one chain are written
// once, what is used least goes when the limit is reached.
//
// All calls are for one thread, which is never kept waiting but by those that say so. A state is there when all of its
// records are; one that fails its checksums on the way up is forgotten, with everything that needs the same record.
// Private to state/.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "state/chain_index.hpp"
#include "state/disk_options.hpp"
#include "state/disk_worker.hpp"
#include "state/prefix_cache.hpp"
#include "state/segment_store.hpp"
#include "state/state.hpp"

namespace tidelock::state {

// A state on its way up. Whoever holds it may let it go at any time.
class StateLoad {
 public:
  bool done() const { return done_.load(std::memory_order_acquire); }
  std::int64_t position() const { return state_.position(); }

 private:
  friend class DiskTier;
  explicit StateLoad(SequenceState state) : state_(std::move(state)) {}
  CheckpointId id_ = 0;
  SequenceState state_;
  std::vector<WantedRecord> records_;
  std::atomic<bool> done_ = false;
};

class DiskTier {
 public:
  // Throws as SegmentStore does. The pool must outlive it.
  DiskTier(Pool& pool, const DiskOptions& options);
  ~DiskTier();  // ends what is under way
  DiskTier(const DiskTier&) = delete;
  DiskTier& operator=(const DiskTier&) = delete;

  // Tokens of the deepest state that these lead through; 0: none.
  std::int64_t reach(const Digest& lineage, std::span<const std::int32_t> tokens);
  // Begins to bring up that state, which must be there. `have`: blocks that lie in memory, in order from the first.
  std::shared_ptr<StateLoad> load(const Digest& lineage, std::span<const std::int32_t> tokens,
                                  std::span<std::byte* const> have);
  void wait(const StateLoad& load);
  // The state of a load that is done; nothing when it failed, which is then counted and forgotten.
  std::optional<SequenceState> finish(StateLoad& load);

  bool has(const Digest& node, std::span<const std::int32_t> tail) const { return index_.find(node, tail).has_value(); }
  // Begins to write a state. False when it is larger than the whole tier.
  using StoreId = std::uint64_t;
  bool store(const PrefixCache::View& view, StoreId tag);
  std::uint64_t queued_bytes() const { return queued_bytes_; }

  struct Stored {
    StoreId tag;
    bool ok;
  };
  struct Place {
    Digest node;
    std::vector<std::int32_t> tail;
  };
  struct News {
    std::vector<Stored> stored;
    std::vector<Place> gone;  // states that had to go, or that failed
  };
  // What happened since the last call.
  News poll();
  void wait_for_news();  // until a store that is under way has ended

  void clear();
  DiskCounters counters() const;
  void check() const;  // for tests; throws Error{internal}

 private:
  struct Block {
    std::optional<Location> location;
    bool queued = false;  // to be written by a store under way
  };
  using Index = ChainIndex<Block>;
  struct Checkpoint {
    std::optional<Location> location;  // none: it is being written
    Segment segment;
  };
  struct Ended {  // a store
    CheckpointId id;
    StoreId tag;
    std::vector<Digest> blocks;       // that it wrote, in order; the checkpoint's own record follows
    std::vector<Location> locations;  // empty: it failed
    std::uint64_t bytes;
  };
  struct Job;
  bool whole_chain(CheckpointId id) const;  // every block of it is there
  static RecordInfo info_of(const Index::Node& node, std::size_t depth);
  RecordInfo info_of(CheckpointId id, std::size_t depth) const;
  std::shared_ptr<Job> prepare(const PrefixCache::View& view, CheckpointId id);
  void run(Job& job, DiskLane& lane);
  void settle(const Ended& ended);
  void erase(CheckpointId id);
  bool make_room(std::uint64_t bytes);
  void discard(std::vector<Location> locations);
  void adopt();
  Index::Node* take_in(const Digest& lineage, std::span<const SegmentStore::Found* const> chain);
  void forget_behind(const Digest& node);

  Pool& pool_;
  const std::uint64_t limit_;
  SegmentStore store_;
  Index index_;
  EvictionOrder order_;  // of checkpoints that are there whole
  std::unordered_map<CheckpointId, Checkpoint> checkpoints_;
  CheckpointId next_id_ = 1;
  std::uint64_t used_bytes_ = 0;    // of records that are there, or are to be
  std::uint64_t queued_bytes_ = 0;  // of stores under way
  News news_;
  DiskCounters counters_;  // but what is now

  std::mutex mutex_;  // of what the threads tell
  std::condition_variable told_;
  std::vector<Ended> ended_;
  std::atomic<std::int64_t> store_microseconds_ = 0, load_microseconds_ = 0, loaded_bytes_ = 0;

  DiskWorker writer_, reader_;  // last: they use the above
};

}  // namespace tidelock::state
