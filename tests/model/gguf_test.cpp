// GGUF: what was written is what is read, and no lie in a file is believed.
#include "model/gguf.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "model/expect_refused.hpp"
#include "model/gguf_image.hpp"
#include "model/temporary_folder.hpp"

namespace tidelock::model {
namespace gguf_test {

using namespace testing;

class Gguf : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::filesystem::path path = folder.path / "x.gguf";

  GgufFile open(const std::string& image) {
    write_file_atomic(path, image);
    return GgufFile(path);
  }
  void refuse(const GgufImage& image, const std::string& part, ErrorCode code = ErrorCode::corrupt_data) {
    refuse(image.image(), part, code);
  }
  void refuse(const std::string& image, const std::string& part, ErrorCode code = ErrorCode::corrupt_data) {
    SCOPED_TRACE(part);
    write_file_atomic(path, image);
    expect_refused(code, "x.gguf", [&] { GgufFile file(path); });
    expect_refused(code, part, [&] { GgufFile file(path); });
  }
};

GgufTensorToWrite tensor_of(const std::string& name, std::uint32_t type, std::vector<std::int64_t> ne,
                            const std::string& bytes) {
  return {name, type, std::move(ne), [bytes](const ByteSink& sink) {
            const auto all = std::as_bytes(std::span(bytes));
            sink(all.first(bytes.size() / 2));  // in two pieces
            sink(all.subspan(bytes.size() / 2));
          }};
}

TEST_F(Gguf, WritesAndReadsBack) {
  const std::vector<std::pair<std::string, GgufValue>> metadata = {
      {"general.architecture", GgufValue::of("kimi-k3")},
      {"u8", GgufValue{GgufType::u8, false, {255}, {}, {}}},
      {"i8", GgufValue{GgufType::i8, false, {static_cast<std::uint64_t>(-7)}, {}, {}}},
      {"u16", GgufValue{GgufType::u16, false, {65535}, {}, {}}},
      {"i16", GgufValue{GgufType::i16, false, {static_cast<std::uint64_t>(-32768)}, {}, {}}},
      {"u32", GgufValue::of(std::uint32_t{4000000000U})},
      {"i32", GgufValue{GgufType::i32, false, {static_cast<std::uint64_t>(-1)}, {}, {}}},
      {"f32", GgufValue::of(1e-5F)},
      {"bool", GgufValue::of(true)},
      {"u64", GgufValue{GgufType::u64, false, {~std::uint64_t{0}}, {}, {}}},
      {"i64", GgufValue{GgufType::i64, false, {std::uint64_t{1} << 63}, {}, {}}},
      {"f64", GgufValue{GgufType::f64, false, {}, {0.1}, {}}},
      {"strings", GgufValue::list(std::vector<std::string>{"", "a\0b", "\xc3\xa9"})},
      {"list", GgufValue::list(GgufType::u32, {0, 1, 4000000000U})},
      {"empty", GgufValue::list(GgufType::f32, {})}};
  const std::string a(24, '\7'), b(34, '\3'), c(2, '\1');
  write_gguf(path, metadata,
             {tensor_of("a.weight", ggml::f32, {3, 2}, a), tensor_of("b", ggml::q8_0, {32}, b),
              tensor_of("c", ggml::bf16, {1, 1, 1, 1}, c)});
  const GgufFile file(path);
  EXPECT_EQ(file.metadata(), (GgufMetadata(metadata.begin(), metadata.end())));
  ASSERT_EQ(file.tensors().size(), 3U);
  const auto content = [](const GgufTensor& t) {
    return std::string(reinterpret_cast<const char*>(t.bytes.data()), t.bytes.size());
  };
  EXPECT_EQ(content(file.tensors()[0]), a);
  EXPECT_EQ(content(file.tensors()[1]), b);
  EXPECT_EQ(content(file.tensors()[2]), c);
  EXPECT_EQ(file.tensors()[0].ne, (std::vector<std::int64_t>{3, 2}));
  EXPECT_EQ(file.tensors()[1].type->name, "Q8_0");
  for (const GgufTensor& t : file.tensors()) EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.bytes.data()) % 32, 0U);
}

