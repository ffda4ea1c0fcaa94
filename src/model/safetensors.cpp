#include "model/safetensors.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <set>

#include "model/json.hpp"
#include "model/produced.hpp"
#include "numerics/formats.hpp"

namespace tidelock::model {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian and is read in place");

// As large as the header that other readers of the format accept.
constexpr std::uint64_t max_header_bytes = 100'000'000;
constexpr std::size_t length_bytes = 8;

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  std::size_t size;
};
constexpr std::array<DtypeRow, 16> dtype_rows{{{Dtype::boolean, "BOOL", 1},
                                               {Dtype::u8, "U8", 1},
                                               {Dtype::i8, "I8", 1},
                                               {Dtype::f8_e5m2, "F8_E5M2", 1},
                                               {Dtype::f8_e4m3, "F8_E4M3", 1},
                                               {Dtype::f8_e8m0, "F8_E8M0", 1},
                                               {Dtype::i16, "I16", 2},
                                               {Dtype::u16, "U16", 2},
                                               {Dtype::f16, "F16", 2},
                                               {Dtype::bf16, "BF16", 2},
                                               {Dtype::i32, "I32", 4},
                                               {Dtype::u32, "U32", 4},
                                               {Dtype::f32, "F32", 4},
                                               {Dtype::i64, "I64", 8},
                                               {Dtype::u64, "U64", 8},
                                               {Dtype::f64, "F64", 8}}};

const DtypeRow& row_of(Dtype dtype) {
  return dtype_rows.at(static_cast<std::size_t>(dtype));
}

std::optional<Dtype> dtype_of(std::string_view name) {
  for (const DtypeRow& row : dtype_rows)
    if (row.name == name) return row.dtype;
  return std::nullopt;
}

