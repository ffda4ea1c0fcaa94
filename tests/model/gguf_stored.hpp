// A GGUF file taken apart, to be changed and written again.
#pragma once

#include <stdexcept>

#include "model/gguf.hpp"
#include "model/small_model.hpp"

namespace tidelock::model::testing {

struct GgufStored {
  struct Tensor {
    std::string name;
    std::uint32_t type;
    std::vector<std::int64_t> ne;
    std::vector<std::byte> bytes;
  };
  std::vector<std::pair<std::string, GgufValue>> metadata;
  std::vector<Tensor> tensors;

  GgufStored() = default;
  explicit GgufStored(const std::filesystem::path& path) {
    const GgufFile file(path);
    metadata.assign(file.metadata().begin(), file.metadata().end());
    for (const GgufTensor& t : file.tensors())
      tensors.push_back({t.name, t.type->id, t.ne, {t.bytes.begin(), t.bytes.end()}});
  }
  void write(const std::filesystem::path& path) const {
    std::vector<GgufTensorToWrite> out;
    for (const Tensor& t : tensors)
      out.push_back({t.name, t.type, t.ne, [&t](const ByteSink& sink) { sink(t.bytes); }});
    write_gguf(path, metadata, out);
  }
  GgufValue& key(const std::string& name) {
    for (auto& [key, value] : metadata)
      if (key == name) return value;
    throw std::logic_error(name);
  }
  void remove_key(const std::string& name) {
    std::erase_if(metadata, [&](const auto& entry) { return entry.first == name; });
  }
  Tensor& tensor(const std::string& name) {
    for (Tensor& t : tensors)
      if (t.name == name) return t;
    throw std::logic_error(name);
  }
};

// A small model that GGUF can hold: as many heads in KDA as in MLA layers. `wide`: every row is whole blocks of 32.
inline Config gguf_config_of(Variant v, bool wide = false) {
  Config c = small_config(v);
  c.kda.heads = c.mla.heads;
  if (!wide) return c;
  c.hidden = 64;
  c.intermediate = 96;
  c.kda.head_dim = 32;
  c.mla = {.heads = 3,
           .q_lora = c.mla.q_lora == 0 ? 0 : 32,
           .latent = 32,
           .nope = 32,
           .extra = 32,
           .value = 32,
           .output_gate = c.mla.output_gate};
  c.experts.intermediate = 32;
  if (c.experts.latent != 0) c.experts.latent = 64;
  if (c.index.heads != 0) c.index.dim = 32;
  return c;
}

}  // namespace tidelock::model::testing
