#include <algorithm>
#include <cmath>

#include "base/base.hpp"
#include "train/train.hpp"

namespace tidelock::train {

FullParameters::FullParameters(const model::Model& model) {
  std::int64_t offset = 0;
  for (const auto& p : model.parameters()) {
    offsets_.push_back(offset);
    offset += p.count();
  }
  offsets_.push_back(offset);
  values_.resize(static_cast<std::size_t>(offset));
}

std::span<float> FullParameters::of(ParameterId id) {
  const auto i = static_cast<std::size_t>(id);
  return std::span(values_).subspan(static_cast<std::size_t>(offsets_[i]),
                                    static_cast<std::size_t>(offsets_[i + 1] - offsets_[i]));
}

std::span<const float> FullParameters::of(ParameterId id) const {
  const auto i = static_cast<std::size_t>(id);
  return std::span(values_).subspan(static_cast<std::size_t>(offsets_[i]),
                                    static_cast<std::size_t>(offsets_[i + 1] - offsets_[i]));
}

void FullParameters::initialize(const model::Model& model, std::uint64_t seed) {
  for (ParameterId id = 0; id < static_cast<ParameterId>(model.parameters().size()); ++id) {
    const std::vector<float> fresh = model::initial_values(model, id, seed);
    std::copy(fresh.begin(), fresh.end(), of(id).begin());
  }
}

void FullParameters::apply(model::Model& model, Team& team) const {
  team.parallel(static_cast<std::int64_t>(model.parameters().size()), 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) model.set(static_cast<ParameterId>(i), of(static_cast<ParameterId>(i)));
  });
}

model::Gradients FullParameters::gradients(std::span<float> flat) const {
  model::Gradients g;
  for (std::size_t i = 0; i + 1 < offsets_.size(); ++i) g.parameters.push_back(flat.data() + offsets_[i]);
  return g;
}

bool FullParameters::decays(const model::Model& model, ParameterId id) const {
  const auto kind = model.parameter(id).kind;
  return kind != model::ParameterKind::vector && kind != model::ParameterKind::conv;
}

namespace {

// "model.layers.0.self_attn.q_proj.weight" -> "q_proj"
std::string module_name(const std::string& parameter) {
  const std::string path = parameter.substr(0, parameter.rfind('.'));
  return path.substr(path.rfind('.') + 1);
}

}  // namespace

LoraParameters::LoraParameters(const model::Model& model, int rank, float alpha,
                               const std::vector<std::string>& targets)
    : model_(model), rank_(rank), alpha_(alpha) {
  const bool all = targets.size() == 1 && targets.front() == "all-linear";
  std::vector<std::string> unused = all ? std::vector<std::string>{} : targets;
  std::int64_t offset = 0;
  for (const ParameterId id : model::adaptable_parameters(model)) {
    const auto& p = model.parameter(id);
    const std::string module = module_name(p.name);
    if (!all && std::find(targets.begin(), targets.end(), module) == targets.end()) continue;
    unused.erase(std::remove(unused.begin(), unused.end(), module), unused.end());
    const std::int64_t in = p.shape[1], out = p.shape[0];
    slots_.push_back({id, offset, offset + rank * in, in, out});
    offset += rank * (in + out);
  }
  if (!unused.empty())
    fail(ErrorCode::invalid_argument, "adapter target {} names no linear map of this model", unused.front());
  if (slots_.empty()) fail(ErrorCode::invalid_argument, "the adapter has no targets");
  values_.resize(static_cast<std::size_t>(offset));
}

void LoraParameters::initialize(std::uint64_t seed) {
  for (const Slot& slot : slots_) {
    Random random(seed, static_cast<std::uint64_t>(slot.id));
    const float bound = 1.0F / std::sqrt(static_cast<float>(slot.in));
    for (std::int64_t i = slot.a; i < slot.b; ++i)
      values_[static_cast<std::size_t>(i)] = bound * (2.0F * random.uniform() - 1.0F);
    std::fill_n(values_.begin() + slot.b, rank_ * slot.out, 0.0F);
  }
}

model::AdapterValues LoraParameters::adapter_values() const {
  model::AdapterValues out{rank_, alpha_, {}};
  for (const Slot& slot : slots_) {
    const auto a = values_.begin() + slot.a, b = values_.begin() + slot.b;
    out.pairs.push_back({slot.id, {a, a + rank_ * slot.in}, {b, b + rank_ * slot.out}});
  }
  return out;
}

void LoraParameters::load(const model::AdapterValues& adapter) {
  if (adapter.rank != rank_ || adapter.alpha != alpha_ || adapter.pairs.size() != slots_.size())
    fail(ErrorCode::mismatch, "the adapter has rank {}, alpha {} and {} targets; this run has {}, {} and {}",
         adapter.rank, adapter.alpha, adapter.pairs.size(), rank_, alpha_, slots_.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto& pair = adapter.pairs[i];
    if (pair.id != slots_[i].id)
      fail(ErrorCode::mismatch, "the adapter adapts {} where this run adapts {}", model_.parameter(pair.id).name,
           model_.parameter(slots_[i].id).name);
    std::copy(pair.a.begin(), pair.a.end(), values_.begin() + slots_[i].a);
    std::copy(pair.b.begin(), pair.b.end(), values_.begin() + slots_[i].b);
  }
}

model::Gradients LoraParameters::gradients(std::span<float> flat) const {
  model::Gradients g;
  g.lora_a.assign(model_.parameters().size(), nullptr);
  g.lora_b.assign(model_.parameters().size(), nullptr);
  for (const Slot& slot : slots_) {
    g.lora_a[static_cast<std::size_t>(slot.id)] = flat.data() + slot.a;
    g.lora_b[static_cast<std::size_t>(slot.id)] = flat.data() + slot.b;
  }
  return g;
}

}  // namespace tidelock::train
