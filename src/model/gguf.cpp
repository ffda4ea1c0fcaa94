#include "model/gguf.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <set>

#include "model/gguf_limits.hpp"
#include "model/json.hpp"
#include "model/safetensors.hpp"

namespace tidelock::model {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is read in place");

constexpr std::array<std::string_view, 13> type_names = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                         "bool", "string", "array", "u64", "i64", "f64"};
constexpr std::array<std::size_t, 13> type_sizes = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

// What ggml can store. Only some of it can be run (weight_source.hpp); the rest is known by name, so that a refusal can
// say what the file holds.
constexpr std::array<GgmlType, 32> ggml_types{
    {{0, "F32", 1, 4},         {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},      {3, "Q4_1", 32, 20},
     {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},      {8, "Q8_0", 32, 34},      {9, "Q8_1", 32, 36},
     {10, "Q2_K", 256, 84},    {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},
     {14, "Q6_K", 256, 210},   {15, "Q8_K", 256, 292},   {16, "IQ2_XXS", 256, 66}, {17, "IQ2_XS", 256, 74},
     {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},   {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},
     {22, "IQ2_S", 256, 82},   {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},         {25, "I16", 1, 2},
     {26, "I32", 1, 4},        {27, "I64", 1, 8},        {28, "F64", 1, 8},        {29, "IQ1_M", 256, 56},
     {30, "BF16", 1, 2},       {34, "TQ1_0", 256, 54},   {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17}}};

// Walks a file's header. Every read is checked against the end of the file.
class Cursor {
 public:
  Cursor(const std::string& file, std::span<const std::byte> bytes) : file_(file), bytes_(bytes) {}

  std::uint64_t at() const { return at_; }
  std::uint64_t left() const { return bytes_.size() - at_; }

  template <typename T>
  T take(const std::string& what) {
    if (left() < sizeof(T))
      fail(ErrorCode::corrupt_data, "{}: ends at byte {} inside {}: truncated?", file_, bytes_.size(), what);
    T value;
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }

  std::string text(const std::string& what, std::uint64_t limit) {
    const auto length = take<std::uint64_t>(what);
    if (length > limit)
      fail(ErrorCode::corrupt_data, "{}: {} has {} bytes, at most {} are allowed", file_, what, length, limit);
    if (length > left())
      fail(ErrorCode::corrupt_data, "{}: {} has {} bytes, {} are left in the file", file_, what, length, left());
    std::string value(reinterpret_cast<const char*>(bytes_.data()) + at_, length);
    at_ += length;
    return value;
  }

  const std::string& file() const { return file_; }

 private:
  const std::string& file_;
  std::span<const std::byte> bytes_;
  std::uint64_t at_ = 0;
};

template <typename T>
void take_integers(Cursor& in, const std::string& what, std::uint64_t count, GgufValue& value) {
  value.integers.reserve(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    const T x = in.take<T>(what);
    if (value.type == GgufType::boolean && x != 0 && x != 1)
      fail(ErrorCode::corrupt_data, "{}: {} holds the byte {} as a bool, expected 0 or 1", in.file(), what, x);
    value.integers.push_back(static_cast<std::uint64_t>(static_cast<std::int64_t>(x)));
  }
}

template <typename T>
void take_reals(Cursor& in, const std::string& what, std::uint64_t count, GgufValue& value) {
  value.reals.reserve(count);
  for (std::uint64_t i = 0; i < count; ++i) value.reals.push_back(double{in.take<T>(what)});
}

