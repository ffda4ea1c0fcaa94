#include "rl/checkpoint.hpp"

#include <algorithm>
#include <charconv>

#include "base/base.hpp"
#include "model/json.hpp"
#include "model/safetensors.hpp"

namespace tidelock::rl {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFormatVersion = 1;

std::optional<std::int64_t> step_of(const fs::path& path) {
  const std::string name = path.filename().string();
  if (!name.starts_with("step_")) return std::nullopt;
  std::int64_t step = 0;
  const auto parsed = std::from_chars(name.data() + 5, name.data() + name.size(), step);
  if (parsed.ec != std::errc() || parsed.ptr != name.data() + name.size()) return std::nullopt;
  return step;
}

std::vector<std::int64_t> steps_in(const fs::path& folder) {
  std::vector<std::int64_t> steps;
  if (!fs::is_directory(folder)) return steps;
  for (const auto& entry : fs::directory_iterator(folder))
    if (const auto step = step_of(entry.path())) steps.push_back(*step);
  std::sort(steps.begin(), steps.end());
  return steps;
}

json to_json(const Estimate& e) {
  return {e.value, e.low, e.high};
}
Estimate to_estimate(const json& j) {
  return {j.at(0), j.at(1), j.at(2)};
}

json to_json(const RunState& s, const std::string& adapter_sha256, std::int64_t optimizer_steps) {
  json out = {{"format", kFormatVersion},
              {"contract", numerics::kContractName},
              {"step", s.step},
              {"weight_version", s.weight_version},
              {"adapter_sha256", adapter_sha256},
              {"optimizer_steps", optimizer_steps},
              {"compared_tokens", s.compared_tokens},
              {"mismatch_tokens", s.mismatch_tokens},
              {"mismatch_max_abs", s.mismatch_max_abs},
              {"elapsed_s", s.elapsed_s},
              {"rollout_s", s.rollout_s},
              {"sandbox_s", s.sandbox_s},
              {"train_s", s.train_s},
              {"other_s", s.other_s},
              {"rewards", s.rewards},
              {"evaluations", json::array()}};
  for (const auto& e : s.evaluations)
    out["evaluations"].push_back({{"step", e.step},
                                  {"k", e.result.k},
                                  {"n", e.result.n},
                                  {"mean_at_k", to_json(e.result.mean_at_k)},
                                  {"pass_at_k", to_json(e.result.pass_at_k)}});
  return out;
}

RunState from_json(const json& j) {
  RunState s;
  s.step = j.at("step");
  s.weight_version = j.at("weight_version");
  s.compared_tokens = j.at("compared_tokens");
  s.mismatch_tokens = j.at("mismatch_tokens");
  s.mismatch_max_abs = j.at("mismatch_max_abs");
  s.elapsed_s = j.at("elapsed_s");
  s.rollout_s = j.at("rollout_s");
  s.sandbox_s = j.at("sandbox_s");
  s.train_s = j.at("train_s");
  s.other_s = j.at("other_s");
  s.rewards = j.at("rewards").get<std::vector<double>>();
  for (const auto& e : j.at("evaluations")) {
    ViewEvaluation v;
    v.step = e.at("step");
    v.result = {e.at("k"), e.at("n"), to_estimate(e.at("mean_at_k")), to_estimate(e.at("pass_at_k"))};
    s.evaluations.push_back(v);
  }
  return s;
}

void read_moments(const fs::path& path, std::span<float> m, std::span<float> v) {
  const model::SafetensorsFile file(path);
  const auto count = static_cast<std::int64_t>(m.size());
  for (const auto& [name, target] : {std::pair{"m", m}, std::pair{"v", v}}) {
    const auto it = file.tensors().find(name);
    if (it == file.tensors().end()) fail(ErrorCode::corrupt_data, "{}: {} is missing", path.string(), name);
    const auto values = model::read_f32(it->second, {count});
    std::copy(values.begin(), values.end(), target.begin());
  }
}

}  // namespace

void save_checkpoint(const fs::path& run, const RunState& state, const model::Model& model,
                     const train::LoraParameters& parameters, train::AdamW& optimizer, const std::string& base_name,
                     std::int64_t keep, const std::function<void(const fs::path&)>& more) {
  const fs::path folder = run / "checkpoints";
  const fs::path final_path = folder / fmt::format("step_{}", state.step),
                 temporary = folder / fmt::format(".step_{}.tmp", state.step);
  fs::create_directories(folder);
  fs::remove_all(temporary);
  fs::remove_all(final_path);  // left by a run that went further before it was resumed
  const model::AdapterValues adapter = parameters.adapter_values();
  try {
    model::save_adapter(model, adapter, temporary, base_name);
    const auto count = static_cast<std::int64_t>(optimizer.m().size());
    model::write_safetensors(temporary / "optimizer.safetensors",
                             {{"m", model::Dtype::f32, {count}, std::as_bytes(optimizer.m())},
                              {"v", model::Dtype::f32, {count}, std::as_bytes(optimizer.v())}},
                             {{"tidelock_contract", numerics::kContractName}});
    if (more) more(temporary);
    write_file_atomic(temporary / "state.json",
                      to_json(state, adapter.sha256(model), optimizer.steps()).dump(1) + "\n");
    sync_directory(temporary);
    fs::rename(temporary, final_path);
    sync_directory(folder);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw;
  }
  const auto steps = steps_in(folder);
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < steps.size(); ++i)
    fs::remove_all(folder / fmt::format("step_{}", steps[i]));
}

std::optional<fs::path> newest_checkpoint(const fs::path& run) {
  const auto steps = steps_in(run / "checkpoints");
  if (steps.empty()) return std::nullopt;
  return run / "checkpoints" / fmt::format("step_{}", steps.back());
}

RunState load_checkpoint(const fs::path& checkpoint, const model::Model& model, train::LoraParameters& parameters,
                         train::AdamW& optimizer) {
  const fs::path state_path = checkpoint / "state.json";
  const json state = model::read_json(state_path, {.bytes = 64 << 20});
  try {
    if (state.at("format") != kFormatVersion)
      fail(ErrorCode::corrupt_data, "{}: not a checkpoint of format {}", state_path.string(), kFormatVersion);
    if (state.at("contract") != numerics::kContractName)
      fail(ErrorCode::mismatch, "{}: made under contract {}, this build is {}", state_path.string(),
           state.at("contract").dump(), numerics::kContractName);
    const model::AdapterValues adapter = model::load_adapter(model, checkpoint);
    if (adapter.sha256(model) != state.at("adapter_sha256"))
      fail(ErrorCode::mismatch, "{}: the adapter beside it is another one", state_path.string());
    parameters.load(adapter);
    read_moments(checkpoint / "optimizer.safetensors", optimizer.m(), optimizer.v());
    optimizer.restore_steps(state.at("optimizer_steps"));
    return from_json(state);
  } catch (const json::exception& error) {
    fail(ErrorCode::corrupt_data, "{}: {}", state_path.string(), error.what());
  }
}

}  // namespace tidelock::rl
