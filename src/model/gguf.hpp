// GGUF version 3, little-endian: the file format of llama.cpp.
//
// Layout: "GGUF", u32 version, u64 tensor count, u64 key count; the keys (string, u32 type, value); the tensors (string
// name, u32 dimensions, u64 ne[dimensions] with the fastest first, u32 type, u64 offset into the data); zeros up to
// general.alignment (32 where it is not given); the data, tensor after tensor, each padded to the alignment. A string
// is u64 length and bytes; an array is u32 element type, u64 count and the elements.
//
// Nothing in a file is believed before it was checked. Every lie is Error{corrupt_data} and every thing that this
// reader does not take is Error{not_supported}; both name the file, the key or tensor, and the numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/files.hpp"
#include "model/safetensors.hpp"

namespace tidelock::model {

enum class GgufType : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };
std::string_view gguf_type_name(GgufType type);

// A value or an array of them; exactly one of the three lists is used.
struct GgufValue {
  GgufType type = GgufType::u32;  // of an array: of its elements
  bool is_array = false;
  std::vector<std::uint64_t> integers;  // booleans and all integer types, the signed ones sign-extended
  std::vector<double> reals;            // f32, f64
  std::vector<std::string> strings;

  std::size_t size() const { return integers.size() + reals.size() + strings.size(); }
  bool operator==(const GgufValue&) const = default;

  static GgufValue of(std::uint32_t value) { return {GgufType::u32, false, {value}, {}, {}}; }
  static GgufValue of(bool value) { return {GgufType::boolean, false, {value ? 1U : 0U}, {}, {}}; }
  static GgufValue of(float value) { return {GgufType::f32, false, {}, {double{value}}, {}}; }
  static GgufValue of(std::string value) { return {GgufType::string, false, {}, {}, {std::move(value)}}; }
  static GgufValue of(const char* value) { return of(std::string(value)); }
  static GgufValue list(GgufType type, std::vector<std::uint64_t> values) {
    return {type, true, std::move(values), {}, {}};
  }
  static GgufValue list(std::vector<std::string> values) { return {GgufType::string, true, {}, {}, std::move(values)}; }
};

// How ggml stores numbers: rows of blocks of `block` elements in `bytes` bytes.
struct GgmlType {
  std::uint32_t id;
  std::string_view name;
  std::int64_t block;
  std::size_t bytes;
};
namespace ggml {
inline constexpr std::uint32_t f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q4_k = 12, q5_k = 13,
                               q6_k = 14, iq4_nl = 20, bf16 = 30, mxfp4 = 39;
}
const GgmlType* find_ggml_type(std::uint32_t id);  // null when this reader does not know it

struct GgufTensor {
  std::string name;
  const GgmlType* type = nullptr;
  std::vector<std::int64_t> ne;      // 1 to 4 dimensions, the fastest first, each at least 1
  std::uint64_t offset = 0;          // into the data
  std::span<const std::byte> bytes;  // in the mapping; aligned to the file's alignment
  std::int64_t elements() const;
};

using GgufMetadata = std::map<std::string, GgufValue>;

// One memory-mapped file; owns the mapping that its tensors point into. Immutable and thread-safe.
class GgufFile {
 public:
  // Throws Error{not_found, io} when the file cannot be mapped, Error{corrupt_data, not_supported} for its content.
  explicit GgufFile(const std::filesystem::path& path);
  const std::filesystem::path& path() const { return path_; }
  const GgufMetadata& metadata() const { return metadata_; }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }  // in the order of the data
  std::size_t alignment() const { return alignment_; }

 private:
  std::filesystem::path path_;
  MappedFile file_;
  GgufMetadata metadata_;
  std::vector<GgufTensor> tensors_;
  std::size_t alignment_ = 32;
};

// A model: one file, or the parts NAME-00001-of-000NN.gguf that keys split.no, split.count and split.tensors.count
// describe. Metadata is that of the first part.
class GgufModel {
 public:
  // `path` is the file or the first part. Throws like GgufFile; Error{corrupt_data} when a part is missing or another
  // one, when parts repeat a tensor, or when they do not hold what the first one promises.
  explicit GgufModel(const std::filesystem::path& path);
  const std::filesystem::path& path() const { return path_; }
  const GgufMetadata& metadata() const { return files_.front()->metadata(); }
  const GgufValue* find_key(const std::string& key) const;       // null when absent
  const GgufTensor* find_tensor(const std::string& name) const;  // null when absent
  const std::map<std::string, const GgufTensor*>& tensors() const { return tensors_; }
  std::size_t parts() const { return files_.size(); }
  std::vector<std::filesystem::path> paths() const;  // of the parts

 private:
  void open_parts(std::uint64_t count);
  void add(const GgufFile& file);

  std::filesystem::path path_;
  std::vector<std::unique_ptr<GgufFile>> files_;
  std::map<std::string, const GgufTensor*> tensors_;
};

struct GgufTensorToWrite {
  std::string name;
  std::uint32_t type = ggml::f32;
  std::vector<std::int64_t> ne;
  std::function<void(const ByteSink&)> produce;  // hands the tensor's bytes over, in any pieces
};

// Bytes of a tensor. Throws Error{invalid_argument} for a type or shape that a reader would refuse.
std::uint64_t gguf_tensor_bytes(const GgufTensorToWrite& tensor);

// Writes a file whole or not at all (AtomicFile). Keys and tensors keep the given order. Throws Error{invalid_argument}
// for what the reader would refuse, Error{internal} when a tensor's producer hands over another number of bytes.
void write_gguf(const std::filesystem::path& path, const std::vector<std::pair<std::string, GgufValue>>& metadata,
                const std::vector<GgufTensorToWrite>& tensors);

}  // namespace tidelock::model
