#include <algorithm>
#include <cmath>
#include <cstring>

#include "model/layers.hpp"

namespace tidelock::model {
namespace {

constexpr std::int64_t kScoreRows = 32;  // rows scored at once: bounds the score buffer to 32 x context

numerics::MlaShape mla_shape(const MlaConfig& m) {
  return {m.heads, m.latent, m.extra, 1.0F / std::sqrt(static_cast<float>(m.query_dim()))};
}

float index_weight_scale(const IndexConfig& c) {
  return 1.0F / std::sqrt(static_cast<float>(c.heads) * static_cast<float>(c.dim));
}

// A span needs a selection once any of its rows sees more than top_k tokens. Below that the selected set is everything,
// and dense attention gives the same bits.
bool needs_selection(const Pass& pass, const Span& span) {
  const IndexConfig& c = pass.model.config().index;
  return c.heads != 0 && !pass.options.dense_attention &&
         span.position + static_cast<std::int64_t>(span.tokens.size()) > c.top_k;
}

// Queries: q = q_proj x, or q_b(norm(q_a x)); each head's first `nope` dims go to latent space, the others stay.
void query_forward(const Pass& pass, const MlaIds& ids, Arena& arena, MlaTape& t) {
  const MlaConfig& m = pass.model.config().mla;
  const std::int64_t rows = pass.rows, width = m.heads * m.query_dim();
  float* q = arena.take<float>(rows * width);
  if (ids.q_a != kNone) {
    t.qa = arena.take<float>(rows * m.q_lora);
    t.qa_inv = arena.take<float>(rows);
    float* qr = arena.take<float>(rows * m.q_lora);
    linear_forward(pass, {.id = ids.q_a}, t.x, rows, pass.runs, t.qa);
    numerics::rms_norm(t.qa, pass.model.vector(ids.q_a_norm), rows, m.q_lora, m.latent_eps, qr, t.qa_inv);
    t.qr = make_signal(pass, qr, rows, m.q_lora, arena);
    linear_forward(pass, {.id = ids.q_b}, t.qr, rows, pass.runs, q);
  } else {
    linear_forward(pass, {.id = ids.q}, t.x, rows, pass.runs, q);
  }
  t.q = make_signal(pass, q, rows, width, arena);
  t.q_abs = arena.take<float>(rows * m.heads * m.key_dim());
  for (int h = 0; h < m.heads; ++h) {
    const std::int64_t from = static_cast<std::int64_t>(h) * m.query_dim(),
                       to = static_cast<std::int64_t>(h) * m.key_dim();
    const Signal head{t.q.f + from, t.q.b == nullptr ? nullptr : t.q.b + from};
    linear_forward(pass, {.id = ids.kv_b, .part = h, .ldx = width, .ldy = m.heads * m.key_dim()}, head, rows, pass.runs,
                   t.q_abs + to);
    for (std::int64_t r = 0; r < rows; ++r)
      std::copy_n(t.q.f + r * width + from + m.nope, m.extra, t.q_abs + r * m.heads * m.key_dim() + to + m.latent);
  }
}

// Keys: [norm(c[:latent]) | c[latent:]], rounded as they are stored.
void keys_forward(const Pass& pass, int layer, const MlaIds& ids, Arena& arena, MlaTape& t) {
  const MlaConfig& m = pass.model.config().mla;
  const std::int64_t rows = pass.rows, kd = m.key_dim();
  float* raw = pass.scratch.take<float>(rows * kd);
  t.c = arena.take<float>(rows * m.latent);
  t.c_inv = arena.take<float>(rows);
  float* normed = pass.scratch.take<float>(rows * m.latent);
  linear_forward(pass, {.id = ids.kv_a}, t.x, rows, pass.runs, raw);
  for (std::int64_t r = 0; r < rows; ++r) std::copy_n(raw + r * kd, m.latent, t.c + r * m.latent);
  numerics::rms_norm(t.c, pass.model.vector(ids.kv_a_norm), rows, m.latent, m.latent_eps, normed, t.c_inv);
  for (std::int64_t r = 0; r < rows; ++r) std::copy_n(normed + r * m.latent, m.latent, raw + r * kd);
  for (std::size_t s = 0; s < pass.spans.size(); ++s) {
    const std::int64_t begin = pass.first_row[s], n = pass.first_row[s + 1] - begin;
    numerics::store_rows(pass.layout.latents(pass.spans[s].state, layer), pass.spans[s].position, n, raw + begin * kd);
  }
}

void index_forward(const Pass& pass, int layer, const MlaIds& ids, Arena& arena, MlaTape& t) {
  const IndexConfig& c = pass.model.config().index;
  const std::int64_t rows = pass.rows;
  t.iq = arena.take<float>(rows * c.heads * c.dim);
  t.ik_raw = arena.take<float>(rows * c.dim);
  t.ik_stats = arena.take<float>(rows * 2);
  t.iw = arena.take<float>(rows * c.heads);
  float* ik = pass.scratch.take<float>(rows * c.dim);
  linear_forward(pass, {.id = ids.index_q}, t.qr, rows, pass.runs, t.iq);
  linear_forward(pass, {.id = ids.index_k}, t.x, rows, pass.runs, t.ik_raw);
  numerics::layer_norm(t.ik_raw, pass.model.vector(ids.index_k_norm), pass.model.vector(ids.index_k_norm_bias), rows,
                       c.dim, c.eps, ik, t.ik_stats);
  linear_forward(pass, {.id = ids.index_w}, t.x, rows, pass.runs, t.iw);
  const float scale = index_weight_scale(c);
  for (std::int64_t i = 0; i < rows * c.heads; ++i) t.iw[i] *= scale;
  for (std::size_t s = 0; s < pass.spans.size(); ++s) {
    const std::int64_t begin = pass.first_row[s], n = pass.first_row[s + 1] - begin;
    numerics::store_rows(pass.layout.index_keys(pass.spans[s].state, layer), pass.spans[s].position, n,
                         ik + begin * c.dim);
  }
}

// Scores and chooses for rows [begin, end) of span s.
void select_rows(const Pass& pass, int layer, std::size_t s, std::int64_t begin, std::int64_t end, const MlaTape& t) {
  const IndexConfig& c = pass.model.config().index;
  const std::int64_t first = pass.first_row[s], position = pass.spans[s].position;
  const std::int64_t stride = position + end;
  thread_local std::vector<float> scores;
  scores.resize(static_cast<std::size_t>((end - begin) * stride));
  numerics::index_scores({c.heads, c.dim}, pass.layout.index_keys(pass.spans[s].state, layer), position + begin,
                         end - begin, t.iq + (first + begin) * c.heads * c.dim, t.iw + (first + begin) * c.heads,
                         scores.data(), stride);
  for (std::int64_t r = begin; r < end; ++r)
    t.counts[first + r] = numerics::select_top_k(scores.data() + (r - begin) * stride, position + r + 1, c.top_k,
                                                 t.selected + (first + r) * t.selected_stride);
}

void attend(const Pass& pass, int layer, const MlaTape& t, float* context) {
  const MlaConfig& m = pass.model.config().mla;
  struct Item {
    std::size_t span;
    std::int64_t begin, end;
  };
  std::vector<Item> items;
  for (std::size_t s = 0; s < pass.spans.size(); ++s) {
    const std::int64_t n = pass.first_row[s + 1] - pass.first_row[s];
    for (std::int64_t r = 0; r < n; r += kScoreRows) items.push_back({s, r, std::min(n, r + kScoreRows)});
  }
  for_rows(pass, static_cast<std::int64_t>(items.size()), 1, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t i = from; i < to; ++i) {
      const Item& item = items[static_cast<std::size_t>(i)];
      const Span& span = pass.spans[item.span];
      const bool selected = needs_selection(pass, span);
      if (selected) select_rows(pass, layer, item.span, item.begin, item.end, t);
      const std::int64_t row = pass.first_row[item.span] + item.begin;
      numerics::mla_attention(mla_shape(m), pass.layout.latents(span.state, layer), span.position + item.begin,
                              item.end - item.begin, t.q_abs + row * m.heads * m.key_dim(),
                              selected ? t.selected + row * t.selected_stride : nullptr, t.selected_stride,
                              selected ? t.counts + row : nullptr, context + row * m.heads * m.latent,
                              t.lse + row * m.heads);
    }
  });
}