TEST_F(Gguf, AFileOfAnotherAlignmentIsRead) {
  GgufImage image = good_image();
  image.key("general.alignment", GgufType::u32, raw(std::uint32_t{64}));
  image.alignment = 64;
  refuse(image, "tensor \"b\" is at offset 32, which is no multiple of the alignment 64");
  image.tensors.pop_back();
  image.tensor("b", {32, 2}, ggml::q8_0, 64).data.assign(64 + 68, '\1');
  EXPECT_EQ(open(image.image()).alignment(), 64U);
  for (const std::uint32_t bad : {0U, 4U, 48U, 1U << 31}) {
    GgufImage lie = good_image();
    refuse(lie.key("general.alignment", GgufType::u32, raw(bad)), "general.alignment = " + std::to_string(bad));
  }
  GgufImage text = good_image();
  refuse(text.key("general.alignment", GgufType::string, raw_text("32")), "general.alignment is not a number");
}

TEST_F(Gguf, MagicVersionAndCounts) {
  EXPECT_NO_THROW(open(good_image().image()));  // the twin: the same file without a lie
  GgufImage image = good_image();
  image.magic = "GGUX";
  refuse(image, "starts with");
  image = good_image();
  image.version = 2;
  refuse(image, "GGUF version 2", ErrorCode::not_supported);
  image.version = 0x03000000U;
  refuse(image, "big-endian", ErrorCode::not_supported);
  image = good_image();
  image.tensor_count = ~std::uint64_t{0};
  refuse(image, "18446744073709551615 tensors");
  image = good_image();
  image.key_count = std::uint64_t{1} << 40;
  refuse(image, "1099511627776 keys");
  image = good_image();
  image.key_count = 2;  // the first tensor is taken for a key
  EXPECT_THROW(open(image.image()), Error);
}

TEST_F(Gguf, EveryCutIsRefused) {
  const std::string whole = good_image().image();
  for (std::size_t size = 0; size < whole.size(); ++size) {
    write_file_atomic(path, whole.substr(0, size));
    try {
      GgufFile file(path);
      ADD_FAILURE() << "accepted " << size << " of " << whole.size() << " bytes";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt_data) << error.what();
    }
  }
}

TEST_F(Gguf, KeysAreChecked) {
  const auto with = [](auto&& change) {
    GgufImage image = good_image();
    change(image);
    return image;
  };
  refuse(with([](auto& i) { i.key("general.architecture", GgufType::boolean, raw(std::uint8_t{1})); }),
         "key \"general.architecture\" stands twice");
  refuse(with([](auto& i) { i.key("", GgufType::boolean, raw(std::uint8_t{1})); }), "key 2 of 2 is empty");
  refuse(with([](auto& i) { i.key("k", static_cast<GgufType>(13), ""); }), "key \"k\" has value type 13");
  refuse(with([](auto& i) { i.key("k", GgufType::boolean, raw(std::uint8_t{2})); }), "holds the byte 2 as a bool");
  refuse(with([](auto& i) { i.key("k", GgufType::string, raw(~std::uint64_t{0})); }),
         "key \"k\" has 18446744073709551615 bytes");
  refuse(with([](auto& i) { i.key("k", GgufType::string, raw(std::uint64_t{1000})); }), "1000 bytes, ");
  refuse(with([](auto& i) { i.list("k", GgufType::u8, ~std::uint64_t{0}, ""); }), "18446744073709551615 u8");
  refuse(with([](auto& i) { i.list("k", GgufType::u64, std::uint64_t{1} << 61, ""); }), "2305843009213693952 u64");
  refuse(with([](auto& i) { i.list("k", GgufType::string, 1000, ""); }), "1000 string");
  refuse(with([](auto& i) { i.list("k", GgufType::array, 1, raw(std::uint32_t{0}) + raw(std::uint64_t{0})); }),
         "array of arrays", ErrorCode::not_supported);
  refuse(with([](auto& i) { i.list("k", static_cast<GgufType>(99), 1, ""); }), "value type 99");
  GgufImage long_key = good_image();
  refuse(long_key.key(std::string(65536, 'k'), GgufType::u8, "\1"), "65536 bytes, at most 65535");
}

