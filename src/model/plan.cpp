#include "model/plan.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "model/state_layout.hpp"
#include "model/weight_source.hpp"

namespace tidelock::model {
namespace {

constexpr const char* kGroupNames[kWeightGroups] = {
    "embedding",      "KDA",   "MLA", "indexer", "dense MLP", "shared experts and latent maps", "router",
    "routed experts", "norms", "head"};

// The takes of a forward pass without a tape, in the pass's order (forward.cpp, residual.cpp and the layers).
class PassSize {
 public:
  PassSize(const Config& c, std::int64_t rows) : c_(c), rows_(rows), narrow_(c.format != Format::f32) {}

  std::uint64_t total(std::int64_t spans) {
    std::uint64_t largest = 0, keep = floats(c_.hidden);
    for (int layer = 0; layer < c_.layer_count(); ++layer) {
      const bool bank = c_.residual_block != 0 && layer % c_.residual_block == 0;
      blocks_ += bank ? 1 : 0;
      if (bank) keep += floats(c_.hidden);
      const std::uint64_t own = (bank ? 1U : 2U) * floats(c_.hidden) + 2 * mix() + signal(c_.hidden);
      const std::uint64_t attention = c_.layers[static_cast<std::size_t>(layer)] == LayerKind::kda ? kda() : mla();
      largest = std::max(largest, own + attention + ffn(layer));
    }
    keep += mix();
    // The logits of one row per sequence, and the head's copy of its input.
    const std::uint64_t head = static_cast<std::uint64_t>(spans) * static_cast<std::uint64_t>(c_.vocab) * 4 +
                               static_cast<std::uint64_t>(spans * c_.hidden) * 6;
    return keep + largest + head;
  }

 private:
  std::uint64_t floats(std::int64_t width) const { return align(static_cast<std::uint64_t>(rows_ * width) * 4); }
  std::uint64_t signal(std::int64_t width) const {
    return narrow_ ? align(static_cast<std::uint64_t>(rows_ * width) * 2) : 0;
  }
  static std::uint64_t align(std::uint64_t bytes) { return (bytes + 63) / 64 * 64; }

  std::uint64_t mix() const {
    const std::uint64_t plain = floats(c_.hidden) + floats(1) + signal(c_.hidden);
    return blocks_ == 0 ? plain : plain + floats(c_.hidden) + floats(blocks_ + 1);
  }
  std::uint64_t kda() const {
    const std::int64_t channels = c_.kda.channels(), d = c_.kda.head_dim, heads = c_.kda.heads;
    const std::uint64_t inner = 14 * floats(channels) + signal(channels) + 4 * floats(heads);
    const std::uint64_t low_rank = floats(d) + signal(d);
    return inner + low_rank + (c_.kda.full_rank_gate ? 0 : low_rank);
  }
  std::uint64_t mla() const {
    const MlaConfig& m = c_.mla;
    const std::int64_t q = std::int64_t{m.heads} * m.query_dim(), out = std::int64_t{m.heads} * m.value;
    const std::int64_t context = std::int64_t{m.heads} * m.latent;
    std::uint64_t bytes = floats(q) + signal(q) + floats(std::int64_t{m.heads} * m.key_dim());
    if (m.q_lora != 0) bytes += 2 * floats(m.q_lora) + signal(m.q_lora) + floats(1);
    bytes += floats(m.key_dim()) + 2 * floats(m.latent) + floats(1);
    bytes += floats(context) + signal(context) + floats(m.heads) + floats(out) + signal(out);
    if (m.output_gate) bytes += 2 * floats(out);
    const IndexConfig& x = c_.index;
    if (x.heads != 0)
      bytes += floats(std::int64_t{x.heads} * x.dim) + 2 * floats(x.dim) + floats(2 + x.heads) + floats(x.top_k + 1);
    return bytes;
  }
  std::uint64_t glu(std::int64_t width) const { return 3 * floats(width) + signal(width); }
  std::uint64_t ffn(int layer) const {
    const ExpertConfig& e = c_.experts;
    if (c_.is_dense_ffn(layer)) return glu(c_.intermediate);
    const std::int64_t width = c_.expert_width(), k = e.top_k;
    std::uint64_t bytes = e.shared == 0 ? 0 : glu(std::int64_t{e.shared} * e.intermediate);
    bytes += floats(e.count) + 3 * floats(k) + (narrow_ ? floats(c_.hidden) : 0);
    if (e.latent != 0) bytes += 2 * (floats(width) + signal(width)) + floats(1);
    return bytes + 2 * floats(k * width) + signal(k * width) + glu(k * e.intermediate) + floats(width);
  }

