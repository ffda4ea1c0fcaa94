#include <algorithm>

#include "model/layers.hpp"

namespace tidelock::model {

using numerics::Input;

namespace {

void activate(const Config& c, const float* gate, const float* up, std::int64_t n, float* y) {
  if (c.activation == Activation::situ)
    numerics::situ_glu(gate, up, n, c.situ_beta, c.situ_linear_beta, y);
  else
    numerics::silu_glu(gate, up, n, y);
}

void activate_backward(const Config& c, const GluTape& t, const float* d_y, std::int64_t n, float* d_gate,
                       float* d_up) {
  if (c.activation == Activation::situ)
    numerics::situ_glu_backward(t.gate, t.up, d_y, n, c.situ_beta, c.situ_linear_beta, d_gate, d_up);
  else
    numerics::silu_glu_backward(t.gate, t.up, d_y, n, d_gate, d_up);
}

// out = down(act(gate x, up x)): the dense layer and the shared experts.
void glu_forward(const Pass& pass, const FfnIds& ids, Signal x, float* out, Arena& arena, GluTape& t) {
  const std::int64_t rows = pass.rows, width = pass.model.parameter(ids.gate).shape[0];
  t.gate = arena.take<float>(rows * width);
  t.up = arena.take<float>(rows * width);
  float* inner = arena.take<float>(rows * width);
  linear_forward(pass, {.id = ids.gate}, x, rows, pass.runs, t.gate);
  linear_forward(pass, {.id = ids.up, .input = Input::same}, x, rows, pass.runs, t.up);
  activate(pass.model.config(), t.gate, t.up, rows * width, inner);
  t.inner = make_signal(pass, inner, rows, width, arena);
  linear_forward(pass, {.id = ids.down}, t.inner, rows, pass.runs, out);
}

void glu_backward(const Pass& pass, const FfnIds& ids, const float* x, const GluTape& t, const float* d_out, float* d_x,
                  Gradients& gradients) {
  const ArenaScope scope(pass.scratch);
  const std::int64_t rows = pass.rows, width = pass.model.parameter(ids.gate).shape[0];
  float* d_inner = pass.scratch.take_zeroed<float>(rows * width);
  float* d_gate = pass.scratch.take_zeroed<float>(rows * width);
  float* d_up = pass.scratch.take_zeroed<float>(rows * width);
  linear_backward(pass, {.id = ids.down}, t.inner.f, rows, pass.runs, d_out, d_inner, gradients);
  activate_backward(pass.model.config(), t, d_inner, rows * width, d_gate, d_up);
  linear_backward(pass, {.id = ids.gate}, x, rows, pass.runs, d_gate, d_x, gradients);
  linear_backward(pass, {.id = ids.up}, x, rows, pass.runs, d_up, d_x, gradients);
}

// Adapter runs of the gathered rows of one expert: the batch's runs, seen through the (ascending) list of slots.
std::vector<AdapterRun> gathered_runs(const Pass& pass, std::span<const std::int32_t> slots, int top_k) {
  std::vector<AdapterRun> runs;
  std::size_t run = 0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::int64_t row = slots[i] / top_k;
    while (row >= pass.runs[run].end) ++run;
    const auto at = static_cast<std::int64_t>(i);
    if (!runs.empty() && runs.back().adapter == pass.runs[run].adapter)
      runs.back().end = at + 1;
    else
      runs.push_back({at, at + 1, pass.runs[run].adapter});
  }
  return runs;
}

// Calls body(expert, first gathered row, rows, adapter runs) for every expert that has rows.
template <typename F>
void for_experts(const Pass& pass, const FfnTape& t, F&& body) {
  const ExpertConfig& e = pass.model.config().experts;
  for (int expert = 0; expert < e.count; ++expert) {
    const std::int64_t begin = t.expert_begin[static_cast<std::size_t>(expert)],
                       end = t.expert_begin[static_cast<std::size_t>(expert) + 1];
    if (begin == end) continue;
    const auto slots =
        std::span(t.slot_rows).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
    const auto runs = gathered_runs(pass, slots, e.top_k);
    body(static_cast<std::size_t>(expert), begin, end - begin, runs);
  }
}

// Experts' weights that may have to come from the disk: asks for those that a layer uses, in the order of use, a window
// ahead of the computation, so that the disk works beside it and what was read is not gone before its turn.
class ReadAhead {
 public:
  static constexpr std::uint64_t kWindow = 128U << 20;  // bytes

