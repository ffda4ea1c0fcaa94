// Records on disk. The head property: whatever happens to the files, a record that is handed out is the one that was
// put in.
#include "state/segment_store.hpp"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "base/base.hpp"
#include "model/expect_refused.hpp"
#include "model/temporary_folder.hpp"
#include "state/faulty_io.hpp"

namespace tidelock::state {
namespace segment_store_test {

namespace fs = std::filesystem;
using namespace testing;
using model::testing::expect_refused;
using model::testing::TemporaryFolder;

constexpr std::uint64_t kSegment = 1 << 20;

Digest digest(std::uint64_t value) {
  Digest d{};
  std::memcpy(d.data(), &value, sizeof value);
  return d;
}
const Digest kIdentity = digest(77);

struct Record {
  RecordInfo info;
  std::vector<std::byte> content;
};

Record record(std::uint64_t seed, std::size_t bytes) {
  Random random(seed);
  Record r;
  r.info.kind = seed % 3 == 0 ? RecordInfo::Kind::checkpoint : RecordInfo::Kind::block;
  r.info.node = digest(seed);
  r.info.parent = digest(seed + 1000);
  r.info.depth = seed % 7;
  if (r.info.kind == RecordInfo::Kind::checkpoint) r.info.tail.assign(seed % kBlockTokens, static_cast<int>(seed));
  r.content.resize(bytes);
  for (std::byte& b : r.content) b = static_cast<std::byte>(random.below(256));
  return r;
}

std::vector<Location> put(SegmentStore& store, DiskLane& lane, const std::vector<Record>& records) {
  std::vector<NewRecord> all;
  for (const Record& r : records) {
    const auto content = std::span<const std::byte>(r.content);
    all.push_back({r.info, {content.first(content.size() / 3), content.subspan(content.size() / 3)}});
  }
  return store.append(lane, all);
}

struct Loaded {
  LoadOutcome outcome;
  bool same;
};
std::vector<Loaded> get(const SegmentStore& store, DiskLane& lane, const std::vector<Record>& records,
                        const std::vector<Location>& locations) {
  std::vector<std::vector<std::byte>> contents;
  std::vector<WantedRecord> wanted;
  for (std::size_t i = 0; i < records.size(); ++i) {
    auto& to = contents.emplace_back(records[i].content.size());
    const auto bytes = std::span(to);
    wanted.push_back({records[i].info, locations[i], {bytes.first(bytes.size() / 2), bytes.subspan(bytes.size() / 2)}});
  }
  store.load(lane, wanted);
  std::vector<Loaded> loaded;
  for (std::size_t i = 0; i < records.size(); ++i)
    loaded.push_back({wanted[i].outcome, contents[i] == records[i].content});
  return loaded;
}

DiskLane lane(IoKind kind = IoKind::best) {
  return DiskLane(make_disk_io(kind));
}

class Store : public ::testing::TestWithParam<IoKind> {
 protected:
  const TemporaryFolder folder;
  const fs::path path = folder.path / "states";
  DiskLane here = lane(GetParam());

