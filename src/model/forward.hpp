// The one forward pass, and its exact derivative.
//
// forward(model, rows, state, tape): `rows` is any mix of prefill spans and single decode rows of different sequences;
// its composition never changes a bit of any row. State is read and appended through the views that the spans carry.
// The tape is null when serving; in training it keeps what backward() needs, and nothing else differs.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/team.hpp"
#include "model/arena.hpp"
#include "model/model.hpp"
#include "model/state_layout.hpp"

namespace tidelock::model {

// Consecutive tokens of one sequence. The state covers exactly `position` tokens before the call and `position +
// tokens.size()` after it; its blocks must reach that far.
struct Span {
  SequenceView state;
  std::int64_t position = 0;
  std::span<const std::int32_t> tokens;
  const Adapter* adapter = nullptr;  // of this model, or null
};

struct Tape;  // opaque; owned by the Workspace

// Working memory of one thread of work; grows to what is needed and stays.
class Workspace {
 public:
  Workspace();
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  Arena scratch, keep;
  std::unique_ptr<Tape> tape;
  std::size_t reserved_bytes() const { return scratch.reserved_bytes() + keep.reserved_bytes(); }
};

enum class TapeMode {
  none,      // serving
  full,      // keep every activation that backward needs
  recompute  // keep each layer's residual inputs only; backward runs the layer's forward again
};

struct ForwardOptions {
  TapeMode tape = TapeMode::none;
  // Training a new indexer starts dense (spec/model.md 4.7): attend to everything whatever top_k says.
  bool dense_attention = false;
};

// Returns the final normed hidden rows, [rows, hidden] in span order (as lm_head sees them; valid until the workspace's
// next use). Throws Error{invalid_argument} for a token outside the vocabulary, before any state is touched. With a
// tape, every span must start at position 0.
const float* forward(const Model& model, const StateLayout& layout, std::span<const Span> spans,
                     const ForwardOptions& options, Workspace& workspace, Team& team);

// Logits of hidden rows: out [rows, vocab].
void head_forward(const Model& model, const float* hidden, std::int64_t rows, float* out, Workspace& workspace,
                  Team& team);
// Given d_logits [rows, vocab]: adds to d_hidden [rows, hidden], and to the head's gradient when wanted.
struct Gradients;
void head_backward(const Model& model, const float* hidden, std::int64_t rows, const float* d_logits, float* d_hidden,
                   Gradients& gradients, Team& team);

// The log-probability of `token` in the unmodified distribution. Rollout and trainer call this one function.
float token_logprob(const float* logits, std::int64_t vocab, std::int32_t token);

// Where the backward pass adds. Null: not wanted. Layouts as in Parameter::values order ([out, in]; conv tap-major;
// LoRA a [rank, in], b [out, rank]).
struct Gradients {
  std::vector<float*> parameters;  // by ParameterId; empty: none
  std::vector<float*> lora_a, lora_b;
  float index_loss_weight = 0;            // > 0: also train the indexer towards the attention it replaces
  double index_loss = 0;                  // its value, summed over rows and layers (when weight > 0)
  std::vector<std::int64_t> expert_load;  // [layers * experts] rows sent to each expert; sized by the caller or empty
};

// Derivative of a scalar with respect to what `gradients` wants, given d_hidden [rows, hidden] for the rows of the last
// forward() with a tape in this workspace. Same model, spans, options and adapters.
void backward(const Model& model, const StateLayout& layout, std::span<const Span> spans, const ForwardOptions& options,
              const float* d_hidden, Gradients& gradients, Workspace& workspace, Team& team);

}  // namespace tidelock::model
