// States in memory and on disk together. The head properties: whatever is found is what was kept, by bytes, and the
// limits of both tiers hold - over any operations, restarts, turned bits, failing disks and kills.
#include "state/kept_states.hpp"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "base/base.hpp"
#include "model/small_model.hpp"
#include "model/temporary_folder.hpp"
#include "state/faulty_io.hpp"
#include "state/marked_states.hpp"

namespace tidelock::state {
namespace kept_states_test {

namespace fs = std::filesystem;
using namespace testing;
using model::testing::random_tokens;
using model::testing::TemporaryFolder;

class Tiers : public ::testing::TestWithParam<Kind>, protected MarkedStates {
 protected:
  Tiers() : MarkedStates(GetParam()) {}
  const TemporaryFolder folder;
  const fs::path path = folder.path / "states";

  DiskOptions disk(std::uint64_t limit = 1 << 30) const { return {path, limit, lineage_of(0), {}}; }

  // A request as the engine makes it. Returns where it went on from.
  std::int64_t request(KeptStates& kept, std::uint64_t tenant, const Tokens& tokens,
                       Segment segment = Segment::protected_use) {
    SequenceState state = look_up(kept, tenant, tokens);
    const std::int64_t position = state.position();
    if (position > 0) {
      EXPECT_TRUE(holds(state, tenant, tokens)) << "at " << position;
    }
    feed(state, tenant, tokens);
    kept.insert(lineage_of(tenant), tokens, std::move(state), segment);
    return position;
  }
  static SequenceState look_up(KeptStates& kept, std::uint64_t tenant, const Tokens& tokens) {
    while (true) {
      KeptStates::Hit hit = kept.lookup(lineage_of(tenant), tokens);
      if (!hit.load) return std::move(hit.state);
      kept.wait(*hit.load);
      if (auto state = kept.finish(*hit.load, std::ssize(tokens))) return std::move(*state);
    }
  }
  static Tokens with(const Tokens& tokens, std::uint64_t seed, std::int64_t more) {
    Tokens longer = tokens;
    const Tokens rest = random_tokens(more, 500 + seed);
    longer.insert(longer.end(), rest.begin(), rest.end());
    return longer;
  }
  std::size_t bytes_for(std::int64_t tokens, std::size_t sequences) const {
    return sequences * (static_cast<std::size_t>(model::StateLayout::blocks_for(tokens)) * layout.block_bytes() +
                        layout.recurrent_bytes());
  }
};
INSTANTIATE_TEST_SUITE_P(Models, Tiers, ::testing::Values(Kind::hybrid, Kind::attention_only, Kind::recurrent_only),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(Tiers, WhatWasKeptIsThereAfterAnOrderlyEnd) {
  std::vector<Tokens> all;
  for (const std::int64_t length : {1, 63, 64, 65, 130, 400}) all.push_back(random_tokens(length, 20 + length));
  all.push_back(with(all.back(), 1, 100));  // shares a chain
  {
    Pool pool(layout);
    KeptStates kept(pool, disk());
    for (const Tokens& tokens : all) request(kept, 1, tokens);
    kept.write_back();
    EXPECT_EQ(kept.disk_counters().stored, std::ssize(all));
    EXPECT_EQ(kept.disk_counters().stored_bytes, kept.disk_counters().used_bytes);
    const std::int64_t written = kept.disk_counters().stored_bytes;
    kept.write_back();
    EXPECT_EQ(kept.disk_counters().stored_bytes, written) << "what is below is not written again";
  }
  Pool pool(layout);
  KeptStates kept(pool, disk());
  EXPECT_EQ(kept.disk_counters().found, std::ssize(all));
  for (const Tokens& tokens : all) EXPECT_EQ(look_up(kept, 1, with(tokens, 9, 10)).position(), std::ssize(tokens));
  EXPECT_EQ(look_up(kept, 2, with(all[3], 9, 10)).position(), 0) << "another tenant's";
  EXPECT_EQ(kept.disk_counters().loads, std::ssize(all));
  kept.check();
  kept.forget();
  EXPECT_EQ(look_up(kept, 1, with(all[3], 9, 10)).position(), 0);
}

TEST_P(Tiers, ABlockThatIsInMemoryIsNotRead) {
  const Tokens first = random_tokens(640, 1), second = with(first, 1, 200), other = with(first, 2, 3);
  {
    Pool pool(layout);
    KeptStates kept(pool, disk());
    request(kept, 1, first);
    request(kept, 1, second);
    kept.write_back();
  }
  Pool pool(layout);
  KeptStates kept(pool, disk());
  EXPECT_EQ(request(kept, 1, other), std::ssize(first));
  const std::int64_t before = kept.disk_counters().loaded_bytes;
  SequenceState state = look_up(kept, 1, with(second, 3, 1));
  EXPECT_EQ(state.position(), std::ssize(second));
  EXPECT_TRUE(holds(state, 1, second));
  const std::int64_t whole = std::ssize(second) / 64 - std::ssize(first) / 64;  // blocks that only the second has
  EXPECT_LE(kept.disk_counters().loaded_bytes - before,
            static_cast<std::int64_t>(static_cast<std::size_t>(whole) * (layout.block_bytes() + 4096) +
                                      layout.recurrent_bytes() + layout.block_bytes() + 4096));
}

TEST_P(Tiers, NothingIsWrittenWhileMemoryIsAmple) {
  Pool pool(layout, bytes_for(640, 40));
  KeptStates kept(pool, disk());
  for (std::uint64_t i = 0; i < 20; ++i) {
    request(kept, 1, random_tokens(100, i));
    kept.tend();
  }
  EXPECT_EQ(kept.disk_counters().stored_bytes, 0);
}

TEST_P(Tiers, WhatLeavesMemoryWasWrittenAheadAndIsFoundBelow) {
  Pool pool(layout, bytes_for(128, 24));
  KeptStates kept(pool, disk());
  for (std::uint64_t i = 0; i < 60; ++i) {
    while (pool.limit() - pool.used_bytes() < bytes_for(128, 2)) ASSERT_TRUE(kept.evict());
    request(kept, 1, random_tokens(100, i));
    ASSERT_LE(pool.used_bytes(), pool.limit());
    for (kept.tend(); kept.disk_counters().queued_bytes > 0; kept.tend())  // a true request takes longer than a write
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  kept.check();
  while (kept.evict()) {
  }
  EXPECT_EQ(pool.used_bytes(), 0U);
  std::int64_t found = 0;
  for (std::uint64_t i = 0; i < 60; ++i)
    found += look_up(kept, 1, with(random_tokens(100, i), 9, 5)).position() == 100 ? 1 : 0;
  EXPECT_EQ(found, kept.disk_counters().stored);
  EXPECT_GT(found, 30) << "few were written before they had to go";
  EXPECT_EQ(kept.disk_counters().loads, found);
}

TEST_P(Tiers, ASequenceThatIsSetAsideIsWrittenWhereThatPays) {
  const Tokens tokens = random_tokens(200, 1), more = with(tokens, 1, 5);
  for (const double tokens_per_second : {1e12, 1.0}) {
    const TemporaryFolder own;
    Pool pool(layout);
    KeptStates kept(pool, DiskOptions{own.path / "states", 1 << 30, lineage_of(0), {}});
    SequenceState state(pool);
    feed(state, 1, tokens);
    kept.set_aside(lineage_of(1), tokens, std::move(state), tokens_per_second);
    while (kept.evict()) {
    }
    EXPECT_EQ(pool.used_bytes(), 0U);
    const bool written = tokens_per_second == 1;
    EXPECT_EQ(kept.written_out(), written ? 1 : 0);
    SequenceState again = look_up(kept, 1, more);
    EXPECT_EQ(again.position(), written ? 200 : 0);
    EXPECT_TRUE(!written || holds(again, 1, tokens));
  }
}

// Any operations, restarts among them, on a disk that may fail in any way.
class Storm : public Tiers {
 protected:
  void run(std::uint64_t seed, std::uint64_t faults, bool turned_bits, DiskCounters& total) {
    Random random(seed);
    const std::size_t memory = bytes_for(192, 3 + random.below(12));
    const std::uint64_t room =
        (1 + random.below(20)) * 4 * (layout.recurrent_bytes() + 2 * layout.block_bytes() + 4096);
    std::set<std::pair<std::uint64_t, Tokens>> ever;
    for (int life = 0; life < 3; ++life) {
      Pool pool(layout, memory);
      DiskOptions options = disk(room);
      if (faults != 0)
        options.io = [seed = seed * 100 + static_cast<std::uint64_t>(life),
                      faults]() mutable -> std::unique_ptr<DiskIo> {
          return std::make_unique<SpoiledIo>(random_faults(++seed, faults));
        };
      KeptStates kept(pool, options);
      for (int i = 0; i < 60; ++i) {
        const std::uint64_t tenant = random.below(2);
        const Tokens tokens = some_tokens(random);
        switch (random.below(8)) {
          case 0:
            kept.evict();
            break;
          case 1:
            kept.write_back();
            break;
          case 2:
            if (random.below(25) == 0) kept.forget();
            break;
          case 3:
            if (turned_bits) turn_a_bit(random);
            break;
          default: {
            bool room_left = true;
            while (room_left && pool.used_bytes() + bytes_for(512, 2) > pool.limit()) room_left = kept.evict();
            if (!room_left) break;
            const std::int64_t from =
                request(kept, tenant, tokens, random.below(4) == 0 ? Segment::probation : Segment::protected_use);
            if (recurrent && from > 0) {
              EXPECT_TRUE(ever.contains({tenant, {tokens.begin(), tokens.begin() + from}})) << "nobody kept that";
            }
            ever.insert({tenant, tokens});
          }
        }
        kept.tend();
        ASSERT_NO_THROW(kept.check()) << "seed " << seed << ", life " << life << ", operation " << i;
        if (turned_bits) continue;  // one that is turned in a hole fills it
        ASSERT_LE(bytes_on_disk(), room) << "seed " << seed << ", life " << life << ", operation " << i;
      }
      if (random.below(2) == 0) kept.write_back();
      const DiskCounters c = kept.disk_counters();
      total.loads += c.loads;
      total.stored += c.stored;
      total.found += c.found;
      total.store_failures += c.store_failures;
      total.loads_corrupt += c.loads_corrupt;
      total.loads_missing += c.loads_missing;
      total.loads_failed += c.loads_failed;
      total.evicted += c.evicted;
    }
    fs::remove_all(path);
  }
  std::uint64_t bytes_on_disk() const {
    std::uint64_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(path)) {
      struct stat info {};
      if (::stat(entry.path().c_str(), &info) != 0 || !entry.path().filename().string().starts_with("segment"))
        continue;
      const auto taken = static_cast<std::uint64_t>(info.st_blocks) * 512;
      bytes += taken - std::min<std::uint64_t>(taken, 8192);  // the file system's own notes of many holes
    }
    return bytes;
  }
  void turn_a_bit(Random& random) const {
    std::vector<fs::path> segments;
    for (const auto& entry : fs::directory_iterator(path))
      if (entry.path().filename().string().starts_with("segment")) segments.push_back(entry.path());
    if (segments.empty()) return;
    const fs::path& segment = segments[random.below(segments.size())];
    std::error_code gone;
    const auto size = fs::file_size(segment, gone);
    if (gone || size == 0) return;
    std::fstream file(segment, std::ios::in | std::ios::out | std::ios::binary);
    const auto at = static_cast<std::streamoff>(random.below(size));
    file.seekg(at);
    const int byte = file.get();
    file.clear();
    file.seekp(at);
    file.put(static_cast<char>(byte ^ (1 << random.below(8))));
  }
};
INSTANTIATE_TEST_SUITE_P(Models, Storm, ::testing::Values(Kind::hybrid, Kind::attention_only, Kind::recurrent_only),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(Storm, OnAGoodDisk) {
  DiskCounters total;
  for (std::uint64_t seed = 0; seed < 12; ++seed) run(seed, 0, false, total);
  EXPECT_GT(total.loads, 20);
  EXPECT_GT(total.found, 20);
  EXPECT_GT(total.evicted, 20);
  EXPECT_EQ(total.store_failures + total.loads_corrupt + total.loads_missing + total.loads_failed, 0);
}

TEST_P(Storm, OnADiskThatFails) {
  DiskCounters total;
  for (std::uint64_t seed = 100; seed < 112; ++seed) run(seed, 6, false, total);
  EXPECT_GT(total.loads, 5);
  EXPECT_GT(total.store_failures, 5);
  EXPECT_GT(total.loads_corrupt, 0);
  EXPECT_GT(total.loads_failed, 0);
}

TEST_P(Storm, OnADiskThatForgetsBits) {
  DiskCounters total;
  for (std::uint64_t seed = 200; seed < 212; ++seed) run(seed, 0, true, total);
  EXPECT_GT(total.loads, 5);
  EXPECT_GT(total.loads_corrupt + total.loads_missing, 0);
}

// The process is killed when it begins its n-th write, or halfway through it; the next one finds only what is whole.
TEST_P(Tiers, AKillAtAnyWriteLosesNoTruth) {
  std::int64_t found = 0, cut = 0;
  for (int killed_at = 1; killed_at < 24; ++killed_at) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      auto left = std::make_shared<int>(killed_at);
      Pool pool(layout, bytes_for(128, 8));
      DiskOptions options = disk();
      options.io = [left]() -> std::unique_ptr<DiskIo> { return std::make_unique<FatalIo>(left.get()); };
      KeptStates kept(pool, options);
      for (std::uint64_t i = 0; i < 200; ++i) {
        while (pool.limit() - pool.used_bytes() < bytes_for(128, 2) && kept.evict()) {
        }
        SequenceState state(pool);
        const Tokens tokens = random_tokens(100 + static_cast<std::int64_t>(i % 40), i);
        feed(state, 1, tokens);
        kept.insert(lineage_of(1), tokens, std::move(state), Segment::protected_use);
        kept.write_back();
      }
      _exit(9);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "it was to be killed at write " << killed_at;
    Pool pool(layout);
    KeptStates kept(pool, disk());
    kept.check();
    EXPECT_GE(kept.disk_counters().found, killed_at - 2) << "what was whole is there";
    for (std::uint64_t i = 0; i < 40; ++i) {
      const Tokens tokens = random_tokens(100 + static_cast<std::int64_t>(i % 40), i);
      SequenceState state = look_up(kept, 1, with(tokens, 9, 5));
      if (state.position() == 0) continue;
      ++found;
      EXPECT_TRUE(holds(state, 1, tokens));
    }
    cut += kept.disk_counters().cut_bytes;
    EXPECT_EQ(kept.disk_counters().loads_corrupt, 0) << "a torn record was taken for a whole one";
    fs::remove_all(path);
  }
  EXPECT_GT(found, 100);
  EXPECT_TRUE(cut > 0 || GetParam() == Kind::attention_only) << "half of its small writes is whole records";
}

TEST(Cleaning, BeginsAtTheWatermarkAndEndsAtTheReserve) {
  const CleaningInput full{80, 100, 5, 0};
  EXPECT_TRUE(clean_another(full));
  EXPECT_FALSE(clean_another({69, 100, 5, 0})) << "memory is ample";
  EXPECT_FALSE(clean_another({80, 100, 15, 0})) << "enough is ready to go";
  EXPECT_FALSE(clean_another({80, 100, 5, 256U << 20})) << "the disk has enough to do";
  EXPECT_FALSE(clean_another({80, Pool::kNoLimit, 0, 0})) << "nothing will ever have to go";
}

TEST(WriteOut, PaysWhenTheDiskIsFasterThanTheModel) {
  EXPECT_TRUE(cheaper_to_write(1 << 20, 1000, {1e9, 1e9, 1000}));
  EXPECT_FALSE(cheaper_to_write(1 << 20, 1, {1e9, 1e9, 1000}));
  EXPECT_FALSE(cheaper_to_write(1000 << 20, 1000, {1e8, 1e8, 1000}));
  EXPECT_TRUE(cheaper_to_write(1000 << 20, 1000, {1e9, 1e9, 100}));
  EXPECT_TRUE(cheaper_to_write(1 << 20, 1000, {0, 0, 0})) << "nothing is known yet";
}

}  // namespace kept_states_test
}  // namespace tidelock::state
