#include "model/config.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/base.hpp"
#include "model/json.hpp"

namespace tidelock::model {
namespace {

using nlohmann::json;

// Keys that describe packaging, training or vision and leave the text model as it is.
const std::set<std::string>& ignored_keys() {
  static const std::set<std::string> keys = {"_name_or_path",
                                             "architectures",
                                             "auto_map",
                                             "transformers_version",
                                             "model_type",
                                             "use_cache",
                                             "initializer_range",
                                             "attention_dropout",
                                             "pad_token_id",
                                             "bos_token_id",
                                             "head_dim",
                                             "num_key_value_heads",
                                             "model_max_length_note",
                                             "rope_theta",
                                             "rope_scaling",
                                             "rope_parameters",
                                             "pretraining_tp",
                                             "tensor_prefix",
                                             "num_nextn_predict_layers",
                                             "aux_loss_alpha",
                                             "seq_aux",
                                             "ep_size",
                                             "vision_config",
                                             "media_placeholder_token_id",
                                             "name",
                                             "is_encoder_decoder",
                                             "return_dict",
                                             "output_attentions",
                                             "output_hidden_states",
                                             "tie_encoder_decoder",
                                             "use_bidirectional_attention",
                                             "router_aux_loss_coef"};
  return keys;
}

// Reads keys of one JSON object, remembers which were used, and names the object in errors.
class Reader {
 public:
  Reader(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) fail(ErrorCode::invalid_argument, "{}: expected an object", where_);
  }

  const json* find(std::initializer_list<const char*> names) {
    const json* found = nullptr;
    std::string found_name;
    for (const char* name : names) {
      const auto it = object_.find(name);
      if (it == object_.end() || it->is_null()) {
        used_.insert(name);
        continue;
      }
      if (found != nullptr && *found != *it)
        fail(ErrorCode::invalid_argument, "{}: {} = {} contradicts {} = {}", where_, name, it->dump(), found_name,
             found->dump());
      found = &*it;
      found_name = name;
      used_.insert(name);
    }
    return found;
  }

  std::int64_t integer(std::initializer_list<const char*> names, std::int64_t low, std::int64_t high,
                       std::int64_t fallback = -1) {
    const json* value = find(names);
    if (value == nullptr) {
      if (fallback >= 0) return fallback;
      fail(ErrorCode::invalid_argument, "{}: key {} is missing", where_, *names.begin());
    }
    if (!value->is_number_integer())
      fail(ErrorCode::invalid_argument, "{}: {} = {}: expected a whole number", where_, *names.begin(), value->dump());
    const auto x = value->get<std::int64_t>();
    if (x < low || x > high)
      fail(ErrorCode::invalid_argument, "{}: {} = {}: expected {} to {}", where_, *names.begin(), x, low, high);
    return x;
  }
  int size(std::initializer_list<const char*> names, std::int64_t fallback = -1) {
    return static_cast<int>(integer(names, fallback == 0 ? 0 : 1, 1 << 26, fallback));
  }

