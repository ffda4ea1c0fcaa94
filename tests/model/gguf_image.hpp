// GGUF files made byte by byte, whatever they claim.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "model/gguf.hpp"

namespace tidelock::model::testing {

template <typename T>
std::string raw(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}
inline std::string raw_text(const std::string& text) {
  return raw<std::uint64_t>(text.size()) + text;
}

// A header and data in parts that a test may change before image() joins them.
struct GgufImage {
  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::vector<std::string> keys, tensors;
  std::uint64_t key_count = 0, tensor_count = 0;
  std::uint64_t alignment = 32;
  std::string data;

  GgufImage& key(const std::string& name, GgufType type, const std::string& value) {
    keys.push_back(raw_text(name) + raw(static_cast<std::uint32_t>(type)) + value);
    key_count = keys.size();
    return *this;
  }
  GgufImage& list(const std::string& name, GgufType type, std::uint64_t count, const std::string& values) {
    return key(name, GgufType::array, raw(static_cast<std::uint32_t>(type)) + raw(count) + values);
  }
  GgufImage& tensor(const std::string& name, const std::vector<std::uint64_t>& ne, std::uint32_t type,
                    std::uint64_t offset) {
    std::string bytes = raw_text(name) + raw(static_cast<std::uint32_t>(ne.size()));
    for (const std::uint64_t n : ne) bytes += raw(n);
    tensors.push_back(bytes + raw(type) + raw(offset));
    tensor_count = tensors.size();
    return *this;
  }
  std::string image() const {
    std::string bytes = magic + raw(version) + raw(tensor_count) + raw(key_count);
    for (const auto& k : keys) bytes += k;
    for (const auto& t : tensors) bytes += t;
    bytes.resize((bytes.size() + alignment - 1) / alignment * alignment, '\0');
    return bytes + data;
  }
};

// One key and two tensors: F32 [4, 2] and Q8_0 [32, 2].
inline GgufImage good_image() {
  GgufImage image;
  image.key("general.architecture", GgufType::string, raw_text("kimi-linear"));
  image.tensor("a", {4, 2}, ggml::f32, 0).tensor("b", {32, 2}, ggml::q8_0, 32);
  image.data.assign(32 + 68, '\1');
  return image;
}

}  // namespace tidelock::model::testing
