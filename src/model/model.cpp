#include "model/model.hpp"

#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <map>

#include "base/base.hpp"

namespace tidelock::model {

using numerics::PackedMatrix;

std::int64_t Parameter::count() const {
  std::int64_t n = 1;
  for (const auto d : shape) n *= d;
  return n;
}

// Lists every tensor of a config, in the order of meaning, with the ids that the layers use.
class ModelPlan {
 public:
  explicit ModelPlan(Model& model) : model_(model), c_(model.config_) {}

  void build() {
    const std::string root = c_.tensor_prefix + "model.";
    Model& m = model_;
    m.embedding = add(root + "embed_tokens.weight", {c_.vocab, c_.hidden}, ParameterKind::embedding, 1.0F);
    m.final_norm = ones(root + "norm.weight", c_.hidden);
    m.head = linear(c_.tensor_prefix + "lm_head.weight", c_.vocab, c_.hidden);
    mutable_parameter(m.head).adaptable = false;
    if (c_.residual_block != 0) mix(root + "output_attn_res", m.output_mix_norm, m.output_mix_proj);
    for (int i = 0; i < c_.layer_count(); ++i) m.layers.push_back(layer(root + fmt::format("layers.{}.", i), i));
  }

 private:
  Parameter& mutable_parameter(ParameterId id) { return model_.parameters_[static_cast<std::size_t>(id)]; }

  ParameterId add(std::string name, std::vector<std::int64_t> shape, ParameterKind kind, float deviation,
                  float mean = 0) {
    Parameter p;
    p.name = std::move(name);
    p.shape = std::move(shape);
    p.kind = kind;
    p.init_deviation = deviation;
    p.init_mean = mean;
    p.adaptable = kind == ParameterKind::linear || kind == ParameterKind::absorbed;
    model_.parameters_.push_back(std::move(p));
    return static_cast<ParameterId>(model_.parameters_.size()) - 1;
  }
  ParameterId ones(const std::string& name, int n) { return add(name, {n}, ParameterKind::vector, 0, 1); }
  ParameterId zeros(const std::string& name, int n) { return add(name, {n}, ParameterKind::vector, 0, 0); }
  ParameterId linear(const std::string& name, int out, int in, bool split = false) {
    const auto id = add(name, {out, in}, ParameterKind::linear, 1.0F / std::sqrt(static_cast<float>(in)));
    mutable_parameter(id).split = split;
    return id;
  }
  void mix(const std::string& base, ParameterId& norm, ParameterId& proj) {
    norm = ones(base + "_norm.weight", c_.hidden);
    proj = add(base + "_proj.weight", {1, c_.hidden}, ParameterKind::vector, 0.02F);
  }

  LayerIds layer(const std::string& base, int index) {
    LayerIds ids;
    ids.attention_norm = ones(base + "input_layernorm.weight", c_.hidden);
    ids.ffn_norm = ones(base + "post_attention_layernorm.weight", c_.hidden);
    if (c_.residual_block != 0) {
      mix(base + "self_attention_res", ids.attention_mix_norm, ids.attention_mix_proj);
      mix(base + "mlp_res", ids.ffn_mix_norm, ids.ffn_mix_proj);
    }
    if (c_.layers[static_cast<std::size_t>(index)] == LayerKind::kda)
      ids.kda = kda(base + "self_attn.");
    else
      ids.mla = mla(base + "self_attn.");
    ids.ffn = c_.is_dense_ffn(index) ? dense(base + "mlp.", c_.intermediate) : experts(base + "block_sparse_moe.");
    return ids;
  }

