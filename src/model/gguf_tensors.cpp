#include "model/gguf_tensors.hpp"

#include <fmt/core.h>

#include <algorithm>

namespace tidelock::model {
namespace {

class Entries {
 public:
  explicit Entries(const Model& model) : model_(model), c_(model.config()) {}

  std::vector<GgufEntry> build() {
    matrix("token_embd.weight", model_.embedding);
    for (int i = 0; i < c_.layer_count(); ++i) layer(i);
    vector("output_norm.weight", model_.final_norm);
    score("output_res_score.weight", model_.output_mix_norm, model_.output_mix_proj);
    matrix("output.weight", model_.head);
    return std::move(entries_);
  }

 private:
  void layer(int index) {
    const LayerIds& ids = model_.layers[static_cast<std::size_t>(index)];
    base_ = fmt::format("blk.{}.", index);
    vector("attn_norm.weight", ids.attention_norm);
    score("attn_res_score.weight", ids.attention_mix_norm, ids.attention_mix_proj);
    if (c_.layers[static_cast<std::size_t>(index)] == LayerKind::kda)
      kda(ids.kda);
    else
      mla(ids.mla);
    vector("ffn_norm.weight", ids.ffn_norm);
    score("ffn_res_score.weight", ids.ffn_mix_norm, ids.ffn_mix_proj);
    ffn(ids.ffn);
    base_.clear();
  }

  void kda(const KdaIds& ids) {
    matrix("attn_q.weight", ids.q);
    matrix("attn_k.weight", ids.k);
    matrix("attn_v.weight", ids.v);
    conv("ssm_conv1d_q.weight", ids.q_conv);
    conv("ssm_conv1d_k.weight", ids.k_conv);
    conv("ssm_conv1d_v.weight", ids.v_conv);
    matrix("ssm_f_a.weight", ids.f_a);
    matrix("ssm_f_b.weight", ids.f_b);
    matrix("ssm_beta.weight", ids.b);
    const bool k3 = c_.kda.full_rank_gate;
    add("ssm_a", k3 ? std::vector<std::int64_t>{c_.kda.heads} : std::vector<std::int64_t>{1, c_.kda.heads, 1, 1},
        GgufRole::decay, {ids.a_log});
    vector("ssm_dt.bias", ids.dt_bias);
    matrix("ssm_g_a.weight", ids.g_a);
    matrix(k3 ? "ssm_g.weight" : "ssm_g_b.weight", ids.g_b);
    vector("ssm_norm.weight", ids.o_norm);
    matrix("attn_output.weight", ids.o);
  }

  void mla(const MlaIds& ids) {
    matrix("attn_q.weight", ids.q);
    matrix("attn_q_a.weight", ids.q_a);
    vector("attn_q_a_norm.weight", ids.q_a_norm);
    matrix("attn_q_b.weight", ids.q_b);
    matrix("attn_kv_a_mqa.weight", ids.kv_a);
    vector("attn_kv_a_norm.weight", ids.kv_a_norm);
    const MlaConfig& m = c_.mla;
    add("attn_k_b.weight", {m.nope, m.latent, m.heads}, GgufRole::keys, {ids.kv_b});
    add("attn_v_b.weight", {m.latent, m.value, m.heads}, GgufRole::values, {ids.kv_b});
    matrix("attn_gate.weight", ids.gate);
    matrix("attn_output.weight", ids.o);
    matrix("indexer.attn_q_b.weight", ids.index_q);
    matrix("indexer.attn_k.weight", ids.index_k);
    vector("indexer.k_norm.weight", ids.index_k_norm);
    vector("indexer.k_norm.bias", ids.index_k_norm_bias);
    matrix("indexer.proj.weight", ids.index_w);
  }

  void ffn(const FfnIds& ids) {
    const std::string kind = ids.router == kNone ? ".weight" : "_shexp.weight";
    matrix("ffn_gate" + kind, ids.gate);
    matrix("ffn_up" + kind, ids.up);
    matrix("ffn_down" + kind, ids.down);
    if (ids.router == kNone) return;
    matrix("ffn_gate_inp.weight", ids.router);
    vector("exp_probs_b.bias", ids.router_bias);
    matrix("ffn_routed_down.weight", ids.latent_down);
    matrix("ffn_routed_up.weight", ids.latent_up);
    vector("ffn_routed_norm.weight", ids.latent_norm);
    experts("ffn_gate_exps.weight", ids.expert_gate);
    experts("ffn_up_exps.weight", ids.expert_up);
    experts("ffn_down_exps.weight", ids.expert_down);
  }

  void add(const std::string& name, std::vector<std::int64_t> ne, GgufRole role, std::vector<ParameterId> ids) {
    entries_.push_back({base_ + name, std::move(ne), role, std::move(ids)});
  }
  void matrix(const std::string& name, ParameterId id) {
    if (id == kNone) return;
    const auto& shape = model_.parameter(id).shape;
    add(name, {shape[1], shape[0]}, GgufRole::matrix, {id});
  }
  void vector(const std::string& name, ParameterId id) {
    if (id != kNone) add(name, {model_.parameter(id).count()}, GgufRole::vector, {id});
  }
  void conv(const std::string& name, ParameterId id) {
    add(name, {4, 1, model_.parameter(id).shape[0], 1}, GgufRole::conv, {id});
  }
  void score(const std::string& name, ParameterId norm, ParameterId projection) {
    if (norm != kNone) add(name, {c_.hidden}, GgufRole::score, {norm, projection});
  }
  void experts(const std::string& name, const std::vector<ParameterId>& ids) {
    const auto& shape = model_.parameter(ids.front()).shape;
    add(name, {shape[1], shape[0], static_cast<std::int64_t>(ids.size())}, GgufRole::experts, ids);
  }

  const Model& model_;
  const Config& c_;
  std::string base_;
  std::vector<GgufEntry> entries_;
};

}  // namespace

std::vector<GgufEntry> gguf_entries(const Model& model) {
  return Entries(model).build();
}

bool same_gguf_shape(const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b) {
  const auto without_ones = [](std::vector<std::int64_t> ne) {
    std::erase(ne, 1);
    return ne;
  };
  return without_ones(a) == without_ones(b);
}

}  // namespace tidelock::model
