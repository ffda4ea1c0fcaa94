#include <algorithm>
#include <array>
#include <cstring>
#include <unordered_map>

#include "base/base.hpp"
#include "model/json.hpp"
#include "model/safetensors.hpp"
#include "model/weight_source.hpp"

namespace tidelock::model {
namespace {

constexpr const char* kPrefix = "language_model.";

bool is_vision(const std::string& name) {
  return name.starts_with("vision_tower.") || name.starts_with("mm_projector.");
}

// Files of other programs name no contract; one that names another was made under other numerics (contract rule 12).
void check_contract(const Checkpoint& checkpoint) {
  for (const auto& file : checkpoint.files()) {
    const auto contract = file->metadata().find("tidelock_contract");
    if (contract != file->metadata().end() && contract->second != numerics::kContractName)
      fail(ErrorCode::mismatch, "{}: made under contract {}, this build is {}", file->path().string(), contract->second,
           numerics::kContractName);
  }
}

// What the names of the text model begin with, as the tensors say it.
std::string find_prefix(const Checkpoint& checkpoint) {
  const std::string name = "model.embed_tokens.weight";
  const bool plain = checkpoint.find(name) != nullptr, nested = checkpoint.find(kPrefix + name) != nullptr;
  if (plain == nested)
    fail(ErrorCode::corrupt_data, "{}: {} {} and {}{} is in it, expected one of them", checkpoint.path().string(),
         plain ? "both" : "neither", name, kPrefix, name);
  return nested ? kPrefix : "";
}

// The shapes in which the family's checkpoints hold a parameter: [1, 1, heads, 1], [heads, 1] or a longer, padded
// A_log, [channels, 4] convolutions, [hidden] projections of block residuals.
bool shape_fits(const TensorInfo& tensor, const Parameter& p) {
  const auto& shape = tensor.shape;
  if (p.name.ends_with("A_log")) return tensor.elements() == p.count() || (shape.size() == 1 && shape[0] > p.count());
  if (shape == p.shape) return true;
  if (p.kind == ParameterKind::conv) return shape == std::vector<std::int64_t>{p.shape[0], p.shape[2]};
  return p.shape.size() == 2 && p.shape[0] == 1 && shape == std::vector<std::int64_t>{p.shape[1]};
}

class FolderSource : public WeightSource {
 public:
  FolderSource(std::unique_ptr<Checkpoint> checkpoint, Config config)
      : WeightSource(checkpoint->path(), std::move(config)), checkpoint_(std::move(checkpoint)) {}

  std::string kind() const override {
    const std::size_t n = checkpoint_->files().size();
    return fmt::format("Hugging Face folder, {} safetensors file{}", n, n == 1 ? "" : "s");
  }

  std::vector<std::filesystem::path> files() const override {
    std::vector<std::filesystem::path> files{path_ / "config.json"};
    for (const auto& file : checkpoint_->files()) files.push_back(file->path());
    return files;
  }

  void bind(const Model& model) override {
    model_ = &model;
    places_.clear();
    std::unordered_map<std::string_view, bool> known;
    for (const Parameter& p : model.parameters()) {
      places_.push_back(find(p));
      const Place& place = places_.back();
      known.emplace(place.tensor->name, true);
      if (place.scale != nullptr) known.emplace(place.scale->name, true);
    }
    std::size_t vision = 0;
    for (const std::string& name : checkpoint_->names()) {
      if (is_vision(name)) {
        ++vision;
      } else if (!known.contains(name)) {
        fail(ErrorCode::corrupt_data, "{}: tensor {} is not part of the model that config.json describes",
             path_.string(), json_quote(name));
      }
    }
    if (vision != 0)
      spdlog::warn("{}: {} vision tensors are left out; this build runs text only", path_.string(), vision);
  }

  StoredWeight stored(ParameterId id) const override {
    const Place& p = place(id);
    if (p.scale != nullptr) return {"MXFP4", p.tensor->bytes.size() + p.scale->bytes.size()};
    return {dtype_name(p.tensor->dtype), p.tensor->bytes.size()};
  }

  // A matrix is run in the dtype of the config, whatever wider one its file has; routers stay float32.
  Format format(ParameterId id, int /*piece*/) const override {
    const Place& p = place(id);
    if (p.scale != nullptr) return Format::mxfp4;
    if (model().parameter(id).kind == ParameterKind::router) return Format::f32;
    return config_.format;
  }

  std::span<const std::byte> rows(ParameterId id, int piece, std::vector<std::byte>& scratch) const override {
    const Place& p = place(id);
    if (p.scale != nullptr) return packed_rows(p, scratch);
    const Format to = format(id, piece);
    const bool absorbed = model().parameter(id).kind == ParameterKind::absorbed;
    const bool same =
        (p.tensor->dtype == Dtype::f32 && to == Format::f32) || (p.tensor->dtype == Dtype::bf16 && to == Format::bf16);
    if (same && !absorbed) return p.tensor->bytes;
    std::vector<float> values = read_f32(*p.tensor, p.tensor->shape);
    if (absorbed) values = absorbed_half(values, piece);
    const auto n = static_cast<std::int64_t>(values.size());
    scratch.resize(numerics::row_bytes(to, n));
    numerics::quantize(to, values.data(), n, scratch.data());
    return scratch;
  }

