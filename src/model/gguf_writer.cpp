#include <cstring>
#include <set>

#include "base/error.hpp"
#include "model/gguf.hpp"
#include "model/gguf_limits.hpp"
#include "model/json.hpp"
#include "model/produced.hpp"

namespace tidelock::model {
namespace {

constexpr std::uint64_t kAlignment = 32;

// The header's bytes; data is streamed behind it.
class Header {
 public:
  template <typename T>
  void put(T value) {
    const std::size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    std::memcpy(bytes_.data() + at, &value, sizeof(T));
  }
  void text(const std::string& value) {
    put<std::uint64_t>(value.size());
    bytes_ += value;
  }
  void value(const GgufValue& value) {
    if (value.is_array) put(static_cast<std::uint32_t>(GgufType::array));
    put(static_cast<std::uint32_t>(value.type));
    if (value.is_array) put<std::uint64_t>(value.size());
    for (const std::uint64_t x : value.integers) integer(value.type, x);
    for (const double x : value.reals) {
      if (value.type == GgufType::f32)
        put(static_cast<float>(x));
      else
        put(x);
    }
    for (const std::string& x : value.strings) text(x);
  }
  void pad() { bytes_.resize((bytes_.size() + kAlignment - 1) / kAlignment * kAlignment, '\0'); }
  const std::string& bytes() const { return bytes_; }

 private:
  void integer(GgufType type, std::uint64_t x) {
    switch (type) {
      case GgufType::u8:
      case GgufType::i8:
      case GgufType::boolean:
        return put(static_cast<std::uint8_t>(x));
      case GgufType::u16:
      case GgufType::i16:
        return put(static_cast<std::uint16_t>(x));
      case GgufType::u32:
      case GgufType::i32:
        return put(static_cast<std::uint32_t>(x));
      default:
        return put(x);
    }
  }
  std::string bytes_;
};

void check_value(const std::string& key, const GgufValue& value) {
  const bool real = value.type == GgufType::f32 || value.type == GgufType::f64;
  const std::size_t used = real                             ? value.reals.size()
                           : value.type == GgufType::string ? value.strings.size()
                                                            : value.integers.size();
  if (value.type == GgufType::array || used != value.size() || (!value.is_array && used != 1) ||
      used > gguf_limits::array_elements)
    fail(ErrorCode::invalid_argument, "key {}: {} values of type {} cannot be written", json_quote(key), value.size(),
         gguf_type_name(value.type));
}

void check_names(const std::vector<std::pair<std::string, GgufValue>>& metadata,
                 const std::vector<GgufTensorToWrite>& tensors) {
  std::set<std::string_view> keys, names;
  for (const auto& [key, value] : metadata) {
    if (key.empty() || key.size() > gguf_limits::key_bytes || !keys.insert(key).second)
      fail(ErrorCode::invalid_argument, "key {} is empty, too long or stands twice", json_quote(key));
    check_value(key, value);
  }
  for (const auto& tensor : tensors)
    if (tensor.name.empty() || tensor.name.size() > gguf_limits::name_bytes || !names.insert(tensor.name).second)
      fail(ErrorCode::invalid_argument, "tensor name {} is empty, longer than {} bytes or stands twice",
           json_quote(tensor.name), gguf_limits::name_bytes);
}

}  // namespace

void write_gguf(const std::filesystem::path& path, const std::vector<std::pair<std::string, GgufValue>>& metadata,
                const std::vector<GgufTensorToWrite>& tensors) {
  check_names(metadata, tensors);
  Header header;
  header.put(gguf_limits::magic);
  header.put(gguf_limits::version);
  header.put<std::uint64_t>(tensors.size());
  header.put<std::uint64_t>(metadata.size());
  for (const auto& [key, value] : metadata) {
    header.text(key);
    header.value(value);
  }
  std::uint64_t offset = 0;
  for (const auto& tensor : tensors) {
    header.text(tensor.name);
    header.put(static_cast<std::uint32_t>(tensor.ne.size()));
    for (const std::int64_t n : tensor.ne) header.put(n);
    header.put(tensor.type);
    header.put(offset);
    offset += (gguf_tensor_bytes(tensor) + kAlignment - 1) / kAlignment * kAlignment;
  }
  header.pad();
  AtomicFile file(path);
  file.write(header.bytes());
  const std::string zeros(kAlignment, '\0');
  for (const auto& tensor : tensors) {
    const std::uint64_t expected = gguf_tensor_bytes(tensor);
    write_produced(file, tensor.produce, expected, path.string(), tensor.name);
    file.write(std::string_view(zeros).substr(0, (kAlignment - expected % kAlignment) % kAlignment));
  }
  file.commit();
}

}  // namespace tidelock::model
