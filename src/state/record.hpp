// The form of a record on disk: a head of 512 bytes, then its content, then zeros up to a whole page. Numbers are
// little-endian. Private to state/.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/content_hasher.hpp"
#include "state/digest.hpp"
#include "state/segment.hpp"

namespace tidelock::state {

struct RecordInfo {
  enum class Kind : std::uint32_t { block = 1, checkpoint = 2 };
  Kind kind = Kind::block;
  Digest node{};                   // block: its own name; checkpoint: that of the last whole block before it
  Digest parent{};                 // block: of the one before, or the lineage
  std::uint64_t depth = 0;         // whole blocks up to `node`; 0: it is a lineage
  std::vector<std::int32_t> tail;  // checkpoint: the tokens behind, fewer than kBlockTokens
  Segment segment = Segment::protected_use;
  bool operator==(const RecordInfo&) const = default;
};

inline constexpr std::size_t kPage = 4096, kHeadBytes = 512;
using RecordHead = std::array<std::byte, kHeadBytes>;

struct ReadHead {
  RecordInfo info;
  std::uint64_t content_bytes = 0;
  ContentHash content_hash{};
};

std::uint64_t record_bytes(std::uint64_t content);  // the whole record
RecordHead write_head(const RecordInfo& info, const Digest& identity, std::uint64_t content_bytes,
                      const ContentHash& hash);
// Nothing when these bytes are not a head of this identity, whole and unchanged.
std::optional<ReadHead> read_head(std::span<const std::byte, kHeadBytes> bytes, const Digest& identity);

}  // namespace tidelock::state