// Bytes of a tensor, or nothing when a dimension is negative or the product does not fit.
std::optional<std::uint64_t> byte_count(std::span<const std::int64_t> shape, Dtype dtype) {
  std::uint64_t count = dtype_size(dtype);
  bool empty = false;
  for (const std::int64_t dimension : shape) {
    if (dimension < 0) return std::nullopt;
    if (dimension == 0) {
      empty = true;
      continue;
    }
    // Checked even when another dimension is zero, so that elements() of an accepted shape never overflows.
    if (__builtin_mul_overflow(count, static_cast<std::uint64_t>(dimension), &count)) return std::nullopt;
    if (count > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
  }
  return empty ? 0 : count;
}

// One entry of the header, with the place it claims in the data.
struct Claim {
  TensorInfo tensor;
  std::uint64_t begin = 0, end = 0;
};

// What a header says about one tensor, checked against the size of the data.
class ClaimReader {
 public:
  ClaimReader(std::string file, std::uint64_t data_bytes) : file_(std::move(file)), data_bytes_(data_bytes) {}

  Claim read(const std::string& name, const Json& entry) const {
    if (!entry.is_object()) wrong(name, "its entry is not an object");
    for (const auto& [key, value] : entry.items())
      if (key != "dtype" && key != "shape" && key != "data_offsets")
        wrong(name, fmt::format("unknown key {}; expected dtype, shape and data_offsets", json_quote(key)));
    Claim claim;
    claim.tensor.name = name;
    claim.tensor.dtype = read_dtype(name, entry);
    claim.tensor.shape = read_shape(name, entry);
    const auto offsets = entry.find("data_offsets");
    if (offsets == entry.end() || !offsets->is_array() || offsets->size() != 2 || !(*offsets)[0].is_number_unsigned() ||
        !(*offsets)[1].is_number_unsigned())
      wrong(name, "data_offsets is not a pair of non-negative integers");
    claim.begin = (*offsets)[0].get<std::uint64_t>();
    claim.end = (*offsets)[1].get<std::uint64_t>();
    if (claim.begin > claim.end)
      wrong(name, fmt::format("data_offsets [{}, {}] run backwards", claim.begin, claim.end));
    if (claim.end > data_bytes_)
      wrong(name, fmt::format("data_offsets [{}, {}] reach beyond the {} bytes of data in the file", claim.begin,
                              claim.end, data_bytes_));
    const auto bytes = byte_count(claim.tensor.shape, claim.tensor.dtype);
    if (!bytes) wrong(name, fmt::format("shape {} is negative or too large", shape_text(claim.tensor.shape)));
    if (*bytes != claim.end - claim.begin)
      wrong(name,
            fmt::format("shape {} of {} needs {} bytes, data_offsets [{}, {}] hold {}", shape_text(claim.tensor.shape),
                        dtype_name(claim.tensor.dtype), *bytes, claim.begin, claim.end, claim.end - claim.begin));
    return claim;
  }

 private:
  [[noreturn]] void wrong(const std::string& name, const std::string& why) const {
    fail(ErrorCode::corrupt_data, "{}: tensor {}: {}", file_, json_quote(name), why);
  }

  Dtype read_dtype(const std::string& name, const Json& entry) const {
    const auto found = entry.find("dtype");
    if (found == entry.end() || !found->is_string()) wrong(name, "dtype is missing or not a string");
    const auto dtype = dtype_of(found->get_ref<const std::string&>());
    if (!dtype) wrong(name, fmt::format("unknown dtype {}", found->dump()));
    return *dtype;
  }

  std::vector<std::int64_t> read_shape(const std::string& name, const Json& entry) const {
    const auto found = entry.find("shape");
    if (found == entry.end() || !found->is_array()) wrong(name, "shape is missing or not an array");
    std::vector<std::int64_t> shape;
    for (const Json& dimension : *found) {
      if (!dimension.is_number_unsigned() ||
          dimension.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        wrong(name, fmt::format("shape holds {}; expected non-negative integers", dimension.dump()));
      shape.push_back(dimension.get<std::int64_t>());
    }
    return shape;
  }

  std::string file_;
  std::uint64_t data_bytes_;
};

// The tensors must cover [0, data_bytes) exactly: a hole could hide data, an overlap makes one tensor another.
void check_cover(const std::string& file, std::vector<Claim>& claims, std::uint64_t data_bytes) {
  std::sort(claims.begin(), claims.end(),
            [](const Claim& a, const Claim& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  std::uint64_t covered = 0;
  const std::string* previous = nullptr;
  for (const Claim& claim : claims) {
    const std::string before = previous == nullptr ? "the start" : "tensor " + json_quote(*previous);
    if (claim.begin > covered)
      fail(ErrorCode::corrupt_data, "{}: {} unused bytes at offset {}, between {} and tensor {}", file,
           claim.begin - covered, covered, before, json_quote(claim.tensor.name));
    if (claim.begin < covered)
      fail(ErrorCode::corrupt_data, "{}: tensor {} at offset {} overlaps {}, which ends at {}", file,
           json_quote(claim.tensor.name), claim.begin, before, covered);
    covered = claim.end;
    previous = &claim.tensor.name;
  }
  if (covered != data_bytes)
    fail(ErrorCode::corrupt_data, "{}: {} bytes of data belong to no tensor; the last one ends at {} of {}", file,
         data_bytes - covered, covered, data_bytes);
}

std::uint64_t load_length(std::span<const std::byte> bytes) {
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), length_bytes);
  return length;
}

// The header's JSON; every length in it is still unchecked.
Json read_header(const std::string& file, std::span<const std::byte> bytes) {
  if (bytes.size() < length_bytes)
    fail(ErrorCode::corrupt_data, "{}: {} bytes long; a safetensors file has at least 8", file, bytes.size());
  const std::uint64_t length = load_length(bytes);
  if (length > max_header_bytes)
    fail(ErrorCode::corrupt_data, "{}: header length {} is more than the {} bytes allowed", file, length,
         max_header_bytes);
  if (length > bytes.size() - length_bytes)
    fail(ErrorCode::corrupt_data, "{}: header length {} reaches beyond the file of {} bytes: truncated?", file, length,
         bytes.size());
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + length_bytes, length);
  if (!text.starts_with('{')) fail(ErrorCode::corrupt_data, "{}: the header does not start with '{{'", file);
  return parse_json(text, file + ": header", {.bytes = max_header_bytes, .depth = 4});
}

std::map<std::string, std::string> read_metadata(const std::string& file, const Json& entry) {
  std::map<std::string, std::string> metadata;
  if (!entry.is_object()) fail(ErrorCode::corrupt_data, "{}: __metadata__ is not an object", file);
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string())
      fail(ErrorCode::corrupt_data, "{}: __metadata__ \"{}\" is {}, expected a string", file, key, value.type_name());
    metadata[key] = value.get<std::string>();
  }
  return metadata;
}

}  // namespace