  const Config& c_;
  std::int64_t rows_;
  bool narrow_;
  std::int64_t blocks_ = 0;
};

// How many of `count` experts are touched by `rows` tokens that choose k of them each, evenly.
double touched(std::int64_t count, std::int64_t k, std::int64_t rows) {
  const double miss = 1.0 - static_cast<double>(k) / static_cast<double>(count);
  return static_cast<double>(count) * (1.0 - std::pow(miss, static_cast<double>(rows)));
}

// What persists, how much of it, and how much of that a decode step moves.
struct Holding {
  std::string what;
  std::uint64_t bytes, moved;
};

using Groups = std::array<std::uint64_t, kWeightGroups>;

Groups weight_groups(const Model& model, const FormatOf& format) {
  Groups groups{};
  for (ParameterId id = 0; id < static_cast<ParameterId>(model.parameters().size()); ++id)
    groups[static_cast<std::size_t>(weight_group(model, id))] += packed_parameter_bytes(model, id, format);
  return groups;
}

std::vector<Holding> weight_holdings(const Model& model, const Groups& groups, std::int64_t rows) {
  const Config& c = model.config();
  std::vector<Holding> out;
  for (int g = 0; g < kWeightGroups; ++g) {
    Holding h{kGroupNames[g], groups[static_cast<std::size_t>(g)], groups[static_cast<std::size_t>(g)]};
    if (h.bytes == 0) continue;
    if (g == static_cast<int>(WeightGroup::embedding))
      h.moved = h.bytes / static_cast<std::uint64_t>(c.vocab) * static_cast<std::uint64_t>(rows);
    if (g == static_cast<int>(WeightGroup::routed)) {
      const double experts = touched(c.experts.count, c.experts.top_k, rows);
      h.moved = static_cast<std::uint64_t>(static_cast<double>(h.bytes) * experts / c.experts.count);
      h.what += fmt::format(" ({:.1f} of {} a layer)", experts, c.experts.count);
    }
    out.push_back(std::move(h));
  }
  return out;
}

// State of all sequences, with `context` tokens behind each.
std::vector<Holding> state_holdings(const Config& c, const StateLayout& layout, const PlanRequest& request) {
  const auto mla = static_cast<std::uint64_t>(std::count(c.layers.begin(), c.layers.end(), LayerKind::mla));
  const auto n = static_cast<std::uint64_t>(request.context), sequences = static_cast<std::uint64_t>(request.sequences);
  const std::uint64_t element = c.format == Format::f32 ? 4 : 2;
  const auto blocks = static_cast<std::uint64_t>(StateLayout::blocks_for(request.context)) * layout.block_bytes();
  const std::uint64_t key_row = mla * static_cast<std::uint64_t>(c.index.dim) * element;
  const std::uint64_t latent_row = mla * static_cast<std::uint64_t>(c.mla.key_dim()) * element;
  // Below top_k everything is selected and no key is scored.
  const bool sparse = c.index.heads != 0 && c.index.top_k < request.context;
  const std::uint64_t keys = blocks == 0 ? 0 : blocks * key_row / (key_row + latent_row);
  std::vector<Holding> out = {
      {"latents", sequences * (blocks - keys),
       sequences * latent_row * (sparse ? static_cast<std::uint64_t>(c.index.top_k) : n)},
      {"index keys", sequences * keys, sequences * (sparse ? key_row * n : 0)},
      // Read for every token, written once in a chunk.
      {"recurrent state", sequences * layout.recurrent_bytes(),
       sequences * (layout.recurrent_bytes() + layout.recurrent_bytes() / numerics::kKdaChunk)}};
  std::erase_if(out, [](const Holding& h) { return h.bytes == 0; });
  return out;
}

// Memory goes to the work memory, then to what a step moves most of: what every step reads first, rarely chosen experts
// last. What is left out is streamed.
void fill_speed(std::vector<Holding> holdings, const PlanRequest& request, Plan& plan) {
  const std::uint64_t all = plan.weight_bytes + plan.state_bytes;
  plan.fits = all + plan.workspace_bytes <= request.memory;
  std::uint64_t room = request.memory > plan.workspace_bytes ? request.memory - plan.workspace_bytes : 0;
  plan.resident_bytes = std::min(room, all);
  const auto density = [](const Holding& h) { return static_cast<double>(h.moved) / static_cast<double>(h.bytes); };
  std::stable_sort(holdings.begin(), holdings.end(),
                   [&](const Holding& a, const Holding& b) { return density(a) > density(b); });
  for (const Holding& h : holdings) {
    const std::uint64_t kept = std::min(room, h.bytes);
    room -= kept;
    plan.streamed_bytes += static_cast<std::uint64_t>(static_cast<double>(h.bytes - kept) * density(h));
  }
  if (request.memory <= plan.workspace_bytes || request.memory_bandwidth <= 0) return;
  if (plan.streamed_bytes != 0 && request.nvme <= 0) return;
  // Streaming runs beside the products: the slower of the two sets the pace.
  plan.step_seconds = static_cast<double>(plan.moved_bytes) / request.memory_bandwidth;
  if (plan.streamed_bytes != 0)
    plan.step_seconds = std::max(plan.step_seconds, static_cast<double>(plan.streamed_bytes) / request.nvme);
  plan.tokens_per_second = static_cast<double>(request.sequences) / plan.step_seconds;
}

}  // namespace

const char* group_name(WeightGroup group) {
  return kGroupNames[static_cast<int>(group)];
}

WeightGroup weight_group(const Model& model, ParameterId id) {
  const Parameter& p = model.parameter(id);
  if (id == model.embedding) return WeightGroup::embedding;
  if (id == model.head) return WeightGroup::head;
  if (p.kind == ParameterKind::router || p.name.ends_with("e_score_correction_bias")) return WeightGroup::router;
  const auto has = [&](const char* part) { return p.name.find(part) != std::string::npos; };
  if (has(".shared_experts.")) return WeightGroup::shared;
  if (has(".experts.") || has(".routed_expert_")) return has(".experts.") ? WeightGroup::routed : WeightGroup::shared;
  if (has(".mlp.")) return WeightGroup::dense;
  if (p.indexer) return WeightGroup::indexer;
  if (!has(".self_attn.")) return WeightGroup::residual;
  const std::size_t at = p.name.find("layers.") + 7;
  const auto layer = static_cast<std::size_t>(std::stoi(p.name.substr(at)));
  return model.config().layers[layer] == LayerKind::kda ? WeightGroup::kda : WeightGroup::mla;
}

std::uint64_t packed_parameter_bytes(const Model& model, ParameterId id, const FormatOf& format) {
  const Parameter& p = model.parameter(id);
  if (p.kind == ParameterKind::vector || p.kind == ParameterKind::conv)
    return static_cast<std::uint64_t>(p.count()) * sizeof(float);
  if (p.kind == ParameterKind::embedding) return numerics::row_bytes(format(id, 0), p.count());
  if (p.kind != ParameterKind::absorbed) return numerics::packed_bytes(format(id, 0), p.shape[0], p.shape[1]);
  const MlaConfig& m = model.config().mla;
  return static_cast<std::uint64_t>(m.heads) * (numerics::packed_bytes(format(id, 0), m.latent, m.nope) +
                                                numerics::packed_bytes(format(id, 1), m.value, m.latent));
}

FormatOf config_formats(const Model& model) {
  return [&model](ParameterId id, int /*piece*/) {
    const Parameter& p = model.parameter(id);
    if (p.kind == ParameterKind::router) return Format::f32;
    const bool packed = model.config().experts.packed && p.name.find(".experts.") != std::string::npos;
    return packed ? Format::mxfp4 : model.config().format;
  };
}

std::uint64_t workspace_bytes(const Model& model, std::int64_t rows, std::int64_t spans) {
  return PassSize(model.config(), rows).total(spans);
}

Plan make_plan(const Model& model, const FormatOf& format, const PlanRequest& request) {
  const Config& c = model.config();
  Plan plan;
  std::vector<Holding> holdings = weight_holdings(model, weight_groups(model, format), request.sequences);
  const std::vector<Holding> state = state_holdings(c, StateLayout(c), request);
  for (const Holding& h : holdings) plan.weight_bytes += h.bytes;
  for (const Holding& h : state) plan.state_bytes += h.bytes;
  holdings.insert(holdings.end(), state.begin(), state.end());
  for (const Holding& h : holdings) {
    plan.persists.push_back({h.what.substr(0, h.what.find(" (")), h.bytes});
    plan.moved.push_back({h.what, h.moved});
    plan.moved_bytes += h.moved;
  }
  plan.moved.push_back({"logits", static_cast<std::uint64_t>(request.sequences * c.vocab) * 4});
  plan.moved_bytes += plan.moved.back().bytes;
  const std::int64_t prefill = std::min(request.prefill_rows, request.context);
  const std::uint64_t one = workspace_bytes(model, prefill, 1),
                      all = workspace_bytes(model, request.sequences, request.sequences);
  plan.workspace = {{fmt::format("prefill pass of {} rows", prefill), one},
                    {fmt::format("decode step of {} rows", request.sequences), all}};
  plan.workspace_bytes = std::max(one, all);  // one arena serves both
  fill_speed(std::move(holdings), request, plan);
  return plan;
}

}  // namespace tidelock::model