void take_elements(Cursor& in, const std::string& what, std::uint64_t count, GgufValue& value) {
  switch (value.type) {
    case GgufType::u8:
    case GgufType::boolean:
      return take_integers<std::uint8_t>(in, what, count, value);
    case GgufType::i8:
      return take_integers<std::int8_t>(in, what, count, value);
    case GgufType::u16:
      return take_integers<std::uint16_t>(in, what, count, value);
    case GgufType::i16:
      return take_integers<std::int16_t>(in, what, count, value);
    case GgufType::u32:
      return take_integers<std::uint32_t>(in, what, count, value);
    case GgufType::i32:
      return take_integers<std::int32_t>(in, what, count, value);
    case GgufType::u64:
      return take_integers<std::uint64_t>(in, what, count, value);
    case GgufType::i64:
      return take_integers<std::int64_t>(in, what, count, value);
    case GgufType::f32:
      return take_reals<float>(in, what, count, value);
    case GgufType::f64:
      return take_reals<double>(in, what, count, value);
    case GgufType::string:
      value.strings.reserve(count);
      for (std::uint64_t i = 0; i < count; ++i) value.strings.push_back(in.text(what, gguf_limits::string_bytes));
      return;
    case GgufType::array:
      fail(ErrorCode::not_supported, "{}: {} is an array of arrays, expected an array of values", in.file(), what);
  }
}

GgufType take_type(Cursor& in, const std::string& what) {
  const auto type = in.take<std::uint32_t>(what);
  if (type >= type_names.size())
    fail(ErrorCode::corrupt_data, "{}: {} has value type {}, expected 0 to {}", in.file(), what, type,
         type_names.size() - 1);
  return static_cast<GgufType>(type);
}

GgufValue take_value(Cursor& in, const std::string& what) {
  GgufValue value;
  value.type = take_type(in, what);
  value.is_array = value.type == GgufType::array;
  std::uint64_t count = 1;
  if (value.is_array) {
    value.type = take_type(in, what);
    count = in.take<std::uint64_t>(what);
    // A string takes eight bytes for its length at least.
    const std::size_t least = std::max<std::size_t>(
        1, value.type == GgufType::string ? 8 : type_sizes.at(static_cast<std::size_t>(value.type)));
    if (count > gguf_limits::array_elements || count > in.left() / least)
      fail(ErrorCode::corrupt_data,
           "{}: {} is an array of {} {}, {} bytes are left in the file and {} elements allowed", in.file(), what, count,
           gguf_type_name(value.type), in.left(), gguf_limits::array_elements);
  }
  take_elements(in, what, count, value);
  return value;
}

GgufMetadata take_metadata(Cursor& in, std::uint64_t count) {
  GgufMetadata metadata;
  for (std::uint64_t i = 0; i < count; ++i) {
    std::string key = in.text(fmt::format("key {} of {}", i + 1, count), gguf_limits::key_bytes);
    if (key.empty()) fail(ErrorCode::corrupt_data, "{}: key {} of {} is empty", in.file(), i + 1, count);
    const std::string what = "key " + json_quote(key);
    GgufValue value = take_value(in, what);
    if (!metadata.emplace(std::move(key), std::move(value)).second)
      fail(ErrorCode::corrupt_data, "{}: {} stands twice", in.file(), what);
    if (in.at() > gguf_limits::header_bytes)
      fail(ErrorCode::corrupt_data, "{}: the keys have more than {} bytes, reached in {}", in.file(),
           gguf_limits::header_bytes, what);
  }
  return metadata;
}

// Elements of a shape; nothing when it is not a size.
std::optional<std::int64_t> element_count(std::span<const std::int64_t> ne) {
  std::int64_t count = 1;
  for (const std::int64_t d : ne)
    if (d < 1 || __builtin_mul_overflow(count, d, &count)) return std::nullopt;
  return count;
}

// Bytes of a tensor; nothing when they do not fit 63 bits or a row is no whole number of blocks.
std::optional<std::uint64_t> tensor_bytes(std::span<const std::int64_t> ne, const GgmlType& type) {
  const auto count = element_count(ne);
  if (!count || ne.empty() || ne.size() > 4 || ne[0] % type.block != 0) return std::nullopt;
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(*count / type.block, static_cast<std::int64_t>(type.bytes), &bytes)) return std::nullopt;
  return static_cast<std::uint64_t>(bytes);
}