TEST_F(Gguf, TensorsAreChecked) {
  const auto with = [](const std::string& name, const std::vector<std::uint64_t>& ne, std::uint32_t type,
                       std::uint64_t offset) {
    GgufImage image = good_image();
    image.tensors.pop_back();
    return image.tensor(name, ne, type, offset);
  };
  EXPECT_NO_THROW(open(with("b", {32, 2}, ggml::q8_0, 32).image()));
  refuse(with("a", {32, 2}, ggml::q8_0, 32), "tensor \"a\" stands twice");
  refuse(with("", {32, 2}, ggml::q8_0, 32), "tensor 2 of 2 has no name");
  refuse(with(std::string(64, 'n'), {32, 2}, ggml::q8_0, 32), "64 bytes, at most 63");
  refuse(with("b", {}, ggml::q8_0, 32), "tensor \"b\" has 0 dimensions");
  refuse(with("b", {1, 1, 1, 1, 1}, ggml::f32, 32), "5 dimensions");
  refuse(with("b", {32, 0}, ggml::q8_0, 32), "size 0 in dimension 1");
  refuse(with("b", {32, ~std::uint64_t{0}}, ggml::q8_0, 32), "size 18446744073709551615 in dimension 1");
  refuse(with("b", {1ULL << 32, 1ULL << 31}, ggml::f32, 32), "is too large");
  refuse(with("b", {1ULL << 32, 1ULL << 30}, ggml::f32, 32), "reaches beyond");  // the bytes overflow, not the count
  refuse(with("b", {31, 2}, ggml::q8_0, 32), "rows of 31 elements, Q8_0 needs a multiple of 32");
  refuse(with("b", {32, 2}, 99, 32), "ggml type 99", ErrorCode::not_supported);
  refuse(with("b", {32, 2}, 4, 32), "ggml type 4", ErrorCode::not_supported);
  refuse(with("b", {32, 2}, ggml::q8_0, 33), "no multiple of the alignment 32");
  refuse(with("b", {32, 2}, ggml::q8_0, 0), "overlaps tensor \"a\", which ends at 32");
  refuse(with("b", {32, 2}, ggml::q8_0, 64), "is at offset 64, expected 32 after tensor \"a\"");
  refuse(with("b", {32, 2}, ggml::q8_0, ~std::uint64_t{31}), "expected 32 after tensor \"a\"");
  refuse(with("b", {32, 3}, ggml::q8_0, 32), "reaches beyond the 100 bytes of data");
}

TEST_F(Gguf, TypesThatCannotBeRunAreReadByName) {
  GgufImage image = good_image();
  image.tensors.pop_back();
  image.tensor("b", {64}, 2, 32).data.assign(32 + 36, '\0');
  EXPECT_EQ(open(image.image()).tensors()[1].type->name, "Q4_0");
}

TEST_F(Gguf, BytesThatBelongToNoTensorAreRefused) {
  GgufImage image = good_image();
  image.data.resize(128);  // the padding behind the last tensor
  EXPECT_NO_THROW(open(image.image()));
  image.data.resize(132);
  refuse(image, "32 bytes after tensor \"b\" belong to no tensor");
}

