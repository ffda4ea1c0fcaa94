#include <cmath>

#include "model/layers.hpp"

namespace tidelock::model {

using numerics::Input;

namespace {

numerics::GateShape gate_shape(const KdaConfig& c) {
  return {c.heads, c.head_dim, c.bounded, c.lower_bound};
}

void convolve(const Pass& pass, int layer, const KdaIds& ids, std::int64_t channels, KdaTape& t) {
  const ParameterId taps[3] = {ids.q_conv, ids.k_conv, ids.v_conv};
  for (std::size_t s = 0; s < pass.spans.size(); ++s) {
    const std::int64_t begin = pass.first_row[s] * channels, rows = pass.first_row[s + 1] - pass.first_row[s];
    float* tails = pass.layout.conv_tails(pass.spans[s].state, layer);
    for (int i = 0; i < 3; ++i)
      numerics::causal_conv(t.z[i] + begin, pass.model.vector(taps[i]), rows, channels, tails + 3 * channels * i,
                            t.u[i] == nullptr ? nullptr : t.u[i] + begin, t.y[i] + begin);
  }
}

// Work items are (span, head): each owns its state and its outputs.
void run_heads(const Pass& pass, int layer, const KdaConfig& c, KdaTape& t, bool keep_chunks) {
  const std::int64_t items = static_cast<std::int64_t>(pass.spans.size()) * c.heads;
  const auto body = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const auto s = static_cast<std::size_t>(item / c.heads);
      const int head = static_cast<int>(item % c.heads);
      const std::int64_t row = pass.first_row[s], rows = pass.first_row[s + 1] - row;
      const std::int64_t at = row * c.channels();
      numerics::kda_forward(c.shape(), head, head + 1, pass.spans[s].position, rows, t.q + at, t.k + at, t.y[2] + at,
                            t.g + at, t.beta + row * c.heads, pass.layout.kda_state(pass.spans[s].state, layer),
                            t.o + at, keep_chunks ? t.chunk_states[s] : nullptr);
    }
  };
  for_rows(pass, items, 1, body);
}

}  // namespace

