#include "numerics/rowops_reference.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace tidelock::numerics::reference {
namespace {

// The contract's reduction: 16 strided chains, then lane i meets i+8, i+4, i+2, i+1. `term(i, sum)` continues a chain;
// positions past n in the last group of 16 add +0.
template <class Term>
float strided_sum(Index n, Term term) {
  float chain[16];
  for (Index lane = 0; lane < 16; ++lane) {
    chain[lane] = 0.0F;
    const Index groups = (n + 15) / 16;
    for (Index group = 0; group < groups; ++group) {
      const Index i = group * 16 + lane;
      chain[lane] = i < n ? term(i, chain[lane]) : chain[lane] + 0.0F;
    }
  }
  for (int width = 8; width >= 1; width /= 2)
    for (int lane = 0; lane < width; ++lane) chain[lane] = chain[lane] + chain[lane + width];
  return chain[0];
}

float dot(const float* a, const float* b, Index n) {
  return strided_sum(n, [&](Index i, float sum) { return std::fma(a[i], b[i], sum); });
}

}  // namespace

void round_to_bf16(float* x, Index n, bf16* out) {
  for (Index i = 0; i < n; ++i) {
    out[i] = to_bf16(x[i]);
    x[i] = to_float(out[i]);
  }
}

void rms_norm(const float* x, const float* w, Index rows, Index dim, float eps, float* y, float* inv_rms) {
  for (Index r = 0; r < rows; ++r) {
    const float* row = x + r * dim;
    const float mean_square = dot(row, row, dim) / static_cast<float>(dim);
    const float inv = rsqrt(mean_square + eps);
    for (Index i = 0; i < dim; ++i) y[r * dim + i] = row[i] * inv * w[i];
    if (inv_rms != nullptr) inv_rms[r] = inv;
  }
}

void layer_norm(const float* x, const float* w, const float* b, Index rows, Index dim, float eps, float* y,
                float* stats) {
  for (Index r = 0; r < rows; ++r) {
    const float* row = x + r * dim;
    const float mean = strided_sum(dim, [&](Index i, float sum) { return sum + row[i]; }) / static_cast<float>(dim);
    const float square = strided_sum(dim, [&](Index i, float sum) {
      const float d = row[i] - mean;
      return std::fma(d, d, sum);
    });
    const float inv = rsqrt(square / static_cast<float>(dim) + eps);
    for (Index i = 0; i < dim; ++i) y[r * dim + i] = std::fma((row[i] - mean) * inv, w[i], b[i]);
    if (stats != nullptr) {
      stats[2 * r] = mean;
      stats[2 * r + 1] = inv;
    }
  }
}

void l2_norm(const float* x, Index rows, Index dim, float eps, float scale, float* y, float* inv) {
  for (Index r = 0; r < rows; ++r) {
    const float* row = x + r * dim;
    const float norm = rsqrt(dot(row, row, dim) + eps);
    for (Index i = 0; i < dim; ++i) y[r * dim + i] = row[i] * norm * scale;
    if (inv != nullptr) inv[r] = norm;
  }
}

