// The parts of microVM sandboxes that need no virtual machine.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "base/files.hpp"
#include "sandbox/support.hpp"
#include "sandbox/vm/entries.hpp"
#include "sandbox/vm/event_log.hpp"
#include "sandbox/vm/frame.hpp"
#include "sandbox/vm/journal.hpp"
#include "sandbox/vm/layer.hpp"
#include "sandbox/vm/pool.hpp"
#include "sandbox/vm/qcow2.hpp"

namespace tidelock::sandbox::vm {
namespace vm_parts_test {

using testing::code_of;
using testing::Folder;
namespace fs = std::filesystem;
using Json = nlohmann::json;

void overwrite(const fs::path& path, std::size_t at, char value) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(value);
}

// ---- what must never break

TEST(VmFrame, WhatIsCutOrDamagedNeverHidesTheNextFrame) {
  EXPECT_TRUE(rc::check([] {
    const auto payload = *rc::gen::container<std::string>(rc::gen::arbitrary<char>());
    const auto garbage = *rc::gen::container<std::string>(rc::gen::arbitrary<char>());
    std::string stream = garbage;
    stream.push_back('\0');  // as hello begins
    append_frame(stream, FrameType::output, 7, payload);
    FrameReader reader;
    Frame frame;
    bool found = false;
    const auto step = *rc::gen::inRange<std::size_t>(1, 40);
    for (std::size_t at = 0; at < stream.size(); at += step) {
      reader.feed(std::string_view(stream).substr(at, step));
      while (reader.next(frame)) {
        found = frame.stream == 7 && frame.payload == payload;
      }
    }
    RC_ASSERT(found);
  }));
}

TEST(VmJournal, ACutOrDamagedFileGivesWhatWasCommittedBefore) {
  const Folder folder;
  const fs::path path = folder.path() / "journal";
  std::vector<std::uintmax_t> sizes;
  {
    Journal journal(path, folder.path() / "quarantine");
    for (int i = 0; i < 5; ++i) {
      journal.commit({{"a" + std::to_string(i), Json{{"value", i}}}, {"last", Json{{"value", i}}}});
      sizes.push_back(fs::file_size(path));
    }
  }
  const std::string whole = read_file(path);
  for (std::size_t cut = sizes[1]; cut < whole.size(); cut += 3) {
    write_file_atomic(path, whole.substr(0, cut));
    const Journal journal(path, folder.path() / "quarantine");
    const auto committed = std::upper_bound(sizes.begin(), sizes.end(), cut) - sizes.begin();
    ASSERT_EQ(journal.find("last")->at("value"), committed - 1) << "cut at " << cut;
    ASSERT_FALSE(journal.damaged());
  }
}

TEST(VmLayer, EveryPageComesBackAndDecayIsFound) {
  const Folder folder;
  constexpr std::size_t kPages = 64;
  std::mt19937_64 random(1);
  std::string base(kPages * kPage, '\0');
  for (char& c : base) {
    c = static_cast<char>(random());
  }
  write_file_atomic(folder.path() / "base", base);
  std::string now = base;
  std::vector<fs::path> layers;
  for (int generation = 0; generation < 4; ++generation) {
    std::vector<std::uint32_t> pages;
    std::string data;
    for (std::uint32_t page = 0; page < kPages; ++page) {
      if (random() % 3 == 0) {
        const int what = static_cast<int>(random() % 4);
        if (what < 3) {  // else: private, but unchanged
          for (std::size_t i = 0; i < kPage; ++i) {
            now[page * kPage + i] = what == 0 ? '\0' : static_cast<char>(random());
          }
        }
        pages.push_back(page);
        data += now.substr(page * kPage, kPage);
      }
    }
    layers.push_back(folder.path() / ("layer" + std::to_string(generation)));
    const PageChain below(folder.path() / "base", {layers.begin(), layers.end() - 1});
    const LayerSize size = write_layer(layers.back(), below, pages, reinterpret_cast<const std::byte*>(data.data()));
    EXPECT_EQ(size.pages + size.unchanged, pages.size());
    EXPECT_EQ(size.file_bytes, fs::file_size(layers.back()));
    std::string restored = base;
    std::vector<const std::byte*> contents;
    const PageChain chain(folder.path() / "base", layers);
    chain.newest(pages, contents);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      std::memcpy(&restored[pages[i] * kPage], contents[i], kPage);
    }
    EXPECT_EQ(restored, now);
  }
  const std::string layer = read_file(layers.back());
  for (const std::size_t at : {std::size_t{0}, std::size_t{20}, std::size_t{40}, layer.size() - 1}) {
    overwrite(layers.back(), at, static_cast<char>(layer[at] + 1));
    EXPECT_EQ(code_of([&] {
                std::vector<std::uint32_t> pages;
                std::vector<const std::byte*> contents;
                PageChain(folder.path() / "base", layers).newest(pages, contents);
              }),
              ErrorCode::corrupt_data)
        << at;
    overwrite(layers.back(), at, layer[at]);
  }
  fs::resize_file(layers.back(), layer.size() - 1);
  EXPECT_EQ(code_of([&] { PageLayer(layers.back(), kPages * kPage); }), ErrorCode::corrupt_data);
}

