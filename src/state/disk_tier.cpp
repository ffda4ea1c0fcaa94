#include "state/disk_tier.hpp"

#include <algorithm>

#include "base/base.hpp"
#include "base/clock.hpp"

namespace tidelock::state {
namespace {

// A file holds many records and is a small part of the limit: room comes back piece by piece where files end, too.
std::uint64_t segment_bytes(std::uint64_t limit) {
  return std::clamp<std::uint64_t>(limit / 32, 1 << 20, 256 << 20);
}

std::unique_ptr<DiskIo> io_of(const DiskOptions& options) {
  return options.io ? options.io() : make_disk_io();
}

std::int64_t microseconds_since(std::chrono::steady_clock::time_point start) {
  return static_cast<std::int64_t>(seconds_since(start) * 1e6);
}

}  // namespace

struct DiskTier::Job {
  Ended ended;
  std::vector<NewRecord> records;
  std::shared_ptr<const SequenceState> state;  // keeps the records' content alive
};

DiskTier::DiskTier(Pool& pool, const DiskOptions& options)
    : pool_(pool),
      limit_(options.limit_bytes),
      store_(options.folder, options.identity, segment_bytes(options.limit_bytes)),
      order_(EvictionOrder::kNoBound),
      writer_(io_of(options)),
      reader_(io_of(options)) {
  counters_.cut_bytes = static_cast<std::int64_t>(store_.cut_bytes());
  adopt();
}

DiskTier::~DiskTier() = default;

RecordInfo DiskTier::info_of(const Index::Node& node, std::size_t depth) {
  return {RecordInfo::Kind::block, node.digest, node.parent->digest, depth, {}, Segment::protected_use};
}

RecordInfo DiskTier::info_of(CheckpointId id, std::size_t depth) const {
  const Index::Place& place = index_.place(id);
  return {RecordInfo::Kind::checkpoint, place.node->digest, {}, depth, place.tail, checkpoints_.at(id).segment};
}

bool DiskTier::whole_chain(CheckpointId id) const {
  for (const Index::Node* node = index_.place(id).node; node->parent != nullptr; node = node->parent)
    if (!node->block.location) return false;
  return true;
}

// ---- what was there at the start ------------------------------------------------------------------------------------

// The nodes of a chain (deepest block first) of the lineage. Null when one of that name stands elsewhere: no true chain
// of hashes has such.
DiskTier::Index::Node* DiskTier::take_in(const Digest& lineage, std::span<const SegmentStore::Found* const> chain) {
  const Index::Node* above = index_.node(lineage);
  if (above != nullptr && above->parent != nullptr) return nullptr;
  for (auto block = chain.rbegin(); block != chain.rend(); ++block) {
    const Digest& digest = (*block)->info.node;
    const Index::Node* there = index_.node(digest);
    if (digest == lineage || (there != nullptr && (above == nullptr || there->parent != above))) return nullptr;
    above = there;
  }
  Index::Node* node = &index_.node_at(lineage, nullptr);
  for (auto block = chain.rbegin(); block != chain.rend(); ++block) {
    node = &index_.node_at((*block)->info.node, node);
    node->block.location = (*block)->location;
  }
  return node;
}

// Takes in the states whose records are all there; what no state needs is given back.
void DiskTier::adopt() {
  const std::vector<SegmentStore::Found> found = store_.take_found();
  std::unordered_map<Digest, const SegmentStore::Found*, DigestHash> blocks;
  std::vector<Location> useless;
  const std::uint64_t block_record = record_bytes(pool_.layout().block_bytes());
  for (const auto& record : found) {
    used_bytes_ += record.location.bytes;
    if (record.info.kind != RecordInfo::Kind::block) continue;
    if (record.location.bytes != block_record || record.info.depth == 0 ||
        !blocks.emplace(record.info.node, &record).second)
      useless.push_back(record.location);
  }
  for (const auto& record : found) {
    if (record.info.kind != RecordInfo::Kind::checkpoint) continue;
    const std::uint64_t content =
        pool_.layout().recurrent_bytes() + (record.info.tail.empty() ? 0 : pool_.layout().block_bytes());
    std::vector<const SegmentStore::Found*> chain;  // deepest first
    Digest at = record.info.node;
    while (chain.size() < record.info.depth) {
      const auto block = blocks.find(at);
      if (block == blocks.end() || block->second->info.depth != record.info.depth - chain.size()) break;
      chain.push_back(block->second);
      at = block->second->info.parent;
    }
    if (record.location.bytes != record_bytes(content) || chain.size() != record.info.depth ||
        (chain.empty() && record.info.tail.empty()) || index_.find(record.info.node, record.info.tail)) {
      useless.push_back(record.location);
      continue;
    }
    Index::Node* node = take_in(at, chain);
    if (node == nullptr) {
      useless.push_back(record.location);
      continue;
    }
    const CheckpointId id = next_id_++;
    index_.attach(id, node, record.info.tail);
    checkpoints_.emplace(id, Checkpoint{record.location, record.info.segment});
    order_.insert(id, record.location.bytes, record.info.segment);
    ++counters_.found;
  }
  for (const auto& [digest, record] : blocks)
    if (const Index::Node* node = index_.node(digest); node == nullptr || node->block.location != record->location)
      useless.push_back(record->location);
  for (const Location& one : useless) used_bytes_ -= one.bytes;
  discard(std::move(useless));
  make_room(0);
}

// ---- down -----------------------------------------------------------------------------------------------------------

// The records that the state needs and that are neither there nor under way.
std::shared_ptr<DiskTier::Job> DiskTier::prepare(const PrefixCache::View& view, CheckpointId id) {
  auto job = std::make_shared<Job>();
  job->state = view.state;
  job->ended.id = id;
  const std::size_t block_bytes = pool_.layout().block_bytes();
  const auto blocks = view.state->blocks();
  std::uint64_t bytes = 0;
  Index::Node* node = &index_.node_at(view.chain.front(), nullptr);
  for (std::size_t i = 1; i < view.chain.size(); ++i) {
    node = &index_.node_at(view.chain[i], node);
    if (node->block.location || node->block.queued) continue;
    node->block.queued = true;
    NewRecord record{info_of(*node, i), {}};
    if (block_bytes != 0) record.parts.emplace_back(blocks[i - 1], block_bytes);
    job->records.push_back(std::move(record));
    job->ended.blocks.push_back(node->digest);
    bytes += record_bytes(block_bytes);
  }
  index_.attach(id, node, view.tail);
  checkpoints_.emplace(id, Checkpoint{std::nullopt, view.segment});
  NewRecord record{info_of(id, view.chain.size() - 1), {}};
  std::uint64_t content = 0;
  if (const std::size_t slot = pool_.layout().recurrent_bytes(); slot != 0) {
    record.parts.emplace_back(view.state->slot(), slot);
    content += slot;
  }
  if (!view.tail.empty() && block_bytes != 0) {
    record.parts.emplace_back(blocks.back(), block_bytes);
    content += block_bytes;
  }
  job->records.push_back(std::move(record));
  job->ended.bytes = bytes + record_bytes(content);
  return job;
}

bool DiskTier::store(const PrefixCache::View& view, StoreId tag) {
  const CheckpointId id = next_id_++;
  const auto job = prepare(view, id);
  job->ended.tag = tag;
  if (!make_room(job->ended.bytes)) {
    for (const Digest& digest : job->ended.blocks) index_.node(digest)->block.queued = false;
    erase(id);
    return false;
  }
  used_bytes_ += job->ended.bytes;
  queued_bytes_ += job->ended.bytes;
  writer_.post([this, job](DiskLane& lane) { run(*job, lane); });
  return true;
}

void DiskTier::run(Job& job, DiskLane& lane) {
  const auto start = std::chrono::steady_clock::now();
  try {
    job.ended.locations = store_.append(lane, job.records);
  } catch (const std::exception& error) {
    spdlog::warn("a state is not written: {}", error.what());
  }
  store_microseconds_ += microseconds_since(start);
  job.state.reset();
  const std::lock_guard lock(mutex_);
  ended_.push_back(std::move(job.ended));
  told_.notify_all();
}

void DiskTier::settle(const Ended& ended) {
  queued_bytes_ -= ended.bytes;
  const bool written = !ended.locations.empty(), wanted = checkpoints_.contains(ended.id);
  if (written) counters_.stored_bytes += static_cast<std::int64_t>(ended.bytes);
  if (!written) ++counters_.store_failures;
  if (!written || !wanted) used_bytes_ -= ended.bytes;
  if (!wanted) {  // cleared meanwhile
    discard(ended.locations);
    news_.stored.push_back({ended.tag, false});
    return;
  }
  for (std::size_t i = 0; i < ended.blocks.size(); ++i) {
    Block& block = index_.node(ended.blocks[i])->block;
    block.queued = false;
    if (written) block.location = ended.locations[i];
  }
  if (written) checkpoints_.at(ended.id).location = ended.locations.back();
  // A store before this one, which was to write a part of its chain, may have failed.
  const bool whole = written && whole_chain(ended.id);
  if (whole) {
    order_.insert(ended.id, ended.bytes, checkpoints_.at(ended.id).segment);
    ++counters_.stored;
  } else {
    erase(ended.id);
  }
  news_.stored.push_back({ended.tag, whole});
}

DiskTier::News DiskTier::poll() {
  std::vector<Ended> ended;
  {
    const std::lock_guard lock(mutex_);
    ended.swap(ended_);
  }
  for (const Ended& one : ended) settle(one);
  return std::exchange(news_, {});
}

void DiskTier::wait_for_news() {
  if (queued_bytes_ == 0) return;
  std::unique_lock lock(mutex_);
  told_.wait(lock, [this] { return !ended_.empty(); });
}

// ---- up -------------------------------------------------------------------------------------------------------------

std::int64_t DiskTier::reach(const Digest& lineage, std::span<const std::int32_t> tokens) {
  const auto best = index_.deepest(index_.walk(lineage, tokens), tokens,
                                   [this](CheckpointId id) { return checkpoints_.at(id).location.has_value(); });
  return best ? static_cast<std::int64_t>(best->depth) : 0;
}

std::shared_ptr<StateLoad> DiskTier::load(const Digest& lineage, std::span<const std::int32_t> tokens,
                                          std::span<std::byte* const> have) {
  const Index::Path path = index_.walk(lineage, tokens);
  const auto best =
      index_.deepest(path, tokens, [this](CheckpointId id) { return checkpoints_.at(id).location.has_value(); });
  if (!best) fail(ErrorCode::internal, "a state was to be loaded that is not there");
  order_.touch(best->id);
  const std::size_t block_bytes = pool_.layout().block_bytes(), slot_bytes = pool_.layout().recurrent_bytes();
  std::vector<WantedRecord> records;
  std::vector<std::byte*> blocks;
  for (std::size_t i = 1; i <= best->blocks && block_bytes != 0; ++i) {
    if (i <= have.size()) {
      pool_.share_block(have[i - 1]);
      blocks.push_back(have[i - 1]);
      continue;
    }
    blocks.push_back(pool_.take_block());
    records.push_back({info_of(*path[i], i), *path[i]->block.location, {{blocks.back(), block_bytes}}});
  }
  WantedRecord own{info_of(best->id, best->blocks), *checkpoints_.at(best->id).location, {}};
  std::byte* slot = slot_bytes == 0 ? nullptr : pool_.take_raw_slot();
  if (slot != nullptr) own.parts.emplace_back(slot, slot_bytes);
  if (best->depth % kBlockTokens != 0 && block_bytes != 0) {
    blocks.push_back(pool_.take_block());
    own.parts.emplace_back(blocks.back(), block_bytes);
  }
  records.push_back(std::move(own));
  auto load = std::shared_ptr<StateLoad>(
      new StateLoad({pool_, std::move(blocks), slot, static_cast<std::int64_t>(best->depth)}));
  load->id_ = best->id;
  load->records_ = std::move(records);
  reader_.post([this, load](DiskLane& lane) {
    const auto start = std::chrono::steady_clock::now();
    store_.load(lane, load->records_);
    load_microseconds_ += microseconds_since(start);
    for (const WantedRecord& record : load->records_)
      if (record.outcome == LoadOutcome::ok) loaded_bytes_ += static_cast<std::int64_t>(record.location.bytes);
    const std::lock_guard lock(mutex_);
    load->done_.store(true, std::memory_order_release);
    told_.notify_all();
  });
  return load;
}

void DiskTier::wait(const StateLoad& load) {
  std::unique_lock lock(mutex_);
  told_.wait(lock, [&] { return load.done(); });
}

std::optional<SequenceState> DiskTier::finish(StateLoad& load) {
  SequenceState state = std::move(load.state_);  // its memory goes back now, if it is worth nothing
  bool ok = true;
  for (const WantedRecord& record : load.records_) {
    if (record.outcome == LoadOutcome::ok) continue;
    if (ok)  // one state, one failure: by the first cause
      ++(record.outcome == LoadOutcome::missing   ? counters_.loads_missing
         : record.outcome == LoadOutcome::corrupt ? counters_.loads_corrupt
                                                  : counters_.loads_failed);
    ok = false;
    if (record.info.kind == RecordInfo::Kind::block) {
      forget_behind(record.info.node);
    } else if (checkpoints_.contains(load.id_)) {
      erase(load.id_);
    }
  }
  if (!ok) return std::nullopt;
  ++counters_.loads;
  counters_.loaded_tokens += state.position();
  return state;
}

// ---- out ------------------------------------------------------------------------------------------------------------

// Every state that is there and needs this block.
void DiskTier::forget_behind(const Digest& digest) {
  std::vector<CheckpointId> behind;
  for (const auto& [id, checkpoint] : checkpoints_) {
    if (!checkpoint.location) continue;  // being written: it will find that its chain is not whole
    for (const Index::Node* node = index_.place(id).node; node != nullptr; node = node->parent)
      if (node->digest == digest) behind.push_back(id);
  }
  if (Index::Node* node = index_.node(digest); node != nullptr && node->block.location) {
    used_bytes_ -= node->block.location->bytes;
    discard({*node->block.location});
    node->block.location.reset();
  }
  for (const CheckpointId id : behind) erase(id);
}

void DiskTier::erase(CheckpointId id) {
  const Index::Place& place = index_.place(id);
  const auto& location = checkpoints_.at(id).location;
  std::vector<Location> locations;
  if (location) {
    locations.push_back(*location);
    news_.gone.push_back({place.node->digest, place.tail});
  }
  if (order_.contains(id)) order_.erase(id);
  checkpoints_.erase(id);
  index_.erase(id, [&](const Index::Node& node) {
    if (node.block.location) locations.push_back(*node.block.location);
  });
  for (const Location& one : locations) used_bytes_ -= one.bytes;
  discard(std::move(locations));
}

bool DiskTier::make_room(std::uint64_t bytes) {
  while (used_bytes_ + bytes > limit_) {
    const auto victim = order_.victim();
    if (!victim) return false;
    erase(*victim);
    ++counters_.evicted;
  }
  return true;
}

void DiskTier::discard(std::vector<Location> locations) {
  if (locations.empty()) return;
  writer_.post([this, gone = std::move(locations)](DiskLane&) { store_.discard(gone); });
}

void DiskTier::clear() {
  std::vector<CheckpointId> all;
  for (const auto& [id, checkpoint] : checkpoints_) all.push_back(id);
  for (const CheckpointId id : all) erase(id);
}

DiskCounters DiskTier::counters() const {
  DiskCounters now = counters_;
  now.checkpoints = static_cast<std::int64_t>(order_.size());
  now.used_bytes = static_cast<std::int64_t>(used_bytes_);
  now.queued_bytes = static_cast<std::int64_t>(queued_bytes_);
  now.store_seconds = static_cast<double>(store_microseconds_) * 1e-6;
  now.load_seconds = static_cast<double>(load_microseconds_) * 1e-6;
  now.loaded_bytes = loaded_bytes_;
  return now;
}

void DiskTier::check() const {
  const auto want = [](bool holds, const char* what) {
    if (!holds) fail(ErrorCode::internal, "disk tier: {}", what);
  };
  std::uint64_t bytes = queued_bytes_;
  for (const auto& [id, checkpoint] : checkpoints_) {
    want(order_.contains(id) == checkpoint.location.has_value(),
         "a state that is there has no turn, or the other way round");
    if (!checkpoint.location) continue;
    bytes += checkpoint.location->bytes;
    want(whole_chain(id), "a state lacks a block");
  }
  for (const auto& [digest, node] : index_.nodes()) {
    want(node.below > 0, "a node cannot be reached");
    if (node.block.location) bytes += node.block.location->bytes;
  }
  want(bytes == used_bytes_, "bytes are miscounted");
  want(used_bytes_ <= limit_, "the limit is broken");
}

}  // namespace tidelock::state