  KdaIds kda(const std::string& base) {
    const int channels = c_.kda.channels(), d = c_.kda.head_dim;
    KdaIds ids;
    ids.q = linear(base + "q_proj.weight", channels, c_.hidden);
    ids.k = linear(base + "k_proj.weight", channels, c_.hidden);
    ids.v = linear(base + "v_proj.weight", channels, c_.hidden);
    ids.q_conv = add(base + "q_conv1d.weight", {channels, 1, 4}, ParameterKind::conv, 0.3F);
    ids.k_conv = add(base + "k_conv1d.weight", {channels, 1, 4}, ParameterKind::conv, 0.3F);
    ids.v_conv = add(base + "v_conv1d.weight", {channels, 1, 4}, ParameterKind::conv, 0.3F);
    ids.f_a = linear(base + "f_a_proj.weight", d, c_.hidden);
    ids.f_b = linear(base + "f_b_proj.weight", channels, d);
    ids.dt_bias = zeros(base + "dt_bias", channels);
    ids.a_log = zeros(base + "A_log", c_.kda.heads);
    ids.b = linear(base + "b_proj.weight", c_.kda.heads, c_.hidden);
    if (c_.kda.full_rank_gate) {
      ids.g_b = linear(base + "g_proj.weight", channels, c_.hidden);
    } else {
      ids.g_a = linear(base + "g_a_proj.weight", d, c_.hidden);
      ids.g_b = linear(base + "g_b_proj.weight", channels, d);
    }
    ids.o_norm = ones(base + "o_norm.weight", d);
    ids.o = linear(base + "o_proj.weight", c_.hidden, channels, true);
    return ids;
  }

  MlaIds mla(const std::string& base) {
    const MlaConfig& m = c_.mla;
    MlaIds ids;
    if (m.q_lora == 0) {
      ids.q = linear(base + "q_proj.weight", m.heads * m.query_dim(), c_.hidden);
    } else {
      ids.q_a = linear(base + "q_a_proj.weight", m.q_lora, c_.hidden);
      ids.q_a_norm = ones(base + "q_a_layernorm.weight", m.q_lora);
      ids.q_b = linear(base + "q_b_proj.weight", m.heads * m.query_dim(), m.q_lora);
    }
    ids.kv_a = linear(base + "kv_a_proj_with_mqa.weight", m.key_dim(), c_.hidden);
    ids.kv_a_norm = ones(base + "kv_a_layernorm.weight", m.latent);
    ids.kv_b = add(base + "kv_b_proj.weight", {m.heads * (m.nope + m.value), m.latent}, ParameterKind::absorbed,
                   1.0F / std::sqrt(static_cast<float>(m.latent)));
    if (m.output_gate) ids.gate = linear(base + "g_proj.weight", m.heads * m.value, c_.hidden);
    ids.o = linear(base + "o_proj.weight", c_.hidden, m.heads * m.value, true);
    if (c_.index.heads != 0) {
      ids.index_q = indexer(linear(base + "indexer.wq_b.weight", c_.index.heads * c_.index.dim, m.q_lora));
      ids.index_k = indexer(linear(base + "indexer.wk.weight", c_.index.dim, c_.hidden));
      ids.index_k_norm = indexer(ones(base + "indexer.k_norm.weight", c_.index.dim));
      ids.index_k_norm_bias = indexer(zeros(base + "indexer.k_norm.bias", c_.index.dim));
      ids.index_w = indexer(linear(base + "indexer.weights_proj.weight", c_.index.heads, c_.hidden));
    }
    return ids;
  }
  ParameterId indexer(ParameterId id) {
    mutable_parameter(id).indexer = true;
    mutable_parameter(id).adaptable = false;
    return id;
  }

  FfnIds dense(const std::string& base, int width) {
    FfnIds ids;
    ids.gate = linear(base + "gate_proj.weight", width, c_.hidden);
    ids.up = linear(base + "up_proj.weight", width, c_.hidden);
    ids.down = linear(base + "down_proj.weight", c_.hidden, width, true);
    return ids;
  }