// ---- the rest

TEST(VmEntries, ChangesAreTakenWholeAndWhatNoWatchPrintsIsRefused) {
  const auto zeros = [](std::string text) {
    std::replace(text.begin(), text.end(), '|', '\0');
    return text;
  };
  const std::string whole = zeros("c|a/b|9|f|/w/a/b|5|100644|user|user|12|34||r|gone|0|");
  FileChange change;
  std::string bytes;
  int taken = 0;
  for (const char byte : whole) {  // in the smallest pieces
    bytes.push_back(byte);
    if (take_change(bytes, change)) {
      ++taken;
      EXPECT_EQ(change.name, taken == 1 ? "a/b" : "gone");
      EXPECT_EQ(change.entry.has_value(), taken == 1);
    }
  }
  EXPECT_EQ(taken, 2);
  EXPECT_EQ(change.kind, FileChange::Kind::remove);
  for (const char* bad : {"x|a|0|", "cc|a|0|", "|a|0|", "c|a|1|", "c|a||", "c|a|99|"}) {
    bytes = zeros(bad);
    EXPECT_EQ(code_of([&] { take_change(bytes, change); }), ErrorCode::io) << bad;
  }
  bytes.assign(kMaxChange + 1, 'a');
  EXPECT_EQ(code_of([&] { take_change(bytes, change); }), ErrorCode::io);
}

