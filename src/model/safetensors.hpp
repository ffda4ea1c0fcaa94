// Safetensors: the file format of Hugging Face checkpoints and PEFT adapters.
//
// Layout: u64 little-endian header length; that many bytes of JSON,
//   {"__metadata__": {string: string}, NAME: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
// padded with spaces; then the data, which the tensors cover without a hole or an overlap. Nothing in a file is
// believed before it was checked; every lie is Error{corrupt_data} that names the file, the tensor and the numbers.
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
#include <vector>

#include "base/files.hpp"

namespace tidelock::model {

enum class Dtype { boolean, u8, i8, f8_e5m2, f8_e4m3, f8_e8m0, i16, u16, f16, bf16, i32, u32, f32, i64, u64, f64 };

std::size_t dtype_size(Dtype dtype);       // bytes per element
std::string_view dtype_name(Dtype dtype);  // as it stands in a header: "F32", "BF16", ...

struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;   // row-major; empty for a scalar
  std::span<const std::byte> bytes;  // in the mapping of the file; not aligned to anything
  std::int64_t elements() const;
};

// "[2, 3]", for messages.
std::string shape_text(std::span<const std::int64_t> shape);

// One memory-mapped file; owns the mapping, and the TensorInfo it hands out live as long as it does. Immutable and
// thread-safe once constructed. Like every mapping, a file truncated by another process while in use raises SIGBUS.
class SafetensorsFile {
 public:
  // Throws Error{not_found, io} when the file cannot be mapped, Error{corrupt_data} for any lie in its header.
  explicit SafetensorsFile(const std::filesystem::path& path);
  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  std::filesystem::path path_;
  MappedFile file_;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
};

// The weights of a model: one .safetensors file, or a folder with model.safetensors, or a folder with
// model.safetensors.index.json and the shards it names. Owns the mappings. Immutable and thread-safe.
class Checkpoint {
 public:
  // Throws like SafetensorsFile; Error{corrupt_data} also when index and shards disagree about a tensor, when a shard's
  // name is more than a plain file name, or when a folder holds both a single file and an index.
  explicit Checkpoint(const std::filesystem::path& path);
  const TensorInfo* find(const std::string& name) const;  // null when absent
  const TensorInfo& at(const std::string& name) const;    // throws Error{not_found} naming the tensor and the folder
  std::vector<std::string> names() const;                 // sorted
  const std::filesystem::path& path() const { return path_; }
  const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }

 private:
  void open_index(const std::filesystem::path& index);
  void add(const SafetensorsFile& file);

  std::filesystem::path path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const TensorInfo*> tensors_;
};

// The tensor's values as f32; F32, BF16 and F16 widen exactly, everything else is refused. Throws
// Error{corrupt_data} when the shape is not `expected_shape`, when the dtype is not one of the three, and, with
// `refuse_nan`, at the first value that is NaN or infinite.
std::vector<float> read_f32(const TensorInfo& tensor, const std::vector<std::int64_t>& expected_shape,
                            bool refuse_nan = true);

using ByteSink = std::function<void(std::span<const std::byte>)>;

struct TensorToWrite {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
  // Instead of `bytes`, for tensors that are made as they are written: hands them over in any pieces.
  std::function<void(const ByteSink&)> produce = nullptr;
};

// Writes a file whole or not at all (AtomicFile). The bytes depend on the arguments' values only: tensors are laid out
// by name, whatever their order here. Throws Error{invalid_argument} for a repeated or reserved name, a name that is
// not UTF-8, or bytes that do not fit the shape; Error{internal} for a producer of another number of bytes; Error{io}
// as AtomicFile does.
void write_safetensors(const std::filesystem::path& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

// Writes folder/model.safetensors, or, when the tensors have more than `shard_bytes` together, shards of at most so
// many (a larger tensor has one to itself) in the order of `tensors`, and at last model.safetensors.index.json, without
// which nobody reads them. Returns how many files hold tensors. Throws like write_safetensors.
std::size_t write_checkpoint(const std::filesystem::path& folder, const std::vector<TensorToWrite>& tensors,
                             const std::map<std::string, std::string>& metadata, std::uint64_t shard_bytes);

}  // namespace tidelock::model