  float number(std::initializer_list<const char*> names, float fallback) {
    const json* value = find(names);
    if (value == nullptr) return fallback;
    if (!value->is_number())
      fail(ErrorCode::invalid_argument, "{}: {} = {}: expected a number", where_, *names.begin(), value->dump());
    const auto x = value->get<float>();
    if (!(x > -1e30F && x < 1e30F)) fail(ErrorCode::invalid_argument, "{}: {} is not finite", where_, *names.begin());
    return x;
  }
  float positive(std::initializer_list<const char*> names, float fallback) {
    const float x = number(names, fallback);
    if (!(x > 0)) fail(ErrorCode::invalid_argument, "{}: {} = {}: expected above 0", where_, *names.begin(), x);
    return x;
  }
  bool flag(std::initializer_list<const char*> names, bool fallback) {
    const json* value = find(names);
    if (value == nullptr) return fallback;
    if (!value->is_boolean())
      fail(ErrorCode::invalid_argument, "{}: {} = {}: expected true or false", where_, *names.begin(), value->dump());
    return value->get<bool>();
  }
  std::string text(std::initializer_list<const char*> names, const std::string& fallback) {
    const json* value = find(names);
    if (value == nullptr) return fallback;
    if (!value->is_string())
      fail(ErrorCode::invalid_argument, "{}: {} = {}: expected a string", where_, *names.begin(), value->dump());
    return value->get<std::string>();
  }
  std::vector<int> integers(std::initializer_list<const char*> names) {
    const json* value = find(names);
    std::vector<int> out;
    if (value == nullptr) return out;
    const auto one = [&](const json& x) {
      if (!x.is_number_integer() || x < -1 || x > (1 << 30))
        fail(ErrorCode::invalid_argument, "{}: {} holds {}: expected whole numbers", where_, *names.begin(), x.dump());
      return x.get<int>();
    };
    if (value->is_number()) return {one(*value)};
    if (!value->is_array())
      fail(ErrorCode::invalid_argument, "{}: {} = {}: expected a list of whole numbers", where_, *names.begin(),
           value->dump().substr(0, 80));
    for (const auto& x : *value) out.push_back(one(x));
    return out;
  }

  // Refuses a value that would need something this build does not do.
  void require(std::initializer_list<const char*> names, const json& only) {
    const json* value = find(names);
    if (value != nullptr && *value != only)
      fail(ErrorCode::not_supported, "{}: {} = {}: only {} is supported", where_, *names.begin(), value->dump(),
           only.dump());
  }

  void finish(const std::set<std::string>& ignored) const {
    for (const auto& [key, value] : object_.items())
      if (!used_.contains(key) && !ignored.contains(key))
        fail(ErrorCode::invalid_argument, "{}: unknown key {} = {}", where_, key, value.dump().substr(0, 80));
  }

  const std::string& where() const { return where_; }

