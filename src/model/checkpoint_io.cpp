#include <algorithm>

#include "base/base.hpp"
#include "model/model.hpp"
#include "model/plan.hpp"
#include "model/safetensors.hpp"
#include "model/weight_source.hpp"

namespace tidelock::model {

void load_parameter(const WeightSource& source, ParameterId id, Model& model) {
  const ParameterKind kind = model.parameter(id).kind;
  std::vector<float> values;
  std::vector<std::byte> scratch, more;
  if (kind == ParameterKind::vector || kind == ParameterKind::conv) {
    source.values(id, values);
    model.set(id, values);
  } else if (kind == ParameterKind::absorbed) {
    const auto keys = source.rows(id, 0, scratch), halves = source.rows(id, 1, more);
    model.set_absorbed_blocks(id, source.format(id, 0), keys, source.format(id, 1), halves);
  } else {
    model.set_blocks(id, source.format(id, 0), source.rows(id, 0, scratch));
  }
}

void check_memory(const Model& model, const FormatOf& format, const std::filesystem::path& path,
                  std::uint64_t available) {
  std::uint64_t needed = 0;
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    const auto id = static_cast<ParameterId>(i);
    const Parameter& p = model.parameter(id);
    needed += packed_parameter_bytes(model, id, format);
    if (model.for_training() &&
        (p.kind == ParameterKind::linear || p.kind == ParameterKind::router || p.kind == ParameterKind::absorbed))
      needed += static_cast<std::uint64_t>(p.count()) * sizeof(float);  // transposed, float32
  }
  if (needed <= available) return;
  throw Error(ErrorCode::exhausted,
              fmt::format("{}: the weights need {} of memory{}, {} are free", path.string(), bytes_text(needed),
                          model.for_training() ? " for training" : "", bytes_text(available)),
              "convert it to coarser numbers (tidelock convert --type), or run it from the disk (--weights mmap); see "
              "tidelock plan");
}

std::unique_ptr<Model> load_model(const std::filesystem::path& path, bool for_training, const ValueSink& raw) {
  return load_model(*open_weights(path), for_training, raw);
}

std::unique_ptr<Model> load_model(WeightSource& source, bool for_training, const ValueSink& raw) {
  auto model = std::make_unique<Model>(source.config(), for_training);
  source.bind(*model);
  check_memory(
      *model, [&](ParameterId id, int piece) { return source.format(id, piece); }, source.path(), available_memory());
  std::vector<float> values;
  for (std::size_t i = 0; i < model->parameters().size(); ++i) {
    const auto id = static_cast<ParameterId>(i);
    load_parameter(source, id, *model);
    if (!raw) continue;
    source.values(id, values);
    raw(id, values);
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
