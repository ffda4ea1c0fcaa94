#include "model/forward.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "model/residual.hpp"

namespace tidelock::model {

Workspace::Workspace() : tape(std::make_unique<Tape>()) {}
Workspace::~Workspace() = default;

Pass make_pass(const Model& model, const StateLayout& layout, std::span<const Span> spans,
               const ForwardOptions& options, Workspace& workspace, Team& team) {
  Pass pass{model, layout, spans, {0}, 0, {}, options, workspace.scratch, workspace.keep, team};
  for (const Span& span : spans) {
    const auto n = static_cast<std::int64_t>(span.tokens.size());
    if (!pass.runs.empty() && pass.runs.back().adapter == span.adapter)
      pass.runs.back().end = pass.rows + n;
    else
      pass.runs.push_back({pass.rows, pass.rows + n, span.adapter});
    pass.rows += n;
    pass.first_row.push_back(pass.rows);
  }
  return pass;
}

namespace {

void check_spans(const Model& model, std::span<const Span> spans, const ForwardOptions& options) {
  const Config& c = model.config();
  for (const Span& span : spans) {
    if (span.position < 0 || span.position + static_cast<std::int64_t>(span.tokens.size()) > c.max_context)
      fail(ErrorCode::invalid_argument, "positions {} to {} are outside the model's context of {}", span.position,
           span.position + static_cast<std::int64_t>(span.tokens.size()), c.max_context);
    if (options.tape != TapeMode::none && span.position != 0)
      fail(ErrorCode::internal, "a tape needs whole sequences, this span starts at {}", span.position);
    for (const auto token : span.tokens)
      if (token < 0 || token >= c.vocab)
        fail(ErrorCode::invalid_argument, "token {} is outside the vocabulary of {}", token, c.vocab);
  }
}

float* embed(const Pass& pass) {
  const std::int64_t hidden = pass.model.config().hidden;
  float* out = pass.keep.take<float>(pass.rows * hidden);
  float* row = out;
  for (const Span& span : pass.spans)
    for (const auto token : span.tokens) {
      pass.model.embedding_row(token, row);
      row += hidden;
    }
  return out;
}

void add_rows(float* y, const float* x, std::int64_t n) {
  numerics::axpy(1.0F, x, n, y);
}

}  // namespace

const float* forward(const Model& model, const StateLayout& layout, std::span<const Span> spans,
                     const ForwardOptions& options, Workspace& workspace, Team& team) {
  check_spans(model, spans, options);
  workspace.scratch.release({});
  workspace.keep.release({});
  const Pass pass = make_pass(model, layout, spans, options, workspace, team);
  const Config& c = model.config();
  const std::int64_t n = pass.rows * c.hidden;
  const bool taping = options.tape != TapeMode::none, keep = options.tape == TapeMode::full;
  Tape& tape = *workspace.tape;
  tape.mode = options.tape;
  tape.blocks.clear();
  tape.layers.resize(static_cast<std::size_t>(c.layer_count()));

  float* prefix = embed(pass);
  for (int layer = 0; layer < c.layer_count(); ++layer) {
    const ArenaScope scope(pass.scratch);
    LayerTape& t = tape.layers[static_cast<std::size_t>(layer)];
    t.prefix_in = prefix;
    // The stream's new value gets memory of its own when something still needs the old one: a bank, or the backward
    // pass.
    float* mid = taping || banks(c, layer) ? pass.keep.take<float>(n) : nullptr;
    float* out = mid != nullptr ? mid : pass.scratch.take<float>(n);
    const std::vector<float*> sources = tape.blocks;
    if (banks(c, layer)) tape.blocks.push_back(prefix);
    attention_half(pass, layer, sources, prefix, out, t, keep);
    if (mid == nullptr) {
      add_rows(prefix, out, n);
    } else {
      if (!banks(c, layer)) add_rows(mid, prefix, n);
      prefix = mid;
    }
    t.prefix_mid = prefix;
    float* after = taping ? pass.keep.take<float>(n) : pass.scratch.take<float>(n);
    ffn_half(pass, layer, tape.blocks, prefix, after, t, keep);
    if (taping) {
      add_rows(after, prefix, n);
      prefix = after;
    } else {
      add_rows(prefix, after, n);
    }
  }
  tape.prefix_out = prefix;
  float* hidden = mix_forward(pass, tape.blocks, prefix, model.output_mix_norm, model.output_mix_proj, model.final_norm,
                              pass.keep, tape.output_mix);
  make_signal(pass, hidden, pass.rows, c.hidden, pass.scratch);
  return hidden;
}

void head_forward(const Model& model, const float* hidden, std::int64_t rows, float* out, Workspace& workspace,
                  Team& team) {
  const ArenaScope scope(workspace.scratch);
  const auto& w = model.matrix(model.head).forward;
  if (w.format() == Format::f32) {
    numerics::matmul(w, hidden, w.in(), rows, out, w.out(), Output::store, team);
    return;
  }
  float* copy = workspace.scratch.take<float>(rows * w.in());
  bf16* narrow = workspace.scratch.take<bf16>(rows * w.in());
  std::copy_n(hidden, rows * w.in(), copy);
  numerics::round_to_bf16(copy, rows * w.in(), narrow);
  numerics::matmul(w, narrow, w.in(), rows, out, w.out(), Output::store, team);
}

void head_backward(const Model& model, const float* hidden, std::int64_t rows, const float* d_logits, float* d_hidden,
                   Gradients& gradients, Team& team) {
  const auto& w = model.matrix(model.head);
  const std::int64_t in = w.forward.in(), out = w.forward.out();
  numerics::matmul(w.transposed, d_logits, out, rows, d_hidden, in, Output::add, team);
  if (float* d_w = parameter_gradient(gradients, model.head))
    numerics::matmul_transposed_a(d_logits, out, hidden, in, rows, out, in, d_w, in, Output::add, team);
}

float token_logprob(const float* logits, std::int64_t vocab, std::int32_t token) {
  return logits[token] - numerics::log_sum_exp(logits, vocab);
}

}  // namespace tidelock::model