// Stored rows read back: what backward differentiates is what attention saw.
std::vector<float*> read_back(const Pass& pass, Arena& arena, int dim, const auto& view_of) {
  std::vector<float*> out;
  for (const Span& span : pass.spans) {
    const auto n = static_cast<std::int64_t>(span.tokens.size());
    out.push_back(arena.take<float>(n * dim));
    numerics::load_rows(view_of(span), 0, n, out.back());
  }
  return out;
}

}  // namespace

// forward: q_abs = absorb(q); store [latent | k_pe]; index keys stored, set chosen; context = attention; o = W_UV
// context; out = o_proj(o * sigmoid(gate x))
void mla_layer_forward(const Pass& pass, int layer, Signal x, float* out, MlaTape* tape) {
  const Config& config = pass.model.config();
  const MlaConfig& m = config.mla;
  const MlaIds& ids = pass.model.layers[static_cast<std::size_t>(layer)].mla;
  const std::int64_t rows = pass.rows;
  Arena& arena = tape != nullptr ? pass.keep : pass.scratch;
  MlaTape local{};
  MlaTape& t = tape != nullptr ? *tape : local;
  t.x = x;
  query_forward(pass, ids, arena, t);
  keys_forward(pass, layer, ids, arena, t);
  t.selected = nullptr;
  t.counts = nullptr;
  t.selected_stride = config.index.top_k;
  if (config.index.heads != 0) {
    index_forward(pass, layer, ids, arena, t);
    if (std::any_of(pass.spans.begin(), pass.spans.end(),
                    [&](const Span& span) { return needs_selection(pass, span); })) {
      t.selected = arena.take<std::int32_t>(rows * config.index.top_k);
      t.counts = arena.take<std::int32_t>(rows);
    }
  }
  t.lse = arena.take<float>(rows * m.heads);
  float* context = arena.take<float>(rows * m.heads * m.latent);
  attend(pass, layer, t, context);
  t.context_raw = context;
  if (tape != nullptr) {
    context = arena.take<float>(rows * m.heads * m.latent);
    std::copy_n(t.context_raw, rows * m.heads * m.latent, context);
    t.keys =
        read_back(pass, arena, m.key_dim(), [&](const Span& span) { return pass.layout.latents(span.state, layer); });
    if (config.index.heads != 0)
      t.index_keys = read_back(pass, arena, config.index.dim,
                               [&](const Span& span) { return pass.layout.index_keys(span.state, layer); });
  }
  t.context = make_signal(pass, context, rows, m.heads * m.latent, arena);
  const std::int64_t width = m.heads * m.value;
  t.o = arena.take<float>(rows * width);
  for (int h = 0; h < m.heads; ++h) {
    const std::int64_t from = static_cast<std::int64_t>(h) * m.latent;
    const Signal head{t.context.f + from, t.context.b == nullptr ? nullptr : t.context.b + from};
    linear_forward(pass, {.id = ids.kv_b, .part = m.heads + h, .ldx = m.heads * m.latent, .ldy = width}, head, rows,
                   pass.runs, t.o + static_cast<std::int64_t>(h) * m.value);
  }
  float* gated = t.o;
  if (ids.gate != kNone) {
    t.og = arena.take<float>(rows * width);
    gated = arena.take<float>(rows * width);
    linear_forward(pass, {.id = ids.gate}, x, rows, pass.runs, t.og);
    numerics::sigmoid_gate(t.o, t.og, rows * width, gated);
  }
  t.out = make_signal(pass, gated, rows, width, arena);
  linear_forward(pass, {.id = ids.o}, t.out, rows, pass.runs, out);
}

