#include <algorithm>
#include <cmath>

#include "base/base.hpp"
#include "model/model.hpp"
#include "model/safetensors.hpp"

namespace tidelock::model {
namespace {

bool is_vision(const std::string& name) {
  return name.starts_with("vision_tower.") || name.starts_with("mm_projector.");
}

// Shapes that the family's checkpoints use for the same values: [1, 1, heads, 1], [heads, 1] or padded A_log,
// [channels, 4] convs.
std::vector<float> read_parameter(const TensorInfo& tensor, const Parameter& p) {
  const std::int64_t n = p.count();
  if (p.name.ends_with("A_log")) {
    std::vector<float> values = read_f32(tensor, tensor.shape);
    if (static_cast<std::int64_t>(values.size()) < n)
      fail(ErrorCode::corrupt_data, "{}: {} values, expected at least {}", p.name, values.size(), n);
    values.resize(static_cast<std::size_t>(n));
    return values;
  }
  if (p.kind == ParameterKind::conv) {
    const bool flat = tensor.shape.size() == 2;
    return read_f32(tensor, flat ? std::vector<std::int64_t>{p.shape[0], 4} : p.shape);
  }
  if (p.shape.size() == 2 && p.shape[0] == 1 && tensor.shape.size() == 1) return read_f32(tensor, {p.shape[1]});
  return read_f32(tensor, p.shape);
}

std::vector<float> turn_conv(std::span<const float> values, bool to_tap_major) {
  const std::size_t channels = values.size() / 4;
  std::vector<float> out(values.size());
  for (std::size_t c = 0; c < channels; ++c)
    for (std::size_t tap = 0; tap < 4; ++tap)
      (to_tap_major ? out[tap * channels + c] : out[c * 4 + tap]) =
          to_tap_major ? values[c * 4 + tap] : values[tap * channels + c];
  return out;
}

void check_all_known(const Model& model, const Checkpoint& checkpoint) {
  std::vector<std::string> expected;
  for (const auto& p : model.parameters()) expected.push_back(p.name);
  std::sort(expected.begin(), expected.end());
  std::size_t vision = 0;
  for (const std::string& name : checkpoint.names()) {
    if (is_vision(name)) {
      ++vision;
    } else if (!std::binary_search(expected.begin(), expected.end(), name)) {
      fail(ErrorCode::corrupt_data, "{}: tensor {} is not part of the model that config.json describes",
           checkpoint.path().string(), name);
    }
  }
  if (vision != 0)
    spdlog::warn("{}: {} vision tensors are left out; this build runs text only", checkpoint.path().string(), vision);
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

}  // namespace

std::unique_ptr<Model> load_model(const std::filesystem::path& folder, bool for_training, const ValueSink& raw) {
  auto model = std::make_unique<Model>(load_config(folder), for_training);
  const Checkpoint checkpoint(folder);
  check_contract(checkpoint);
  check_all_known(*model, checkpoint);
  for (std::size_t i = 0; i < model->parameters().size(); ++i) {
    const auto id = static_cast<ParameterId>(i);
    const Parameter& p = model->parameter(id);
    const TensorInfo* tensor = checkpoint.find(p.name);
    if (tensor == nullptr)
      fail(ErrorCode::corrupt_data, "{}: tensor {} {} is missing", checkpoint.path().string(), p.name,
           shape_text(p.shape));
    std::vector<float> values = read_parameter(*tensor, p);
    if (p.kind == ParameterKind::conv) values = turn_conv(values, true);
    model->set(id, values);
    if (raw) raw(id, values);
  }
  return model;
}

void save_model(const Model& model, const ValueSource& values, const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  std::vector<std::vector<float>> wide;
  std::vector<std::vector<numerics::bf16>> narrow;
  wide.reserve(model.parameters().size());
  narrow.reserve(model.parameters().size());
  std::vector<TensorToWrite> tensors;
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    const Parameter& p = model.parameters()[i];
    const auto source = values(static_cast<ParameterId>(i));
    std::vector<float>& x = wide.emplace_back(source.begin(), source.end());
    if (p.kind == ParameterKind::conv) x = turn_conv(x, false);
    const bool rounded = model.config().format == Format::bf16 && p.kind != ParameterKind::vector &&
                         p.kind != ParameterKind::conv && p.kind != ParameterKind::router;
    if (!rounded) {
      tensors.push_back({p.name, Dtype::f32, p.shape, std::as_bytes(std::span(x))});
      continue;
    }
    auto& y = narrow.emplace_back(x.size());
    std::transform(x.begin(), x.end(), y.begin(), numerics::to_bf16);
    tensors.push_back({p.name, Dtype::bf16, p.shape, std::as_bytes(std::span(y))});
  }
  write_safetensors(folder / "model.safetensors", tensors,
                    {{"format", "pt"}, {"tidelock_contract", numerics::kContractName}});
  write_file_atomic(folder / "config.json", config_to_json(model.config()));
}

}  // namespace tidelock::model
