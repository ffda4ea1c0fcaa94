// States on disk against the disk itself: what loading verified records costs over raw reads of as many bytes, and
// writing them over raw writes, in one run and interleaved. Past the page cache (O_DIRECT) on both sides.
//
//   state_disk FOLDER [--megabytes N] [--rounds N] [--json]
//
// FOLDER: on the drive that is meant; a folder of its own is made there and removed.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/base.hpp"
#include "base/clock.hpp"
#include "state/segment_store.hpp"

namespace {

using namespace tidelock;
using namespace tidelock::state;
namespace fs = std::filesystem;

struct Shape {  // of one sequence's state: blocks of 64 tokens, then its recurrent part
  const char* name;
  std::size_t block, recurrent, blocks;
};
// The sizes are those of spec/state.md, 1.1; nano's are what `tidelock plan models/nano` says.
constexpr Shape kShapes[] = {{"nano, 4K tokens", 20 << 10, 70 << 10, 64},
                             {"Kimi Linear 48B, 4K tokens", 64 * 8064, 42 << 20, 64},
                             {"Kimi Linear 48B, recurrent part alone", 0, 42 << 20, 0}};

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// Raw transfers of `bytes`: a window of pieces as large, and as many of them at once, as the store has.
double raw(const fs::path& file, IoOp op, std::uint64_t bytes, DiskLane& lane) {
  const int fd = ::open(file.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
  if (fd < 0) fail_errno("cannot open", file.string());
  const auto start = std::chrono::steady_clock::now();
  std::array<std::vector<IoRequest>, 2> requests;
  std::uint64_t at = 0;
  for (std::size_t turn = 0; at < bytes || !requests[turn].empty(); turn ^= 1) {
    lane.io->wait(requests[turn]);
    for (const IoRequest& r : requests[turn])
      if (r.result != std::ssize(r.bytes))
        fail(ErrorCode::io, "a raw transfer of {} came to {}", r.bytes.size(), r.result);
    requests[turn].clear();
    const auto window = lane.window(static_cast<int>(turn), DiskLane::kWindow);
    for (std::size_t i = 0; i < window.size() && at < bytes; i += DiskLane::kPiece, at += DiskLane::kPiece)
      requests[turn].push_back({op, fd, at, window.subspan(i, DiskLane::kPiece)});
    lane.io->start(requests[turn]);
  }
  lane.io->wait(requests[0]);
  lane.io->wait(requests[1]);
  const double seconds = seconds_since(start);
  ::close(fd);
  return seconds;
}

void measure(const Shape& shape, const fs::path& folder, std::uint64_t wanted, int rounds, bool json) {
  std::vector<std::byte> memory(shape.block * shape.blocks + shape.recurrent);
  Random random(1);
  for (std::size_t i = 0; i + 8 <= memory.size(); i += 8) {
    const std::uint64_t value = random.next_u64();
    std::memcpy(memory.data() + i, &value, 8);
  }
  const auto part = [&](std::size_t i) {
    return std::span(memory).subspan(i * shape.block, i < shape.blocks ? shape.block : shape.recurrent);
  };
  std::uint64_t one = 0;
  for (std::size_t i = 0; i <= shape.blocks; ++i) one += record_bytes(part(i).size());
  const std::uint64_t states = std::max<std::uint64_t>(1, wanted / one), bytes = states * one;
  DiskLane lane(make_disk_io());
  std::vector<double> load, store, raw_read, raw_write;
  for (int round = 0; round < rounds; ++round) {
    const fs::path own = folder / "store";
    SegmentStore records(own, Digest{}, 256 << 20);
    std::vector<std::vector<Location>> places;
    auto start = std::chrono::steady_clock::now();
    for (std::uint64_t s = 0; s < states; ++s) {
      std::vector<NewRecord> all;
      for (std::size_t i = 0; i <= shape.blocks; ++i) {
        RecordInfo info;
        info.depth = s;
        info.node[0] = static_cast<std::byte>(i);
        all.push_back({info, {part(i)}});
      }
      places.push_back(records.append(lane, all));
    }
    store.push_back(seconds_since(start));
    fs::remove(folder / "raw");  // both sides write where nothing was
    raw_write.push_back(
        raw(folder / "raw", IoOp::write, (bytes + DiskLane::kPiece - 1) / DiskLane::kPiece * DiskLane::kPiece, lane));
    std::vector<std::byte> to(memory.size());
    start = std::chrono::steady_clock::now();
    for (std::uint64_t s = 0; s < states; ++s) {
      std::vector<WantedRecord> all;
      for (std::size_t i = 0; i <= shape.blocks; ++i) {
        RecordInfo info;
        info.depth = s;
        info.node[0] = static_cast<std::byte>(i);
        all.push_back({info, places[s][i], {std::span(to).subspan(i * shape.block, part(i).size())}});
      }
      records.load(lane, all);
      for (const WantedRecord& record : all)
        if (record.outcome != LoadOutcome::ok) fail(ErrorCode::internal, "a record was not read back");
    }
    load.push_back(seconds_since(start));
    if (to != memory) fail(ErrorCode::internal, "other bytes were read back");
    raw_read.push_back(
        raw(folder / "raw", IoOp::read, (bytes + DiskLane::kPiece - 1) / DiskLane::kPiece * DiskLane::kPiece, lane));
    fs::remove_all(own);
  }
  const auto print = [&](const char* what, double ours, double theirs) {
    const double rate = static_cast<double>(bytes) / ours * 1e-6, peer = static_cast<double>(bytes) / theirs * 1e-6;
    if (json) {
      fmt::print(
          "{{\"name\":\"{} {}\",\"value\":{:.1f},\"unit\":\"MB/s\",\"peer\":\"raw ({:.1f})\",\"ratio\":{:.3f}}}\n",
          what, shape.name, rate, peer, rate / peer);
    } else {
      fmt::print("{:<6} {:<40} {:>8.1f} MB/s  {:>5.2f} x raw ({:.1f} MB/s)\n", what, shape.name, rate, rate / peer,
                 peer);
    }
    std::fflush(stdout);
  };
  print("load", median(load), median(raw_read));
  print("store", median(store), median(raw_write));
}

int run(int argc, char** argv) {
  fs::path folder;
  std::uint64_t megabytes = 256;
  int rounds = 5;
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view a = argv[i];
    if (a == "--json") {
      json = true;
    } else if (a == "--megabytes" && i + 1 < argc) {
      megabytes = std::stoull(argv[++i]);
    } else if (a == "--rounds" && i + 1 < argc) {
      rounds = std::stoi(argv[++i]);
    } else if (!a.starts_with("-") && folder.empty()) {
      folder = a;
    } else {
      fmt::print(stderr, "usage: state_disk FOLDER [--megabytes N] [--rounds N] [--json]\n");
      return 2;
    }
  }
  if (folder.empty() || rounds < 1 || megabytes < 1) {
    fmt::print(stderr, "state_disk: a folder is needed, and at least one round of one megabyte\n");
    return 2;
  }
  folder /= "tidelock-state-disk-" + std::to_string(::getpid());
  fs::create_directories(folder);
  for (const Shape& shape : kShapes) measure(shape, folder, megabytes << 20, rounds, json);
  fs::remove_all(folder);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "state_disk: {}\n", error.what());
    return 1;
  }
}
