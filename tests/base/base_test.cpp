#include "base/base.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <set>

#include "base/stall_guard.hpp"

namespace tidelock {
namespace base_test {

std::filesystem::path scratch(const std::string& name) {
  auto path = std::filesystem::temp_directory_path() / fmt::format("tidelock-base-{}-{}", ::getpid(), name);
  std::filesystem::create_directories(path);
  return path;
}

TEST(Random, PhiloxMatchesThePublishedVectors) {
  // Random123 known-answer vectors for philox4x32-10: all zeros, and all ones.
  const auto zero = philox(0, 0, 0);
  EXPECT_EQ(zero, (std::array<std::uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const auto ones = philox(~0ULL, ~0ULL, ~0ULL);
  EXPECT_EQ(ones, (std::array<std::uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(Random, BelowIsInRangeAndReachesAll) {
  Random random(7);
  std::array<int, 6> seen{};
  for (int i = 0; i < 6000; ++i) ++seen.at(random.below(6));
  for (const int count : seen) EXPECT_NEAR(count, 1000, 150);
}

TEST(Files, AtomicWriteKeepsTheOldContentWhenTheDiskIsFull) {
  const auto directory = scratch("full");
  if (::mount("none", directory.c_str(), "tmpfs", 0, "size=64k") != 0) GTEST_FAIL() << "needs root to mount a tmpfs";
  const auto path = directory / "file";
  write_file_atomic(path, "old");
  EXPECT_THROW(write_file_atomic(path, std::string(1 << 20, 'x')), Error);
  EXPECT_EQ(read_file(path), "old");
  EXPECT_FALSE(std::filesystem::exists(directory / "file.tmp"));
  ::umount(directory.c_str());
  std::filesystem::remove_all(directory);
}

TEST(Files, ChecksumsMatchPublishedValues) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283U);
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Files, ErrorsNameThePath) {
  try {
    read_file("/nonexistent/file");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::not_found);
    EXPECT_NE(std::string(error.what()).find("/nonexistent/file"), std::string::npos);
  }
}

TEST(Team, CoversEveryIndexOnceAndRethrows) {
  for (const int threads : {1, 2, 3, 8}) {
    Team team(threads);
    for (int round = 0; round < 200; ++round) {
      std::vector<std::atomic<int>> hits(round * 7 + 1);
      team.parallel(static_cast<std::int64_t>(hits.size()), 3, [&](std::int64_t begin, std::int64_t end) {
        for (auto i = begin; i < end; ++i) hits[static_cast<std::size_t>(i)]++;
      });
      for (const auto& hit : hits) ASSERT_EQ(hit.load(), 1);
    }
    EXPECT_THROW(team.parallel(10, 1,
                               [](std::int64_t b, std::int64_t) {
                                 if (b == 5) fail(ErrorCode::internal, "x");
                               }),
                 Error);
  }
}

std::set<pid_t> threads_of_this_process() {
  std::set<pid_t> ids;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    ids.insert(std::stoi(entry.path().filename().string()));
  return ids;
}

std::atomic<int> held{0};
std::atomic<bool> let_go{false};
void hold(int /*signal*/) {
  ++held;
  while (!let_go) ::usleep(1000);
}

// A worker whose core is taken by somebody else does not come; here it sits in a signal handler.
TEST(Team, AWorkerThatDoesNotComeIsNotWaitedFor) {
  struct sigaction action {};
  action.sa_handler = hold;
  ASSERT_EQ(::sigaction(SIGUSR1, &action, nullptr), 0);
  held = 0;
  let_go = false;
  const auto before = threads_of_this_process();
  Team team(3);
  int sent = 0;
  for (const pid_t id : threads_of_this_process()) {
    if (before.contains(id)) continue;
    ASSERT_EQ(::tgkill(::getpid(), id, SIGUSR1), 0);
    ++sent;
  }
  ASSERT_EQ(sent, 2);
  while (held.load() < 2) ::usleep(1000);
  for (int round = 0; round < 100; ++round) {
    std::vector<int> hits(50);  // written by this thread alone
    team.parallel(50, 1, [&](std::int64_t begin, std::int64_t) { ++hits[static_cast<std::size_t>(begin)]; });
    ASSERT_EQ(std::accumulate(hits.begin(), hits.end(), 0), 50);
  }
  let_go = true;
  // Back, they help again: two pieces that wait for each other can only end on two threads.
  std::atomic<int> together{0};
  team.parallel(3, 1, [&](std::int64_t, std::int64_t) {
    for (++together; together.load() < 3;) ::usleep(100);
  });
  EXPECT_EQ(together.load(), 3);
}

TEST(StallGuard, WorksAloneForAMultipleOfTheWaitAndNoLonger) {
  using std::chrono::microseconds;
  const StallGuard::Time zero = StallGuard::Time{} + std::chrono::hours(1);
  StallGuard guard;
  EXPECT_FALSE(guard.alone(zero));
  guard.waited(zero, microseconds(99), microseconds(0));     // short
  guard.waited(zero, microseconds(490), microseconds(100));  // no longer than pieces are
  EXPECT_FALSE(guard.alone(zero));
  guard.waited(zero, microseconds(3000), microseconds(100));
  EXPECT_TRUE(guard.alone(zero));
  EXPECT_TRUE(guard.alone(zero + microseconds(59'999)));
  EXPECT_FALSE(guard.alone(zero + microseconds(60'000)));
}

// Whatever the waits are, they are at most one part in twenty of the time that follows them.
TEST(StallGuard, WaitingIsABoundedShareOfTheTime) {
  Random random(5);
  StallGuard guard;
  StallGuard::Time now = StallGuard::Time{} + std::chrono::hours(1);
  StallGuard::Duration waited{}, worked{};
  for (int i = 0; i < 100'000; ++i) {
    const auto loop = std::chrono::microseconds(5 + random.below(200));
    now += loop;
    worked += loop;
    if (guard.alone(now)) continue;
    const auto wait =
        random.below(3) == 0 ? std::chrono::microseconds(500 + random.below(4000)) : std::chrono::microseconds(0);
    now += wait;
    waited += wait;
    guard.waited(now, wait, std::chrono::microseconds(50));
  }
  EXPECT_GT(waited.count(), 0);
  EXPECT_LT(static_cast<double>(waited.count()), 0.06 * static_cast<double>(worked.count()));
}

}  // namespace base_test
}  // namespace tidelock