  ReadAhead(const Pass& pass, const FfnIds& ids, const FfnTape& t) : model_(pass.model) {
    if (!model_.mapped()) return;
    const auto used = [&](auto&& add) {
      for_experts(pass, t, [&](std::size_t i, std::int64_t, std::int64_t, const auto&) { add(i); });
    };
    used([&](std::size_t i) { order_.insert(order_.end(), {ids.expert_gate[i], ids.expert_up[i]}); });
    used([&](std::size_t i) { order_.push_back(ids.expert_down[i]); });
    ask();
  }
  // The next `n` of the order are about to be read.
  void advance(int n) {
    for (int i = 0; i < n && done_ < order_.size(); ++i) ahead_ -= bytes(order_[done_++]);
    ask();
  }

 private:
  std::uint64_t bytes(ParameterId id) const { return model_.matrix(id).forward.bytes(); }
  void ask() {
    for (; asked_ < order_.size() && ahead_ < kWindow; ++asked_) {
      model_.will_need(order_[asked_]);
      ahead_ += bytes(order_[asked_]);
    }
  }

  const Model& model_;
  std::vector<ParameterId> order_;
  std::size_t asked_ = 0, done_ = 0;
  std::uint64_t ahead_ = 0;  // bytes asked for and not yet used
};

Signal offset(Signal x, std::int64_t elements) {
  return {x.f + elements, x.b == nullptr ? nullptr : x.b + elements};
}

// Groups the (row, slot) pairs by expert, ascending within each: a counting sort.
void group_by_expert(const ExpertConfig& e, std::int64_t rows, FfnTape& t) {
  const std::int64_t pairs = rows * e.top_k;
  t.expert_begin.assign(static_cast<std::size_t>(e.count) + 1, 0);
  for (std::int64_t i = 0; i < pairs; ++i) ++t.expert_begin[static_cast<std::size_t>(t.ids[i]) + 1];
  for (std::size_t i = 0; i < static_cast<std::size_t>(e.count); ++i) t.expert_begin[i + 1] += t.expert_begin[i];
  std::vector<std::int64_t> next(t.expert_begin.begin(), t.expert_begin.end() - 1);
  t.slot_rows.resize(static_cast<std::size_t>(pairs));
  for (std::int64_t i = 0; i < pairs; ++i) {
    std::int64_t& at = next[static_cast<std::size_t>(t.ids[i])];
    t.slot_rows[static_cast<std::size_t>(at++)] = static_cast<std::int32_t>(i);
  }
}

Signal gather(const Pass& pass, const FfnTape& t, int top_k, std::int64_t width, Arena& arena) {
  const auto pairs = static_cast<std::int64_t>(t.slot_rows.size());
  Signal out{arena.take<float>(pairs * width), t.z.b == nullptr ? nullptr : arena.take<bf16>(pairs * width)};
  for_rows(pass, pairs, 256, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t row = t.slot_rows[static_cast<std::size_t>(i)] / top_k;
      std::copy_n(t.z.f + row * width, width, out.f + i * width);
      if (out.b != nullptr) std::copy_n(t.z.b + row * width, width, out.b + i * width);
    }
  });
  return out;
}

void experts_forward(const Pass& pass, const FfnIds& ids, Arena& arena, FfnTape& t) {
  const Config& c = pass.model.config();
  const ExpertConfig& e = c.experts;
  const std::int64_t rows = pass.rows, width = c.expert_width(), pairs = rows * e.top_k, inner_width = e.intermediate;
  group_by_expert(e, rows, t);
  ReadAhead ahead(pass, ids, t);
  t.gathered = gather(pass, t, e.top_k, width, arena);
  t.expert.gate = arena.take<float>(pairs * inner_width);
  t.expert.up = arena.take<float>(pairs * inner_width);
  float* inner = arena.take<float>(pairs * inner_width);
  for_experts(pass, t, [&](std::size_t i, std::int64_t begin, std::int64_t n, const auto& runs) {
    ahead.advance(2);
    linear_forward(pass, {.id = ids.expert_gate[i]}, offset(t.gathered, begin * width), n, runs,
                   t.expert.gate + begin * inner_width);
    linear_forward(pass, {.id = ids.expert_up[i], .input = Input::same}, offset(t.gathered, begin * width), n, runs,
                   t.expert.up + begin * inner_width);
  });
  activate(c, t.expert.gate, t.expert.up, pairs * inner_width, inner);
  t.expert.inner = make_signal(pass, inner, pairs, inner_width, arena);
  t.expert_out = arena.take<float>(pairs * width);
  for_experts(pass, t, [&](std::size_t i, std::int64_t begin, std::int64_t n, const auto& runs) {
    ahead.advance(1);
    linear_forward(pass, {.id = ids.expert_down[i]}, offset(t.expert.inner, begin * inner_width), n, runs,
                   t.expert_out + begin * width);
  });
  // Ascending slot order, whatever expert computed it (contract rule 7).
  std::int32_t* place = pass.scratch.take<std::int32_t>(pairs);
  for (std::int64_t i = 0; i < pairs; ++i)
    place[t.slot_rows[static_cast<std::size_t>(i)]] = static_cast<std::int32_t>(i);
  t.sum = arena.take_zeroed<float>(rows * width);
  for (std::int64_t r = 0; r < rows; ++r)
    for (int slot = 0; slot < e.top_k; ++slot)
      numerics::axpy(t.weights[r * e.top_k + slot], t.expert_out + place[r * e.top_k + slot] * width, width,
                     t.sum + r * width);
}

}  // namespace