GgufTensor take_tensor(Cursor& in, std::uint64_t index, std::uint64_t count) {
  GgufTensor tensor;
  tensor.name = in.text(fmt::format("the name of tensor {} of {}", index + 1, count), gguf_limits::name_bytes);
  const std::string what = "tensor " + json_quote(tensor.name);
  if (tensor.name.empty())
    fail(ErrorCode::corrupt_data, "{}: tensor {} of {} has no name", in.file(), index + 1, count);
  const auto dimensions = in.take<std::uint32_t>(what);
  if (dimensions < 1 || dimensions > 4)
    fail(ErrorCode::corrupt_data, "{}: {} has {} dimensions, expected 1 to 4", in.file(), what, dimensions);
  for (std::uint32_t d = 0; d < dimensions; ++d) {
    const auto n = in.take<std::uint64_t>(what);
    if (n < 1 || n > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      fail(ErrorCode::corrupt_data, "{}: {} has size {} in dimension {}", in.file(), what, n, d);
    tensor.ne.push_back(static_cast<std::int64_t>(n));
  }
  const auto type = in.take<std::uint32_t>(what);
  tensor.type = find_ggml_type(type);
  if (tensor.type == nullptr)
    fail(ErrorCode::not_supported, "{}: {} has ggml type {}, which this build does not know", in.file(), what, type);
  if (!element_count(tensor.ne))
    fail(ErrorCode::corrupt_data, "{}: {} of shape {} is too large", in.file(), what, shape_text(tensor.ne));
  if (tensor.ne[0] % tensor.type->block != 0)
    fail(ErrorCode::corrupt_data, "{}: {} has rows of {} elements, {} needs a multiple of {}", in.file(), what,
         tensor.ne[0], tensor.type->name, tensor.type->block);
  tensor.offset = in.take<std::uint64_t>(what);
  return tensor;
}

// Tensors must follow each other, each at the next multiple of the alignment: ggml reads no other files, a hole could
// hide data and an overlap makes one tensor another.
void place_tensors(const std::string& file, std::vector<GgufTensor>& tensors, std::span<const std::byte> data,
                   std::uint64_t alignment) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const GgufTensor& a, const GgufTensor& b) { return a.offset < b.offset; });
  std::uint64_t end = 0;
  std::string before = "the start";
  for (GgufTensor& tensor : tensors) {
    const std::string what = "tensor " + json_quote(tensor.name);
    if (tensor.offset % alignment != 0)
      fail(ErrorCode::corrupt_data, "{}: {} is at offset {}, which is no multiple of the alignment {}", file, what,
           tensor.offset, alignment);
    const std::uint64_t expected = (end + alignment - 1) / alignment * alignment;
    if (tensor.offset < end)
      fail(ErrorCode::corrupt_data, "{}: {} at offset {} overlaps {}, which ends at {}", file, what, tensor.offset,
           before, end);
    if (tensor.offset > expected)
      fail(ErrorCode::corrupt_data, "{}: {} is at offset {}, expected {} after {}", file, what, tensor.offset, expected,
           before);
    const auto bytes = tensor_bytes(tensor.ne, *tensor.type);
    if (!bytes || tensor.offset > data.size() || *bytes > data.size() - tensor.offset)
      fail(ErrorCode::corrupt_data, "{}: {} {} of {} at offset {} reaches beyond the {} bytes of data: truncated?",
           file, what, shape_text(tensor.ne), tensor.type->name, tensor.offset, data.size());
    tensor.bytes = data.subspan(tensor.offset, *bytes);
    end = tensor.offset + *bytes;
    before = what;
  }
  if (data.size() - end >= alignment)
    fail(ErrorCode::corrupt_data, "{}: {} bytes after {} belong to no tensor", file, data.size() - end, before);
}

std::size_t read_alignment(const std::string& file, const GgufMetadata& metadata) {
  const auto found = metadata.find("general.alignment");
  if (found == metadata.end()) return 32;
  const GgufValue& value = found->second;
  if (value.is_array || value.integers.size() != 1)
    fail(ErrorCode::corrupt_data, "{}: general.alignment is not a number", file);
  const std::uint64_t alignment = value.integers[0];
  if (!std::has_single_bit(alignment) || alignment < 8 || alignment > gguf_limits::alignment)
    fail(ErrorCode::corrupt_data, "{}: general.alignment = {}, expected a power of two from 8 to {}", file, alignment,
         gguf_limits::alignment);
  return alignment;
}