std::size_t dtype_size(Dtype dtype) {
  return row_of(dtype).size;
}
std::string_view dtype_name(Dtype dtype) {
  return row_of(dtype).name;
}
std::string shape_text(std::span<const std::int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::int64_t TensorInfo::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t dimension : shape) count *= dimension;
  return count;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : path_(path), file_(path) {
  const std::string name = path.string();
  const Json header = read_header(name, file_.bytes());
  const auto data = file_.bytes().subspan(length_bytes + load_length(file_.bytes()));
  const ClaimReader reader(name, data.size());
  std::vector<Claim> claims;
  for (const auto& [key, entry] : header.items()) {
    if (key == "__metadata__") {
      metadata_ = read_metadata(name, entry);
    } else {
      claims.push_back(reader.read(key, entry));
    }
  }
  check_cover(name, claims, data.size());
  for (Claim& claim : claims) {
    claim.tensor.bytes = data.subspan(claim.begin, claim.end - claim.begin);
    tensors_.emplace(claim.tensor.name, std::move(claim.tensor));
  }
}

Checkpoint::Checkpoint(const std::filesystem::path& path) : path_(path) {
  std::filesystem::path single = path;
  if (std::filesystem::is_directory(path)) {
    single = path / "model.safetensors";
    const auto index = path / "model.safetensors.index.json";
    const bool has_index = std::filesystem::exists(index);
    if (has_index && std::filesystem::exists(single))
      fail(ErrorCode::corrupt_data, "{}: holds both model.safetensors and model.safetensors.index.json; remove one",
           path.string());
    if (has_index) {
      open_index(index);
      return;
    }
  }
  files_.push_back(std::make_unique<SafetensorsFile>(single));
  add(*files_.back());
}

void Checkpoint::open_index(const std::filesystem::path& index) {
  const Json document = read_json(index);
  const auto weight_map = document.is_object() ? document.find("weight_map") : document.end();
  if (!document.is_object() || weight_map == document.end() || !weight_map->is_object())
    fail(ErrorCode::corrupt_data, "{}: weight_map is missing or not an object", index.string());
  std::map<std::string, std::size_t> shards;  // file name -> tensors that the index places in it
  for (const auto& [tensor, shard] : weight_map->items()) {
    if (!shard.is_string())
      fail(ErrorCode::corrupt_data, "{}: the shard of tensor {} is not a string", index.string(), json_quote(tensor));
    const auto& name = shard.get_ref<const std::string&>();
    // An index may come from anywhere: it must not make us open a file outside its folder.
    if (name.find_first_of(std::string("/\\\0", 3)) != std::string::npos || name.empty() || name.front() == '.')
      fail(ErrorCode::corrupt_data, "{}: tensor {} is placed in {}; expected a plain file name", index.string(),
           json_quote(tensor), json_quote(name));
    ++shards[name];
  }
  for (const auto& [name, count] : shards) {
    const auto shard = path_ / name;
    if (!std::filesystem::exists(shard))
      fail(ErrorCode::corrupt_data, "{}: shard {} is missing; the index places {} tensors in it", index.string(),
           shard.string(), count);
    files_.push_back(std::make_unique<SafetensorsFile>(shard));
    for (const auto& [tensor, info] : files_.back()->tensors()) {
      const auto placed = weight_map->find(tensor);
      if (placed == weight_map->end() || placed->get_ref<const std::string&>() != name)
        fail(ErrorCode::corrupt_data, "{}: shard {} holds tensor \"{}\", which the index {}", index.string(), name,
             tensor,
             placed == weight_map->end() ? std::string("does not name")
                                         : "places in " + placed->get_ref<const std::string&>());
    }
    add(*files_.back());
  }
  for (const auto& [tensor, shard] : weight_map->items())
    if (find(tensor) == nullptr)
      fail(ErrorCode::corrupt_data, "{}: tensor \"{}\" is not in shard {}", index.string(), tensor,
           shard.get_ref<const std::string&>());
}

void Checkpoint::add(const SafetensorsFile& file) {
  for (const auto& [name, info] : file.tensors()) tensors_.emplace(name, &info);
}

const TensorInfo* Checkpoint::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : found->second;
}

const TensorInfo& Checkpoint::at(const std::string& name) const {
  const TensorInfo* tensor = find(name);
  if (tensor == nullptr) fail(ErrorCode::not_found, "{}: tensor \"{}\" is missing", path_.string(), name);
  return *tensor;
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  names.reserve(tensors_.size());
  for (const auto& [name, info] : tensors_) names.push_back(name);
  return names;
}

