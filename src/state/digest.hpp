// Names of states: h(i) = SHA-256(h(i-1), tokens of block i), a chain that starts at the lineage.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "numerics/attention.hpp"

namespace tidelock::state {

inline constexpr auto kBlockTokens = static_cast<std::size_t>(numerics::kBlockTokens);

using Digest = std::array<std::byte, 32>;
struct DigestHash {
  std::size_t operator()(const Digest& digest) const;
};

// The lineage of states: everything beside the tokens that their bits, or the right to use them, depend on.
Digest lineage(std::span<const std::string_view> parts);

// The name of a chain that goes on with `block`, kBlockTokens of them.
Digest chain_digest(const Digest& before, std::span<const std::int32_t> block);

}  // namespace tidelock::state
