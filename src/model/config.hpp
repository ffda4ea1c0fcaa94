// One architecture config for the whole family (spec/model.md): Kimi-Linear, K3 and K3.1 differ by keys, never by name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "numerics/numerics.hpp"

namespace tidelock::model {

using numerics::Format;

enum class LayerKind : std::uint8_t { kda, mla };
enum class Activation : std::uint8_t { silu, situ };

struct KdaConfig {
  int heads = 0, head_dim = 0;
  int conv_kernel = 4;
  bool full_rank_gate = false;  // output gate g_proj [heads * head_dim, hidden] instead of g_a/g_b
  bool bounded = false;         // gate_lower_bound is present
  float lower_bound = 0;
  float l2_eps = 1e-6F;  // inside the root that scales each head's q and k
  int channels() const { return heads * head_dim; }
  numerics::KdaShape shape() const { return {heads, head_dim, head_dim, bounded}; }
};

struct MlaConfig {
  int heads = 0;
  int q_lora = 0;  // 0: q_proj
  int latent = 0;  // kv_lora_rank
  int nope = 0, extra = 0, value = 0;
  bool output_gate = false;
  float latent_eps = 1e-6F;  // of q_a_layernorm and kv_a_layernorm
  int query_dim() const { return nope + extra; }
  int key_dim() const { return latent + extra; }  // as stored
};

struct IndexConfig {  // DSA; heads == 0: dense attention
  int heads = 0, dim = 0, top_k = 0;
  float eps = 1e-5F;
};

struct ExpertConfig {
  int count = 0;  // 0: every layer is dense
  int top_k = 0, intermediate = 0;
  int latent = 0;  // 0: experts work on the hidden width
  bool latent_norm = false;
  int shared = 0;  // shared experts, fused into one MLP of shared * intermediate
  bool renormalize = true;
  float scale = 1;
  bool packed = false;  // config.json has a quantization_config: routed experts are stored as MXFP4
};

struct Config {
  int hidden = 0, vocab = 0, intermediate = 0;
  int first_dense = 1;  // layers before this one have a dense MLP
  Activation activation = Activation::silu;
  float situ_beta = 4, situ_linear_beta = 25;
  float rms_eps = 1e-5F;
  std::vector<LayerKind> layers;
  KdaConfig kda;
  MlaConfig mla;
  IndexConfig index;
  ExpertConfig experts;
  int residual_block = 0;  // attn_res_block_size; 0: plain residuals
  bool tied_head = false;
  // torch_dtype: of stored latents and index keys, and of matrices whose file has no format of its own. With bf16 the
  // inputs of all matrices are rounded to bf16; with f32 all matrices are f32.
  Format format = Format::bf16;
  std::int64_t max_context = 0;
  std::vector<std::int32_t> end_tokens;
  std::string tensor_prefix;  // "language_model." in K3 files

  int layer_count() const { return static_cast<int>(layers.size()); }
  bool is_dense_ffn(int layer) const { return experts.count == 0 || layer < first_dense; }
  int expert_width() const { return experts.latent != 0 ? experts.latent : hidden; }
};

// Parses a config.json: text keys at the top level or under "text_config". Missing, contradictory, unknown or
// unsupported keys are refused with Error{invalid_argument / not_supported} that names the key, what was found and what
// is expected. Keys that do not change the text model (torch_dtype aside) are ignored by an explicit list.
// torch_dtype float16 gives Format::f32: every half is a float, and there is no half arithmetic here.
Config parse_config(std::string_view json, const std::string& source_name);
Config load_config(const std::filesystem::path& folder);

// Throws Error{not_supported} for tie_word_embeddings.
void refuse_tied_head(const Config& config);

// A config.json that parse_config reads back to the same Config.
std::string config_to_json(const Config& config);

}  // namespace tidelock::model
