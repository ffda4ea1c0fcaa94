// Weights: every tensor of a model by name, packed for the kernels, and low-rank adapters beside them.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.hpp"

namespace tidelock::model {

using ParameterId = int;
inline constexpr ParameterId kNone = -1;

enum class ParameterKind : std::uint8_t {
  vector,     // norms, biases, gates: float32
  conv,       // [channels, 1, 4] in files; values are kept tap-major, [4, channels]
  embedding,  // [vocab, hidden], rows kept in the parameter's format
  linear,     // [out, in], in the parameter's format
  router,     // [out, in], kept and multiplied in float32
  absorbed,   // kv_b_proj [heads * (nope + value), latent]: split by head into its key and value halves
};

// A weight matrix in the forms that the passes need.
struct Matrix {
  numerics::PackedMatrix forward;
  numerics::PackedMatrix transposed;  // packed only when the model was made for training
};

struct Parameter {
  std::string name;                 // as in the checkpoint
  std::vector<std::int64_t> shape;  // as in the checkpoint
  ParameterKind kind = ParameterKind::vector;
  bool indexer = false;         // trained by the index loss only; takes no adapter
  bool adaptable = false;       // may carry a low-rank adapter
  bool split = false;           // an input that ranks may split is summed in segments (contract rule 2)
  Format format = Format::f32;  // of what was set: embedding, linear; absorbed: of the key half
  float init_deviation = 0;     // of a fresh model; vectors start at init_mean
  float init_mean = 0;
  std::vector<float> values;        // vector, conv
  std::span<const std::byte> rows;  // embedding: rows in blocks of `format` (numerics/quant.hpp) ...
  std::vector<std::byte> own_rows;  // ... which lie here, or in the place below
  std::span<std::byte> place;       // where matrices and rows are put, when the model's weights lie together
  std::vector<Matrix> parts;  // linear, router: one. absorbed: heads key parts [latent <- nope], then heads value parts
                              // [value <- latent]
  std::int64_t count() const;  // elements
};

// Parameter ids by role. kNone where the config has no such tensor.
struct KdaIds {
  ParameterId q = kNone, k = kNone, v = kNone, q_conv = kNone, k_conv = kNone, v_conv = kNone, f_a = kNone, f_b = kNone;
  ParameterId dt_bias = kNone, a_log = kNone, b = kNone, o_norm = kNone, o = kNone;
  ParameterId g_a = kNone, g_b = kNone;  // output gate; full rank: g_b alone
};
struct MlaIds {
  ParameterId q = kNone;                                   // without q-LoRA
  ParameterId q_a = kNone, q_a_norm = kNone, q_b = kNone;  // with it
  ParameterId kv_a = kNone, kv_a_norm = kNone, kv_b = kNone, gate = kNone, o = kNone;
  ParameterId index_q = kNone, index_k = kNone, index_k_norm = kNone, index_k_norm_bias = kNone, index_w = kNone;
};
struct FfnIds {
  ParameterId gate = kNone, up = kNone, down = kNone;  // dense layer, or the fused shared experts
  ParameterId router = kNone, router_bias = kNone, latent_down = kNone, latent_up = kNone, latent_norm = kNone;
  std::vector<ParameterId> expert_gate, expert_up, expert_down;
};
struct LayerIds {
  ParameterId attention_norm = kNone, ffn_norm = kNone;
  // Block residuals.
  ParameterId attention_mix_norm = kNone, attention_mix_proj = kNone, ffn_mix_norm = kNone, ffn_mix_proj = kNone;
  KdaIds kda;
  MlaIds mla;
  FfnIds ffn;
};

class Model {
 public:
  // A model of the config's shape with all parameters unset (zeros). `for_training` keeps what the backward pass needs.
  Model(Config config, bool for_training);