  FfnIds experts(const std::string& base) {
    const ExpertConfig& e = c_.experts;
    FfnIds ids;
    if (e.shared != 0) ids = dense(base + "shared_experts.", e.shared * e.intermediate);
    ids.router = add(base + "gate.weight", {e.count, c_.hidden}, ParameterKind::router,
                     1.0F / std::sqrt(static_cast<float>(c_.hidden)));
    ids.router_bias = zeros(base + "gate.e_score_correction_bias", e.count);
    if (e.latent != 0) {
      ids.latent_down = linear(base + "routed_expert_down_proj.weight", e.latent, c_.hidden);
      ids.latent_up = linear(base + "routed_expert_up_proj.weight", c_.hidden, e.latent);
      if (e.latent_norm) ids.latent_norm = ones(base + "routed_expert_norm.weight", e.latent);
    }
    for (int i = 0; i < e.count; ++i) {
      const std::string expert = base + fmt::format("experts.{}.", i);
      ids.expert_gate.push_back(linear(expert + "w1.weight", e.intermediate, c_.expert_width()));
      ids.expert_up.push_back(linear(expert + "w3.weight", e.intermediate, c_.expert_width()));
      ids.expert_down.push_back(linear(expert + "w2.weight", c_.expert_width(), e.intermediate, true));
    }
    return ids;
  }

  Model& model_;
  const Config& c_;
};

Model::Model(Config config, bool for_training) : config_(std::move(config)), for_training_(for_training) {
  refuse_tied_head(config_);
  ModelPlan(*this).build();
}

ParameterId Model::find(std::string_view name) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (parameters_[i].name == name) return static_cast<ParameterId>(i);
  fail(ErrorCode::not_found, "the model has no tensor {}", name);
}

void Model::embedding_row(std::int32_t token, float* out) const {
  const Parameter& p = parameter(embedding);
  const std::size_t row = numerics::row_bytes(p.format, config_.hidden);
  numerics::dequantize(p.format, p.rows.data() + static_cast<std::size_t>(token) * row, config_.hidden, out);
}

Model::PartShape Model::part_shape(const Config& config, const Parameter& p, int part, Format format,
                                   Format value_format) {
  const MlaConfig& m = config.mla;
  if (p.kind == ParameterKind::absorbed)
    return part < m.heads ? PartShape{format, m.latent, m.nope, 1} : PartShape{value_format, m.value, m.latent, 1};
  if (p.kind == ParameterKind::router) format = Format::f32;
  return {format, p.shape[0], p.shape[1], p.split ? numerics::split_segments(format, p.shape[1]) : 1};
}

void Model::pack(Parameter& p, int part, const PartShape& shape, const std::byte* rows) const {
  const auto [format, out, in, segments] = shape;
  std::byte* to = nullptr;
  if (!p.place.empty()) {
    to = p.place.data();
    for (const Matrix& before : p.parts) to += before.forward.bytes();
    if (to + numerics::packed_bytes(format, out, in) > p.place.data() + p.place.size())
      fail(ErrorCode::internal, "{}: part {} does not fit its place", p.name, part);
  }
  Matrix m;
  m.forward = PackedMatrix::pack_blocks(format, rows, numerics::row_bytes(format, in), out, in, segments, to);
  if (for_training_) {
    std::vector<float> values(static_cast<std::size_t>(out * in));
    numerics::dequantize(format, rows, out * in, values.data());
    m.transposed = PackedMatrix::pack_transposed(Format::f32, values.data(), out, in);
  }
  p.parts.push_back(std::move(m));
}

void Model::place(ParameterId id, std::span<std::byte> to) {
  parameters_[static_cast<std::size_t>(id)].place = to;
}

void Model::adopt(ParameterId id, Format format, Format value_format, std::span<const std::byte> packed) {
  Parameter& p = parameters_[static_cast<std::size_t>(id)];
  p.format = p.kind == ParameterKind::router ? Format::f32 : format;
  if (p.kind == ParameterKind::embedding) {
    p.rows = packed;
    return;
  }
  p.parts.clear();
  const int parts = p.kind == ParameterKind::absorbed ? 2 * config_.mla.heads : 1;
  std::size_t at = 0;
  for (int part = 0; part < parts; ++part) {
    const auto [form, out, in, segments] = part_shape(config_, p, part, format, value_format);
    p.parts.push_back({PackedMatrix::view(form, packed.data() + at, out, in, segments), {}});
    at += p.parts.back().forward.bytes();
  }
  if (at != packed.size())
    fail(ErrorCode::internal, "{}: {} bytes of packed weights, expected {}", p.name, packed.size(), at);
}

