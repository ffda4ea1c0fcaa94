// States without a model: each token leaves a mark that depends on all tokens up to it, so that a state tells whether
// it is what it should be.
#pragma once

#include <cstring>

#include "base/base.hpp"
#include "model/small_model.hpp"
#include "state/digest.hpp"
#include "state/state.hpp"

namespace tidelock::state::testing {

using Tokens = std::vector<std::int32_t>;

inline Digest lineage_of(std::uint64_t tenant) {
  const std::string text = std::to_string(tenant);
  const std::array<std::string_view, 1> parts{text};
  return lineage(parts);
}

inline std::uint64_t hash_of(std::uint64_t tenant, std::span<const std::int32_t> tokens) {
  std::uint64_t hash = tenant * 0x9E3779B97F4A7C15ULL + 1;
  for (const std::int32_t t : tokens) hash = (hash ^ static_cast<std::uint64_t>(t)) * 0x100000001B3ULL;
  return hash;
}

enum class Kind : std::uint8_t { hybrid, attention_only, recurrent_only };
inline std::string name_of(Kind kind) {
  const char* names[] = {"hybrid", "attention_only", "recurrent_only"};
  return names[static_cast<int>(kind)];
}

class MarkedStates {
 public:
  explicit MarkedStates(Kind kind) : layout(config(kind)) {}
  static model::Config config(Kind kind) {
    using namespace model::testing;
    model::Config c = small_config({Family::linear, Format::f32});
    if (kind != Kind::hybrid)
      c.layers.assign(c.layers.size(), kind == Kind::attention_only ? model::LayerKind::mla : model::LayerKind::kda);
    return c;
  }
  const model::StateLayout layout;
  const bool recurrent = layout.recurrent_bytes() != 0, blocks = layout.block_bytes() != 0;

  // Runs on to the end of `tokens`, as a pass over a model would.
  void feed(SequenceState& s, std::uint64_t tenant, std::span<const std::int32_t> tokens) const {
    const std::int64_t from = s.position(), to = static_cast<std::int64_t>(tokens.size());
    const model::SequenceView view = s.extend(to - from);
    for (std::int64_t i = from; i < to; ++i) {
      const std::uint64_t mark = hash_of(tenant, tokens.first(static_cast<std::size_t>(i) + 1));
      if (blocks) std::memcpy(view.blocks[i / 64] + i % 64 * 8, &mark, 8);
      if (recurrent) std::memcpy(view.recurrent, &mark, 8);
      if (recurrent) std::memcpy(view.recurrent + layout.recurrent_bytes() - 8, &mark, 8);
    }
    s.advance(to - from);
  }
  bool holds(SequenceState& s, std::uint64_t tenant, std::span<const std::int32_t> tokens) const {
    const model::SequenceView view = s.extend(0);
    for (std::int64_t i = 0; i < s.position(); ++i) {
      const std::uint64_t mark = hash_of(tenant, tokens.first(static_cast<std::size_t>(i) + 1));
      if (blocks && std::memcmp(view.blocks[i / 64] + i % 64 * 8, &mark, 8) != 0) return false;
      if (!recurrent || i + 1 != s.position()) continue;
      if (std::memcmp(view.recurrent, &mark, 8) != 0) return false;
      if (std::memcmp(view.recurrent + layout.recurrent_bytes() - 8, &mark, 8) != 0) return false;
    }
    return true;
  }
};

// Of few kinds, so that many start alike and part at any place.
inline Tokens some_tokens(Random& random) {
  Tokens tokens;
  const std::size_t parts = random.below(5);
  for (std::size_t i = 0; i <= parts; ++i) {
    const Tokens part = model::testing::random_tokens(static_cast<std::int64_t>(1 + random.below(90)), random.below(3));
    tokens.insert(tokens.end(), part.begin(), part.end());
  }
  return tokens;
}

}  // namespace tidelock::state::testing
