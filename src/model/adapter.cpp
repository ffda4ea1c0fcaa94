#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/base.hpp"
#include "model/json.hpp"
#include "model/model.hpp"
#include "model/safetensors.hpp"

namespace tidelock::model {
namespace {

using nlohmann::json;
using numerics::PackedMatrix;

std::vector<float> transpose(const float* x, std::int64_t rows, std::int64_t columns) {
  std::vector<float> out(static_cast<std::size_t>(rows * columns));
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) out[static_cast<std::size_t>(c * rows + r)] = x[r * columns + c];
  return out;
}

AdapterPart make_part(const float* down, std::int64_t in, const float* up, std::int64_t out, int rank,
                      bool for_training) {
  AdapterPart part;
  part.down = PackedMatrix::pack(Format::f32, down, rank, in);
  part.up = PackedMatrix::pack(Format::f32, up, out, rank);
  if (for_training) {
    part.down_transposed = PackedMatrix::pack_transposed(Format::f32, down, rank, in);
    part.up_transposed = PackedMatrix::pack_transposed(Format::f32, up, out, rank);
  }
  return part;
}

// "model.layers.0.self_attn.q_proj.weight" -> "base_model.model.model.layers.0.self_attn.q_proj"
std::string peft_module(const std::string& parameter_name) {
  const std::string suffix = ".weight";
  return "base_model.model." + parameter_name.substr(0, parameter_name.size() - suffix.size());
}

}  // namespace

Adapter::Adapter(const Model& model, int rank, float alpha)
    : model_(model), rank_(rank), alpha_(alpha), parts_(model.parameters().size()) {
  if (rank < 1 || rank > 1024) fail(ErrorCode::invalid_argument, "adapter rank {}: expected 1 to 1024", rank);
}

void Adapter::set(ParameterId id, std::span<const float> a, std::span<const float> b) {
  const Parameter& p = model_.parameter(id);
  if (!p.adaptable) fail(ErrorCode::not_supported, "{} takes no adapter", p.name);
  const std::int64_t out = p.shape[0], in = p.shape[1];
  if (static_cast<std::int64_t>(a.size()) != rank_ * in || static_cast<std::int64_t>(b.size()) != out * rank_)
    fail(ErrorCode::internal, "{}: adapter of {} and {} values, expected {} and {}", p.name, a.size(), b.size(),
         rank_ * in, out * rank_);
  {
    const std::lock_guard lock(hash_mutex_);
    sha256_.clear();
  }
  auto& parts = parts_[static_cast<std::size_t>(id)];
  parts.clear();
  const bool training = model_.for_training();
  if (p.kind != ParameterKind::absorbed) {
    parts.push_back(make_part(a.data(), in, b.data(), out, rank_, training));
    return;
  }
  // q_abs += scale * A^T (B_k^T q) per head, and o += scale * B_v (A ctx): the adapter of kv_b in absorbed form.
  const MlaConfig& m = model_.config().mla;
  const std::vector<float> a_turned = transpose(a.data(), rank_, in);
  const auto head_rows = [&](int h) { return b.data() + static_cast<std::int64_t>(h) * (m.nope + m.value) * rank_; };
  for (int h = 0; h < m.heads; ++h)
    parts.push_back(
        make_part(transpose(head_rows(h), m.nope, rank_).data(), m.nope, a_turned.data(), m.latent, rank_, training));
  for (int h = 0; h < m.heads; ++h)
    parts.push_back(make_part(a.data(), m.latent, head_rows(h) + static_cast<std::int64_t>(m.nope) * rank_, m.value,
                              rank_, training));
}

AdapterValues Adapter::values() const {
  AdapterValues values;
  values.rank = rank_;
  values.alpha = alpha_;
  for (ParameterId id = 0; id < static_cast<ParameterId>(parts_.size()); ++id) {
    const auto& parts = parts_[static_cast<std::size_t>(id)];
    if (parts.empty()) continue;
    const Parameter& p = model_.parameter(id);
    AdapterValues::Pair pair{id, {}, {}};
    if (p.kind != ParameterKind::absorbed) {
      pair.a = parts[0].down.unpack();
      pair.b = parts[0].up.unpack();
    } else {
      const MlaConfig& m = model_.config().mla;
      const auto heads = static_cast<std::size_t>(m.heads);
      pair.a = parts[heads].down.unpack();
      for (std::size_t h = 0; h < heads; ++h) {
        if (parts[heads + h].down.unpack() != pair.a ||
            transpose(parts[h].up.unpack().data(), m.latent, rank_) != pair.a)
          fail(ErrorCode::mismatch, "{}: the adapter's copies of A differ at head {}", p.name, h);
        const auto key = transpose(parts[h].down.unpack().data(), rank_, m.nope), value = parts[heads + h].up.unpack();
        pair.b.insert(pair.b.end(), key.begin(), key.end());
        pair.b.insert(pair.b.end(), value.begin(), value.end());
      }
    }
    values.pairs.push_back(std::move(pair));
  }
  return values;
}

std::string Adapter::sha256() const {
  const std::lock_guard lock(hash_mutex_);
  if (sha256_.empty()) sha256_ = values().sha256(model_);
  return sha256_;
}

std::vector<ParameterId> adaptable_parameters(const Model& model) {
  std::vector<ParameterId> ids;
  for (std::size_t i = 0; i < model.parameters().size(); ++i)
    if (model.parameters()[i].adaptable) ids.push_back(static_cast<ParameterId>(i));
  return ids;
}

