#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "base/error.hpp"
#include "model/gguf_config.hpp"
#include "model/gguf_tensors.hpp"
#include "model/json.hpp"
#include "model/safetensors.hpp"
#include "model/weight_source.hpp"

namespace tidelock::model {
namespace {

// What a ggml type becomes. Types without kernels of their own are widened, which is exact.
std::optional<Format> run_format(const GgmlType& type) {
  switch (type.id) {
    case ggml::f32:
    case ggml::f16:
      return Format::f32;
    case ggml::bf16:
      return Format::bf16;
    case ggml::q4_0:
    case ggml::q5_0:
    case ggml::q8_0:
    case ggml::iq4_nl:
      return Format::q8_0;
    case ggml::q4_1:
    case ggml::q5_1:
      return Format::q5_1;
    case ggml::q4_k:
      return Format::q4_k;
    case ggml::q5_k:
      return Format::q5_k;
    case ggml::q6_k:
      return Format::q6_k;
    case ggml::mxfp4:
      return Format::mxfp4;
    default:
      return std::nullopt;
  }
}

std::span<const std::byte> widen_halves(std::span<const std::byte> halves, std::vector<std::byte>& scratch) {
  scratch.resize(halves.size() * 2);
  for (std::size_t i = 0; i < halves.size() / 2; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, halves.data() + 2 * i, 2);
    const float x = numerics::f16_to_float(bits);
    std::memcpy(scratch.data() + 4 * i, &x, 4);
  }
  return scratch;
}

// The bytes in the layout of run_format's format.
std::span<const std::byte> widen(const GgmlType& type, std::span<const std::byte> bytes,
                                 std::vector<std::byte>& scratch) {
  if (type.id == ggml::f16) return widen_halves(bytes, scratch);
  const std::size_t blocks = bytes.size() / type.bytes;
  const auto n = static_cast<std::int64_t>(blocks) * 32;
  const auto room = [&](Format format) {
    scratch.resize(blocks * numerics::block_bytes(format));
    return scratch.data();
  };
  switch (type.id) {
    case ggml::q4_0:
    case ggml::q5_0:
      numerics::widen_to_q8_0(type.id == ggml::q5_0 ? 5 : 4, bytes.data(), n, room(Format::q8_0));
      return scratch;
    case ggml::iq4_nl:
      numerics::widen_iq4_nl_to_q8_0(bytes.data(), n, room(Format::q8_0));
      return scratch;
    case ggml::q4_1:
      numerics::widen_to_q5_1(bytes.data(), n, room(Format::q5_1));
      return scratch;
    default:
      return bytes;
  }
}

class GgufSource : public WeightSource {
 public:
  GgufSource(std::unique_ptr<GgufModel> file, Config config)
      : WeightSource(file->path(), std::move(config)), file_(std::move(file)) {}

  std::string kind() const override {
    return fmt::format("GGUF v3, {}, {}", file_->find_key("general.architecture")->strings.front(),
                       file_->parts() == 1 ? std::string("one file") : fmt::format("{} parts", file_->parts()));
  }

  std::vector<std::filesystem::path> files() const override { return file_->paths(); }

  GgufMetadata vocabulary() const override {
    GgufMetadata keys;
    for (const auto& [key, value] : file_->metadata())
      if (key.starts_with("tokenizer.")) keys.emplace(key, value);
    return keys;
  }

  void bind(const Model& model) override {
    model_ = &model;
    places_.assign(model.parameters().size(), {});
    std::size_t found = 0;
    for (const GgufEntry& entry : gguf_entries(model)) {
      const GgufTensor& tensor = find(entry);
      ++found;
      for (std::size_t i = 0; i < entry.parameters.size(); ++i) {
        Place& place = places_[static_cast<std::size_t>(entry.parameters[i])];
        place.role = entry.role;
        if (entry.role == GgufRole::values)
          place.values = &tensor;
        else
          place.tensor = &tensor;
        place.slice = static_cast<std::int64_t>(i);
      }
    }
    if (found != file_->tensors().size()) refuse_the_unknown(model);
  }

  StoredWeight stored(ParameterId id) const override {
    const Place& p = place(id);
    StoredWeight out{p.tensor->type->name, p.tensor->bytes.size()};
    if (p.role == GgufRole::experts) out.bytes /= static_cast<std::uint64_t>(config_.experts.count);
    if (p.role == GgufRole::score) out.bytes = p.slice == 0 ? 0 : out.bytes;  // one tensor for two parameters
    if (p.values != nullptr) out.bytes += p.values->bytes.size();
    return out;
  }