// forward: z = W x; (u, y) = conv(z), SiLU; q, k L2-normalised, q scaled; raw = f_b(f_a(x)); g = gate(raw); beta =
// sigmoid(b x); o = kda(q, k, v, g, beta); out = o_proj(rms_norm(o) * sigmoid(gate(x)))
void kda_layer_forward(const Pass& pass, int layer, Signal x, float* out, KdaTape* tape) {
  const KdaConfig& c = pass.model.config().kda;
  const KdaIds& ids = pass.model.layers[static_cast<std::size_t>(layer)].kda;
  const std::int64_t rows = pass.rows, channels = c.channels(), n = rows * channels;
  Arena& arena = tape != nullptr ? pass.keep : pass.scratch;
  KdaTape local;
  KdaTape& t = tape != nullptr ? *tape : local;
  t.x = x;
  const ParameterId projections[3] = {ids.q, ids.k, ids.v};
  for (int i = 0; i < 3; ++i) {
    t.z[i] = arena.take<float>(n);
    t.y[i] = arena.take<float>(n);
    t.u[i] = tape != nullptr ? arena.take<float>(n) : nullptr;
    linear_forward(pass, {.id = projections[i], .input = i == 0 ? Input::fresh : Input::same}, x, rows, pass.runs,
                   t.z[i]);
  }
  convolve(pass, layer, ids, channels, t);
  t.q = arena.take<float>(n);
  t.k = arena.take<float>(n);
  t.q_inv = arena.take<float>(rows * c.heads);
  t.k_inv = arena.take<float>(rows * c.heads);
  numerics::l2_norm(t.y[0], rows * c.heads, c.head_dim, c.l2_eps, 1.0F / std::sqrt(static_cast<float>(c.head_dim)), t.q,
                    t.q_inv);
  numerics::l2_norm(t.y[1], rows * c.heads, c.head_dim, c.l2_eps, 1.0F, t.k, t.k_inv);

  float* f1 = arena.take<float>(rows * c.head_dim);
  linear_forward(pass, {.id = ids.f_a, .input = Input::same}, x, rows, pass.runs, f1);
  t.f1 = make_signal(pass, f1, rows, c.head_dim, arena);
  t.raw = arena.take<float>(n);
  t.g = arena.take<float>(n);
  linear_forward(pass, {.id = ids.f_b}, t.f1, rows, pass.runs, t.raw);
  numerics::kda_gate(gate_shape(c), t.raw, pass.model.vector(ids.dt_bias), pass.model.vector(ids.a_log), rows, t.g);
  t.beta = arena.take<float>(rows * c.heads);
  linear_forward(pass, {.id = ids.b}, x, rows, pass.runs, t.beta);
  numerics::sigmoid_rows(t.beta, rows * c.heads, t.beta);

  t.o = arena.take<float>(n);
  if (tape != nullptr) {
    t.chunk_states.clear();
    for (const Span& span : pass.spans) {
      const auto chunks =
          (static_cast<std::int64_t>(span.tokens.size()) + numerics::kKdaChunk - 1) / numerics::kKdaChunk;
      t.chunk_states.push_back(arena.take<float>(chunks * channels * c.head_dim));
    }
  }
  run_heads(pass, layer, c, t, tape != nullptr);

  t.on = arena.take<float>(n);
  t.o_inv = arena.take<float>(rows * c.heads);
  numerics::rms_norm(t.o, pass.model.vector(ids.o_norm), rows * c.heads, c.head_dim, pass.model.config().rms_eps, t.on,
                     t.o_inv);
  t.og = arena.take<float>(n);
  t.g1 = x;
  if (ids.g_a != kNone) {
    float* g1 = arena.take<float>(rows * c.head_dim);
    linear_forward(pass, {.id = ids.g_a}, x, rows, pass.runs, g1);
    t.g1 = make_signal(pass, g1, rows, c.head_dim, arena);
  }
  linear_forward(pass, {.id = ids.g_b}, t.g1, rows, pass.runs, t.og);
  float* gated = arena.take<float>(n);
  numerics::sigmoid_gate(t.on, t.og, n, gated);
  t.out = make_signal(pass, gated, rows, channels, arena);
  linear_forward(pass, {.id = ids.o}, t.out, rows, pass.runs, out);
}

namespace {

struct KdaAdjoints {
  float *q, *k, *v, *g, *beta;
};

// d_o -> adjoints of the row function's inputs.
KdaAdjoints heads_backward(const Pass& pass, const KdaConfig& c, const KdaTape& t, const float* d_o) {
  const std::int64_t n = pass.rows * c.channels();
  Arena& arena = pass.scratch;
  const KdaAdjoints d{arena.take_zeroed<float>(n), arena.take_zeroed<float>(n), arena.take_zeroed<float>(n),
                      arena.take_zeroed<float>(n), arena.take_zeroed<float>(pass.rows * c.heads)};
  const std::int64_t items = static_cast<std::int64_t>(pass.spans.size()) * c.heads;
  for_rows(pass, items, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const auto s = static_cast<std::size_t>(item / c.heads);
      const int head = static_cast<int>(item % c.heads);
      const std::int64_t row = pass.first_row[s], at = row * c.channels();
      numerics::kda_backward(c.shape(), head, head + 1, pass.first_row[s + 1] - row, t.q + at, t.k + at, t.y[2] + at,
                             t.g + at, t.beta + row * c.heads, t.chunk_states[s], d_o + at, d.q + at, d.k + at,
                             d.v + at, d.g + at, d.beta + row * c.heads);
    }
  });
  return d;
}