// The counts of tensors and keys, after magic and version.
std::pair<std::uint64_t, std::uint64_t> take_header(Cursor& in) {
  const auto magic = in.take<std::uint32_t>("the magic number");
  if (magic != gguf_limits::magic)
    fail(ErrorCode::corrupt_data, "{}: starts with {:08x}, a GGUF file with {:08x}", in.file(), magic,
         gguf_limits::magic);
  const auto version = in.take<std::uint32_t>("the version");
  if (version == 0x03000000U)
    fail(ErrorCode::not_supported, "{}: is big-endian, only little-endian files are supported", in.file());
  if (version != gguf_limits::version)
    fail(ErrorCode::not_supported, "{}: GGUF version {}, only version {} is supported", in.file(), version,
         gguf_limits::version);
  const auto tensors = in.take<std::uint64_t>("the tensor count");
  const auto keys = in.take<std::uint64_t>("the key count");
  // The least that a tensor or key takes in the header, so that a count cannot make us loop or reserve for nothing.
  if (tensors > in.left() / 32 || tensors > gguf_limits::tensors)
    fail(ErrorCode::corrupt_data, "{}: {} tensors in a file of {} bytes, at most {} are allowed", in.file(), tensors,
         in.at() + in.left(), gguf_limits::tensors);
  if (keys > in.left() / 13 || keys > gguf_limits::keys)
    fail(ErrorCode::corrupt_data, "{}: {} keys in a file of {} bytes, at most {} are allowed", in.file(), keys,
         in.at() + in.left(), gguf_limits::keys);
  return {tensors, keys};
}

}  // namespace

std::string_view gguf_type_name(GgufType type) {
  return type_names.at(static_cast<std::size_t>(type));
}

const GgmlType* find_ggml_type(std::uint32_t id) {
  for (const GgmlType& type : ggml_types)
    if (type.id == id) return &type;
  return nullptr;
}

std::int64_t GgufTensor::elements() const {
  return element_count(ne).value_or(0);
}

GgufFile::GgufFile(const std::filesystem::path& path) : path_(path), file_(path) {
  const std::string name = path.string();
  Cursor in(name, file_.bytes());
  const auto [tensors, keys] = take_header(in);
  metadata_ = take_metadata(in, keys);
  alignment_ = read_alignment(name, metadata_);
  std::set<std::string_view> names;
  tensors_.reserve(tensors);
  for (std::uint64_t i = 0; i < tensors; ++i) {
    tensors_.push_back(take_tensor(in, i, tensors));
    if (!names.insert(tensors_.back().name).second)
      fail(ErrorCode::corrupt_data, "{}: tensor {} stands twice", name, json_quote(tensors_.back().name));
  }
  const std::uint64_t begin = (in.at() + alignment_ - 1) / alignment_ * alignment_;
  // A file of keys alone may end without the padding.
  const auto data = begin < file_.bytes().size() ? file_.bytes().subspan(begin) : std::span<const std::byte>();
  place_tensors(name, tensors_, data, alignment_);
}

namespace {

std::optional<std::uint64_t> split_key(const GgufFile& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  if (found == file.metadata().end()) return std::nullopt;
  const GgufValue& value = found->second;
  if (value.is_array || value.integers.size() != 1)
    fail(ErrorCode::corrupt_data, "{}: {} is not a number", file.path().string(), key);
  return value.integers[0];
}

void expect_split(const GgufFile& file, const std::string& key, std::uint64_t expected) {
  const auto value = split_key(file, key);
  if (value != expected)
    fail(ErrorCode::corrupt_data, "{}: {} = {}, expected {}", file.path().string(), key,
         value ? std::to_string(*value) : std::string("absent"), expected);
}

// NAME-00001-of-00003.gguf, the way llama.cpp names the parts of a split model.
struct PartName {
  std::string stem;
  std::uint64_t number, count;
};

std::optional<PartName> parse_part_name(std::string_view name) {
  constexpr std::string_view pattern = "-#####-of-#####.gguf";  // # is a digit
  if (name.size() < pattern.size()) return std::nullopt;
  const std::string_view tail = name.substr(name.size() - pattern.size());
  std::array<std::uint64_t, 2> numbers{};
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const bool digit = tail[i] >= '0' && tail[i] <= '9';
    if (pattern[i] == '#' ? !digit : tail[i] != pattern[i]) return std::nullopt;
    std::uint64_t& number = numbers[i < pattern.find('o') ? 0 : 1];
    if (digit) number = 10 * number + static_cast<std::uint64_t>(tail[i] - '0');
  }
  return PartName{std::string(name.substr(0, name.size() - pattern.size())), numbers[0], numbers[1]};
}

}  // namespace