void Model::will_need(ParameterId id) const {
  constexpr std::uintptr_t kPage = 4096;
  for (const Matrix& part : parameter(id).parts) {
    const std::byte* data = part.forward.data();
    const std::size_t into_page = reinterpret_cast<std::uintptr_t>(data) % kPage;
    // A wish: pages come anyway.
    ::madvise(const_cast<std::byte*>(data - into_page), part.forward.bytes() + into_page, MADV_WILLNEED);
  }
}

void Model::check_blocks(const Parameter& p, Format format, std::span<const std::byte> rows, std::int64_t n) const {
  if (numerics::is_quantized(format) && config_.format == Format::f32)
    fail(ErrorCode::internal, "{}: {} rows in a model of format f32", p.name, numerics::format_name(format));
  if (n % numerics::block_elements(format) != 0 || rows.size() != numerics::row_bytes(format, n))
    fail(ErrorCode::internal, "{}: {} bytes given for {} elements of {}", p.name, rows.size(), n,
         numerics::format_name(format));
  if (const auto at = numerics::find_not_finite(format, rows.data(), n); at != n)
    fail(ErrorCode::corrupt_data, "{}: the {} value or block at element {} is not finite", p.name,
         numerics::format_name(format), at);
}

void Model::set_blocks(ParameterId id, Format format, std::span<const std::byte> rows) {
  Parameter& p = parameters_[static_cast<std::size_t>(id)];
  check_blocks(p, format, rows, p.count());
  p.format = format;
  if (p.kind == ParameterKind::embedding) {
    if (p.place.empty()) {
      p.own_rows.assign(rows.begin(), rows.end());
      p.rows = p.own_rows;
    } else {
      std::memcpy(p.place.data(), rows.data(), std::min(rows.size(), p.place.size()));
      p.rows = p.place;
    }
  } else if (p.kind == ParameterKind::linear) {
    p.parts.clear();
    pack(p, 0, part_shape(config_, p, 0, format, format), rows.data());
  } else if (p.kind == ParameterKind::router) {
    std::vector<float> values(static_cast<std::size_t>(p.count()));
    numerics::dequantize(format, rows.data(), p.count(), values.data());
    p.format = Format::f32;
    p.parts.clear();
    pack(p, 0, part_shape(config_, p, 0, format, format), std::as_bytes(std::span(values)).data());
  } else {
    fail(ErrorCode::internal, "{} takes no blocks", p.name);
  }
}

void Model::set_absorbed_blocks(ParameterId id, Format key_format, std::span<const std::byte> keys, Format value_format,
                                std::span<const std::byte> values) {
  Parameter& p = parameters_[static_cast<std::size_t>(id)];
  const MlaConfig& m = config_.mla;
  const std::int64_t key_count = std::int64_t{m.latent} * m.nope, value_count = std::int64_t{m.value} * m.latent;
  check_blocks(p, key_format, keys, m.heads * key_count);
  check_blocks(p, value_format, values, m.heads * value_count);
  p.format = key_format;
  p.parts.clear();
  const std::size_t key_bytes = numerics::row_bytes(key_format, key_count);
  const std::size_t half_bytes = numerics::row_bytes(value_format, value_count);
  for (int part = 0; part < 2 * m.heads; ++part) {
    const auto h = static_cast<std::size_t>(part % m.heads);
    pack(p, part, part_shape(config_, p, part, key_format, value_format),
         part < m.heads ? keys.data() + h * key_bytes : values.data() + h * half_bytes);
  }
}

