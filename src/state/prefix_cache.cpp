#include "state/prefix_cache.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace tidelock::state {
namespace {

std::size_t probation_bytes(const Pool& pool) {
  return pool.limit() == Pool::kNoLimit
             ? Pool::kNoLimit
             : static_cast<std::size_t>(PrefixCache::kProbationShare * static_cast<double>(pool.limit()));
}

}  // namespace

PrefixCache::PrefixCache(Pool& pool) : pool_(pool), order_(probation_bytes(pool)) {}

PrefixCacheCounters PrefixCache::counters() const {
  PrefixCacheCounters now = counters_;
  now.checkpoints = static_cast<std::int64_t>(states_.size());
  now.blocks = static_cast<std::int64_t>(index_.nodes().size());
  return now;
}

PrefixCache::Found PrefixCache::look(const Digest& lineage, std::span<const std::int32_t> prompt) {
  Found found;
  if (prompt.empty()) return found;
  const auto usable = prompt.first(prompt.size() - 1);
  found.path = index_.walk(lineage, usable);
  if (found.path.empty()) return found;
  found.known = static_cast<std::int64_t>((found.path.size() - 1) * kBlockTokens);
  found.best = index_.deepest(found.path, usable, [](CheckpointId) { return true; });
  found.position = found.best ? static_cast<std::int64_t>(found.best->depth) : 0;
  found.by_blocks = pool_.layout().recurrent_bytes() == 0 && found.known > found.position;
  if (found.by_blocks) found.position = found.known;
  return found;
}

PrefixCache::Hit PrefixCache::lookup(const Digest& lineage, std::span<const std::int32_t> prompt) {
  ++counters_.lookups;
  counters_.asked_tokens += static_cast<std::int64_t>(prompt.size());
  const Found found = look(lineage, prompt);
  Hit hit{SequenceState(pool_), found.known};
  if (found.by_blocks) {
    hit.state = from_blocks(found.path);
  } else if (found.best) {
    order_.touch(found.best->id);
    hit.state = states_.at(found.best->id)->fork();
  }
  counters_.hits += found.position > 0 ? 1 : 0;
  counters_.hit_tokens += found.position;
  counters_.lost_no_checkpoint_tokens += std::max<std::int64_t>(found.known - found.position, 0);
  return hit;
}

PrefixCache::Reach PrefixCache::reach(const Digest& lineage, std::span<const std::int32_t> prompt) {
  const Found found = look(lineage, prompt);
  Reach reach{found.position, {}};
  for (std::size_t i = 1; i < found.path.size(); ++i) reach.blocks.push_back(found.path[i]->block);
  return reach;
}

SequenceState PrefixCache::from_blocks(const Index::Path& path) {
  std::vector<std::byte*> blocks;
  for (std::size_t i = 1; i < path.size(); ++i) {
    pool_.share_block(path[i]->block);
    blocks.push_back(path[i]->block);
  }
  return {pool_, std::move(blocks), nullptr, static_cast<std::int64_t>((path.size() - 1) * kBlockTokens)};
}

std::optional<CheckpointId> PrefixCache::insert(const Digest& lineage, std::span<const std::int32_t> tokens,
                                                SequenceState state, Segment segment) {
  if (state.position() != static_cast<std::int64_t>(tokens.size()))
    fail(ErrorCode::internal, "a state at {} was to be kept for {} tokens", state.position(), tokens.size());
  if (tokens.empty()) return std::nullopt;
  Index::Path path = index_.walk(lineage, tokens);
  if (const auto there = index_.find(path, tokens)) {
    if (segment == Segment::protected_use) order_.touch(*there);
    return std::nullopt;
  }
  state.trim();
  const CheckpointId id = next_id_++;
  index_.add(id, lineage, tokens, path);
  const bool has_blocks = pool_.layout().block_bytes() != 0;
  for (std::size_t i = 1; has_blocks && i < path.size(); ++i) {
    if (path[i]->block == nullptr) {
      path[i]->block = state.blocks()[i - 1];
    } else {
      state.replace_block(i - 1, path[i]->block);  // the same bits, computed twice: one copy is enough
    }
  }
  const bool tail = tokens.size() % kBlockTokens != 0;
  const std::size_t bytes = pool_.layout().recurrent_bytes() + (tail ? pool_.layout().block_bytes() : 0);
  states_.emplace(id, std::make_shared<SequenceState>(std::move(state)));
  order_.insert(id, bytes, segment);
  ++counters_.inserted;
  return id;
}

// A block that no checkpoint lies behind cannot be reached any more; the state that is gone held the last reference.
void PrefixCache::erase(CheckpointId id) {
  order_.erase(id);
  index_.erase(id, [](const Index::Node&) {});
  states_.erase(id);
}

bool PrefixCache::evict() {
  const auto victim = order_.victim();
  if (!victim) return false;
  erase(*victim);
  ++counters_.evicted;
  return true;
}

void PrefixCache::clear() {
  while (!states_.empty()) erase(states_.begin()->first);
}

PrefixCache::View PrefixCache::view(CheckpointId id) const {
  const Index::Place& place = index_.place(id);
  View view{{}, place.tail, order_.segment(id), states_.at(id)};
  for (const Index::Node* node = place.node; node != nullptr; node = node->parent) view.chain.push_back(node->digest);
  std::ranges::reverse(view.chain);
  return view;
}

void PrefixCache::check() const {
  std::unordered_map<const Index::Node*, std::int64_t> below;
  const auto want = [](bool holds, const char* what) {
    if (!holds) fail(ErrorCode::internal, "prefix cache: {}", what);
  };
  want(states_.size() == index_.places().size(), "a state is in no place");
  for (const auto& [id, place] : index_.places()) {
    const SequenceState& state = *states_.at(id);
    want(std::ranges::count(place.node->here, id) == 1, "a checkpoint is not at its node");
    std::size_t depth = 0;
    for (const Index::Node* node = place.node; node != nullptr; node = node->parent) {
      ++below[node];
      depth += node->parent != nullptr ? 1 : 0;
    }
    want(state.position() == static_cast<std::int64_t>(depth * kBlockTokens + place.tail.size()),
         "a checkpoint's position is not its depth");
    const Index::Node* node = place.node;
    for (std::size_t i = depth; i-- > 0; node = node->parent)
      want(pool_.layout().block_bytes() == 0 || state.blocks()[i] == node->block,
           "a state of a chain has blocks of its own");
  }
  for (const auto& [digest, node] : index_.nodes()) {
    want(below[&node] == node.below, "a node miscounts what lies below");
    want(node.below > 0, "a node cannot be reached");
  }
}

}  // namespace tidelock::state
