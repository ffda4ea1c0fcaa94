// train/: gradients of sequences, parameters that learn, and the optimizer. Deterministic: the number of threads
// changes no bit.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/team.hpp"
#include "model/forward.hpp"
#include "state/state.hpp"

namespace tidelock::train {

using model::ParameterId;

// ---- parameters that learn ------------------------------------------------------------------------------------------

// All of a model's weights as float32 masters, one flat vector in parameter order. The router's selection bias is part
// of it but takes no gradient: it moves by the balance rule (spec/model.md 4.7).
class FullParameters {
 public:
  explicit FullParameters(const model::Model& model);
  std::span<float> values() { return values_; }
  std::span<const float> values() const { return values_; }
  std::span<float> of(ParameterId id);
  std::span<const float> of(ParameterId id) const;
  void initialize(const model::Model& model, std::uint64_t seed);
  // Rounds and packs every parameter into the model.
  void apply(model::Model& model, Team& team) const;
  // Pointers into a flat gradient of the same layout.
  model::Gradients gradients(std::span<float> flat) const;
  // Which elements take weight decay: matrices and embeddings, not vectors.
  bool decays(const model::Model& model, ParameterId id) const;

 private:
  std::vector<std::int64_t> offsets_;  // by ParameterId, one more at the end
  std::vector<float> values_;
};

// One low-rank pair for each adapted parameter, one flat vector: a then b, in parameter order.
class LoraParameters {
 public:
  // Targets: "all-linear", or last path components such as {"q_proj", "w1"}. Unknown ones are refused by name.
  LoraParameters(const model::Model& model, int rank, float alpha, const std::vector<std::string>& targets);
  // A from (seed, parameter): uniform in +-1/sqrt(in); B zero: the adapter starts as the identity.
  void initialize(std::uint64_t seed);
  std::span<float> values() { return values_; }
  std::span<const float> values() const { return values_; }
  model::AdapterValues adapter_values() const;
  // Takes over the values of a saved adapter of the same rank and targets.
  void load(const model::AdapterValues& adapter);
  model::Gradients gradients(std::span<float> flat) const;

 private:
  struct Slot {
    ParameterId id;
    std::int64_t a, b, in, out;  // offsets and dims
  };
  const model::Model& model_;
  int rank_;
  float alpha_;
  std::vector<Slot> slots_;
  std::vector<float> values_;
};

// ---- gradients ------------------------------------------------------------------------------------------------------

struct TrainSequence {
  std::span<const std::int32_t> tokens;
  std::span<const std::uint8_t> mask;  // [tokens]: 1 where the token's log-probability enters the loss (never at 0)
  const model::Adapter* adapter = nullptr;
};

// Given the log-probabilities of a sequence's masked tokens in order, writes d loss / d logprob for each; returns the
// sequence's contribution to the loss. Called once per sequence, from any thread.
using SequenceLoss =
    std::function<double(std::size_t sequence, std::span<const float> logprobs, std::span<float> d_logprobs)>;

struct GradientOptions {
  std::int64_t micro_batch_tokens = 2048;  // sequences are packed in order up to this many tokens
  model::TapeMode tape = model::TapeMode::full;
  bool dense_attention = false;
  float index_loss_weight = 0;  // per row, already divided by the number of rows of the batch
};

struct GradientResult {
  double loss = 0;
  double index_loss = 0;                     // summed over rows and MLA layers
  std::vector<std::vector<float>> logprobs;  // by sequence, of masked tokens
  std::vector<std::int64_t> expert_load;     // [layers * experts]
  std::int64_t tokens = 0;                   // all tokens of all sequences
};

// Working memory kept between calls.
class GradientWorker {
 public:
  GradientWorker(const model::Model& model, Team& team);
  ~GradientWorker();

  // Adds the gradient of the summed loss to `flat`, whose layout `view` maps to model::Gradients. Micro-batches are
  // fixed by the sequences alone and their gradients are added in order.
  using GradientView = std::function<model::Gradients(std::span<float>)>;
  GradientResult run(std::span<const TrainSequence> sequences, const SequenceLoss& loss, const GradientOptions& options,
                     const GradientView& view, std::span<float> flat);

  // Log-probabilities of masked tokens only: the same forward without a tape.
  std::vector<std::vector<float>> score(std::span<const TrainSequence> sequences, const GradientOptions& options);

  std::size_t reserved_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// ---- optimizer ------------------------------------------------------------------------------------------------------

struct AdamWOptions {
  float learning_rate = 1e-3F, beta1 = 0.9F, beta2 = 0.95F, epsilon = 1e-8F, weight_decay = 0;
};

class PutAway;  // put_away.hpp

// Decoupled weight decay (Loshchilov and Hutter 2019). Moments in float32.
class AdamW {
 public:
  explicit AdamW(std::size_t count);
  ~AdamW();
  // values -= lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * values); the gradient is multiplied by `scale` first
  // (clipping). `decay`, when not empty, marks by element what decays.
  void step(std::span<float> values, std::span<const float> gradient, float scale, const AdamWOptions& options,
            std::span<const std::uint8_t> decay = {});
  std::int64_t steps() const { return steps_; }
  std::span<float> m() { return m_; }
  std::span<float> v() { return v_; }
  void restore_steps(std::int64_t steps) { steps_ = steps; }

  // Moves the moments to a file without a name in `folder`, which is made if it is not there, and gives their memory
  // back; returns how much. The file goes with the process, however that ends. Until retrieve() the moments are empty,
  // and step() throws. Throws Error{io}: the moments stay.
  std::size_t put_away(const std::filesystem::path& folder);
  // Brings them back, verified. Throws Error{io, corrupt_data}: what is left is a checkpoint. Nothing when they are
  // here.
  void retrieve();

 private:
  std::vector<float> m_, v_;
  std::int64_t steps_ = 0;
  std::unique_ptr<PutAway> away_;
  std::size_t count_ = 0;  // of what is away
};

// Euclidean norm, summed in double in ascending order.
double gradient_norm(std::span<const float> gradient);
// The factor that brings a gradient of this norm to at most `limit` (limit <= 0: no clipping).
float clip_scale(double norm, double limit);

}  // namespace tidelock::train