GgufModel::GgufModel(const std::filesystem::path& path) : path_(path) {
  files_.push_back(std::make_unique<GgufFile>(path));
  const std::uint64_t count = split_key(*files_.front(), "split.count").value_or(1);
  if (count > 1) {
    open_parts(count);
  } else {
    add(*files_.front());
  }
}

void GgufModel::open_parts(std::uint64_t count) {
  const std::string name = path_.filename().string();
  if (count > gguf_limits::parts)
    fail(ErrorCode::corrupt_data, "{}: split.count = {}, at most {} parts are allowed", path_.string(), count,
         gguf_limits::parts);
  const std::optional<PartName> part_of = parse_part_name(name);
  if (!part_of || part_of->count != count)
    fail(ErrorCode::corrupt_data, "{}: split.count = {}, but the file is not named NAME-00001-of-{:05}.gguf",
         path_.string(), count, count);
  const std::string stem = part_of->stem;
  const auto part_path = [&](std::uint64_t part) {
    return path_.parent_path() / fmt::format("{}-{:05}-of-{:05}.gguf", stem, part + 1, count);
  };
  if (split_key(*files_.front(), "split.no") != 0U || part_of->number != 1)
    throw Error(ErrorCode::invalid_argument, fmt::format("{} is not the first of {} parts", path_.string(), count),
                "give " + part_path(0).string());
  for (std::uint64_t part = 1; part < count; ++part) {
    if (!std::filesystem::exists(part_path(part)))
      fail(ErrorCode::corrupt_data, "{}: part {} of {} is missing: {}", path_.string(), part + 1, count,
           part_path(part).string());
    files_.push_back(std::make_unique<GgufFile>(part_path(part)));
    expect_split(*files_.back(), "split.no", part);
    expect_split(*files_.back(), "split.count", count);
  }
  for (const auto& file : files_) add(*file);
  expect_split(*files_.front(), "split.tensors.count", tensors_.size());
}

void GgufModel::add(const GgufFile& file) {
  for (const GgufTensor& tensor : file.tensors())
    if (!tensors_.emplace(tensor.name, &tensor).second)
      fail(ErrorCode::corrupt_data, "{}: tensor {} is in an earlier part too", file.path().string(),
           json_quote(tensor.name));
}

std::vector<std::filesystem::path> GgufModel::paths() const {
  std::vector<std::filesystem::path> paths;
  for (const auto& file : files_) paths.push_back(file->path());
  return paths;
}

const GgufValue* GgufModel::find_key(const std::string& key) const {
  const auto found = metadata().find(key);
  return found == metadata().end() ? nullptr : &found->second;
}

const GgufTensor* GgufModel::find_tensor(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : found->second;
}

std::uint64_t gguf_tensor_bytes(const GgufTensorToWrite& tensor) {
  const GgmlType* type = find_ggml_type(tensor.type);
  const auto bytes = type == nullptr ? std::nullopt : tensor_bytes(tensor.ne, *type);
  if (!bytes)
    fail(ErrorCode::invalid_argument, "tensor {} of shape {} cannot be stored as ggml type {}", json_quote(tensor.name),
         shape_text(tensor.ne), type == nullptr ? std::to_string(tensor.type) : std::string(type->name));
  return *bytes;
}

}  // namespace tidelock::model