 protected:
  void stored_vector(ParameterId id, std::vector<float>& out) const override {
    const Place& p = place(id);
    const std::size_t n = out.size();
    out = read_f32(*p.tensor, p.tensor->shape);
    out.resize(n);  // a padded A_log is longer
    if (model().parameter(id).kind == ParameterKind::conv) out = turn_conv(out, true);
  }

 private:
  struct Place {
    const TensorInfo* tensor = nullptr;  // with a scale: the packed codes
    const TensorInfo* scale = nullptr;
  };

  const Place& place(ParameterId id) const { return places_[static_cast<std::size_t>(id)]; }

  Place find(const Parameter& p) const {
    if (const TensorInfo* tensor = checkpoint_->find(p.name)) {
      if (!shape_fits(*tensor, p)) wrong_shape(*tensor, p.shape);
      if (tensor->dtype != Dtype::f32 && tensor->dtype != Dtype::bf16 && tensor->dtype != Dtype::f16)
        fail(ErrorCode::corrupt_data, "{}: tensor {} is {}, expected F32, BF16 or F16", path_.string(), p.name,
             dtype_name(tensor->dtype));
      return {tensor, nullptr};
    }
    const bool packed = config_.experts.packed && p.name.find(".experts.") != std::string::npos;
    const Place place{packed ? checkpoint_->find(p.name + "_packed") : nullptr,
                      packed ? checkpoint_->find(p.name + "_scale") : nullptr};
    if (place.tensor == nullptr || place.scale == nullptr) missing(p, packed, place);
    if (p.shape[1] % 32 != 0)
      fail(ErrorCode::corrupt_data, "{}: tensor {} has rows of {}, MXFP4 needs a multiple of 32", path_.string(),
           p.name, p.shape[1]);
    check_bytes(*place.tensor, {p.shape[0], p.shape[1] / 2});
    check_bytes(*place.scale, {p.shape[0], p.shape[1] / 32});
    return place;
  }

  [[noreturn]] void missing(const Parameter& p, bool packed, const Place& place) const {
    if (place.tensor != nullptr || place.scale != nullptr)
      fail(ErrorCode::corrupt_data, "{}: tensor {}{} is missing beside {}{}", path_.string(), p.name,
           place.tensor == nullptr ? "_packed" : "_scale", p.name, place.tensor == nullptr ? "_scale" : "_packed");
    if (!packed && checkpoint_->find(p.name + "_packed") != nullptr)
      fail(ErrorCode::not_supported,
           "{}: tensor {}_packed: only routed experts may be packed, and config.json must say "
           "so in quantization_config",
           path_.string(), p.name);
    fail(ErrorCode::corrupt_data, "{}: tensor {} {} is missing", path_.string(), p.name, shape_text(p.shape));
  }

  [[noreturn]] void wrong_shape(const TensorInfo& tensor, const std::vector<std::int64_t>& expected) const {
    fail(ErrorCode::corrupt_data, "{}: tensor {} has shape {}, expected {}", path_.string(), tensor.name,
         shape_text(tensor.shape), shape_text(expected));
  }
  void check_bytes(const TensorInfo& tensor, const std::vector<std::int64_t>& expected) const {
    if (tensor.shape != expected) wrong_shape(tensor, expected);
    if (tensor.dtype != Dtype::u8 && tensor.dtype != Dtype::f8_e8m0)
      fail(ErrorCode::corrupt_data, "{}: tensor {} is {}, expected U8", path_.string(), tensor.name,
           dtype_name(tensor.dtype));
  }

  // Codes and scales, each contiguous, become blocks: a move of bits.
  static std::span<const std::byte> packed_rows(const Place& p, std::vector<std::byte>& scratch) {
    const std::size_t blocks = p.scale->bytes.size();
    scratch.resize(blocks * 17);
    const std::byte* codes = p.tensor->bytes.data();
    std::byte* to = scratch.data();
    for (std::size_t i = 0; i < blocks; ++i, codes += 16, to += 17) {
      to[0] = p.scale->bytes[i];
      to_ggml_nibbles(codes, to + 1);
    }
    return scratch;
  }

  // kv_b has, head by head, nope key rows and value rows. The key halves are turned, so that they map queries to latent
  // space.
  std::vector<float> absorbed_half(const std::vector<float>& rows, int piece) const {
    const MlaConfig& m = config_.mla;
    const std::int64_t latent = m.latent;
    std::vector<float> out;
    out.reserve(rows.size());
    for (std::int64_t h = 0; h < m.heads; ++h) {
      const float* head = rows.data() + h * (m.nope + m.value) * latent;
      if (piece == 1) {
        out.insert(out.end(), head + m.nope * latent, head + (m.nope + m.value) * latent);
        continue;
      }
      for (std::int64_t l = 0; l < latent; ++l)
        for (std::int64_t n = 0; n < m.nope; ++n) out.push_back(head[n * latent + l]);
    }
    return out;
  }

  std::unique_ptr<Checkpoint> checkpoint_;
  std::vector<Place> places_;  // by ParameterId
};

}  // namespace

std::unique_ptr<WeightSource> open_folder(const std::filesystem::path& folder) {
  Config config = load_config(folder);
  refuse_tied_head(config);
  auto checkpoint = std::make_unique<Checkpoint>(folder);
  check_contract(*checkpoint);
  config.tensor_prefix = find_prefix(*checkpoint);
  return std::make_unique<FolderSource>(std::move(checkpoint), std::move(config));
}

}  // namespace tidelock::model
