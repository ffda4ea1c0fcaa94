#include "state/prefix_cache.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"

namespace tidelock::state {
namespace {

constexpr auto kBlock = static_cast<std::size_t>(numerics::kBlockTokens);

Digest chain(const Digest& before, std::span<const std::int32_t> block) {
  std::array<std::byte, sizeof(Digest) + kBlock * sizeof(std::int32_t)> bytes;
  std::memcpy(bytes.data(), before.data(), sizeof(Digest));
  std::memcpy(bytes.data() + sizeof(Digest), block.data(), block.size_bytes());
  return sha256(bytes);
}

std::size_t probation_bytes(const Pool& pool) {
  return pool.limit() == Pool::kNoLimit
             ? Pool::kNoLimit
             : static_cast<std::size_t>(PrefixCache::kProbationShare * static_cast<double>(pool.limit()));
}

}  // namespace

Digest lineage(std::span<const std::string_view> parts) {
  std::string text;  // with lengths, so that no two lists read the same
  for (const std::string_view part : parts) text.append(std::to_string(part.size())).append(":").append(part);
  return sha256(std::as_bytes(std::span(text.data(), text.size())));
}

std::size_t DigestHash::operator()(const Digest& digest) const {
  std::size_t hash = 0;
  std::memcpy(&hash, digest.data(), sizeof hash);
  return hash;
}

PrefixCache::PrefixCache(Pool& pool) : pool_(pool), order_(probation_bytes(pool)) {}

PrefixCacheCounters PrefixCache::counters() const {
  PrefixCacheCounters now = counters_;
  now.checkpoints = static_cast<std::int64_t>(checkpoints_.size());
  now.blocks = static_cast<std::int64_t>(nodes_.size());
  return now;
}

// The nodes that the tokens pass through, as far as they are known: path[i] stands for i whole blocks, path[0] for the
// lineage itself.
std::vector<PrefixCache::Node*> PrefixCache::walk(const Digest& lineage, std::span<const std::int32_t> tokens) {
  std::vector<Node*> path;
  Digest digest = lineage;
  for (std::size_t blocks = 0;; ++blocks) {
    const auto found = nodes_.find(digest);
    if (found == nodes_.end()) break;
    path.push_back(&found->second);
    if ((blocks + 1) * kBlock > tokens.size()) break;
    digest = chain(digest, tokens.subspan(blocks * kBlock, kBlock));
  }
  return path;
}

PrefixCache::Hit PrefixCache::lookup(const Digest& lineage, std::span<const std::int32_t> prompt) {
  ++counters_.lookups;
  counters_.asked_tokens += static_cast<std::int64_t>(prompt.size());
  Hit hit{SequenceState(pool_), 0};
  if (prompt.empty()) return hit;
  const auto usable = prompt.first(prompt.size() - 1);
  const std::vector<Node*> path = walk(lineage, usable);
  if (path.empty()) return hit;
  hit.known = static_cast<std::int64_t>((path.size() - 1) * kBlock);
  std::optional<EvictionOrder::Id> best;
  std::size_t deepest = 0;
  for (std::size_t blocks = 0; blocks < path.size(); ++blocks) {
    const auto rest = usable.subspan(blocks * kBlock);
    for (const EvictionOrder::Id id : path[blocks]->here) {
      const std::vector<std::int32_t>& tail = checkpoints_.at(id).tail;
      const std::size_t depth = blocks * kBlock + tail.size();
      if (depth <= deepest || tail.size() > rest.size()) continue;
      if (!std::equal(tail.begin(), tail.end(), rest.begin())) continue;
      best = id;
      deepest = depth;
    }
  }
  // Without a recurrent part every block's end is a place to go on from.
  const bool by_blocks = pool_.layout().recurrent_bytes() == 0 && static_cast<std::size_t>(hit.known) > deepest;
  if (by_blocks) {
    hit.state = from_blocks(path);
  } else if (best) {
    order_.touch(*best);
    hit.state = checkpoints_.at(*best).state.fork();
  }
  counters_.hits += hit.state.position() > 0 ? 1 : 0;
  counters_.hit_tokens += hit.state.position();
  counters_.lost_no_checkpoint_tokens += std::max<std::int64_t>(hit.known - hit.state.position(), 0);
  return hit;
}

SequenceState PrefixCache::from_blocks(const std::vector<Node*>& path) {
  SequenceState state(pool_);
  for (std::size_t i = 1; i < path.size(); ++i) {
    pool_.share_block(path[i]->block);
    state.blocks_.push_back(path[i]->block);
  }
  state.position_ = static_cast<std::int64_t>((path.size() - 1) * kBlock);
  return state;
}

PrefixCache::Node& PrefixCache::node_at(const Digest& digest, Node* parent) {
  const auto [place, added] = nodes_.try_emplace(digest);
  if (added) {
    place->second.parent = parent;
    place->second.digest = digest;
  }
  return place->second;
}

void PrefixCache::insert(const Digest& lineage, std::span<const std::int32_t> tokens, SequenceState state,
                         Segment segment) {
  if (state.position() != static_cast<std::int64_t>(tokens.size()))
    fail(ErrorCode::internal, "a state at {} was to be kept for {} tokens", state.position(), tokens.size());
  if (tokens.empty()) return;
  const std::size_t blocks = tokens.size() / kBlock;
  const auto tail = tokens.subspan(blocks * kBlock);
  const bool has_blocks = pool_.layout().block_bytes() != 0;
  if (has_blocks)  // what a pass took beyond its end is not part of the state
    while (state.blocks_.size() > blocks + (tail.empty() ? 0 : 1)) {
      pool_.give_block(state.blocks_.back());
      state.blocks_.pop_back();
    }
  std::vector<Node*> path = walk(lineage, tokens);
  if (path.size() == blocks + 1) {
    for (const EvictionOrder::Id id : path.back()->here) {
      if (!std::ranges::equal(checkpoints_.at(id).tail, tail)) continue;
      if (segment == Segment::protected_use) order_.touch(id);
      return;
    }
  }
  if (path.empty()) path.push_back(&node_at(lineage, nullptr));
  while (path.size() <= blocks) {
    const auto block = tokens.subspan((path.size() - 1) * kBlock, kBlock);
    path.push_back(&node_at(chain(path.back()->digest, block), path.back()));
  }
  for (Node* node : path) ++node->below;
  for (std::size_t i = 0; has_blocks && i < blocks; ++i) {
    Node& node = *path[i + 1];
    std::byte*& own = state.blocks_[i];
    if (node.block == nullptr) {
      node.block = own;
    } else if (node.block != own) {  // the same bits, computed twice: one copy is enough
      pool_.share_block(node.block);
      pool_.give_block(std::exchange(own, node.block));
    }
  }
  const EvictionOrder::Id id = next_id_++;
  const std::size_t bytes = pool_.layout().recurrent_bytes() + (tail.empty() ? 0 : pool_.layout().block_bytes());
  path.back()->here.push_back(id);
  checkpoints_.emplace(id, Checkpoint{path.back(), {tail.begin(), tail.end()}, std::move(state)});
  order_.insert(id, bytes, segment);
  ++counters_.inserted;
  while (order_.over()) evict();
}

void PrefixCache::erase(EvictionOrder::Id id) {
  const auto found = checkpoints_.find(id);
  Node* node = found->second.node;
  std::erase(node->here, id);
  order_.erase(id);
  checkpoints_.erase(found);
  // A block that no checkpoint lies behind cannot be reached any more; the state that is gone held the last reference.
  while (node != nullptr) {
    Node* parent = node->parent;
    if (--node->below == 0) nodes_.erase(Digest(node->digest));
    node = parent;
  }
}

bool PrefixCache::evict() {
  const auto victim = order_.victim();
  if (!victim) return false;
  erase(*victim);
  ++counters_.evicted;
  return true;
}

void PrefixCache::clear() {
  while (!checkpoints_.empty()) erase(checkpoints_.begin()->first);
}

void PrefixCache::check() const {
  std::unordered_map<const Node*, std::int64_t> below;
  const auto want = [](bool holds, const char* what) {
    if (!holds) fail(ErrorCode::internal, "prefix cache: {}", what);
  };
  for (const auto& [id, checkpoint] : checkpoints_) {
    want(std::ranges::count(checkpoint.node->here, id) == 1, "a checkpoint is not at its node");
    std::size_t depth = 0;
    for (const Node* node = checkpoint.node; node != nullptr; node = node->parent) {
      ++below[node];
      depth += node->parent != nullptr ? 1 : 0;
    }
    want(checkpoint.state.position() == static_cast<std::int64_t>(depth * kBlock + checkpoint.tail.size()),
         "a checkpoint's position is not its depth");
    const Node* node = checkpoint.node;
    for (std::size_t i = depth; i-- > 0; node = node->parent)
      want(pool_.layout().block_bytes() == 0 || checkpoint.state.blocks_[i] == node->block,
           "a state of a chain has blocks of its own");
  }
  for (const auto& [digest, node] : nodes_) {
    want(below[&node] == node.below, "a node miscounts what lies below");
    want(node.below > 0, "a node cannot be reached");
  }
}

}  // namespace tidelock::state