void silu_glu(const float* gate, const float* up, Index n, float* y) {
  for (Index i = 0; i < n; ++i) y[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

void situ_glu(const float* gate, const float* up, Index n, float beta, float linear_beta, float* y) {
  for (Index i = 0; i < n; ++i) {
    const float soft_gate = beta * tanh(gate[i] / beta);
    const float soft_up = linear_beta * tanh(up[i] / linear_beta);
    y[i] = soft_gate * sigmoid(gate[i]) * soft_up;
  }
}

void sigmoid_rows(const float* x, Index n, float* y) {
  for (Index i = 0; i < n; ++i) y[i] = sigmoid(x[i]);
}

void sigmoid_gate(const float* x, const float* gate, Index n, float* y) {
  for (Index i = 0; i < n; ++i) y[i] = x[i] * sigmoid(gate[i]);
}

void axpy(float a, const float* x, Index n, float* y) {
  for (Index i = 0; i < n; ++i) y[i] = std::fma(a, x[i], y[i]);
}

void causal_conv(const float* z, const float* w, Index rows, Index channels, float* tail, float* u, float* y) {
  std::vector<float> inputs(tail, tail + 3 * channels);  // the tail, then every row: input t+j meets tap j of row t
  inputs.insert(inputs.end(), z, z + rows * channels);
  for (Index t = 0; t < rows; ++t)
    for (Index c = 0; c < channels; ++c) {
      float sum = 0.0F;
      for (Index j = 0; j < 4; ++j) sum = std::fma(w[j * channels + c], inputs[(t + j) * channels + c], sum);
      if (u != nullptr) u[t * channels + c] = sum;
      y[t * channels + c] = sum * sigmoid(sum);
    }
  std::copy(inputs.end() - 3 * channels, inputs.end(), tail);
}

void kda_gate(const GateShape& shape, const float* raw, const float* dt_bias, const float* a_log, Index rows,
              float* g) {
  for (Index r = 0; r < rows; ++r)
    for (Index h = 0; h < shape.heads; ++h)
      for (Index d = 0; d < shape.dim; ++d) {
        const Index at = (r * shape.heads + h) * shape.dim + d;
        const float x = raw[at] + dt_bias[h * shape.dim + d];
        const float rate = exp(a_log[h]);
        g[at] = shape.bounded ? shape.lower_bound * sigmoid(rate * x) : -rate * softplus(x);
      }
}

void route(const RouterShape& shape, const float* logits, const float* bias, Index rows, std::int32_t* ids,
           float* weights) {
  std::vector<float> score(static_cast<std::size_t>(shape.experts));
  std::vector<float> value(score.size());
  std::vector<std::int32_t> order(score.size());
  for (Index r = 0; r < rows; ++r) {
    for (std::size_t e = 0; e < score.size(); ++e) {
      score[e] = sigmoid(logits[r * shape.experts + static_cast<Index>(e)]);
      value[e] = score[e] + bias[e];
      if (std::isnan(value[e])) value[e] = -std::numeric_limits<float>::infinity();
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return value[static_cast<std::size_t>(a)] > value[static_cast<std::size_t>(b)];
    });
    float sum = 0.0F;
    for (Index k = 0; k < shape.top_k; ++k) sum += score[static_cast<std::size_t>(order[static_cast<std::size_t>(k)])];
    for (Index k = 0; k < shape.top_k; ++k) {
      const std::int32_t id = order[static_cast<std::size_t>(k)];
      const float s = score[static_cast<std::size_t>(id)];
      ids[r * shape.top_k + k] = id;
      weights[r * shape.top_k + k] = shape.renormalize ? s / (sum + 1e-20F) * shape.scale : s * shape.scale;
    }
  }
}

void block_mix(const float* const* sources, int n_sources, const float* w, Index rows, Index dim, float eps, float* out,
               float* probs) {
  const std::size_t count = static_cast<std::size_t>(n_sources);
  std::vector<float> p(count);
  for (Index r = 0; r < rows; ++r) {
    for (std::size_t s = 0; s < count; ++s) {
      const float* v = sources[s] + r * dim;
      p[s] = rsqrt(dot(v, v, dim) / static_cast<float>(dim) + eps) * dot(v, w, dim);
    }
    const float top = *std::max_element(p.begin(), p.end());
    float sum = 0.0F;
    for (float& x : p) {
      x = exp(x - top);
      sum += x;
    }
    for (float& x : p) x /= sum;
    for (Index i = 0; i < dim; ++i) {
      float mix = 0.0F;
      for (std::size_t s = 0; s < count; ++s) mix = std::fma(p[s], sources[s][r * dim + i], mix);
      out[r * dim + i] = mix;
    }
    if (probs != nullptr) std::copy(p.begin(), p.end(), probs + r * n_sources);
  }
}

float log_sum_exp(const float* x, Index n) {
  float top = -std::numeric_limits<float>::infinity();
  for (Index i = 0; i < n; ++i) top = std::max(top, x[i]);
  if (std::isinf(top) && top < 0.0F) top = 0.0F;
  return top + log(strided_sum(n, [&](Index i, float sum) { return sum + exp(x[i] - top); }));
}

void softmax_accumulate(const float* x, Index n, float lse, float scale, float* d_x) {
  for (Index i = 0; i < n; ++i) d_x[i] = std::fma(scale, exp(x[i] - lse), d_x[i]);
}

}  // namespace tidelock::numerics::reference
