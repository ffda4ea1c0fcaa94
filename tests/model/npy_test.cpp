#include "model/npy.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>

#include "base/base.hpp"

namespace tidelock::model {
namespace npy_test {

class Npy : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // A version 1 file with this header text and data.
  static std::string image(const std::string& header, const std::string& data) {
    const auto length = static_cast<std::uint16_t>(header.size());
    return std::string("\x93NUMPY\x01\x00", 8) + std::string(reinterpret_cast<const char*>(&length), 2) + header + data;
  }
  NpyArray read(const std::string& content) {
    write_file_atomic(path_, content);
    return read_npy(path_);
  }
  std::vector<TokenId> tokens(const std::string& content) {
    write_file_atomic(path_, content);
    return read_tokens(path_);
  }
  template <typename Body>
  static ErrorCode code_of(Body body) {
    try {
      body();
    } catch (const Error& error) {
      return error.code();
    }
    ADD_FAILURE() << "nothing was thrown";
    return ErrorCode::internal;
  }

  std::filesystem::path folder_ = std::filesystem::temp_directory_path() / fmt::format("tidelock-npy-{}", ::getpid());
  std::filesystem::path path_ = folder_ / "x.npy";
};

const std::string le12("\x01\x00\x00\x00\x02\x00\x00\x00", 8);  // 1, 2 as int32; 0x200000001 as int64

TEST_F(Npy, WritesTheBytesThatNumPyWrites) {
  // numpy.save of numpy.array([[1, -2.5], [0, 3]], "<f4"), by its documented layout: 64-byte aligned data.
  const std::vector<float> values{1.0F, -2.5F, 0.0F, 3.0F};
  write_npy(path_, values, {2, 2});
  std::string expected("\x93NUMPY\x01\x00\x76\x00", 10);
  expected += "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }";
  expected.resize(127, ' ');
  expected += '\n';
  expected.append(reinterpret_cast<const char*>(values.data()), 16);
  EXPECT_EQ(read_file(path_), expected);
  const NpyArray array = read_npy(path_);
  EXPECT_EQ(array.shape, (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(std::get<std::vector<float>>(array.values), values);
}

TEST_F(Npy, ShapesOfEveryRankComeBack) {
  const std::vector<float> values(24, 0.5F);
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{24}, {2, 12}, {2, 3, 4}, {24, 1, 1, 1}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 24}}) {
    write_npy(path_, values, shape);
    EXPECT_EQ(read_npy(path_).shape, shape);
    EXPECT_EQ(read_file(path_).size() % 64, (24 * 4) % 64);
  }
  write_npy(path_, std::span(values).first(1), {});
  EXPECT_TRUE(read_npy(path_).shape.empty());
  write_npy(path_, {}, {0, 5});
  EXPECT_EQ(read_npy(path_).shape, (std::vector<std::int64_t>{0, 5}));
  EXPECT_EQ(code_of([&] { write_npy(path_, values, {23}); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { write_npy(path_, values, {-24}); }), ErrorCode::invalid_argument);
}

TEST_F(Npy, ReadsIntegersOfBothWidthsAndLongHeaders) {
  const auto narrow = read(image("{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }\n", le12));
  EXPECT_EQ(std::get<std::vector<std::int32_t>>(narrow.values), (std::vector<std::int32_t>{1, 2}));
  const auto wide = read(image("{\"shape\": (1,), \"fortran_order\": False, \"descr\": \"<i8\"}", le12));
  EXPECT_EQ(std::get<std::vector<std::int64_t>>(wide.values), (std::vector<std::int64_t>{0x200000001}));
  const std::string header = "{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }\n";
  const auto length = static_cast<std::uint32_t>(header.size());
  const auto second = read(std::string("\x93NUMPY\x02\x00", 8) +
                           std::string(reinterpret_cast<const char*>(&length), 4) + header + le12);
  EXPECT_EQ(second.shape, (std::vector<std::int64_t>{2}));
}

TEST_F(Npy, LiesAreRefused) {
  const auto corrupt = [&](const std::string& content) {
    EXPECT_EQ(code_of([&] { read(content); }), ErrorCode::corrupt_data) << content;
  };
  EXPECT_NO_THROW(read(image("{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }", le12)));
  corrupt("");
  corrupt("\x93NUMPY");
  corrupt("plain text that is long enough");
  corrupt(image("{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }", le12).substr(0, 30));
  corrupt(image("{'descr': '<i4', 'fortran_order': False, 'shape': (3,), }", le12));
  corrupt(image("{'descr': '<i4', 'fortran_order': False, 'shape': (1,), }", le12));
  corrupt(image("{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }", le12 + "x"));
  corrupt(image("{'descr': '<i4', 'fortran_order': False, 'shape': (4611686018427387904, 4), }", le12));
  corrupt(image("{'descr': '<i4', 'fortran_order': False, 'shape': (99999999999999999999,), }", le12));
  corrupt(image("{'descr': '<i4', 'fortran_order': False, 'shape': (-2,), }", le12));
  corrupt(image("{'descr': '<i4', 'fortran_order': False, 'shape': (2,)", le12));
  corrupt(image("{'descr': '<i4', 'fortran_order': False}", le12));
  corrupt(image("{'descr': '<i4', 'descr': '<i4', 'fortran_order': False, 'shape': (2,)}", le12));
  corrupt(image("{'descr': '<i4', 'fortran_order': False, 'shape': (2,), 'x': 'y'}", le12));
  corrupt(image("{'descr': '<i4', 'fortran_order': Maybe, 'shape': (2,)}", le12));
  corrupt(image("{'descr': '<i4, 'fortran_order': False, 'shape': (2,)}", le12));
  corrupt(image("{'descr': '<i4', 'fortran_order': False, 'shape': (2,)} x", le12));
  const auto unsupported = [&](const std::string& content) {
    EXPECT_EQ(code_of([&] { read(content); }), ErrorCode::not_supported) << content;
  };
  unsupported(image("{'descr': '>i4', 'fortran_order': False, 'shape': (2,), }", le12));
  unsupported(image("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }", le12));
  unsupported(image("{'descr': '<i4', 'fortran_order': True, 'shape': (2,), }", le12));
  unsupported(std::string("\x93NUMPY\x09\x00\x00\x00\x00\x00\x00\x00", 14));
}

TEST_F(Npy, TokenFilesAreArraysOrText) {
  EXPECT_EQ(tokens(" 1 2\n3\t40\r\n"), (std::vector<TokenId>{1, 2, 3, 40}));
  EXPECT_TRUE(tokens(" \n").empty());
  EXPECT_EQ(tokens(image("{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }", le12)),
            (std::vector<TokenId>{1, 2}));
  for (const std::string bad : {"1 x", "1,2", "-1", "1.0", "2147483648", "99999999999999999999"})
    EXPECT_EQ(code_of([&] { tokens(bad); }), ErrorCode::corrupt_data) << bad;
  const auto refused = [&](const std::string& content) {
    EXPECT_EQ(code_of([&] { tokens(content); }), ErrorCode::corrupt_data);
  };
  refused(image("{'descr': '<i8', 'fortran_order': False, 'shape': (1,), }", le12));  // beyond 32 bits
  refused(image("{'descr': '<i4', 'fortran_order': False, 'shape': (2, 1), }", le12));
  refused(image("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", le12));
}

}  // namespace npy_test
}  // namespace tidelock::model