TEST_F(Gguf, TheWriterRefusesWhatTheReaderWould) {
  const std::string bytes(4, '\0');
  const auto refused = [&](const std::vector<std::pair<std::string, GgufValue>>& keys,
                           const std::vector<GgufTensorToWrite>& tensors, const std::string& part,
                           ErrorCode code = ErrorCode::invalid_argument) {
    expect_refused(code, part, [&] { write_gguf(path, keys, tensors); });
    EXPECT_FALSE(std::filesystem::exists(path));
    EXPECT_FALSE(std::filesystem::exists(path.string() + ".tmp"));
  };
  refused({{"k", GgufValue::of(true)}, {"k", GgufValue::of(true)}}, {}, "\"k\"");
  refused({{"", GgufValue::of(true)}}, {}, "\"\"");
  refused({{"k", GgufValue{GgufType::u32, false, {1, 2}, {}, {}}}}, {}, "2 values");
  refused({{"k", GgufValue{GgufType::string, true, {1}, {}, {}}}}, {}, "type string");
  refused({}, {tensor_of("t", ggml::f32, {1}, bytes), tensor_of("t", ggml::f32, {1}, bytes)}, "\"t\"");
  refused({}, {tensor_of(std::string(64, 't'), ggml::f32, {1}, bytes)}, "longer than 63");
  refused({}, {tensor_of("t", ggml::q8_0, {4}, bytes)}, "cannot be stored as ggml type Q8_0");
  refused({}, {tensor_of("t", 99, {1}, bytes)}, "99");
  refused({}, {tensor_of("t", ggml::f32, {2}, bytes)}, "4 bytes, expected 8", ErrorCode::internal);
  refused({}, {tensor_of("t", ggml::bf16, {1}, bytes)}, "4 bytes, expected 2", ErrorCode::internal);
}

class GgufParts : public Gguf {
 protected:
  std::filesystem::path part(int n) { return folder.path / fmt::format("m-{:05}-of-00002.gguf", n); }
  void write(int n, const std::string& tensor, std::uint32_t no, std::uint32_t count, std::uint32_t total) {
    write_gguf(part(n),
               {{"split.no", GgufValue{GgufType::u16, false, {no}, {}, {}}},
                {"split.count", GgufValue{GgufType::u16, false, {count}, {}, {}}},
                {"split.tensors.count", GgufValue{GgufType::i32, false, {total}, {}, {}}}},
               {tensor_of(tensor, ggml::f32, {1}, std::string(4, '\0'))});
  }
};

TEST_F(GgufParts, AreOneModel) {
  write(1, "a", 0, 2, 2);
  write(2, "b", 1, 2, 2);
  const GgufModel model(part(1));
  EXPECT_EQ(model.parts(), 2U);
  EXPECT_NE(model.find_tensor("a"), nullptr);
  EXPECT_NE(model.find_tensor("b"), nullptr);
  EXPECT_EQ(model.find_tensor("c"), nullptr);
  expect_refused(ErrorCode::invalid_argument, "not the first", [&] { GgufModel second(part(2)); });
}

TEST_F(GgufParts, MissingSwappedAndRepeatedOnesAreRefused) {
  const auto refused = [&](const std::string& text) {
    expect_refused(ErrorCode::corrupt_data, text, [&] { GgufModel model(part(1)); });
  };
  write(1, "a", 0, 2, 2);
  refused("part 2 of 2 is missing");
  write(2, "b", 0, 2, 2);
  refused("split.no = 0, expected 1");
  write(2, "b", 1, 3, 2);
  refused("split.count = 3, expected 2");
  write(2, "a", 1, 2, 2);
  refused("tensor \"a\" is in an earlier part too");
  write(2, "b", 1, 2, 2);
  write(1, "a", 0, 2, 3);
  refused("split.tensors.count = 3, expected 2");
  write(1, "a", 0, 4, 2);
  refused("is not named");
  write(1, "a", 0, 2, 2);
  std::filesystem::rename(part(1), path);
  expect_refused(ErrorCode::corrupt_data, "is not named", [&] { GgufModel model(path); });
}

}  // namespace gguf_test
}  // namespace tidelock::model