// forward: out = shared(x) + latent_up(norm(sum of w_e expert_e(latent_down x))), or the dense MLP
void ffn_forward(const Pass& pass, int layer, Signal x, const float* router_in, float* out, FfnTape* tape) {
  const Config& c = pass.model.config();
  const FfnIds& ids = pass.model.layers[static_cast<std::size_t>(layer)].ffn;
  Arena& arena = tape != nullptr ? pass.keep : pass.scratch;
  FfnTape local;
  FfnTape& t = tape != nullptr ? *tape : local;
  t.x = x;
  t.router_in = router_in;
  if (ids.gate != kNone)
    glu_forward(pass, ids, x, out, arena, t.dense);
  else
    std::fill_n(out, pass.rows * c.hidden, 0.0F);
  if (c.is_dense_ffn(layer)) return;

  const ExpertConfig& e = c.experts;
  const std::int64_t rows = pass.rows, width = c.expert_width();
  t.logits = arena.take<float>(rows * e.count);
  t.ids = arena.take<std::int32_t>(rows * e.top_k);
  t.weights = arena.take<float>(rows * e.top_k);
  linear_forward(pass, {.id = ids.router}, {const_cast<float*>(router_in), nullptr}, rows, {}, t.logits);
  numerics::route({e.count, e.top_k, e.renormalize, e.scale}, t.logits, pass.model.vector(ids.router_bias), rows, t.ids,
                  t.weights);
  t.z = x;
  if (ids.latent_down != kNone) {
    float* z = arena.take<float>(rows * width);
    linear_forward(pass, {.id = ids.latent_down}, x, rows, pass.runs, z);
    t.z = make_signal(pass, z, rows, width, arena);
  }
  experts_forward(pass, ids, arena, t);
  if (ids.latent_up == kNone) {
    numerics::axpy(1.0F, t.sum, rows * width, out);
    return;
  }
  float* normed = arena.take<float>(rows * width);
  t.sum_inv = arena.take<float>(rows);
  if (ids.latent_norm != kNone)
    numerics::rms_norm(t.sum, pass.model.vector(ids.latent_norm), rows, width, c.rms_eps, normed, t.sum_inv);
  else
    std::copy_n(t.sum, rows * width, normed);
  t.sum_signal = make_signal(pass, normed, rows, width, arena);
  linear_forward(pass, {.id = ids.latent_up, .output = Output::add}, t.sum_signal, rows, pass.runs, out);
}

