#include "state/digest.hpp"

#include <cstring>
#include <string>

#include "base/files.hpp"

namespace tidelock::state {

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

Digest chain_digest(const Digest& before, std::span<const std::int32_t> block) {
  std::array<std::byte, sizeof(Digest) + kBlockTokens * sizeof(std::int32_t)> bytes;
  std::memcpy(bytes.data(), before.data(), sizeof(Digest));
  std::memcpy(bytes.data() + sizeof(Digest), block.data(), block.size_bytes());
  return sha256(bytes);
}

}  // namespace tidelock::state
