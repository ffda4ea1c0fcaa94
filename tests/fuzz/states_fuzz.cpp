// Any file of records - with heads that say anything, checksums that are right or wrong, records cut or missing - is
// opened, keeps its own books, stays below its limit, and hands out nothing but what a checksum vouches for.
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/files.hpp"
#include "base/log.hpp"
#include "model/config.hpp"
#include "state/kept_states.hpp"
#include "state/record.hpp"

namespace {

using namespace tidelock;
using namespace tidelock::state;
namespace fs = std::filesystem;

constexpr std::size_t kChain = 8, kStep = 16;  // blocks of the chain that lookups follow; bytes of input for a record
constexpr std::uint64_t kLimit = 1 << 20;

model::Config small() {
  model::Config config;
  config.format = numerics::Format::bf16;
  config.mla = {.heads = 1, .q_lora = 0, .latent = 2, .nope = 2, .extra = 2, .value = 2};
  config.layers = {model::LayerKind::mla, model::LayerKind::kda};
  config.kda = {.heads = 1, .head_dim = 16};
  return config;
}

struct World {
  const model::StateLayout layout{small()};
  fs::path folder;
  std::vector<std::int32_t> tokens;
  std::array<Digest, kChain> chain{};
  World() {
    spdlog::set_level(spdlog::level::off);
    std::string pattern = (fs::exists("/dev/shm") ? "/dev/shm" : "/tmp") + std::string("/tidelock-fuzz-XXXXXX");
    if (::mkdtemp(pattern.data()) == nullptr) std::abort();
    folder = fs::path(pattern) / "states";
    for (std::size_t i = 0; i < kChain * kBlockTokens + 1; ++i) tokens.push_back(static_cast<std::int32_t>(i % 97));
    for (std::size_t i = 1; i < kChain; ++i)
      chain[i] = chain_digest(chain[i - 1], std::span(tokens).subspan((i - 1) * kBlockTokens, kBlockTokens));
  }
  ~World() { fs::remove_all(folder.parent_path()); }
};

// One record for each kStep bytes of input.
void write_segment(const World& world, std::span<const std::uint8_t> input) {
  std::ofstream file(world.folder / "segment-00000001", std::ios::binary);
  for (std::size_t at = 0; at + kStep <= input.size(); at += kStep) {
    const auto* b = input.data() + at;
    RecordInfo info;
    info.kind = (b[0] & 1) != 0 ? RecordInfo::Kind::checkpoint : RecordInfo::Kind::block;
    info.node = world.chain[b[1] % kChain];
    info.parent = world.chain[b[2] % kChain];
    info.depth = (b[0] & 2) != 0 ? b[1] % kChain : b[3];
    info.tail.assign(world.tokens.begin(), world.tokens.begin() + b[4] % static_cast<int>(kBlockTokens));
    if ((b[0] & 4) != 0) info.tail.clear();
    info.segment = (b[0] & 8) != 0 ? Segment::probation : Segment::protected_use;
    std::uint64_t bytes = info.kind == RecordInfo::Kind::block
                              ? world.layout.block_bytes()
                              : world.layout.recurrent_bytes() + (info.tail.empty() ? 0 : world.layout.block_bytes());
    if ((b[0] & 16) != 0) std::memcpy(&bytes, b + 8, sizeof bytes);
    const std::vector<std::byte> content(std::min<std::uint64_t>(bytes, 20000), static_cast<std::byte>(b[5]));
    ContentHasher hasher;
    hasher.add(content);
    RecordHead head = write_head(info, Digest{}, bytes, hasher.result());
    if ((b[0] & 32) != 0) head[b[6] % kHeadBytes] ^= static_cast<std::byte>(b[7]);
    file.write(reinterpret_cast<const char*>(head.data()), kHeadBytes);
    std::string rest(record_bytes(content.size()) - kHeadBytes, '\0');
    if (!content.empty()) std::memcpy(rest.data(), content.data(), content.size());
    if ((b[0] & 64) != 0) rest[b[6]] = static_cast<char>(rest[b[6]] ^ static_cast<char>(b[7]));
    if ((b[0] & 128) != 0) rest.resize(rest.size() * b[7] / 256);
    file.write(rest.data(), static_cast<std::streamsize>(rest.size()));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const World world;
  fs::remove_all(world.folder);
  fs::create_directories(world.folder);
  write_file_atomic(world.folder / "store", "tidelock states, format 1\n" + to_hex(Digest{}) + "\n");
  write_segment(world, {data, std::min<std::size_t>(size, 64 * kStep)});
  Pool pool(world.layout);
  KeptStates kept(pool, DiskOptions{world.folder, kLimit, Digest{}, [] { return make_disk_io(IoKind::plain); }});
  kept.check();
  for (std::size_t length = 2; length <= world.tokens.size(); length += 37) {
    const auto prompt = std::span(world.tokens).first(length);
    while (true) {
      KeptStates::Hit hit = kept.lookup(Digest{}, prompt);
      if (!hit.load) break;
      kept.wait(*hit.load);
      const auto state = kept.finish(*hit.load, std::ssize(prompt));
      if (state && state->position() >= std::ssize(prompt)) std::abort();
      kept.check();
      if (state) break;
    }
  }
  if (pool.used_bytes() != 0) std::abort();
  return 0;
}
