#include "base/base.hpp"

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <atomic>
#include <numeric>

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

}  // namespace base_test
}  // namespace tidelock