namespace {

// KL(p || q) for one row: p the head-averaged attention over the list, q the soft-max of the index scores over the same
// list. d_scores = weight * (q - p).
double index_row_loss(const float* mean_probs, const float* scores, const std::int32_t* list, std::int64_t n,
                      float weight, float* d_scores) {
  double top = -1e300;
  for (std::int64_t j = 0; j < n; ++j) top = std::max(top, static_cast<double>(scores[list == nullptr ? j : list[j]]));
  double sum = 0;
  for (std::int64_t j = 0; j < n; ++j)
    sum += std::exp(static_cast<double>(scores[list == nullptr ? j : list[j]]) - top);
  double loss = 0;
  for (std::int64_t j = 0; j < n; ++j) {
    const double log_q = static_cast<double>(scores[list == nullptr ? j : list[j]]) - top - std::log(sum);
    const double p = mean_probs[j];
    if (p > 0) loss += p * (std::log(p) - log_q);
    d_scores[j] = static_cast<float>(static_cast<double>(weight) * (std::exp(log_q) - p));
  }
  return loss;
}

// Trains the indexer towards the attention it replaces; nothing flows to the layer's input (spec/model.md 4.7).
void index_backward(const Pass& pass, int layer, const MlaIds& ids, const MlaTape& t,
                    const std::vector<float*>& mean_probs, Gradients& gradients) {
  const IndexConfig& c = pass.model.config().index;
  const std::int64_t rows = pass.rows;
  Arena& arena = pass.scratch;
  float* d_iq = arena.take_zeroed<float>(rows * c.heads * c.dim);
  float* d_iw = arena.take_zeroed<float>(rows * c.heads);
  float* d_ik = arena.take_zeroed<float>(rows * c.dim);
  for (std::size_t s = 0; s < pass.spans.size(); ++s) {
    const ArenaScope scope(arena);
    const std::int64_t first = pass.first_row[s], n = pass.first_row[s + 1] - first;
    const bool selected = needs_selection(pass, pass.spans[s]);
    const std::int64_t stride = selected ? t.selected_stride : n;
    float* scores = arena.take<float>(n * n);
    float* d_scores = arena.take_zeroed<float>(n * stride);
    numerics::index_scores({c.heads, c.dim}, pass.layout.index_keys(pass.spans[s].state, layer), 0, n,
                           t.iq + first * c.heads * c.dim, t.iw + first * c.heads, scores, n);
    for (std::int64_t r = 0; r < n; ++r) {
      const std::int32_t* list = selected ? t.selected + (first + r) * stride : nullptr;
      const std::int64_t entries = selected ? t.counts[first + r] : r + 1;
      gradients.index_loss += index_row_loss(mean_probs[s] + r * stride, scores + r * n, list, entries,
                                             gradients.index_loss_weight, d_scores + r * stride);
    }
    numerics::index_scores_backward({c.heads, c.dim}, t.index_keys[s], n, t.iq + first * c.heads * c.dim,
                                    t.iw + first * c.heads, selected ? t.selected + first * stride : nullptr, stride,
                                    selected ? t.counts + first : nullptr, d_scores, d_iq + first * c.heads * c.dim,
                                    d_iw + first * c.heads, d_ik + first * c.dim);
  }
  const float scale = index_weight_scale(c);
  for (std::int64_t i = 0; i < rows * c.heads; ++i) d_iw[i] *= scale;
  float* d_ik_raw = arena.take_zeroed<float>(rows * c.dim);
  numerics::layer_norm_backward(t.ik_raw, pass.model.vector(ids.index_k_norm), t.ik_stats, d_ik, rows, c.dim, d_ik_raw,
                                parameter_gradient(gradients, ids.index_k_norm),
                                parameter_gradient(gradients, ids.index_k_norm_bias));
  linear_backward(pass, {.id = ids.index_q}, t.qr.f, rows, pass.runs, d_iq, nullptr, gradients);
  linear_backward(pass, {.id = ids.index_k}, t.x.f, rows, pass.runs, d_ik_raw, nullptr, gradients);
  linear_backward(pass, {.id = ids.index_w}, t.x.f, rows, pass.runs, d_iw, nullptr, gradients);
}

void query_backward(const Pass& pass, const MlaIds& ids, const MlaTape& t, const float* d_q_abs, float* d_x,
                    Gradients& gradients) {
  const MlaConfig& m = pass.model.config().mla;
  const std::int64_t rows = pass.rows, width = m.heads * m.query_dim();
  float* d_q = pass.scratch.take_zeroed<float>(rows * width);
  for (int h = 0; h < m.heads; ++h) {
    const std::int64_t from = static_cast<std::int64_t>(h) * m.query_dim(),
                       to = static_cast<std::int64_t>(h) * m.key_dim();
    linear_backward(pass, {.id = ids.kv_b, .part = h, .ldx = width, .ldy = m.heads * m.key_dim()}, t.q.f + from, rows,
                    pass.runs, d_q_abs + to, d_q + from, gradients);
    for (std::int64_t r = 0; r < rows; ++r)
      for (int e = 0; e < m.extra; ++e)
        d_q[r * width + from + m.nope + e] += d_q_abs[r * m.heads * m.key_dim() + to + m.latent + e];
  }
  if (ids.q_a == kNone) {
    linear_backward(pass, {.id = ids.q}, t.x.f, rows, pass.runs, d_q, d_x, gradients);
    return;
  }
  float* d_qr = pass.scratch.take_zeroed<float>(rows * m.q_lora);
  float* d_qa = pass.scratch.take_zeroed<float>(rows * m.q_lora);
  linear_backward(pass, {.id = ids.q_b}, t.qr.f, rows, pass.runs, d_q, d_qr, gradients);
  numerics::rms_norm_backward(t.qa, pass.model.vector(ids.q_a_norm), t.qa_inv, d_qr, rows, m.q_lora, d_qa,
                              parameter_gradient(gradients, ids.q_a_norm));
  linear_backward(pass, {.id = ids.q_a}, t.x.f, rows, pass.runs, d_qa, d_x, gradients);
}

void keys_backward(const Pass& pass, const MlaIds& ids, const MlaTape& t, const float* d_keys, float* d_x,
                   Gradients& gradients) {
  const MlaConfig& m = pass.model.config().mla;
  const std::int64_t rows = pass.rows, kd = m.key_dim();
  float* d_normed = pass.scratch.take<float>(rows * m.latent);
  float* d_latent = pass.scratch.take_zeroed<float>(rows * m.latent);
  float* d_raw = pass.scratch.take<float>(rows * kd);
  for (std::int64_t r = 0; r < rows; ++r) std::copy_n(d_keys + r * kd, m.latent, d_normed + r * m.latent);
  numerics::rms_norm_backward(t.c, pass.model.vector(ids.kv_a_norm), t.c_inv, d_normed, rows, m.latent, d_latent,
                              parameter_gradient(gradients, ids.kv_a_norm));
  for (std::int64_t r = 0; r < rows; ++r) {
    std::copy_n(d_latent + r * m.latent, m.latent, d_raw + r * kd);
    std::copy_n(d_keys + r * kd + m.latent, m.extra, d_raw + r * kd + m.latent);
  }
  linear_backward(pass, {.id = ids.kv_a}, t.x.f, rows, pass.runs, d_raw, d_x, gradients);
}

}  // namespace

