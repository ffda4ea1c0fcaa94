#include "state/record.hpp"

#include <xxhash.h>

#include <bit>
#include <cstring>

namespace tidelock::state {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint64_t kMagic = 0x3145544154534C54;  // "TLSTATE1"

struct Head {
  std::uint64_t magic;
  std::uint32_t kind, segment;
  Digest identity, node, parent;
  std::uint64_t depth, content_bytes;
  ContentHash content_hash;
  std::uint64_t tail_count;
  std::array<std::int32_t, kBlockTokens> tail;
  std::array<std::byte, 96> unused;
  std::uint64_t head_hash;  // XXH3, 64 bits, of all before
};
static_assert(sizeof(Head) == kHeadBytes);

std::uint64_t hash_of(const Head& head) {
  return XXH3_64bits(&head, offsetof(Head, head_hash));
}

}  // namespace

std::uint64_t record_bytes(std::uint64_t content) {
  return (kHeadBytes + content + kPage - 1) / kPage * kPage;
}

RecordHead write_head(const RecordInfo& info, const Digest& identity, std::uint64_t content_bytes,
                      const ContentHash& hash) {
  Head head{};
  head.magic = kMagic;
  head.kind = static_cast<std::uint32_t>(info.kind);
  head.segment = static_cast<std::uint32_t>(info.segment);
  head.identity = identity;
  head.node = info.node;
  head.parent = info.parent;
  head.depth = info.depth;
  head.content_bytes = content_bytes;
  head.content_hash = hash;
  head.tail_count = info.tail.size();
  std::copy(info.tail.begin(), info.tail.end(), head.tail.begin());
  head.head_hash = hash_of(head);
  return std::bit_cast<RecordHead>(head);
}

std::optional<ReadHead> read_head(std::span<const std::byte, kHeadBytes> bytes, const Digest& identity) {
  Head head;
  std::memcpy(&head, bytes.data(), sizeof head);
  if (head.magic != kMagic || head.head_hash != hash_of(head) || head.identity != identity) return std::nullopt;
  const auto kind = static_cast<RecordInfo::Kind>(head.kind);
  if (kind != RecordInfo::Kind::block && kind != RecordInfo::Kind::checkpoint) return std::nullopt;
  if (head.tail_count >= kBlockTokens || head.segment > 1 || head.content_bytes > (1ULL << 50)) return std::nullopt;
  const auto tail = std::span(head.tail).first(head.tail_count);
  return ReadHead{
      {kind, head.node, head.parent, head.depth, {tail.begin(), tail.end()}, static_cast<Segment>(head.segment)},
      head.content_bytes,
      head.content_hash};
}

}  // namespace tidelock::state
