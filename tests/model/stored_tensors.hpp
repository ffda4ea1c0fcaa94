// A safetensors file taken apart, to be changed and written again.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "model/safetensors.hpp"

namespace tidelock::model::testing {

struct Stored {
  std::string name;
  Dtype dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
};

struct StoredFile {
  std::vector<Stored> tensors;
  std::map<std::string, std::string> metadata;

  StoredFile() = default;
  explicit StoredFile(const std::filesystem::path& path) {
    const SafetensorsFile file(path);
    for (const auto& [name, t] : file.tensors())
      tensors.push_back({name, t.dtype, t.shape, {t.bytes.begin(), t.bytes.end()}});
    metadata = file.metadata();
  }
  void write(const std::filesystem::path& path) const {
    std::vector<TensorToWrite> out;
    for (const Stored& t : tensors) out.push_back({t.name, t.dtype, t.shape, t.bytes});
    write_safetensors(path, out, metadata);
  }
};

}  // namespace tidelock::model::testing