std::string AdapterValues::sha256(const Model& model) const {
  std::string digest_input = fmt::format("{} {}", rank, alpha);
  for (const Pair& pair : pairs) {
    const auto bytes = [](const std::vector<float>& v) { return std::as_bytes(std::span(v)); };
    digest_input +=
        fmt::format("\n{} {} {}", model.parameter(pair.id).name, sha256_hex(bytes(pair.a)), sha256_hex(bytes(pair.b)));
  }
  return sha256_hex(digest_input);
}

std::unique_ptr<Adapter> make_adapter(const Model& model, const AdapterValues& values) {
  auto adapter = std::make_unique<Adapter>(model, values.rank, values.alpha);
  for (const auto& pair : values.pairs) adapter->set(pair.id, pair.a, pair.b);
  return adapter;
}

void save_adapter(const Model& model, const AdapterValues& values, const std::filesystem::path& folder,
                  const std::string& base_name) {
  std::filesystem::create_directories(folder);
  std::vector<TensorToWrite> tensors;
  std::vector<std::string> modules;
  for (const auto& pair : values.pairs) {
    const Parameter& p = model.parameter(pair.id);
    const std::string module = peft_module(p.name);
    tensors.push_back(
        {module + ".lora_A.weight", Dtype::f32, {values.rank, p.shape[1]}, std::as_bytes(std::span(pair.a))});
    tensors.push_back(
        {module + ".lora_B.weight", Dtype::f32, {p.shape[0], values.rank}, std::as_bytes(std::span(pair.b))});
    const std::string last = module.substr(module.rfind('.') + 1);
    if (std::find(modules.begin(), modules.end(), last) == modules.end()) modules.push_back(last);
  }
  std::sort(modules.begin(), modules.end());
  json config = {{"peft_type", "LORA"},
                 {"task_type", "CAUSAL_LM"},
                 {"base_model_name_or_path", base_name},
                 {"r", values.rank},
                 {"lora_alpha", values.alpha},
                 {"lora_dropout", 0.0},
                 {"target_modules", modules},
                 {"bias", "none"},
                 {"fan_in_fan_out", false},
                 {"use_rslora", false},
                 {"use_dora", false},
                 {"init_lora_weights", true},
                 {"inference_mode", true}};
  write_safetensors(
      folder / "adapter_model.safetensors", tensors,
      {{"format", "pt"}, {"tidelock_contract", numerics::kContractName}, {"tidelock_sha256", values.sha256(model)}});
  write_file_atomic(folder / "adapter_config.json", config.dump(2) + "\n");
}

AdapterValues load_adapter(const Model& model, const std::filesystem::path& folder) {
  const std::string config_path = (folder / "adapter_config.json").string();
  const json config = parse_json(read_file(config_path, 1 << 20), config_path);
  if (!config.is_object()) fail(ErrorCode::corrupt_data, "{}: expected an object", config_path);
  const auto value_of = [&](const char* key) { return config.contains(key) ? config[key] : json(); };
  if (value_of("peft_type") != "LORA")
    fail(ErrorCode::not_supported, "{}: peft_type = {}: expected \"LORA\"", config_path, value_of("peft_type").dump());
  for (const char* flag : {"use_dora", "use_rslora", "fan_in_fan_out"})
    if (config.contains(flag) && config[flag] != false)
      fail(ErrorCode::not_supported, "{}: {} = {} is not supported", config_path, flag, config[flag].dump());
  const json rank = value_of("r"), alpha = value_of("lora_alpha");
  if (!rank.is_number_integer() || rank < 1 || rank > 1024)
    fail(ErrorCode::corrupt_data, "{}: r = {}: expected a whole number from 1 to 1024", config_path, rank.dump());
  if (!alpha.is_number() || !(alpha > 0) || !(alpha < 1e6))
    fail(ErrorCode::corrupt_data, "{}: lora_alpha = {}: expected a number above 0", config_path, alpha.dump());
  AdapterValues values;
  values.rank = rank.get<int>();
  values.alpha = alpha.get<float>();
  const SafetensorsFile file(folder / "adapter_model.safetensors");
  const auto contract = file.metadata().find("tidelock_contract");
  if (contract != file.metadata().end() && contract->second != numerics::kContractName)
    fail(ErrorCode::mismatch, "{}: made under contract {}, this build is {}", file.path().string(), contract->second,
         numerics::kContractName);
  std::set<std::string> used;
  for (const ParameterId id : adaptable_parameters(model)) {
    const Parameter& p = model.parameter(id);
    const auto a = file.tensors().find(peft_module(p.name) + ".lora_A.weight");
    const auto b = file.tensors().find(peft_module(p.name) + ".lora_B.weight");
    if (a == file.tensors().end() && b == file.tensors().end()) continue;
    if (a == file.tensors().end() || b == file.tensors().end())
      fail(ErrorCode::corrupt_data, "{}: {} has only one of lora_A and lora_B", file.path().string(), p.name);
    values.pairs.push_back(
        {id, read_f32(a->second, {values.rank, p.shape[1]}), read_f32(b->second, {p.shape[0], values.rank})});
    used.insert(a->first);
    used.insert(b->first);
  }
  // A tensor that is left out silently (of another model, of DoRA, of a frozen map) would be another adapter.
  for (const auto& [name, tensor] : file.tensors())
    if (!used.contains(name))
      fail(ErrorCode::corrupt_data, "{}: {} does not belong to an adapter of this model", file.path().string(), name);
  const auto hash = file.metadata().find("tidelock_sha256");
  if (hash != file.metadata().end() && hash->second != values.sha256(model))
    fail(ErrorCode::mismatch, "{}: its values do not match the hash it was saved with", file.path().string());
  return values;
}

}  // namespace tidelock::model
