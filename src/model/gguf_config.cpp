#include "model/gguf_config.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "base/error.hpp"
#include "model/json.hpp"

namespace tidelock::model {
namespace {

constexpr const char* kLinear = "kimi-linear";
constexpr const char* kK3 = "kimi-k3";
constexpr std::uint64_t kSigmoid = 2;  // of expert_gating_func

// Keys of ours in files that we wrote, for what GGUF has no key for. Other readers skip them.
constexpr const char* kLatentEpsilon = "tidelock.mla_latent_norm_eps";
constexpr const char* kL2Epsilon = "tidelock.kda_l2_norm_eps";
constexpr const char* kContract = "tidelock.contract";

// Reads the keys under the architecture's name and remembers which were used.
class KeyReader {
 public:
  KeyReader(const GgufModel& file, std::string arch) : file_(file), arch_(std::move(arch)) {}

  std::string full(const std::string& key) const { return arch_ + "." + key; }
  std::string where() const { return file_.path().string(); }

  const GgufValue* find(const std::string& key) {
    used_.insert(full(key));
    return file_.find_key(full(key));
  }

  // A whole number, or a list that repeats one number for every layer.
  std::int64_t integer(const std::string& key, std::int64_t low, std::int64_t high, std::int64_t fallback = -1) {
    const GgufValue* value = find(key);
    if (value == nullptr) {
      if (fallback >= 0) return fallback;
      fail(ErrorCode::corrupt_data, "{}: key {} is missing", where(), full(key));
    }
    const auto& all = value->integers;
    if (all.empty() || std::any_of(all.begin(), all.end(), [&](auto x) { return x != all.front(); }))
      fail(ErrorCode::not_supported, "{}: {} is no whole number, or not the same one for every layer", where(),
           full(key));
    if (all.front() > static_cast<std::uint64_t>(high) || all.front() < static_cast<std::uint64_t>(low))
      fail(ErrorCode::corrupt_data, "{}: {} = {}, expected {} to {}", where(), full(key), all.front(), low, high);
    return static_cast<std::int64_t>(all.front());
  }
  int size(const std::string& key, std::int64_t fallback = -1) {
    return static_cast<int>(integer(key, fallback == 0 ? 0 : 1, 1 << 26, fallback));
  }

  float number(const std::string& full_key) const {
    const GgufValue* value = file_.find_key(full_key);
    if (value == nullptr) fail(ErrorCode::corrupt_data, "{}: key {} is missing", where(), full_key);
    if (value->is_array || value->reals.size() != 1 || !(std::abs(value->reals[0]) < 1e30))
      fail(ErrorCode::corrupt_data, "{}: {} is no finite number", where(), full_key);
    return static_cast<float>(value->reals[0]);
  }
  float positive(const std::string& full_key, float fallback) {
    used_.insert(full_key);
    if (file_.find_key(full_key) == nullptr && fallback > 0) return fallback;
    const float x = number(full_key);
    if (!(x > 0)) fail(ErrorCode::corrupt_data, "{}: {} = {}, expected above 0", where(), full_key, x);
    return x;
  }
  bool flag(const std::string& key) {
    const GgufValue* value = find(key);
    if (value == nullptr) fail(ErrorCode::corrupt_data, "{}: key {} is missing", where(), full(key));
    if (value->is_array || value->type != GgufType::boolean)
      fail(ErrorCode::corrupt_data, "{}: {} is no bool", where(), full(key));
    return value->integers[0] != 0;
  }

  // Refuses a value that contradicts what the others say, or that would need something this build does not do.
  void expect(const std::string& key, std::int64_t only, ErrorCode code) {
    if (find(key) == nullptr) return;
    const auto found = integer(key, 0, std::numeric_limits<std::int64_t>::max());
    if (found != only) fail(code, "{}: {} = {}, expected {}", where(), full(key), found, only);
  }

  void ignore(const std::string& key) { used_.insert(full(key)); }
  void finish() const {
    for (const auto& [key, value] : file_.metadata())
      if (key.starts_with(arch_ + ".") && !used_.contains(key))
        fail(ErrorCode::not_supported, "{}: unknown key {}", where(), json_quote(key));
  }