 private:
  const json& object_;
  std::string where_;
  std::set<std::string> used_;
};

json read_root(std::string_view text, const std::string& source) {
  json parsed = parse_json(text, source, {.bytes = 16 << 20, .code = ErrorCode::invalid_argument});
  if (!parsed.is_object()) fail(ErrorCode::invalid_argument, "{}: expected a JSON object", source);
  return parsed;
}

void read_linear_attention(const json& object, const std::string& where, int layer_count, Config& config,
                           std::vector<int>& full_layers) {
  Reader r(object, where + ".linear_attn_config");
  config.kda.head_dim = r.size({"head_dim"});
  config.kda.heads = r.size({"num_heads"});
  config.kda.conv_kernel = r.size({"short_conv_kernel_size"}, 4);
  config.kda.full_rank_gate = r.flag({"use_full_rank_gate"}, false);
  if (const json* bound = r.find({"gate_lower_bound"})) {
    if (!bound->is_number()) fail(ErrorCode::invalid_argument, "{}: gate_lower_bound: expected a number", r.where());
    config.kda.bounded = true;
    config.kda.lower_bound = bound->get<float>();
    if (!(config.kda.lower_bound >= -5.0F && config.kda.lower_bound < 0))
      fail(ErrorCode::not_supported, "{}: gate_lower_bound = {}: expected -5 to 0 (16 tokens of it must stay finite)",
           r.where(), config.kda.lower_bound);
  }
  config.kda.l2_eps = r.positive({"l2_norm_eps", "l2_eps"}, 1e-6F);
  full_layers = r.integers({"full_attn_layers"});
  const std::vector<int> kda_layers = r.integers({"kda_layers"});
  r.finish({});
  if (config.kda.conv_kernel != 4)
    fail(ErrorCode::not_supported, "{}: short_conv_kernel_size = {}: only 4 is supported", r.where(),
         config.kda.conv_kernel);
  if (config.kda.head_dim % 16 != 0 || config.kda.head_dim > 256)
    fail(ErrorCode::not_supported, "{}: head_dim = {}: expected a multiple of 16 up to 256", r.where(),
         config.kda.head_dim);
  std::vector<int> owner(static_cast<std::size_t>(layer_count), -1);  // 1-indexed lists
  const auto claim = [&](const std::vector<int>& list, int kind, const char* name) {
    for (const int layer : list) {
      if (layer < 1 || layer > layer_count)
        fail(ErrorCode::invalid_argument, "{}: {} holds {}: layers are counted 1 to {}", r.where(), name, layer,
             layer_count);
      int& slot = owner[static_cast<std::size_t>(layer - 1)];
      if (slot != -1)
        fail(ErrorCode::invalid_argument, "{}: layer {} stands twice in full_attn_layers and kda_layers", r.where(),
             layer);
      slot = kind;
    }
  };
  claim(full_layers, 1, "full_attn_layers");
  claim(kda_layers, 0, "kda_layers");
  for (int i = 0; i < layer_count; ++i) {
    if (owner[static_cast<std::size_t>(i)] == -1)
      fail(ErrorCode::invalid_argument, "{}: layer {} is in neither full_attn_layers nor kda_layers", r.where(), i + 1);
    config.layers.push_back(owner[static_cast<std::size_t>(i)] == 1 ? LayerKind::mla : LayerKind::kda);
  }
}

void read_mla(Reader& r, Config& config) {
  MlaConfig& m = config.mla;
  m.heads = r.size({"num_attention_heads"});
  m.q_lora = r.size({"q_lora_rank"}, 0);
  m.latent = r.size({"kv_lora_rank"});
  m.nope = r.size({"qk_nope_head_dim"});
  m.extra = r.size({"qk_rope_head_dim"});
  m.value = r.size({"v_head_dim"});
  m.output_gate = r.flag({"mla_use_output_gate"}, false);
  m.latent_eps = r.positive({"mla_latent_norm_eps"}, 1e-6F);
  r.require({"mla_use_nope"}, true);
}

void read_index(const json& object, const std::string& where, const std::vector<int>& full_layers, Config& config) {
  Reader r(object, where + ".dsa_config");
  config.index.heads = r.size({"index_n_heads", "n_heads", "num_heads"});
  config.index.dim = r.size({"index_head_dim", "head_dim"});
  config.index.top_k = r.size({"index_topk", "top_k", "topk"});
  config.index.eps = r.positive({"index_norm_eps", "norm_eps"}, config.rms_eps);
  r.require({"index_rope"}, false);
  std::vector<int> layers = r.integers({"layers", "dsa_layers"});
  r.finish({});
  if (config.mla.q_lora == 0) fail(ErrorCode::invalid_argument, "{}: an indexer needs q_lora_rank", r.where());
  std::vector<int> expected = full_layers;
  std::sort(expected.begin(), expected.end());
  std::sort(layers.begin(), layers.end());
  if (!layers.empty() && layers != expected)
    fail(ErrorCode::invalid_argument, "{}: layers must equal linear_attn_config.full_attn_layers", r.where());
}

void read_experts(Reader& r, int layer_count, Config& config) {
  ExpertConfig& e = config.experts;
  e.count = r.size({"num_experts", "n_routed_experts"}, 0);
  config.first_dense = static_cast<int>(r.integer({"first_k_dense_replace"}, 0, layer_count, 1));
  e.top_k = r.size({"num_experts_per_token", "num_experts_per_tok"}, 0);
  e.intermediate = r.size({"moe_intermediate_size"}, 0);
  e.latent = r.size({"routed_expert_hidden_size"}, 0);
  e.latent_norm = r.flag({"latent_moe_use_norm"}, false);
  e.shared = r.size({"num_shared_experts", "n_shared_experts"}, 0);
  e.renormalize = r.flag({"moe_renormalize", "norm_topk_prob"}, true);
  e.scale = r.positive({"routed_scaling_factor"}, 1.0F);
  r.require({"moe_router_activation_func", "scoring_func"}, "sigmoid");
  r.require({"num_expert_group", "n_group"}, 1);
  r.require({"topk_group"}, 1);
  r.require({"moe_layer_freq"}, 1);
  r.find({"use_grouped_topk"});
  r.require({"topk_method"}, "noaux_tc");
  if (e.count == 0) return;
  if (e.top_k < 1 || e.top_k > std::min(e.count, 64))
    fail(ErrorCode::invalid_argument, "{}: num_experts_per_token = {}: expected 1 to {}", r.where(), e.top_k,
         std::min(e.count, 64));
  if (e.intermediate == 0) fail(ErrorCode::invalid_argument, "{}: moe_intermediate_size is missing", r.where());
  if (e.latent_norm && e.latent == 0)
    fail(ErrorCode::invalid_argument, "{}: latent_moe_use_norm without routed_expert_hidden_size", r.where());
}

// Widths that are products of keys: each must stay a size like any other, or the int that holds it overflows.
void check_products(const Config& c, const std::string& where) {
  const auto check = [&](const char* what, std::int64_t a, std::int64_t b) {
    if (a * b > 1 << 26)
      fail(ErrorCode::invalid_argument, "{}: {} = {} x {}: expected at most {}", where, what, a, b, 1 << 26);
  };
  check("linear_attn_config: num_heads x head_dim", c.kda.heads, c.kda.head_dim);
  check("num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)", c.mla.heads,
        std::int64_t{c.mla.nope} + c.mla.extra);
  check("num_attention_heads x (qk_nope_head_dim + v_head_dim)", c.mla.heads, std::int64_t{c.mla.nope} + c.mla.value);
  check("num_attention_heads x (kv_lora_rank + qk_rope_head_dim)", c.mla.heads,
        std::int64_t{c.mla.latent} + c.mla.extra);
  check("dsa_config: index_n_heads x index_head_dim", c.index.heads, c.index.dim);
  check("num_shared_experts x moe_intermediate_size", c.experts.shared, c.experts.intermediate);
  // The live stream is a source beside the banked ones, and a mix takes 32.
  if (c.residual_block != 0 && (c.layer_count() - 1) / c.residual_block + 2 > 32)
    fail(ErrorCode::not_supported, "{}: attn_res_block_size = {}: {} layers would bank more than 31 blocks", where,
         c.residual_block, c.layer_count());
}

// compressed-tensors, as the published K3 has it: groups of 32 values in four bits each and one power of two. Keys that
// say what is not quantised (ignore) or how it came about do not matter: each tensor is taken as it is stored.
bool read_quantization(const json& object, const std::string& where) {
  Reader r(object, where + ".quantization_config");
  r.require({"quant_method"}, "compressed-tensors");
  r.require({"format"}, "mxfp4-pack-quantized");
  if (r.find({"quant_method"}) == nullptr || r.find({"format"}) == nullptr)
    fail(ErrorCode::not_supported, "{}: quant_method and format must say compressed-tensors, mxfp4-pack-quantized",
         r.where());
  r.require({"quantization_status"}, "compressed");
  if (const json* groups = r.find({"config_groups"})) {
    if (!groups->is_object()) fail(ErrorCode::invalid_argument, "{}: config_groups is no object", r.where());
    for (const auto& [name, group] : groups->items()) {
      Reader g(group, r.where() + ".config_groups." + name);
      g.require({"format"}, "mxfp4-pack-quantized");
      g.find({"targets"});
      for (const char* none : {"input_activations", "output_activations"})
        if (g.find({none}) != nullptr)
          fail(ErrorCode::not_supported, "{}: {}: quantised activations are not supported", g.where(), none);
      if (const json* weights = g.find({"weights"})) {
        Reader w(*weights, g.where() + ".weights");
        w.require({"num_bits"}, 4);
        w.require({"type"}, "float");
        w.require({"group_size"}, 32);
        w.require({"symmetric"}, true);
        w.require({"dynamic"}, false);
        w.require({"strategy"}, "group");
      }
      g.finish({});
    }
  }
  r.require({"kv_cache_scheme"}, nullptr);
  r.finish({"ignore", "global_compression_ratio", "sparsity_config", "transform_config", "version"});
  return true;
}

json packed_experts_config() {
  const json weights = {{"num_bits", 4},     {"type", "float"},  {"group_size", 32},
                        {"symmetric", true}, {"dynamic", false}, {"strategy", "group"}};
  const json group = {{"targets", {"Linear"}}, {"weights", weights}, {"format", "mxfp4-pack-quantized"}};
  return {{"quant_method", "compressed-tensors"},
          {"format", "mxfp4-pack-quantized"},
          {"quantization_status", "compressed"},
          {"config_groups", {{"group_0", group}}}};
}

// Where no dtype is given it is float32, as in transformers; a nested text_config inherits the outer one.
Format read_format(Reader& r, const std::string& inherited) {
  const std::string name = r.text({"torch_dtype", "dtype"}, inherited);
  if (name == "bfloat16") return Format::bf16;
  if (name == "float32" || name == "float16") return Format::f32;
  fail(ErrorCode::not_supported, "{}: torch_dtype = {}: expected bfloat16, float16 or float32", r.where(), name);
}

}  // namespace