namespace {

// d_sum [rows, width] -> d_z (added), d_weights [rows, top_k] (set).
void experts_backward(const Pass& pass, const FfnIds& ids, const FfnTape& t, const float* d_sum, float* d_z,
                      float* d_weights, Gradients& gradients) {
  const Config& c = pass.model.config();
  const ExpertConfig& e = c.experts;
  const std::int64_t width = c.expert_width(), pairs = pass.rows * e.top_k, inner_width = e.intermediate;
  Arena& arena = pass.scratch;
  float* d_expert_out = arena.take_zeroed<float>(pairs * width);
  for (std::int64_t i = 0; i < pairs; ++i) {
    const std::int32_t pair = t.slot_rows[static_cast<std::size_t>(i)];
    const float* d_row = d_sum + (pair / e.top_k) * width;
    const float* y = t.expert_out + i * width;
    float dot = 0;
    for (std::int64_t d = 0; d < width; ++d) dot += y[d] * d_row[d];
    d_weights[pair] = dot;
    numerics::axpy(t.weights[pair], d_row, width, d_expert_out + i * width);
  }
  float* d_inner = arena.take_zeroed<float>(pairs * inner_width);
  float* d_gate = arena.take_zeroed<float>(pairs * inner_width);
  float* d_up = arena.take_zeroed<float>(pairs * inner_width);
  float* d_gathered = arena.take_zeroed<float>(pairs * width);
  for_experts(pass, t, [&](std::size_t i, std::int64_t begin, std::int64_t n, const auto& runs) {
    linear_backward(pass, {.id = ids.expert_down[i]}, t.expert.inner.f + begin * inner_width, n, runs,
                    d_expert_out + begin * width, d_inner + begin * inner_width, gradients);
  });
  activate_backward(c, t.expert, d_inner, pairs * inner_width, d_gate, d_up);
  for_experts(pass, t, [&](std::size_t i, std::int64_t begin, std::int64_t n, const auto& runs) {
    const float* x = t.gathered.f + begin * width;
    linear_backward(pass, {.id = ids.expert_gate[i]}, x, n, runs, d_gate + begin * inner_width,
                    d_gathered + begin * width, gradients);
    linear_backward(pass, {.id = ids.expert_up[i]}, x, n, runs, d_up + begin * inner_width, d_gathered + begin * width,
                    gradients);
  });
  for (std::int64_t i = 0; i < pairs; ++i)
    numerics::axpy(1.0F, d_gathered + i * width, width,
                   d_z + (t.slot_rows[static_cast<std::size_t>(i)] / e.top_k) * width);
}

void count_load(const ExpertConfig& e, int layer, const FfnTape& t, Gradients& gradients) {
  if (gradients.expert_load.empty()) return;
  for (std::size_t i = 0; i < static_cast<std::size_t>(e.count); ++i)
    gradients.expert_load[static_cast<std::size_t>(layer) * static_cast<std::size_t>(e.count) + i] +=
        t.expert_begin[i + 1] - t.expert_begin[i];
}

}  // namespace

void ffn_backward(const Pass& pass, int layer, const FfnTape& t, const float* d_out, float* d_x, Gradients& gradients) {
  const ArenaScope scope(pass.scratch);
  const Config& c = pass.model.config();
  const FfnIds& ids = pass.model.layers[static_cast<std::size_t>(layer)].ffn;
  if (ids.gate != kNone) glu_backward(pass, ids, t.x.f, t.dense, d_out, d_x, gradients);
  if (c.is_dense_ffn(layer)) return;

  const ExpertConfig& e = c.experts;
  const std::int64_t rows = pass.rows, width = c.expert_width();
  Arena& arena = pass.scratch;
  count_load(e, layer, t, gradients);
  const float* d_sum = d_out;
  if (ids.latent_up != kNone) {
    float* d_normed = arena.take_zeroed<float>(rows * width);
    linear_backward(pass, {.id = ids.latent_up}, t.sum_signal.f, rows, pass.runs, d_out, d_normed, gradients);
    d_sum = d_normed;
    if (ids.latent_norm != kNone) {
      float* d = arena.take_zeroed<float>(rows * width);
      numerics::rms_norm_backward(t.sum, pass.model.vector(ids.latent_norm), t.sum_inv, d_normed, rows, width, d,
                                  parameter_gradient(gradients, ids.latent_norm));
      d_sum = d;
    }
  }
  float* d_z = ids.latent_down != kNone ? arena.take_zeroed<float>(rows * width) : d_x;
  float* d_weights = arena.take<float>(rows * e.top_k);
  experts_backward(pass, ids, t, d_sum, d_z, d_weights, gradients);
  if (ids.latent_down != kNone)
    linear_backward(pass, {.id = ids.latent_down}, t.x.f, rows, pass.runs, d_z, d_x, gradients);
  float* d_logits = arena.take_zeroed<float>(rows * e.count);
  numerics::route_backward({e.count, e.top_k, e.renormalize, e.scale}, t.logits, t.ids, t.weights, d_weights, rows,
                           d_logits);
  linear_backward(pass, {.id = ids.router}, t.router_in, rows, {}, d_logits, d_x, gradients);
}

}  // namespace tidelock::model