void mla_layer_backward(const Pass& pass, int layer, const MlaTape& t, const float* d_out, float* d_x,
                        Gradients& gradients) {
  const ArenaScope scope(pass.scratch);
  const MlaConfig& m = pass.model.config().mla;
  const MlaIds& ids = pass.model.layers[static_cast<std::size_t>(layer)].mla;
  const std::int64_t rows = pass.rows, width = m.heads * m.value;
  Arena& arena = pass.scratch;
  float* d_gated = arena.take_zeroed<float>(rows * width);
  linear_backward(pass, {.id = ids.o}, t.out.f, rows, pass.runs, d_out, d_gated, gradients);
  float* d_o = d_gated;
  if (ids.gate != kNone) {
    d_o = arena.take_zeroed<float>(rows * width);
    float* d_og = arena.take_zeroed<float>(rows * width);
    numerics::sigmoid_gate_backward(t.o, t.og, d_gated, rows * width, d_o, d_og);
    linear_backward(pass, {.id = ids.gate}, t.x.f, rows, pass.runs, d_og, d_x, gradients);
  }
  float* d_context = arena.take_zeroed<float>(rows * m.heads * m.latent);
  for (int h = 0; h < m.heads; ++h) {
    const std::int64_t from = static_cast<std::int64_t>(h) * m.latent;
    linear_backward(pass, {.id = ids.kv_b, .part = m.heads + h, .ldx = m.heads * m.latent, .ldy = width},
                    t.context.f + from, rows, pass.runs, d_o + static_cast<std::int64_t>(h) * m.value, d_context + from,
                    gradients);
  }
  float* d_q_abs = arena.take_zeroed<float>(rows * m.heads * m.key_dim());
  float* d_keys = arena.take_zeroed<float>(rows * m.key_dim());
  const bool train_index = gradients.index_loss_weight > 0 && ids.index_q != kNone;
  std::vector<float*> mean_probs(pass.spans.size(), nullptr);
  for (std::size_t s = 0; s < pass.spans.size(); ++s) {
    const std::int64_t row = pass.first_row[s], n = pass.first_row[s + 1] - row;
    const bool selected = needs_selection(pass, pass.spans[s]);
    const std::int64_t stride = selected ? t.selected_stride : n;
    if (train_index) mean_probs[s] = arena.take_zeroed<float>(n * stride);
    numerics::mla_attention_backward(mla_shape(m), t.keys[s], n, t.q_abs + row * m.heads * m.key_dim(),
                                     selected ? t.selected + row * stride : nullptr, stride,
                                     selected ? t.counts + row : nullptr, t.context_raw + row * m.heads * m.latent,
                                     t.lse + row * m.heads, d_context + row * m.heads * m.latent,
                                     d_q_abs + row * m.heads * m.key_dim(), d_keys + row * m.key_dim(), mean_probs[s]);
  }
  if (train_index) index_backward(pass, layer, ids, t, mean_probs, gradients);
  query_backward(pass, ids, t, d_q_abs, d_x, gradients);
  keys_backward(pass, ids, t, d_keys, d_x, gradients);
}

}  // namespace tidelock::model