Config parse_config(std::string_view text, const std::string& source) {
  const json root = read_root(text, source);
  const bool nested = root.contains("text_config");
  Reader r(nested ? root.at("text_config") : root, nested ? source + ": text_config" : source);
  Config config;
  config.hidden = r.size({"hidden_size"});
  config.vocab = r.size({"vocab_size"});
  const int layer_count = static_cast<int>(r.integer({"num_hidden_layers"}, 1, 4096));
  config.intermediate = r.size({"intermediate_size"});
  config.rms_eps = r.positive({"rms_norm_eps"}, 1e-5F);
  config.max_context = r.integer({"model_max_length", "max_position_embeddings"}, 1, std::int64_t{1} << 40, 1 << 20);
  config.residual_block = r.size({"attn_res_block_size"}, 0);
  const std::string act = r.text({"hidden_act"}, "silu");
  if (act != "silu" && act != "situ")
    fail(ErrorCode::not_supported, "{}: hidden_act = {}: expected silu or situ", r.where(), act);
  config.activation = act == "situ" ? Activation::situ : Activation::silu;
  config.situ_beta = r.positive({"activation_situ_beta"}, 4);
  config.situ_linear_beta = r.positive({"activation_situ_linear_beta"}, 25);
  Reader outer(root, source);  // what a nested text_config does not say, the outer object may
  config.tied_head = r.flag({"tie_word_embeddings"}, nested && outer.flag({"tie_word_embeddings"}, false));
  const std::string outer_dtype = nested ? outer.text({"torch_dtype", "dtype"}, "float32") : "float32";
  config.format = read_format(r, outer_dtype);
  const json* linear = r.find({"linear_attn_config"});
  if (linear == nullptr) fail(ErrorCode::invalid_argument, "{}: linear_attn_config is missing", r.where());
  std::vector<int> full_layers;
  read_linear_attention(*linear, r.where(), layer_count, config, full_layers);
  read_mla(r, config);
  if (const json* dsa = r.find({"dsa_config"})) read_index(*dsa, r.where(), full_layers, config);
  read_experts(r, layer_count, config);
  for (Reader* level : {&r, &outer})
    if (const json* quantization = level->find({"quantization_config"}))
      config.experts.packed = read_quantization(*quantization, level->where());
  if (config.experts.packed && config.format != Format::bf16)
    fail(ErrorCode::not_supported, "{}: torch_dtype must be bfloat16 beside a quantization_config", r.where());
  config.end_tokens = r.integers({"eos_token_id"});
  if (nested && config.end_tokens.empty()) config.end_tokens = outer.integers({"eos_token_id"});
  for (const int token : config.end_tokens)
    if (token < 0 || token >= config.vocab)
      fail(ErrorCode::invalid_argument, "{}: eos_token_id {} is outside the vocabulary of {}", r.where(), token,
           config.vocab);
  check_products(config, r.where());
  r.finish(ignored_keys());
  if (nested) {
    outer.find({"text_config"});
    outer.find({"eos_token_id"});
    outer.finish(ignored_keys());
  }
  if (config.residual_block != 0) config.tensor_prefix = "language_model.";
  return config;
}

