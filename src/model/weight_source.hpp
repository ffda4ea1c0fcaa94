// Where a model's weights lie, whatever the file format: for every parameter its rows, and the format they are in.
//
// Two kinds of checkpoints are read: Hugging Face folders (config.json, safetensors; bf16, f32, f16, and routed experts
// as MXFP4 of compressed-tensors) and GGUF files of the architectures kimi-linear and kimi-k3. Files are mapped, not
// read: only what is asked for is touched.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/gguf.hpp"
#include "model/model.hpp"

namespace tidelock::model {

struct StoredWeight {
  std::string_view type;    // the file's own word for it: "BF16", "F16", "Q8_0", "MXFP4"
  std::uint64_t bytes = 0;  // in the file
};

// Owns the mappings. Immutable and thread-safe once bound.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  WeightSource(const WeightSource&) = delete;
  WeightSource& operator=(const WeightSource&) = delete;

  const std::filesystem::path& path() const { return path_; }
  const Config& config() const { return config_; }
  // "Hugging Face folder, 20 safetensors files".
  virtual std::string kind() const = 0;
  // The files that hold the weights and what describes them.
  virtual std::vector<std::filesystem::path> files() const = 0;
  // The keys tokenizer.* of a GGUF file; empty for a folder.
  virtual GgufMetadata vocabulary() const { return {}; }

  // Finds the tensors of every parameter of `model`, which was made from config() and outlives this. Every name, shape
  // and type is checked here, before a weight is read. Throws Error{corrupt_data} for a tensor that is missing, has
  // another shape or belongs to nothing, Error{not_supported} for a type that cannot be run.
  virtual void bind(const Model& model) = 0;

  virtual StoredWeight stored(ParameterId id) const = 0;
  // What a piece of a matrix or embedding is run in: the format that rows() gives. An absorbed matrix has two pieces,
  // its key halves and its value halves (Model::set_absorbed_blocks); everything else has one, piece 0.
  virtual Format format(ParameterId id, int piece) const = 0;

  // The rows of a piece, each row_bytes(format(id, piece), in) long: in the mapping where they lie there in this form,
  // else in `scratch`. Not looked at: Model::set_blocks and check_finite refuse what is not finite.
  virtual std::span<const std::byte> rows(ParameterId id, int piece, std::vector<std::byte>& scratch) const = 0;

  // Float32 values in the parameter's own layout, as Model::set takes them: of matrices those of rows(). Throws
  // Error{corrupt_data} at a NaN or infinity.
  void values(ParameterId id, std::vector<float>& out) const;
  void check_finite(ParameterId id, int piece, std::span<const std::byte> rows) const;

 protected:
  WeightSource(std::filesystem::path path, Config config) : path_(std::move(path)), config_(std::move(config)) {}

  virtual void stored_vector(ParameterId id, std::vector<float>& out) const = 0;  // of kinds vector and conv
  const Model& model() const { return *model_; }

  std::filesystem::path path_;
  Config config_;
  const Model* model_ = nullptr;
};

// Opens a folder or a .gguf file and reads its config; refuses what cannot be run before any weight is read.
std::unique_ptr<WeightSource> open_weights(const std::filesystem::path& path);

// load_model (model.hpp) from a source that is open already; binds it to the model, which must live while it is asked.
std::unique_ptr<Model> load_model(WeightSource& source, bool for_training, const ValueSink& raw = nullptr);

// Sets one parameter of `model`, to which `source` is bound. Safe for different parameters at once.
void load_parameter(const WeightSource& source, ParameterId id, Model& model);

// Pieces of a matrix or embedding, and the [rows, columns] of one.
struct PieceShape {
  std::int64_t out, in;
};
PieceShape piece_shape(const Config& config, const Parameter& parameter, int piece);
int piece_count(const Parameter& parameter);

// Each channel's four taps -> four rows of taps, or back.
std::vector<float> turn_conv(std::span<const float> values, bool to_tap_major);

// A group of 32 values of compressed-tensors (two in a byte, the even one low) <-> the 16 bytes of a ggml block
// (element j low, j + 16 high). Moves bits only.
void to_ggml_nibbles(const std::byte* packed, std::byte* block);
void from_ggml_nibbles(const std::byte* block, std::byte* packed);

std::unique_ptr<WeightSource> open_folder(const std::filesystem::path& folder);
std::unique_ptr<WeightSource> open_gguf(const std::filesystem::path& path);

}  // namespace tidelock::model
