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

// What one decode step reads of a sequence's state and writes to it, with `context` tokens behind it.
struct StateTraffic {
  std::uint64_t latents = 0, index_keys = 0, recurrent = 0;
};
StateTraffic state_traffic(const Config& c, const StateLayout& layout, std::int64_t context) {
  const auto mla = static_cast<std::uint64_t>(std::count(c.layers.begin(), c.layers.end(), LayerKind::mla));
  const std::uint64_t element = c.format == Format::f32 ? 4 : 2;
  const auto n = static_cast<std::uint64_t>(context);
  const std::uint64_t read =
      c.index.heads == 0 ? n : std::min<std::uint64_t>(n, static_cast<std::uint64_t>(c.index.top_k));
  StateTraffic t;
  t.latents = mla * read * static_cast<std::uint64_t>(c.mla.key_dim()) * element;
  // Below top_k everything is selected and no key is scored.
  if (c.index.heads != 0 && read < n) t.index_keys = mla * n * static_cast<std::uint64_t>(c.index.dim) * element;
  t.recurrent = layout.recurrent_bytes() + layout.recurrent_bytes() / numerics::kKdaChunk;  // committed once in a chunk
  return t;
}

using Groups = std::array<std::uint64_t, kWeightGroups>;

Groups weight_groups(const Model& model, const FormatOf& format) {
  Groups groups{};
  for (ParameterId id = 0; id < static_cast<ParameterId>(model.parameters().size()); ++id)
    groups[static_cast<std::size_t>(weight_group(model, id))] += packed_parameter_bytes(model, id, format);
  return groups;
}

void add(std::vector<LedgerLine>& ledger, std::uint64_t& total, std::string what, std::uint64_t bytes) {
  if (bytes == 0) return;
  ledger.push_back({std::move(what), bytes});
  total += bytes;
}

// The share of routed experts' bytes that a step of so many rows reads.
double routed_share(const ExpertConfig& e, std::int64_t rows) {
  return e.count == 0 ? 0 : touched(e.count, e.top_k, rows) / e.count;
}

void fill_moved(const Model& model, const StateLayout& layout, const Groups& groups, const PlanRequest& request,
                Plan& plan) {
  const Config& c = model.config();
  const auto rows = static_cast<std::uint64_t>(request.sequences);
  for (int g = 0; g < kWeightGroups; ++g) {
    std::uint64_t bytes = groups[static_cast<std::size_t>(g)];
    std::string what = kGroupNames[g];
    if (g == static_cast<int>(WeightGroup::embedding)) {
      bytes = bytes / static_cast<std::uint64_t>(c.vocab) * rows;
    } else if (g == static_cast<int>(WeightGroup::routed) && bytes != 0) {
      bytes = static_cast<std::uint64_t>(static_cast<double>(bytes) * routed_share(c.experts, request.sequences));
      what += fmt::format(" ({:.1f} of {} a layer)", touched(c.experts.count, c.experts.top_k, request.sequences),
                          c.experts.count);
    }
    add(plan.moved, plan.moved_bytes, what, bytes);
  }
  const StateTraffic t = state_traffic(c, layout, request.context);
  add(plan.moved, plan.moved_bytes, "latents", t.latents * rows);
  add(plan.moved, plan.moved_bytes, "index keys", t.index_keys * rows);
  add(plan.moved, plan.moved_bytes, "recurrent state", t.recurrent * rows);
  add(plan.moved, plan.moved_bytes, "logits", rows * static_cast<std::uint64_t>(c.vocab) * 4);
}

// Memory goes to state and workspace, then to what every step reads, then to routed experts. What is left out is
// streamed.
void fill_speed(const Config& c, const Groups& groups, const PlanRequest& request, Plan& plan) {
  const std::uint64_t fixed = plan.state_bytes + plan.workspace_bytes;
  plan.fits = fixed + plan.weight_bytes <= request.memory;
  const std::uint64_t room = request.memory > fixed ? request.memory - fixed : 0;
  plan.resident_bytes = std::min(room, plan.weight_bytes);
  const std::uint64_t routed = groups[static_cast<std::size_t>(WeightGroup::routed)];
  const std::uint64_t embedding = groups[static_cast<std::size_t>(WeightGroup::embedding)];
  const std::uint64_t every_step = plan.weight_bytes - routed - embedding;
  const std::uint64_t trunk = std::min(every_step, plan.resident_bytes);
  const double cached =
      routed == 0 ? 1
                  : static_cast<double>(std::min(routed, plan.resident_bytes - trunk)) / static_cast<double>(routed);
  plan.streamed_bytes = every_step - trunk +
                        static_cast<std::uint64_t>(static_cast<double>(routed) *
                                                   routed_share(c.experts, request.sequences) * (1 - cached));
  if (room == 0 || request.memory_bandwidth <= 0 || (plan.streamed_bytes != 0 && request.nvme <= 0)) return;
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
  const StateLayout layout(c);
  Plan plan;
  const Groups groups = weight_groups(model, format);
  for (int g = 0; g < kWeightGroups; ++g)
    add(plan.persists, plan.weight_bytes, kGroupNames[g], groups[static_cast<std::size_t>(g)]);
  const auto sequences = static_cast<std::uint64_t>(request.sequences);
  const auto blocks = static_cast<std::uint64_t>(StateLayout::blocks_for(request.context));
  add(plan.persists, plan.state_bytes, "latent and index-key blocks", sequences * blocks * layout.block_bytes());
  add(plan.persists, plan.state_bytes, "recurrent state", sequences * layout.recurrent_bytes());
  const std::int64_t prefill = std::min(request.prefill_rows, request.context);
  const std::uint64_t one = workspace_bytes(model, prefill, 1),
                      all = workspace_bytes(model, request.sequences, request.sequences);
  plan.workspace = {{fmt::format("prefill pass of {} rows", prefill), one},
                    {fmt::format("decode step of {} rows", request.sequences), all}};
  plan.workspace_bytes = std::max(one, all);  // one arena serves both
  fill_moved(model, layout, groups, request, plan);
  fill_speed(c, groups, request, plan);
  return plan;
}

}  // namespace tidelock::model