Config load_config(const std::filesystem::path& folder) {
  const auto path = folder / "config.json";
  return parse_config(read_file(path, 16 << 20), path.string());
}

void refuse_tied_head(const Config& config) {
  if (config.tied_head)
    fail(ErrorCode::not_supported, "tie_word_embeddings = true: only models with their own lm_head are supported");
}

// The shortest decimal that reads back to the same float32.
static json number(float x) {
  return json::parse(fmt::format("{}", x));
}

std::string config_to_json(const Config& c) {
  json out;
  out["model_type"] = "kimi_linear";
  out["hidden_size"] = c.hidden;
  out["vocab_size"] = c.vocab;
  out["num_hidden_layers"] = c.layer_count();
  out["intermediate_size"] = c.intermediate;
  out["rms_norm_eps"] = number(c.rms_eps);
  out["max_position_embeddings"] = c.max_context;
  out["tie_word_embeddings"] = c.tied_head;
  out["hidden_act"] = c.activation == Activation::situ ? "situ" : "silu";
  if (c.activation == Activation::situ) {
    out["activation_situ_beta"] = number(c.situ_beta);
    out["activation_situ_linear_beta"] = number(c.situ_linear_beta);
  }
  out["torch_dtype"] = c.format == Format::bf16 ? "bfloat16" : "float32";
  if (c.residual_block != 0) out["attn_res_block_size"] = c.residual_block;
  json kda = json::array(), full = json::array();
  for (int i = 0; i < c.layer_count(); ++i)
    (c.layers[static_cast<std::size_t>(i)] == LayerKind::kda ? kda : full).push_back(i + 1);
  json linear = {
      {"head_dim", c.kda.head_dim},         {"num_heads", c.kda.heads}, {"short_conv_kernel_size", c.kda.conv_kernel},
      {"full_attn_layers", full},           {"kda_layers", kda},        {"use_full_rank_gate", c.kda.full_rank_gate},
      {"l2_norm_eps", number(c.kda.l2_eps)}};
  if (c.kda.bounded) linear["gate_lower_bound"] = number(c.kda.lower_bound);
  out["linear_attn_config"] = linear;
  out["num_attention_heads"] = c.mla.heads;
  if (c.mla.q_lora != 0) out["q_lora_rank"] = c.mla.q_lora;
  out["kv_lora_rank"] = c.mla.latent;
  out["qk_nope_head_dim"] = c.mla.nope;
  out["qk_rope_head_dim"] = c.mla.extra;
  out["v_head_dim"] = c.mla.value;
  out["mla_use_nope"] = true;
  out["mla_use_output_gate"] = c.mla.output_gate;
  out["mla_latent_norm_eps"] = number(c.mla.latent_eps);
  if (c.index.heads != 0)
    out["dsa_config"] = {{"index_n_heads", c.index.heads},
                         {"index_head_dim", c.index.dim},
                         {"index_topk", c.index.top_k},
                         {"index_norm_eps", number(c.index.eps)},
                         {"layers", full}};
  out["first_k_dense_replace"] = c.first_dense;
  if (c.experts.count != 0) {
    out["num_experts"] = c.experts.count;
    out["num_experts_per_token"] = c.experts.top_k;
    out["moe_intermediate_size"] = c.experts.intermediate;
    if (c.experts.latent != 0) out["routed_expert_hidden_size"] = c.experts.latent;
    out["latent_moe_use_norm"] = c.experts.latent_norm;
    if (c.experts.shared != 0) out["num_shared_experts"] = c.experts.shared;
    out["moe_renormalize"] = c.experts.renormalize;
    out["routed_scaling_factor"] = number(c.experts.scale);
    out["moe_router_activation_func"] = "sigmoid";
  }
  if (c.experts.packed) out["quantization_config"] = packed_experts_config();
  if (c.end_tokens.size() == 1)
    out["eos_token_id"] = c.end_tokens.front();
  else if (!c.end_tokens.empty())
    out["eos_token_id"] = c.end_tokens;
  return out.dump(2) + "\n";
}

}  // namespace tidelock::model