// Convolution and projection of q, k or v.
void projection_backward(const Pass& pass, ParameterId weight, ParameterId taps, const KdaTape& t, int i,
                         const float* d_y, float* d_x, Gradients& gradients) {
  const std::int64_t channels = pass.model.config().kda.channels();
  float* d_z = pass.scratch.take_zeroed<float>(pass.rows * channels);
  for (std::size_t s = 0; s < pass.spans.size(); ++s) {
    const std::int64_t at = pass.first_row[s] * channels, rows = pass.first_row[s + 1] - pass.first_row[s];
    numerics::causal_conv_backward(t.z[i] + at, pass.model.vector(taps), t.u[i] + at, d_y + at, rows, channels,
                                   d_z + at, parameter_gradient(gradients, taps));
  }
  linear_backward(pass, {.id = weight}, t.x.f, pass.rows, pass.runs, d_z, d_x, gradients);
}

}  // namespace

void kda_layer_backward(const Pass& pass, int layer, const KdaTape& t, const float* d_out, float* d_x,
                        Gradients& gradients) {
  const ArenaScope scope(pass.scratch);
  const KdaConfig& c = pass.model.config().kda;
  const KdaIds& ids = pass.model.layers[static_cast<std::size_t>(layer)].kda;
  const std::int64_t rows = pass.rows, channels = c.channels(), n = rows * channels;
  Arena& arena = pass.scratch;
  const auto grad = [&](ParameterId id) { return parameter_gradient(gradients, id); };

  float* d_gated = arena.take_zeroed<float>(n);
  linear_backward(pass, {.id = ids.o}, t.out.f, rows, pass.runs, d_out, d_gated, gradients);
  float* d_on = arena.take_zeroed<float>(n);
  float* d_og = arena.take_zeroed<float>(n);
  numerics::sigmoid_gate_backward(t.on, t.og, d_gated, n, d_on, d_og);
  if (ids.g_a != kNone) {
    float* d_g1 = arena.take_zeroed<float>(rows * c.head_dim);
    linear_backward(pass, {.id = ids.g_b}, t.g1.f, rows, pass.runs, d_og, d_g1, gradients);
    linear_backward(pass, {.id = ids.g_a}, t.x.f, rows, pass.runs, d_g1, d_x, gradients);
  } else {
    linear_backward(pass, {.id = ids.g_b}, t.x.f, rows, pass.runs, d_og, d_x, gradients);
  }
  float* d_o = arena.take_zeroed<float>(n);
  numerics::rms_norm_backward(t.o, pass.model.vector(ids.o_norm), t.o_inv, d_on, rows * c.heads, c.head_dim, d_o,
                              grad(ids.o_norm));

  const KdaAdjoints d = heads_backward(pass, c, t, d_o);
  for (std::int64_t i = 0; i < rows * c.heads; ++i) d.beta[i] *= t.beta[i] * (1.0F - t.beta[i]);
  linear_backward(pass, {.id = ids.b}, t.x.f, rows, pass.runs, d.beta, d_x, gradients);

  float* d_raw = arena.take_zeroed<float>(n);
  numerics::kda_gate_backward(gate_shape(c), t.raw, pass.model.vector(ids.dt_bias), pass.model.vector(ids.a_log), d.g,
                              rows, d_raw, grad(ids.dt_bias), grad(ids.a_log));
  float* d_f1 = arena.take_zeroed<float>(rows * c.head_dim);
  linear_backward(pass, {.id = ids.f_b}, t.f1.f, rows, pass.runs, d_raw, d_f1, gradients);
  linear_backward(pass, {.id = ids.f_a}, t.x.f, rows, pass.runs, d_f1, d_x, gradients);

  float* d_yq = arena.take_zeroed<float>(n);
  float* d_yk = arena.take_zeroed<float>(n);
  numerics::l2_norm_backward(t.y[0], t.q_inv, d.q, rows * c.heads, c.head_dim,
                             1.0F / std::sqrt(static_cast<float>(c.head_dim)), d_yq);
  numerics::l2_norm_backward(t.y[1], t.k_inv, d.k, rows * c.heads, c.head_dim, 1.0F, d_yk);
  projection_backward(pass, ids.q, ids.q_conv, t, 0, d_yq, d_x, gradients);
  projection_backward(pass, ids.k, ids.k_conv, t, 1, d_yk, d_x, gradients);
  projection_backward(pass, ids.v, ids.v_conv, t, 2, d.v, d_x, gradients);
}

}  // namespace tidelock::model
