// Where states are found by their tokens: a tree of blocks of 64 tokens, whose nodes are named by a chain of hashes,
// and checkpoints in it. Both tiers (memory: prefix_cache.hpp; disk: disk_tier.hpp) keep one; `Block` is what they know
// of a block. Bookkeeping only. Private to state/.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "state/digest.hpp"

namespace tidelock::state {

using CheckpointId = std::uint64_t;

template <typename Block>
class ChainIndex {
 public:
  struct Node {  // one block of tokens in a chain; of a lineage itself, none
    Node* parent = nullptr;
    Digest digest{};
    Block block{};
    std::int64_t below = 0;  // checkpoints here and further down
    std::vector<CheckpointId> here;
  };
  using Path = std::vector<Node*>;  // [i] stands for i whole blocks, [0] for the lineage
  struct Place {
    Node* node;
    std::vector<std::int32_t> tail;  // tokens behind the last whole block
  };
  struct Best {
    CheckpointId id;
    std::size_t depth;  // tokens
    std::size_t blocks;
  };

  // The nodes that the tokens pass through, as far as they are known; empty for an unknown lineage.
  Path walk(const Digest& lineage, std::span<const std::int32_t> tokens) {
    Path path;
    Digest digest = lineage;
    for (std::size_t blocks = 0;; ++blocks) {
      const auto found = nodes_.find(digest);
      if (found == nodes_.end()) break;
      path.push_back(&found->second);
      if ((blocks + 1) * kBlockTokens > tokens.size()) break;
      digest = chain_digest(digest, tokens.subspan(blocks * kBlockTokens, kBlockTokens));
    }
    return path;
  }

  // The deepest checkpoint on the path that the tokens pass through and `usable` lets stand.
  template <typename Usable>
  std::optional<Best> deepest(const Path& path, std::span<const std::int32_t> tokens, const Usable& usable) const {
    std::optional<Best> best;
    for (std::size_t blocks = 0; blocks < path.size(); ++blocks) {
      const auto rest = tokens.subspan(blocks * kBlockTokens);
      for (const CheckpointId id : path[blocks]->here) {
        const std::vector<std::int32_t>& tail = places_.at(id).tail;
        const std::size_t depth = blocks * kBlockTokens + tail.size();
        if (depth == 0 || (best && depth <= best->depth) || tail.size() > rest.size()) continue;
        if (std::equal(tail.begin(), tail.end(), rest.begin()) && usable(id)) best = {id, depth, blocks};
      }
    }
    return best;
  }

  // The checkpoint of exactly these tokens, whose known nodes are `path`.
  std::optional<CheckpointId> find(const Path& path, std::span<const std::int32_t> tokens) const {
    const std::size_t blocks = tokens.size() / kBlockTokens;
    if (path.size() != blocks + 1) return std::nullopt;
    return find(*path.back(), tokens.subspan(blocks * kBlockTokens));
  }
  std::optional<CheckpointId> find(const Digest& node, std::span<const std::int32_t> tail) const {
    const auto found = nodes_.find(node);
    return found == nodes_.end() ? std::nullopt : find(found->second, tail);
  }
  Node* node(const Digest& digest) {
    const auto found = nodes_.find(digest);
    return found == nodes_.end() ? nullptr : &found->second;
  }

  // Adds a checkpoint, which is not there yet, and the nodes that lead to it. Completes `path` (of walk()).
  void add(CheckpointId id, const Digest& lineage, std::span<const std::int32_t> tokens, Path& path) {
    if (path.empty()) path.push_back(&node_at(lineage, nullptr));
    while (path.size() <= tokens.size() / kBlockTokens) {
      const auto block = tokens.subspan((path.size() - 1) * kBlockTokens, kBlockTokens);
      path.push_back(&node_at(chain_digest(path.back()->digest, block), path.back()));
    }
    const auto tail = tokens.subspan((path.size() - 1) * kBlockTokens);
    attach(id, path.back(), {tail.begin(), tail.end()});
  }
  Node& node_at(const Digest& digest, Node* parent) {
    const auto [place, added] = nodes_.try_emplace(digest);
    if (added) {
      place->second.parent = parent;
      place->second.digest = digest;
    }
    return place->second;
  }
  void attach(CheckpointId id, Node* node, std::vector<std::int32_t> tail) {
    node->here.push_back(id);
    places_.emplace(id, Place{node, std::move(tail)});
    for (; node != nullptr; node = node->parent) ++node->below;
  }

  // Takes a checkpoint out, and every node that none lies behind any more: `gone` is called with each.
  template <typename Gone>
  void erase(CheckpointId id, const Gone& gone) {
    const auto found = places_.find(id);
    Node* node = found->second.node;
    std::erase(node->here, id);
    places_.erase(found);
    while (node != nullptr) {
      Node* parent = node->parent;
      if (--node->below == 0) {
        gone(*node);
        nodes_.erase(Digest(node->digest));
      }
      node = parent;
    }
  }

  const Place& place(CheckpointId id) const { return places_.at(id); }
  const std::unordered_map<Digest, Node, DigestHash>& nodes() const { return nodes_; }
  const std::unordered_map<CheckpointId, Place>& places() const { return places_; }

 private:
  std::optional<CheckpointId> find(const Node& node, std::span<const std::int32_t> tail) const {
    for (const CheckpointId id : node.here)
      if (std::ranges::equal(places_.at(id).tail, tail)) return id;
    return std::nullopt;
  }

  std::unordered_map<Digest, Node, DigestHash> nodes_;
  std::unordered_map<CheckpointId, Place> places_;
};

}  // namespace tidelock::state