  const Config& config() const { return config_; }
  bool for_training() const { return for_training_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const Parameter& parameter(ParameterId id) const { return parameters_[static_cast<std::size_t>(id)]; }
  const float* vector(ParameterId id) const { return parameter(id).values.data(); }
  const Matrix& matrix(ParameterId id, int part = 0) const {
    return parameter(id).parts[static_cast<std::size_t>(part)];
  }
  // Throws Error{not_found} naming the tensor.
  ParameterId find(std::string_view name) const;

  // The embedding of a token, exact in its format: hidden values.
  void embedding_row(std::int32_t token, float* out) const;

  // Sets a parameter from float32 values in its own layout (conv: tap-major), rounding to the config's format and
  // packing.
  void set(ParameterId id, std::span<const float> values);
  // Sets an embedding, linear or router from rows of blocks ([shape[0]][row_bytes(format, shape[1])], contiguous),
  // which stay as they are; a router's are widened to float32. Quantised rows need a config of format bf16. Throws
  // Error{corrupt_data} naming the parameter for scales and values that are not finite.
  void set_blocks(ParameterId id, Format format, std::span<const std::byte> rows);
  // Likewise the halves of an absorbed matrix, by head: keys [heads][latent] rows of nope, values [heads][value] rows
  // of latent.
  void set_absorbed_blocks(ParameterId id, Format key_format, std::span<const std::byte> keys, Format value_format,
                           std::span<const std::byte> values);

  // Weights that lie together, in memory or in a file of packed weights (packed_weights.hpp), which `keeper` owns.
  // place: what set_blocks and set_absorbed_blocks make of `id` goes there; packed_matrix_bytes of it, 64-byte aligned.
  // adopt: they made it before, from these formats. Not for training.
  // mapped: reading them may wait for the disk (will_need).
  void keep(std::shared_ptr<const void> keeper, bool mapped) { keeper_ = std::move(keeper), mapped_ = mapped; }
  void place(ParameterId id, std::span<std::byte> to);
  void adopt(ParameterId id, Format format, Format value_format, std::span<const std::byte> packed);

  bool mapped() const { return mapped_; }
  // Asks for the matrices of `id` to be read from the disk while others are computed with. Does not wait.
  void will_need(ParameterId id) const;

  ParameterId embedding = kNone, final_norm = kNone, head = kNone, output_mix_norm = kNone, output_mix_proj = kNone;
  std::vector<LayerIds> layers;

  // Weight bytes in kernels' form, and active multiply-adds per token (experts: top_k of them).
  std::size_t weight_bytes() const;
  std::int64_t parameter_count() const;
  std::int64_t active_parameter_count() const;

 private:
  friend class ModelPlan;
  struct PartShape {
    Format format;
    std::int64_t out, in;
    int segments;
  };
  static PartShape part_shape(const Config& config, const Parameter& p, int part, Format format, Format value_format);
  void pack(Parameter& p, int part, const PartShape& shape, const std::byte* rows) const;
  void check_blocks(const Parameter& p, Format format, std::span<const std::byte> rows, std::int64_t n) const;
  Config config_;
  bool for_training_;
  std::vector<Parameter> parameters_;
  std::shared_ptr<const void> keeper_;
  bool mapped_ = false;
};

// Loads a checkpoint: a folder (config.json, safetensors) or a .gguf file (weight_source.hpp). Every tensor's name,
// shape and type is checked, NaN and Inf are refused; tensors the config does not name are refused, except vision
// weights, which are left out with a notice. Throws Error{corrupt_data, invalid_argument, not_supported}. `raw`, when
// not null, receives each parameter's float32 values as they are run.
using ValueSink = std::function<void(ParameterId, std::span<const float>)>;
std::unique_ptr<Model> load_model(const std::filesystem::path& path, bool for_training, const ValueSink& raw = nullptr);

// Writes config.json and model.safetensors from float32 values (rounded to each tensor's stored format).
using ValueSource = std::function<std::span<const float>(ParameterId)>;
void save_model(const Model& model, const ValueSource& values, const std::filesystem::path& folder);

// Fresh values for a parameter, from (seed, parameter id): normal with init_deviation around init_mean; A_log and
// dt_bias by their own rule (decay times spread from short to long).
std::vector<float> initial_values(const Model& model, ParameterId id, std::uint64_t seed);

// ---- adapters -------------------------------------------------------------------------------------------------------

// y = f32(base(x)) + scale * ((x A) B), never merged (contract rule 8). A is [rank, in], B is [out, rank], float32.
struct AdapterPart {
  numerics::PackedMatrix down, up;                        // x -> rank, rank -> y
  numerics::PackedMatrix down_transposed, up_transposed;  // for the backward pass
};

struct AdapterValues;

class Adapter {
 public:
  Adapter(const Model& model, int rank, float alpha);

  // Of the constructor: an adapter belongs to one model object.
  const Model& model() const { return model_; }
  int rank() const { return rank_; }
  float alpha() const { return alpha_; }
  float scale() const { return alpha_ / static_cast<float>(rank_); }
  // Sets the pair of one parameter (linear or absorbed): a is [rank, in], b is [out, rank] with the checkpoint's in and
  // out.
  void set(ParameterId id, std::span<const float> a, std::span<const float> b);
  // The values as the forward pass reads them, from the packed matrices. Throws Error{mismatch} when the copies that an
  // absorbed parameter keeps of its A differ.
  AdapterValues values() const;
  // Of values(); computed once for as long as nothing is set. From any thread.
  std::string sha256() const;
  // Parts beside those of the parameter, or null when this parameter has no adapter.
  const AdapterPart* parts(ParameterId id) const {
    const auto& p = parts_[static_cast<std::size_t>(id)];
    return p.empty() ? nullptr : p.data();
  }

 private:
  const Model& model_;
  int rank_;
  float alpha_;
  std::vector<std::vector<AdapterPart>> parts_;
  mutable std::mutex hash_mutex_;
  mutable std::string sha256_;  // empty: not computed yet
};

// Parameters that take an adapter: all linear maps including experts, without the router, the indexer and the head.
std::vector<ParameterId> adaptable_parameters(const Model& model);

// Float32 values of an adapter as a PEFT folder holds them (adapter_config.json, adapter_model.safetensors).
struct AdapterValues {
  int rank = 0;
  float alpha = 0;
  struct Pair {
    ParameterId id;
    std::vector<float> a, b;
  };
  std::vector<Pair> pairs;  // ascending by id
  // SHA-256 over rank, alpha and all pairs with their names, in order: what a hand-over compares.
  std::string sha256(const Model& model) const;
};
AdapterValues load_adapter(const Model& model, const std::filesystem::path& folder);
void save_adapter(const Model& model, const AdapterValues& values, const std::filesystem::path& folder,
                  const std::string& base_name);
std::unique_ptr<Adapter> make_adapter(const Model& model, const AdapterValues& values);

}  // namespace tidelock::model