namespace {

// kv_b rows of one head are nope key rows, then value rows. The key half is used transposed, so that it maps a query to
// latent space.
struct AbsorbedHalves {
  std::vector<float> keys, values;
};
AbsorbedHalves split_absorbed(const MlaConfig& m, const float* w) {
  const std::int64_t latent = m.latent;
  AbsorbedHalves out;
  out.keys.resize(static_cast<std::size_t>(m.heads * latent * m.nope));
  out.values.reserve(static_cast<std::size_t>(m.heads * latent * m.value));
  for (std::int64_t h = 0; h < m.heads; ++h) {
    const float* head = w + h * (m.nope + m.value) * latent;
    for (std::int64_t n = 0; n < m.nope; ++n)
      for (std::int64_t l = 0; l < latent; ++l)
        out.keys[static_cast<std::size_t>((h * latent + l) * m.nope + n)] = head[n * latent + l];
    out.values.insert(out.values.end(), head + m.nope * latent, head + (m.nope + m.value) * latent);
  }
  return out;
}

// Values rounded to a format that has no blocks.
std::vector<std::byte> narrow(Format format, std::span<const float> values) {
  const auto n = static_cast<std::int64_t>(values.size());
  std::vector<std::byte> rows(numerics::row_bytes(format, n));
  numerics::quantize(format, values.data(), n, rows.data());
  return rows;
}

}  // namespace

void Model::set(ParameterId id, std::span<const float> values) {
  Parameter& p = parameters_[static_cast<std::size_t>(id)];
  if (static_cast<std::int64_t>(values.size()) != p.count())
    fail(ErrorCode::internal, "{}: {} values given, {} expected", p.name, values.size(), p.count());
  switch (p.kind) {
    case ParameterKind::vector:
    case ParameterKind::conv:
      p.values.assign(values.begin(), values.end());
      break;
    case ParameterKind::embedding:
    case ParameterKind::linear:
      set_blocks(id, config_.format, narrow(config_.format, values));
      break;
    case ParameterKind::router:
      set_blocks(id, Format::f32, std::as_bytes(values));
      break;
    case ParameterKind::absorbed: {
      const AbsorbedHalves halves = split_absorbed(config_.mla, values.data());
      set_absorbed_blocks(id, config_.format, narrow(config_.format, halves.keys), config_.format,
                          narrow(config_.format, halves.values));
      break;
    }
  }
}

std::size_t Model::weight_bytes() const {
  std::size_t bytes = 0;
  for (const auto& p : parameters_) {
    bytes += p.values.size() * sizeof(float) + p.rows.size();
    for (const auto& part : p.parts) bytes += part.forward.bytes() + part.transposed.bytes();
  }
  return bytes;
}

std::int64_t Model::parameter_count() const {
  std::int64_t n = 0;
  for (const auto& p : parameters_) n += p.count();
  return n;
}

std::int64_t Model::active_parameter_count() const {
  std::int64_t n = parameter_count() - parameter(embedding).count();
  for (const auto& layer : layers)
    for (const auto* list : {&layer.ffn.expert_gate, &layer.ffn.expert_up, &layer.ffn.expert_down})
      if (!list->empty())
        n -= static_cast<std::int64_t>(list->size() - static_cast<std::size_t>(config_.experts.top_k)) *
             parameter(list->front()).count();
  return n;
}

std::vector<float> initial_values(const Model& model, ParameterId id, std::uint64_t seed) {
  const Parameter& p = model.parameter(id);
  Random random(seed, static_cast<std::uint64_t>(id));
  std::vector<float> values(static_cast<std::size_t>(p.count()));
  for (float& x : values) x = p.init_mean + p.init_deviation * random.normal();
  for (const LayerIds& layer : model.layers) {
    // Decay per token starts between about exp(-5 sigmoid(-6)) and exp(-5 sigmoid(-2)): memories of one to eighty
    // tokens.
    if (id == layer.kda.dt_bias)
      for (float& x : values) x = -6.0F + 4.0F * random.uniform();
    if (id == layer.kda.a_log)
      for (float& x : values) x = 0.5F * (random.uniform() - 0.5F);
  }
  return values;
}

}  // namespace tidelock::model