 private:
  const GgufModel& file_;
  std::string arch_;
  std::set<std::string> used_;
};

std::string text_key(const GgufModel& file, const std::string& key) {
  const GgufValue* value = file.find_key(key);
  if (value == nullptr) fail(ErrorCode::corrupt_data, "{}: key {} is missing", file.path().string(), key);
  if (value->is_array || value->type != GgufType::string)
    fail(ErrorCode::corrupt_data, "{}: {} is no string", file.path().string(), key);
  return value->strings[0];
}

// Whether every layer of a kind has the tensor, or none; a file where some have it is refused.
bool has_tensor(const GgufModel& file, const Config& c, LayerKind kind, int first, const std::string& suffix) {
  int with = 0, all = 0;
  std::string without;
  for (int i = first; i < c.layer_count(); ++i) {
    if (c.layers[static_cast<std::size_t>(i)] != kind) continue;
    ++all;
    const std::string name = fmt::format("blk.{}.{}", i, suffix);
    if (file.find_tensor(name) != nullptr)
      ++with;
    else
      without = name;
  }
  if (with != 0 && with != all)
    fail(ErrorCode::corrupt_data, "{}: tensor {} is missing, other layers have theirs", file.path().string(), without);
  return with != 0;
}

// head_count_kv: one number per layer, 0 for KDA.
void read_layers(KeyReader& r, Config& c) {
  const auto count = static_cast<std::size_t>(r.integer("block_count", 1, 4096));
  const std::string key = "attention.head_count_kv";
  const GgufValue* kinds = r.find(key);
  if (kinds == nullptr || !kinds->is_array || kinds->integers.size() != count)
    fail(ErrorCode::corrupt_data, "{}: {} must be a list of {} whole numbers, 0 for a KDA layer; it has {}", r.where(),
         r.full(key), count, kinds == nullptr ? 0 : kinds->integers.size());
  for (const std::uint64_t heads : kinds->integers) {
    if (heads > 1 && heads != static_cast<std::uint64_t>(c.mla.heads))
      fail(ErrorCode::corrupt_data, "{}: {} holds {}, expected 0, 1 or {}", r.where(), r.full(key), heads, c.mla.heads);
    c.layers.push_back(heads == 0 ? LayerKind::kda : LayerKind::mla);
  }
}

void read_attention(KeyReader& r, bool k3, Config& c) {
  MlaConfig& m = c.mla;
  m.heads = r.size("attention.head_count");
  read_layers(r, c);
  m.q_lora = r.size("attention.q_lora_rank", 0);
  m.latent = r.size("attention.kv_lora_rank");
  m.extra = r.size("rope.dimension_count");
  const int query = r.size("attention.key_length_mla");
  if (query <= m.extra)
    fail(ErrorCode::corrupt_data, "{}: {} = {}, expected more than rope.dimension_count = {}", r.where(),
         r.full("attention.key_length_mla"), query, m.extra);
  m.nope = query - m.extra;
  m.value = r.size("attention.value_length_mla");
  r.expect("attention.key_length", std::int64_t{m.latent} + m.extra, ErrorCode::corrupt_data);
  // llama.cpp's converter leaves another width here for kimi-linear, and its reader takes no notice of it; nor is there
  // a rotation that a base could be for.
  r.ignore("attention.value_length");
  r.ignore("rope.freq_base");
  c.kda.heads = m.heads;
  c.kda.head_dim = r.size("kda.head_dim");
  if (c.kda.head_dim % 16 != 0 || c.kda.head_dim > 256)
    fail(ErrorCode::not_supported, "{}: {} = {}, expected a multiple of 16 up to 256", r.where(),
         r.full("kda.head_dim"), c.kda.head_dim);
  r.expect("ssm.conv_kernel", 4, ErrorCode::not_supported);
  if (r.find("ssm.conv_kernel") == nullptr)
    fail(ErrorCode::corrupt_data, "{}: key {} is missing", r.where(), r.full("ssm.conv_kernel"));
  if (!k3) return;
  c.kda.full_rank_gate = true;
  c.kda.bounded = true;
  r.ignore("kda.gate_lower_bound");
  c.kda.lower_bound = r.number(r.full("kda.gate_lower_bound"));
  if (!(c.kda.lower_bound >= -5.0F && c.kda.lower_bound < 0))
    fail(ErrorCode::not_supported, "{}: {} = {}, expected -5 to 0 (16 tokens of it must stay finite)", r.where(),
         r.full("kda.gate_lower_bound"), c.kda.lower_bound);
}

void read_index(KeyReader& r, Config& c) {
  const std::string base = "attention.indexer.";
  c.index.eps = c.rms_eps;
  if (r.find(base + "head_count") == nullptr) return;
  c.index.heads = r.size(base + "head_count");
  c.index.dim = r.size(base + "key_length");
  c.index.top_k = r.size(base + "top_k");
  c.index.eps = r.positive(r.full("attention.layer_norm_epsilon"), c.rms_eps);
  if (c.mla.q_lora == 0)
    fail(ErrorCode::corrupt_data, "{}: an indexer needs {}", r.where(), r.full("attention.q_lora_rank"));
  const GgufValue* types = r.find(base + "types");  // 1: the layer selects for itself
  if (types == nullptr) return;
  if (types->integers.size() != c.layers.size())
    fail(ErrorCode::corrupt_data, "{}: {} has {} entries, expected {}", r.where(), r.full(base + "types"),
         types->integers.size(), c.layers.size());
  for (std::size_t i = 0; i < c.layers.size(); ++i)
    if (c.layers[i] == LayerKind::mla && types->integers[i] != 1)
      fail(ErrorCode::not_supported, "{}: {}: layer {} shares another layer's selection", r.where(),
           r.full(base + "types"), i);
}

void read_experts(KeyReader& r, const GgufModel& file, bool k3, Config& c) {
  ExpertConfig& e = c.experts;
  e.count = r.size("expert_count", 0);
  c.first_dense = static_cast<int>(r.integer("leading_dense_block_count", 0, c.layer_count(), 0));
  r.expect("expert_group_count", 1, ErrorCode::not_supported);
  r.expect("expert_group_used_count", 1, ErrorCode::not_supported);
  r.expect("moe_every_n_layers", 1, ErrorCode::not_supported);
  r.expect("nextn_predict_layers", 0, ErrorCode::not_supported);
  if (e.count == 0) return;
  e.top_k = static_cast<int>(r.integer("expert_used_count", 1, std::min(e.count, 64)));
  e.intermediate = r.size("expert_feed_forward_length");
  e.shared = r.size("expert_shared_count", 0);
  e.scale = r.positive(r.full("expert_weights_scale"), 1.0F);
  if (r.integer("expert_gating_func", 0, 1 << 20) != kSigmoid)
    fail(ErrorCode::not_supported, "{}: {} = {}, only {} (sigmoid) is supported", r.where(),
         r.full("expert_gating_func"), r.integer("expert_gating_func", 0, 1 << 20), kSigmoid);
  // kimi-linear always renormalises; its files need not say so.
  if (k3 || r.find("expert_weights_norm") != nullptr) e.renormalize = r.flag("expert_weights_norm");
  if (!k3) return;
  e.latent = r.size("expert_latent_length", 0);
  bool norms = false;
  for (const LayerKind kind : {LayerKind::kda, LayerKind::mla})
    norms = has_tensor(file, c, kind, c.first_dense, "ffn_routed_norm.weight") || norms;
  e.latent_norm = e.latent != 0 && norms;
}

// Widths that are products of keys: each must stay a size like any other, or the int that holds it overflows.
void check_products(const KeyReader& r, const Config& c) {
  const auto check = [&](const char* what, std::int64_t a, std::int64_t b) {
    if (a * b > 1 << 26)
      fail(ErrorCode::corrupt_data, "{}: {} = {} x {}, expected at most {}", r.where(), what, a, b, 1 << 26);
  };
  check("attention.head_count x kda.head_dim", c.kda.heads, c.kda.head_dim);
  check("attention.head_count x attention.key_length_mla", c.mla.heads, c.mla.query_dim());
  check("attention.head_count x (key and value length)", c.mla.heads, std::int64_t{c.mla.nope} + c.mla.value);
  check("attention.head_count x attention.key_length", c.mla.heads, std::int64_t{c.mla.latent} + c.mla.extra);
  check("attention.indexer: head_count x key_length", c.index.heads, c.index.dim);
  check("expert_shared_count x expert_feed_forward_length", c.experts.shared, c.experts.intermediate);
  // The live stream is a source beside the banked ones, and a mix takes 32.
  if (c.residual_block != 0 && (c.layer_count() - 1) / c.residual_block + 2 > 32)
    fail(ErrorCode::not_supported, "{}: {} = {}: {} layers would bank more than 31 blocks", r.where(),
         r.full("attn_res.block_size"), c.residual_block, c.layer_count());
}

void read_vocabulary(KeyReader& r, const GgufModel& file, Config& c) {
  const GgufValue* tokens = file.find_key("tokenizer.ggml.tokens");
  c.vocab = r.size("vocab_size", tokens == nullptr ? -1 : static_cast<std::int64_t>(tokens->size()));
  if (c.vocab == 0 || (tokens != nullptr && tokens->size() != static_cast<std::size_t>(c.vocab)))
    fail(ErrorCode::corrupt_data, "{}: {} = {}, but tokenizer.ggml.tokens has {} entries", r.where(),
         r.full("vocab_size"), c.vocab, tokens == nullptr ? 0 : tokens->size());
  for (const char* key :
       {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    const GgufValue* id = file.find_key(key);
    if (id == nullptr) continue;
    if (id->integers.size() != 1 || id->integers[0] >= static_cast<std::uint64_t>(c.vocab))
      fail(ErrorCode::corrupt_data, "{}: {} is outside the vocabulary of {}", r.where(), key, c.vocab);
    const auto token = static_cast<std::int32_t>(id->integers[0]);
    if (std::find(c.end_tokens.begin(), c.end_tokens.end(), token) == c.end_tokens.end()) c.end_tokens.push_back(token);
  }
}

// What latents, index keys and the inputs of matrices are kept in: float32 for files of float32 (and of halves, which
// are widened), bf16 as soon as a matrix is coarser.
Format state_format(const GgufModel& file) {
  for (const auto& [name, tensor] : file.tensors())
    if (tensor->type->id != ggml::f32 && tensor->type->id != ggml::f16) return Format::bf16;
  return Format::f32;
}

void check_contract(const GgufModel& file) {
  if (file.find_key(kContract) == nullptr) return;
  const std::string contract = text_key(file, kContract);
  if (contract != numerics::kContractName)
    fail(ErrorCode::mismatch, "{}: made under contract {}, this build is {}", file.path().string(), contract,
         numerics::kContractName);
}

}  // namespace

Config gguf_config(const GgufModel& file) {
  const std::string arch = text_key(file, "general.architecture");
  if (arch != kLinear && arch != kK3)
    fail(ErrorCode::not_supported, "{}: general.architecture = {}, only {} and {} are supported", file.path().string(),
         json_quote(arch), kLinear, kK3);
  check_contract(file);
  const bool k3 = arch == kK3;
  KeyReader r(file, arch);
  Config c;
  c.hidden = r.size("embedding_length");
  c.intermediate = r.size("feed_forward_length");
  c.max_context = r.integer("context_length", 1, std::int64_t{1} << 40);
  c.rms_eps = r.positive(r.full("attention.layer_norm_rms_epsilon"), 0);
  read_vocabulary(r, file, c);
  read_attention(r, k3, c);
  c.mla.latent_eps = r.positive(kLatentEpsilon, c.rms_eps);
  c.kda.l2_eps = r.positive(kL2Epsilon, c.rms_eps);
  if (k3) {
    c.mla.output_gate = has_tensor(file, c, LayerKind::mla, 0, "attn_gate.weight");
    c.residual_block = r.size("attn_res.block_size");
    c.activation = Activation::situ;
    c.situ_beta = r.positive(r.full("activation.situ_beta"), 0);
    c.situ_linear_beta = r.positive(r.full("activation.situ_linear_beta"), 0);
    read_index(r, c);
  }
  read_experts(r, file, k3, c);
  check_products(r, c);
  r.finish();
  c.format = state_format(file);
  if (c.residual_block != 0) c.tensor_prefix = "language_model.";
  return c;
}

namespace {

// Which architecture can say this config, or a refusal that names what it cannot.
bool writes_as_k3(const Config& c) {
  const bool k3 = c.residual_block != 0;
  const char* arch = k3 ? kK3 : kLinear;
  const auto need = [&](bool fits, const std::string& what) {
    if (!fits) fail(ErrorCode::not_supported, "GGUF architecture {} cannot say: {}", arch, what);
  };
  need(c.kda.heads == c.mla.heads,
       fmt::format("{} heads in KDA layers and {} in MLA layers", c.kda.heads, c.mla.heads));
  need(c.kda.full_rank_gate == k3, fmt::format("use_full_rank_gate = {}", c.kda.full_rank_gate));
  need(c.kda.bounded == k3, k3 ? "a gate without gate_lower_bound" : "gate_lower_bound");
  need((c.activation == Activation::situ) == k3, k3 ? "hidden_act = silu" : "hidden_act = situ");
  need(k3 || !c.mla.output_gate, "mla_use_output_gate");
  need(k3 || c.experts.latent == 0, "routed_expert_hidden_size");
  need(k3 || c.index.heads == 0, "dsa_config");
  need(k3 || c.experts.renormalize, "moe_renormalize = false");
  need(!c.tied_head, "tie_word_embeddings");
  return k3;
}

}  // namespace

std::vector<std::pair<std::string, GgufValue>> gguf_metadata(const Config& c, const std::string& name) {
  const bool k3 = writes_as_k3(c);
  const std::string arch = k3 ? kK3 : kLinear;
  std::vector<std::pair<std::string, GgufValue>> out = {{"general.architecture", GgufValue::of(arch)},
                                                        {"general.name", GgufValue::of(name)}};
  const auto put = [&](const std::string& key, std::int64_t value) {
    out.emplace_back(arch + "." + key, GgufValue::of(static_cast<std::uint32_t>(value)));
  };
  const auto real = [&](const std::string& key, float value) {
    out.emplace_back(arch + "." + key, GgufValue::of(value));
  };
  std::vector<std::uint64_t> kv_heads;
  for (const LayerKind kind : c.layers) kv_heads.push_back(kind == LayerKind::mla ? 1 : 0);
  put("vocab_size", c.vocab);
  put("context_length", std::min<std::int64_t>(c.max_context, std::numeric_limits<std::uint32_t>::max()));
  put("embedding_length", c.hidden);
  put("block_count", c.layer_count());
  put("feed_forward_length", c.intermediate);
  put("attention.head_count", c.mla.heads);
  out.emplace_back(arch + ".attention.head_count_kv", GgufValue::list(GgufType::u32, kv_heads));
  real("attention.layer_norm_rms_epsilon", c.rms_eps);
  put("ssm.conv_kernel", c.kda.conv_kernel);
  put("kda.head_dim", c.kda.head_dim);
  if (c.mla.q_lora != 0) put("attention.q_lora_rank", c.mla.q_lora);
  put("attention.kv_lora_rank", c.mla.latent);
  put("rope.dimension_count", c.mla.extra);
  put("attention.key_length", c.mla.key_dim());
  put("attention.key_length_mla", c.mla.query_dim());
  put("attention.value_length_mla", c.mla.value);
  put("expert_count", c.experts.count);
  put("leading_dense_block_count", c.experts.count == 0 ? c.layer_count() : c.first_dense);
  if (c.experts.count != 0) {
    put("expert_used_count", c.experts.top_k);
    put("expert_feed_forward_length", c.experts.intermediate);
    put("expert_shared_count", c.experts.shared);
    real("expert_weights_scale", c.experts.scale);
    put("expert_gating_func", kSigmoid);
    out.emplace_back(arch + ".expert_weights_norm", GgufValue::of(c.experts.renormalize));
  }
  if (k3) {
    put("attention.value_length", c.mla.latent);
    real("kda.gate_lower_bound", c.kda.lower_bound);
    if (c.experts.latent != 0) put("expert_latent_length", c.experts.latent);
    put("attn_res.block_size", c.residual_block);
    real("activation.situ_beta", c.situ_beta);
    real("activation.situ_linear_beta", c.situ_linear_beta);
  }
  if (c.index.heads != 0) {
    put("attention.indexer.head_count", c.index.heads);
    put("attention.indexer.key_length", c.index.dim);
    put("attention.indexer.top_k", c.index.top_k);
    out.emplace_back(arch + ".attention.indexer.types", GgufValue::list(GgufType::u32, kv_heads));
    real("attention.layer_norm_epsilon", c.index.eps);
  }
  out.emplace_back(kLatentEpsilon, GgufValue::of(c.mla.latent_eps));
  out.emplace_back(kL2Epsilon, GgufValue::of(c.kda.l2_eps));
  out.emplace_back(kContract, GgufValue::of(numerics::kContractName));
  return out;
}

}  // namespace tidelock::model