TEST(VmFrame, MemoryStaysBoundedWhateverComes) {
  FrameReader reader;
  Frame frame;
  for (int i = 0; i < 200; ++i) {
    reader.feed(std::string(10'000, 'x'));
    EXPECT_FALSE(reader.next(frame));
  }
  std::string good(1, '\0');
  append_frame(good, FrameType::exited, 3, "end");
  reader.feed(good);
  ASSERT_TRUE(reader.next(frame));
  EXPECT_EQ(frame.payload, "end");
}

TEST(VmFrame, RequestsComeBackAndBadOnesAreRefused) {
  GuestRequest request;
  request.kind = GuestKind::read_file;
  request.limit = 1ULL << 40;
  request.path = "/root/x";
  request.arguments = std::string("a\0b\0", 4);
  const std::string bytes = encode_request(request);
  GuestRequest back;
  ASSERT_TRUE(decode_request(bytes, back));
  EXPECT_EQ(back.limit, request.limit);
  EXPECT_EQ(back.arguments, request.arguments);
  for (std::size_t cut = 0; cut < bytes.size(); ++cut) {
    EXPECT_FALSE(decode_request(std::string_view(bytes).substr(0, cut), back)) << cut;
  }
  EXPECT_FALSE(decode_request(bytes + "x", back));
}

TEST(VmJournal, ADamagedLineIsSetAsideAndTheOthersAreUsed) {
  const Folder folder;
  const fs::path path = folder.path() / "journal";
  std::uintmax_t first = 0;
  {
    Journal journal(path, folder.path() / "quarantine");
    journal.commit({{"a", Json{{"value", 1}}}});
    first = fs::file_size(path);
    journal.commit({{"b", Json{{"value", 2}}}});
    journal.commit({{"c", Json{{"value", 3}}}});
  }
  overwrite(path, first + 20, '#');
  for (int i = 0; i < 2; ++i) {  // and it stays known
    const Journal journal(path, folder.path() / "quarantine");
    EXPECT_TRUE(journal.damaged());
    EXPECT_NE(journal.find("a"), nullptr);
    EXPECT_EQ(journal.find("b"), nullptr);
    EXPECT_NE(journal.find("c"), nullptr);
    EXPECT_EQ(std::distance(fs::directory_iterator(folder.path() / "quarantine"), {}), 1);
  }
  write_file_atomic(path, "something else\n");
  EXPECT_EQ(code_of([&] { Journal(path, folder.path() / "quarantine"); }), ErrorCode::corrupt_data);
}

TEST(VmPool, PlansOneStartAtATimeAndGivesWayToGuests) {
  constexpr std::uint64_t kGiB = 1ULL << 30;
  EXPECT_EQ(plan_pool({0, 2, kGiB, kCopyBytes, kReserveBytes}), 1);
  EXPECT_EQ(plan_pool({2, 2, kGiB, kCopyBytes, kReserveBytes}), 0);
  EXPECT_EQ(plan_pool({3, 2, kGiB, kCopyBytes, kReserveBytes}), -1);
  EXPECT_EQ(plan_pool({1, 2, kReserveBytes + kCopyBytes - 1, kCopyBytes, kReserveBytes}), 0);
  EXPECT_EQ(plan_pool({2, 2, kReserveBytes - 1, kCopyBytes, kReserveBytes}), -2);
  EXPECT_TRUE(admits(kGiB, kGiB - kReserveBytes, kReserveBytes));
  EXPECT_FALSE(admits(kGiB, kGiB - kReserveBytes + 1, kReserveBytes));
  EXPECT_FALSE(admits(0, 1, kReserveBytes));
}

TEST(VmQcow2, QemuFindsNoFaultInAnEmptyOverlay) {
  const Folder folder;
  for (const std::uint64_t bytes : {1ULL << 20, 77ULL << 20, 3ULL << 30}) {
    const fs::path path = folder.path() / std::to_string(bytes);
    create_overlay(path, bytes);
    EXPECT_EQ(std::system(("qemu-img check -q " + path.string()).c_str()), 0) << bytes;
  }
  EXPECT_EQ(code_of([&] { create_overlay(folder.path() / "none", 0); }), ErrorCode::invalid_argument);
}

std::vector<std::int64_t> times_of(const EventLog& log, const std::string& id) {
  std::vector<std::int64_t> out;
  for (const LogEntry& entry : log.read(id)) {
    out.push_back(entry.time);
  }
  return out;
}

TEST(VmEventLog, TellsWhatItWasToldOfEachSandboxInAnotherProgramToo) {
  const Folder folder;
  const LogEntry odd{7, LogLevel::warning, "two\nlines \x1b[1m", {{"text", "a\xff"}, {"", "=\""}}};
  {
    EventLog log(folder.path() / "logs");
    log.add("a", {1, LogLevel::info, "first"});
    log.add("b", odd);
    log.add("a", {2, LogLevel::error, "second"});
  }
  std::ofstream(folder.path() / "logs/a.jsonl", std::ios::app) << "{\"time\": 3, \"lev\n\n[]\n";
  EventLog log(folder.path() / "logs");
  log.add("a", {4, LogLevel::debug, "third"});
  EXPECT_EQ(times_of(log, "a"), (std::vector<std::int64_t>{1, 2, 4}));
  EXPECT_EQ(log.read("a")[1].level, LogLevel::error);
  const LogEntry back = log.read("b").at(0);
  EXPECT_EQ(back.message, odd.message);
  EXPECT_EQ(back.fields.at("text"), "a\xEF\xBF\xBD") << "what is not UTF-8 is marked";
  EXPECT_EQ(back.level, LogLevel::warning);
  log.keep_only({"b"});
  EXPECT_TRUE(log.read("a").empty());
  log.remove("b");
  EXPECT_TRUE(fs::is_empty(folder.path() / "logs"));
}

TEST(VmEventLog, KeepsTheNewestWithinItsBounds) {
  const Folder folder;
  EventLog log(folder.path() / "logs");
  const std::string long_text(10 << 10, 'x');
  for (std::int64_t i = 0; i < 1000; ++i) {
    log.add("a", {i, LogLevel::info, "many", {{"text", long_text}}});
    ASSERT_LE(fs::file_size(folder.path() / "logs/a.jsonl"), EventLog::kMostBytes);
  }
  const std::vector<std::int64_t> times = times_of(log, "a");
  ASSERT_GE(times.size(), 50U);
  for (std::size_t i = 0; i < times.size(); ++i) {
    ASSERT_EQ(times[i], 1000 - static_cast<std::int64_t>(times.size() - i)) << "the newest, all of them";
  }
}

TEST(VmEventLog, AFullDiskTearsNoLineAndFailsNobody) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "needs root, for a small file system";
  }
  const Folder folder;
  ASSERT_EQ(mount("none", folder.path().c_str(), "tmpfs", 0, "size=64k"), 0);
  {
    EventLog log(folder.path() / "logs");
    for (std::int64_t i = 0; i < 100; ++i) {
      log.add("a", {i, LogLevel::info, std::string(1500, 'x')});
    }
    const std::vector<std::int64_t> told = times_of(log, "a");
    EXPECT_GE(told.size(), 20U);
    EXPECT_LT(told.size(), 60U);
    const std::string text = read_file(folder.path() / "logs/a.jsonl");
    EXPECT_EQ(text.back(), '\n');
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), static_cast<std::ptrdiff_t>(told.size()));
  }
  EXPECT_EQ(umount2(folder.path().c_str(), MNT_DETACH), 0);
}

}  // namespace vm_parts_test
}  // namespace tidelock::sandbox::vm