  // By a store that has ended.
  std::vector<Location> written(const std::vector<Record>& records) {
    SegmentStore store(path, kIdentity, kSegment);
    return put(store, here, records);
  }
  fs::path only_segment() const {
    for (const auto& entry : fs::directory_iterator(path))
      if (entry.path().filename().string().starts_with("segment-")) return entry.path();
    return {};
  }
};
INSTANTIATE_TEST_SUITE_P(Io, Store, ::testing::Values(IoKind::best, IoKind::plain),
                         [](const auto& test) { return test.param == IoKind::best ? "best" : "plain"; });

TEST_P(Store, HandsOutWhatWasPutInOfAnySize) {
  std::vector<Record> records;
  for (const std::size_t bytes : {0, 1, 3583, 3584, 3585, 4096, 70000, 1 << 20, (9 << 20) + 5, 12})
    records.push_back(record(records.size(), bytes));
  std::vector<Location> locations;
  {
    SegmentStore store(path, kIdentity, kSegment);
    locations = put(store, here, records);
    const auto more = put(store, here, {record(50, 100)});
    EXPECT_GT(more[0].segment, locations[0].segment) << "a full segment is followed by another";
    for (const Loaded& one : get(store, here, records, locations))
      EXPECT_TRUE(one.same && one.outcome == LoadOutcome::ok);
  }
  SegmentStore store(path, kIdentity, kSegment);
  const auto found = store.take_found();
  ASSERT_EQ(found.size(), records.size() + 1);
  for (std::size_t i = 0; i < records.size(); ++i) {
    EXPECT_EQ(found[i].info, records[i].info);
    EXPECT_EQ(found[i].location, locations[i]);
  }
  EXPECT_EQ(store.cut_bytes(), 0U);
  for (const Loaded& one : get(store, here, records, locations))
    EXPECT_TRUE(one.same && one.outcome == LoadOutcome::ok);
}

TEST_P(Store, AnotherRecordIsNotTakenForTheOneAskedFor) {
  SegmentStore store(path, kIdentity, kSegment);
  const std::vector<Record> records{record(1, 100), record(2, 100)};
  auto locations = put(store, here, records);
  std::swap(locations[0], locations[1]);
  for (const Loaded& one : get(store, here, records, locations)) EXPECT_EQ(one.outcome, LoadOutcome::corrupt);
}

TEST_P(Store, DiscardedRoomGoesBackAndTheRestStays) {
  SegmentStore store(path, kIdentity, kSegment);
  std::vector<Record> records;
  for (std::uint64_t i = 0; i < 10; ++i) records.push_back(record(i, 20000));
  const auto locations = put(store, here, records);
  const auto blocks = [&] {
    struct stat info {};
    EXPECT_EQ(::stat(only_segment().c_str(), &info), 0);
    return static_cast<std::uint64_t>(info.st_blocks) * 512;
  };
  const std::uint64_t before = blocks();
  store.discard(std::vector<Location>{locations[2], locations[3], locations[7]});
  EXPECT_LE(blocks(), before - 3 * locations[0].bytes);
  const auto loaded = get(store, here, records, locations);
  for (std::size_t i = 0; i < records.size(); ++i) {
    const bool gone = i == 2 || i == 3 || i == 7;
    EXPECT_EQ(loaded[i].outcome, gone ? LoadOutcome::missing : LoadOutcome::ok) << i;
  }
}

TEST_P(Store, AnEmptySegmentIsRemoved) {
  SegmentStore store(path, kIdentity, kSegment);
  const std::vector<Record> records{record(1, 100)};
  store.discard(put(store, here, records));
  EXPECT_EQ(only_segment(), fs::path());
  EXPECT_EQ(get(store, here, records, {{1, 0, 4096}})[0].outcome, LoadOutcome::missing);
  const auto again = put(store, here, records);
  EXPECT_EQ(get(store, here, records, again)[0].outcome, LoadOutcome::ok);
}

// Cut at any place, as by a crash: the records before the cut are found, nothing else, and the store goes on.
TEST_P(Store, ATornEndIsCut) {
  std::vector<Record> records;
  for (std::uint64_t i = 0; i < 4; ++i) records.push_back(record(i, 3000 + 3000 * i));
  const std::vector<Location> locations = written(records);
  const fs::path segment = only_segment();
  const std::uint64_t size = fs::file_size(segment);
  const fs::path copy = folder.path / "copy";
  fs::copy_file(segment, copy);
  for (std::uint64_t cut = 0; cut <= size; cut += 1024) {
    fs::copy_file(copy, segment, fs::copy_options::overwrite_existing);
    fs::resize_file(segment, cut);
    std::size_t whole = 0;
    while (whole < records.size() && locations[whole].offset + locations[whole].bytes <= cut) ++whole;
    SegmentStore store(path, kIdentity, kSegment);
    ASSERT_EQ(store.take_found().size(), whole) << "cut at " << cut;
    const auto next = put(store, here, records);
    const auto loaded = get(store, here, records, next);
    EXPECT_TRUE(std::all_of(loaded.begin(), loaded.end(), [](const Loaded& one) { return one.same; }));
    store.discard(next);
  }
}

TEST_P(Store, ATurnedBitSpoilsItsOwnRecordOnly) {
  std::vector<Record> records;
  for (std::uint64_t i = 0; i < 5; ++i) records.push_back(record(i, 2000 + 4000 * i));
  const std::vector<Location> locations = written(records);
  const fs::path segment = only_segment();
  Random random(3);
  for (int round = 0; round < 60; ++round) {
    const std::size_t victim = random.below(records.size());
    // In its head or its content, or in the padding, which is nothing.
    const std::uint64_t within = random.below(kHeadBytes + records[victim].content.size());
    const std::uint64_t at = locations[victim].offset + within;
    std::fstream file(segment, std::ios::in | std::ios::out | std::ios::binary);
    const auto turn = [&] {
      file.seekg(static_cast<std::streamoff>(at));
      const int byte = file.get();
      file.seekp(static_cast<std::streamoff>(at));
      file.put(static_cast<char>(byte ^ (1 << (round % 8))));
      file.flush();
    };
    turn();
    {
      SegmentStore store(path, kIdentity, kSegment);
      const auto found = store.take_found();
      EXPECT_GE(found.size(), records.size() - 1) << "the records behind a spoilt one were lost";
      if (victim + 1 == records.size() && found.size() < records.size()) {
        fs::resize_file(segment, locations.back().offset + locations.back().bytes);  // it was cut: rebuilt below
        EXPECT_EQ(within < kHeadBytes, true);
        break;
      }
      const auto loaded = get(store, here, records, locations);
      for (std::size_t i = 0; i < records.size(); ++i)
        EXPECT_EQ(loaded[i].outcome, i == victim ? LoadOutcome::corrupt : LoadOutcome::ok) << "record " << i;
    }
    turn();
  }
}

TEST_P(Store, AWriteThatFailsLeavesNothing) {
  for (const int failing : {1, 2, 3}) {
    const fs::path own = path / std::to_string(failing);
    int count = 0;
    DiskLane bad(std::make_unique<SpoiledIo>(
        [&](IoRequest& request) {
          if (++count == failing) request.result = failing == 2 ? -EIO : -ENOSPC;
        },
        GetParam()));
    const std::vector<Record> records{record(1, 100), record(2, 5 << 20)};
    std::vector<Location> before;
    {
      SegmentStore store(own, kIdentity, 64 << 20);
      before = put(store, here, {record(9, 500)});
      expect_refused(failing == 2 ? ErrorCode::io : ErrorCode::exhausted, "cannot write to",
                     [&] { put(store, bad, records); });
      const auto after = put(store, bad, records);
      EXPECT_EQ(after[0].offset, before[0].offset + before[0].bytes) << "the room is used again";
      for (const Loaded& one : get(store, here, records, after)) EXPECT_EQ(one.outcome, LoadOutcome::ok);
    }
    SegmentStore store(own, kIdentity, 64 << 20);
    EXPECT_EQ(store.take_found().size(), 3U);
  }
}

TEST(StoreFolder, OtherThingsAndOtherProcessesAreRefused) {
  const TemporaryFolder folder;
  std::ofstream(folder.path / "thesis.txt") << "mine";
  expect_refused(ErrorCode::invalid_argument, "holds thesis.txt",
                 [&] { SegmentStore(folder.path, kIdentity, kSegment); });
  EXPECT_TRUE(fs::exists(folder.path / "thesis.txt"));
  expect_refused(ErrorCode::io, "cannot make the folder",
                 [&] { SegmentStore(folder.path / "thesis.txt" / "x", kIdentity, kSegment); });
  const fs::path own = folder.path / "own";
  const SegmentStore first(own, kIdentity, kSegment);
  expect_refused(ErrorCode::invalid_argument, "is in use", [&] { SegmentStore(own, kIdentity, kSegment); });
}

TEST(StoreFolder, StatesOfAnotherModelAreRemovedAndAnotherVersionIsRefused) {
  const TemporaryFolder folder;
  DiskLane here = lane();
  {
    SegmentStore store(folder.path, kIdentity, kSegment);
    put(store, here, {record(1, 100)});
  }
  EXPECT_EQ(SegmentStore(folder.path, kIdentity, kSegment).take_found().size(), 1U);
  EXPECT_EQ(SegmentStore(folder.path, digest(78), kSegment).take_found().size(), 0U);
  EXPECT_EQ(SegmentStore(folder.path, kIdentity, kSegment).take_found().size(), 0U) << "they are gone";
  std::ofstream(folder.path / "store") << "tidelock states, format 9\n";
  expect_refused(ErrorCode::not_supported, "another version", [&] { SegmentStore(folder.path, kIdentity, kSegment); });
}

}  // namespace segment_store_test
}  // namespace tidelock::state