std::vector<float> read_f32(const TensorInfo& tensor, const std::vector<std::int64_t>& expected_shape,
                            bool refuse_nan) {
  if (tensor.shape != expected_shape)
    fail(ErrorCode::corrupt_data, "tensor \"{}\" has shape {}, expected {}", tensor.name, shape_text(tensor.shape),
         shape_text(expected_shape));
  const auto count = static_cast<std::size_t>(tensor.elements());
  std::vector<float> values(count);
  if (tensor.dtype == Dtype::f32) {
    if (count > 0) std::memcpy(values.data(), tensor.bytes.data(), count * sizeof(float));
  } else if (tensor.dtype == Dtype::bf16 || tensor.dtype == Dtype::f16) {
    for (std::size_t i = 0; i < count; ++i) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, tensor.bytes.data() + 2 * i, 2);
      values[i] = tensor.dtype == Dtype::bf16 ? numerics::to_float(numerics::bf16{bits}) : numerics::f16_to_float(bits);
    }
  } else {
    fail(ErrorCode::corrupt_data, "tensor \"{}\" is {}, expected F32, BF16 or F16", tensor.name,
         dtype_name(tensor.dtype));
  }
  if (refuse_nan) {
    for (std::size_t i = 0; i < count; ++i)
      if ((std::bit_cast<std::uint32_t>(values[i]) & 0x7F800000U) == 0x7F800000U)
        fail(ErrorCode::corrupt_data, "tensor \"{}\" holds {} at element {} of {}", tensor.name, values[i], i, count);
  }
  return values;
}

namespace {

void write_tensor(AtomicFile& file, const TensorToWrite& tensor, const std::filesystem::path& path) {
  if (!tensor.produce) return file.write(tensor.bytes);
  write_produced(file, tensor.produce, *byte_count(tensor.shape, tensor.dtype), path.string(), tensor.name);
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::map<std::string, const TensorToWrite*> sorted;
  for (const TensorToWrite& tensor : tensors) {
    if (tensor.name == "__metadata__" || !sorted.emplace(tensor.name, &tensor).second)
      fail(ErrorCode::invalid_argument, "{}: tensor name \"{}\" is reserved or stands twice", path.string(),
           tensor.name);
    const auto bytes = byte_count(tensor.shape, tensor.dtype);
    if (!bytes || (!tensor.produce && *bytes != tensor.bytes.size()))
      fail(ErrorCode::invalid_argument, "{}: tensor \"{}\" of shape {} and {} comes with {} bytes", path.string(),
           tensor.name, shape_text(tensor.shape), dtype_name(tensor.dtype), tensor.bytes.size());
  }
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const auto& [name, tensor] : sorted) {
    const std::uint64_t end = offset + *byte_count(tensor->shape, tensor->dtype);
    header[name] = {{"dtype", dtype_name(tensor->dtype)}, {"shape", tensor->shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception& error) {
    fail(ErrorCode::invalid_argument, "{}: a tensor name or metadata is not UTF-8: {}", path.string(), error.what());
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > max_header_bytes)
    fail(ErrorCode::invalid_argument, "{}: the header would have {} bytes, readers accept {}", path.string(),
         text.size(), max_header_bytes);
  AtomicFile file(path);
  const std::uint64_t length = text.size();
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(text);
  for (const auto& [name, tensor] : sorted) write_tensor(file, *tensor, path);
  file.commit();
}

std::size_t write_checkpoint(const std::filesystem::path& folder, const std::vector<TensorToWrite>& tensors,
                             const std::map<std::string, std::string>& metadata, std::uint64_t shard_bytes) {
  std::vector<std::vector<TensorToWrite>> shards(1);
  std::uint64_t in_shard = 0, total = 0;
  for (const TensorToWrite& tensor : tensors) {
    const std::uint64_t bytes =
        byte_count(tensor.shape, tensor.dtype).value_or(0);  // write_safetensors refuses the rest
    if (in_shard != 0 && in_shard + bytes > shard_bytes) {
      shards.emplace_back();
      in_shard = 0;
    }
    shards.back().push_back(tensor);
    in_shard += bytes;
    total += bytes;
  }
  if (shards.size() == 1) {
    write_safetensors(folder / "model.safetensors", tensors, metadata);
    return 1;
  }
  Json places = Json::object();
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    write_safetensors(folder / name, shards[i], metadata);
    for (const TensorToWrite& tensor : shards[i])
      if (!places.emplace(tensor.name, name).second)
        fail(ErrorCode::invalid_argument, "{}: tensor name \"{}\" stands twice", folder.string(), tensor.name);
  }
  const Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", std::move(places)}};
  write_file_atomic(folder / "model.safetensors.index.json", index.dump(2) + "\n");
  return shards.size();
}

}  // namespace tidelock::model
