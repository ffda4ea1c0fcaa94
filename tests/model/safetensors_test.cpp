#include "model/safetensors.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/base.hpp"

namespace tidelock::model {
namespace safetensors_test {

std::filesystem::path scratch(const std::string& name) {
  auto path = std::filesystem::temp_directory_path() / fmt::format("tidelock-safetensors-{}-{}", ::getpid(), name);
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

std::string u64(std::uint64_t value) {
  std::string text(8, '\0');
  std::memcpy(text.data(), &value, 8);
  return text;
}

// A file of this header and data, whatever they claim.
std::string image(const std::string& header, const std::string& data) {
  return u64(header.size()) + header + data;
}

template <typename T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

// The message of the error that `body` throws; fails the test when it throws none or one of another code.
template <typename Body>
std::string error_of(ErrorCode code, Body body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

std::string refusal(const std::string& content) {
  const auto folder = scratch("refusal");
  write_file_atomic(folder / "x.safetensors", content);
  const auto message = error_of(ErrorCode::corrupt_data, [&] { SafetensorsFile file(folder / "x.safetensors"); });
  EXPECT_NE(message.find("x.safetensors"), std::string::npos) << message;
  std::filesystem::remove_all(folder);
  return message;
}

#define EXPECT_SAYS(message, part) EXPECT_NE((message).find(part), std::string::npos) << (message)

constexpr auto one_f32 = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";

TEST(Safetensors, WritesAndReadsBack) {
  const auto folder = scratch("round");
  const std::vector<float> a{1.5F, -2.0F, 0.0F, 3.25F, 4.0F, 5.0F};
  const std::vector<std::uint16_t> b{0x3F80, 0xC000};  // 1, -2 in bf16
  const std::vector<std::uint8_t> c{1, 2, 3};
  const std::vector<TensorToWrite> tensors{{"z.a", Dtype::f32, {2, 3}, bytes_of(a)},
                                           {"b\"\\\n\xc3\xa9", Dtype::bf16, {2}, bytes_of(b)},
                                           {"c", Dtype::u8, {3, 1}, bytes_of(c)},
                                           {"empty", Dtype::f32, {0, 7}, {}},
                                           {"scalar", Dtype::f32, {}, bytes_of(a).first(4)}};
  write_safetensors(folder / "x", tensors, {{"format", "pt"}, {"k", "v\n"}});
  const SafetensorsFile file(folder / "x");
  EXPECT_EQ(file.tensors().size(), 5U);
  EXPECT_EQ(file.metadata().at("k"), "v\n");
  EXPECT_EQ(read_f32(file.tensors().at("z.a"), {2, 3}), a);
  EXPECT_EQ(read_f32(file.tensors().at("b\"\\\n\xc3\xa9"), {2}), (std::vector<float>{1.0F, -2.0F}));
  EXPECT_EQ(read_f32(file.tensors().at("scalar"), {}), (std::vector<float>{1.5F}));
  EXPECT_TRUE(read_f32(file.tensors().at("empty"), {0, 7}).empty());
  EXPECT_EQ(file.tensors().at("c").bytes[2], std::byte{3});

  // The same tensors in another order give the same bytes, and the data starts at a multiple of 8.
  std::vector<TensorToWrite> shuffled(tensors.rbegin(), tensors.rend());
  write_safetensors(folder / "y", shuffled, {{"k", "v\n"}, {"format", "pt"}});
  const auto content = read_file(folder / "x");
  EXPECT_EQ(content, read_file(folder / "y"));
  std::uint64_t length = 0;
  std::memcpy(&length, content.data(), 8);
  EXPECT_EQ(length % 8, 0U);
  std::filesystem::remove_all(folder);
}

TEST(Safetensors, WriterRefusesWhatItsReaderWould) {
  const auto folder = scratch("writer");
  const std::vector<float> a{1.0F};
  const auto refuse = [&](const std::vector<TensorToWrite>& tensors) {
    error_of(ErrorCode::invalid_argument, [&] { write_safetensors(folder / "x", tensors); });
    EXPECT_FALSE(std::filesystem::exists(folder / "x"));
  };
  refuse({{"a", Dtype::f32, {1}, bytes_of(a)}, {"a", Dtype::f32, {1}, bytes_of(a)}});
  refuse({{"a", Dtype::f32, {2}, bytes_of(a)}});
  refuse({{"a", Dtype::f32, {-1}, bytes_of(a)}});
  refuse({{"__metadata__", Dtype::f32, {1}, bytes_of(a)}});
  refuse({{"bad\xff", Dtype::f32, {1}, bytes_of(a)}});
  std::filesystem::remove_all(folder);
}

TEST(Safetensors, EveryLieInAHeaderIsRefusedByName) {
  const std::string four(4, '\0'), eight(8, '\0');
  const auto entry = [](const std::string& fields) { return "{\"a\":{" + fields + "}}"; };
  // The twin that proves the cases below fail for their own reason: the same file without a lie is accepted.
  const auto folder = scratch("good");
  write_file_atomic(folder / "x", image(one_f32, four));
  EXPECT_NO_THROW(SafetensorsFile(folder / "x"));
  write_file_atomic(folder / "x", image(std::string(one_f32) + "   ", four));
  EXPECT_NO_THROW(SafetensorsFile(folder / "x"));
  std::filesystem::remove_all(folder);

  EXPECT_SAYS(refusal(""), "at least 8");
  EXPECT_SAYS(refusal("1234567"), "at least 8");
  EXPECT_SAYS(refusal(u64(100) + "{}"), "truncated");
  EXPECT_SAYS(refusal(u64(~0ULL) + "{}"), "more than");
  EXPECT_SAYS(refusal(u64(100'000'001) + "{}"), "more than");
  EXPECT_SAYS(refusal(image("", "")), "start with");
  EXPECT_SAYS(refusal(image("[]", "")), "start with");
  EXPECT_SAYS(refusal(image(" {}", "")), "start with");
  EXPECT_SAYS(refusal(image("{\"a\":", "")), "not valid JSON");
  EXPECT_SAYS(refusal(image("{} x", "")), "not valid JSON");
  EXPECT_SAYS(refusal(image(std::string("{}\0x", 4), "")), "a zero byte");
  EXPECT_SAYS(refusal(image("{\"\xff\":1}", "")), "not valid JSON");
  EXPECT_SAYS(refusal(image(std::string(1000, '{'), "")), "nested");
  EXPECT_SAYS(refusal(image("{\"__metadata__\":[]}", "")), "__metadata__");
  EXPECT_SAYS(refusal(image("{\"__metadata__\":{\"k\":1}}", "")), "expected a string");
  EXPECT_SAYS(refusal(image("{\"a\":3}", four)), "not an object");
  EXPECT_SAYS(refusal(image(entry(R"("dtype":"F31","shape":[1],"data_offsets":[0,4])"), four)), "unknown dtype");
  EXPECT_SAYS(refusal(image(entry(R"("dtype":7,"shape":[1],"data_offsets":[0,4])"), four)), "dtype");
  EXPECT_SAYS(refusal(image(entry(R"("shape":[1],"data_offsets":[0,4])"), four)), "dtype");
  EXPECT_SAYS(refusal(image(entry(R"("dtype":"F32","data_offsets":[0,4])"), four)), "shape is missing");
  EXPECT_SAYS(refusal(image(entry(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), four)), "shape holds -1");
  EXPECT_SAYS(refusal(image(entry(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"), four)), "shape holds 1.0");
  EXPECT_SAYS(refusal(image(entry(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4])"), four)),
              "shape holds");
  EXPECT_SAYS(refusal(image(entry(R"("dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,4])"), four)),
              "too large");
  EXPECT_SAYS(refusal(image(entry(R"("dtype":"F32","shape":[0,4294967296,4294967296,4],"data_offsets":[0,0])"), "")),
              "too large");
  EXPECT_SAYS(refusal(image(entry(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), four)), "needs 8 bytes");
  EXPECT_SAYS(refusal(image(entry(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])"), four)), "beyond");
  EXPECT_SAYS(refusal(image(entry(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), four)), "backwards");
  EXPECT_SAYS(refusal(image(entry(R"("dtype":"F32","shape":[1],"data_offsets":[-4,0])"), four)), "data_offsets");
  EXPECT_SAYS(refusal(image(entry(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,8])"), four)), "data_offsets");
  EXPECT_SAYS(refusal(image(entry(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1)"), four)), "unknown key");
  EXPECT_SAYS(refusal(image(one_f32, eight)), "belong to no tensor");
  EXPECT_SAYS(refusal(image(one_f32, "")), "beyond");
  EXPECT_SAYS(refusal(image(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", eight)), "unused");
  EXPECT_SAYS(refusal(image(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                            R"("b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
                            four + "xx")),
              "overlaps");
  EXPECT_SAYS(refusal(image(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                            R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                            eight)),
              "stands twice");
}

TEST(Safetensors, AHundredThousandTensorsAreNoTrouble) {
  // A checkpoint with hundreds of experts per layer has that many. Quadratic reading would take minutes.
  const auto folder = scratch("many");
  std::vector<TensorToWrite> tensors;
  for (int i = 0; i < 100'000; ++i) tensors.push_back({fmt::format("layers.{}.w", i), Dtype::f32, {0}, {}});
  write_safetensors(folder / "x", tensors);
  EXPECT_EQ(SafetensorsFile(folder / "x").tensors().size(), tensors.size());
  std::filesystem::remove_all(folder);
}

TEST(Safetensors, ReadingNamesTheTensorAndWhatIsWrong) {
  const std::vector<float> values{1.0F, std::numeric_limits<float>::quiet_NaN()};
  const TensorInfo tensor{"w", Dtype::f32, {2}, bytes_of(values)};
  EXPECT_SAYS(error_of(ErrorCode::corrupt_data, [&] { read_f32(tensor, {1, 2}); }), "has shape [2], expected [1, 2]");
  EXPECT_SAYS(error_of(ErrorCode::corrupt_data, [&] { read_f32(tensor, {2}); }), "nan at element 1");
  EXPECT_EQ(read_f32(tensor, {2}, false).size(), 2U);
  const std::vector<std::uint16_t> infinite{0x7C00};
  EXPECT_SAYS(error_of(ErrorCode::corrupt_data,
                       [&] {
                         read_f32({"h", Dtype::f16, {1}, bytes_of(infinite)}, {1});
                       }),
              "\"h\" holds inf");
  EXPECT_SAYS(error_of(ErrorCode::corrupt_data,
                       [&] {
                         read_f32({"i", Dtype::i16, {1}, bytes_of(infinite)}, {1});
                       }),
              "is I16, expected F32, BF16 or F16");
}

class Shards : public ::testing::Test {
 protected:
  void SetUp() override {
    write_safetensors(folder_ / "one.safetensors", {{"a", Dtype::f32, {1}, bytes_of(a_)}});
    write_safetensors(folder_ / "two.safetensors", {{"b", Dtype::f32, {1}, bytes_of(b_)}});
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void index(const std::string& weight_map) {
    write_file_atomic(folder_ / "model.safetensors.index.json",
                      "{\"metadata\":{\"total_size\":8},\"weight_map\":" + weight_map + "}");
  }
  std::string refused() {
    return error_of(ErrorCode::corrupt_data, [&] { Checkpoint checkpoint(folder_); });
  }

  std::filesystem::path folder_ = scratch("shards");
  std::vector<float> a_{1.0F}, b_{2.0F};
};

TEST_F(Shards, AreFoundThroughTheIndex) {
  index(R"({"a":"one.safetensors","b":"two.safetensors"})");
  const Checkpoint checkpoint(folder_);
  EXPECT_EQ(checkpoint.names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(read_f32(checkpoint.at("b"), {1}), b_);
  EXPECT_EQ(checkpoint.find("c"), nullptr);
  EXPECT_SAYS(error_of(ErrorCode::not_found, [&] { checkpoint.at("c"); }), "\"c\" is missing");
}

TEST_F(Shards, AnIndexThatLiesIsRefused) {
  index(R"({"a":"one.safetensors","b":"three.safetensors"})");
  EXPECT_SAYS(refused(), "three.safetensors is missing");
  index(R"({"a":"two.safetensors","b":"one.safetensors"})");
  EXPECT_SAYS(refused(), "places in");
  index(R"({"a":"one.safetensors","b":"two.safetensors","c":"two.safetensors"})");
  EXPECT_SAYS(refused(), "\"c\" is not in shard two.safetensors");
  write_safetensors(folder_ / "two.safetensors",
                    {{"a", Dtype::f32, {1}, bytes_of(a_)}, {"b", Dtype::f32, {1}, bytes_of(b_)}});
  index(R"({"a":"one.safetensors","b":"two.safetensors"})");
  EXPECT_SAYS(refused(), "places in one.safetensors");
  index(R"({"a":"one.safetensors","b":3})");
  EXPECT_SAYS(refused(), "not a string");
  index("[]");
  EXPECT_SAYS(refused(), "weight_map");
  write_file_atomic(folder_ / "model.safetensors.index.json", "[]");
  EXPECT_SAYS(refused(), "weight_map");
}

TEST_F(Shards, AnIndexCannotLeaveItsFolder) {
  for (const std::string name : {"../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", ".", "", ".hidden",
                                 "one.safetensors\\u0000x"}) {
    index("{\"a\":\"" + name + "\"}");
    EXPECT_SAYS(refused(), "plain file name");
  }
}

TEST_F(Shards, SingleFilesOpenDirectlyOrByFolder) {
  const Checkpoint direct(folder_ / "one.safetensors");
  EXPECT_EQ(direct.names(), (std::vector<std::string>{"a"}));
  error_of(ErrorCode::not_found, [&] { Checkpoint checkpoint(folder_); });
  write_safetensors(folder_ / "model.safetensors", {{"m", Dtype::f32, {1}, bytes_of(a_)}});
  EXPECT_NE(Checkpoint(folder_).find("m"), nullptr);
  index(R"({"a":"one.safetensors"})");
  EXPECT_SAYS(refused(), "both");
}

}  // namespace safetensors_test
}  // namespace tidelock::model