  Format format(ParameterId id, int piece) const override { return *run_format(*tensor_of(place(id), piece).type); }

  std::span<const std::byte> rows(ParameterId id, int piece, std::vector<std::byte>& scratch) const override {
    const Place& p = place(id);
    const GgufTensor& tensor = tensor_of(p, piece);
    auto rows = tensor.bytes;
    if (p.role == GgufRole::experts) {
      const std::size_t bytes = rows.size() / static_cast<std::size_t>(config_.experts.count);
      rows = rows.subspan(static_cast<std::size_t>(p.slice) * bytes, bytes);
    }
    return widen(*tensor.type, rows, scratch);
  }

 protected:
  void stored_vector(ParameterId id, std::vector<float>& out) const override {
    const Place& p = place(id);
    if (p.role == GgufRole::score && p.slice == 0) {
      std::fill(out.begin(), out.end(), 1.0F);
      return;
    }
    std::vector<std::byte> scratch;
    const auto bytes = widen(*p.tensor->type, p.tensor->bytes, scratch);
    numerics::dequantize(*run_format(*p.tensor->type), bytes.data(), static_cast<std::int64_t>(out.size()), out.data());
    if (p.role == GgufRole::conv) out = turn_conv(out, true);
    if (p.role != GgufRole::decay) return;
    for (float& x : out) {
      if (!(x < 0))
        fail(ErrorCode::corrupt_data, "{}: tensor {} holds {}, expected values below 0 (-exp(A_log))", path_.string(),
             p.tensor->name, x);
      x = std::log(-x);
    }
  }

 private:
  struct Place {
    GgufRole role = GgufRole::matrix;
    const GgufTensor* tensor = nullptr;
    const GgufTensor* values = nullptr;  // of an absorbed parameter, beside its keys
    std::int64_t slice = 0;              // within a stack; of a score: 0 norm, 1 projection
  };

  const Place& place(ParameterId id) const { return places_[static_cast<std::size_t>(id)]; }

  static const GgufTensor& tensor_of(const Place& p, int piece) { return piece == 1 ? *p.values : *p.tensor; }

  const GgufTensor& find(const GgufEntry& entry) const {
    const GgufTensor* tensor = file_->find_tensor(entry.name);
    const bool vector = entry.role == GgufRole::vector || entry.role == GgufRole::conv ||
                        entry.role == GgufRole::decay || entry.role == GgufRole::score;
    if (tensor == nullptr)
      fail(ErrorCode::corrupt_data, "{}: tensor {} {} is missing", path_.string(), entry.name, shape_text(entry.ne));
    if (!same_gguf_shape(tensor->ne, entry.ne))
      fail(ErrorCode::corrupt_data, "{}: tensor {} has shape {}, expected {}", path_.string(), entry.name,
           shape_text(tensor->ne), shape_text(entry.ne));
    const auto format = run_format(*tensor->type);
    if (!format || (vector && numerics::is_quantized(*format)))
      fail(ErrorCode::not_supported, "{}: tensor {} is {}, expected {}", path_.string(), entry.name, tensor->type->name,
           vector ? "F32, F16 or BF16"
                  : "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL or MXFP4");
    return *tensor;
  }

  void refuse_the_unknown(const Model& model) const {
    std::vector<std::string> known;
    for (const GgufEntry& entry : gguf_entries(model)) known.push_back(entry.name);
    std::sort(known.begin(), known.end());
    for (const auto& [name, tensor] : file_->tensors())
      if (!std::binary_search(known.begin(), known.end(), name))
        fail(ErrorCode::corrupt_data, "{}: tensor {} is not part of the model that the keys describe", path_.string(),
             json_quote(name));
  }

  std::unique_ptr<GgufModel> file_;
  std::vector<Place> places_;  // by ParameterId
};

}  // namespace

std::unique_ptr<WeightSource> open_gguf(const std::filesystem::path& path) {
  auto file = std::make_unique<GgufModel>(path);
  Config config = gguf_config(*file);
  return std::make_unique<GgufSource>(std::move(file), std::move(config));
}

}  // namespace tidelock::model
