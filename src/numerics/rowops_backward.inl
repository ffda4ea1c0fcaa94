// The derivatives of the row kernels over V16. Every d_* is added to; the order of operations is fixed here and the
// same on every instruction set. Parameter gradients take rows ascending, vectorised across columns.
#pragma once

#include "numerics/rowops.inl"

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {
namespace {

inline V16 one_minus(V16 a) {
  return sub(set1(1.0F), a);
}

// The derivative of x * sigmoid(x), given s = sigmoid(x).
inline V16 silu_slope(V16 x, V16 s) {
  return mul(s, fma(x, one_minus(s), set1(1.0F)));
}

template <class Block>
inline void accumulate(float* p, V16 a, V16 b, Block block) {
  put(p, fma(a, b, get(p, block)), block);
}

// With g = d_y * w and n = x * inv:  d_x += inv * (g - x * (g . x) * inv^2 / dim);  d_w += d_y * n.
void rms_norm_backward(const float* x, const float* w, const float* inv_rms, const float* d_y, Index rows, Index dim,
                       float* d_x, float* d_w) {
  for (Index r = 0; r < rows; ++r, x += dim, d_y += dim, d_x += dim) {
    V16 sum = set1(0.0F);
    columns(dim, [&](Index i, auto block) {
      sum = fma(mul(get(d_y + i, block), get(w + i, block)), get(x + i, block), sum);
    });
    const V16 inv = set1(inv_rms[r]);
    const V16 pull = set1(sum_tree(sum) * inv_rms[r] * inv_rms[r] / static_cast<float>(dim));
    columns(dim, [&](Index i, auto block) {
      const V16 d = get(d_y + i, block);
      const V16 v = get(x + i, block);
      accumulate(d_x + i, inv, fnma(v, pull, mul(d, get(w + i, block))), block);
      if (d_w != nullptr) accumulate(d_w + i, d, mul(v, inv), block);
    });
  }
}

// With g = d_y * w and n = (x - mean) * inv:  d_x += inv * (g - mean(g) - n * mean(g * n));  d_w += d_y * n; d_b +=
// d_y.
void layer_norm_backward(const float* x, const float* w, const float* stats, const float* d_y, Index rows, Index dim,
                         float* d_x, float* d_w, float* d_b) {
  const float count = static_cast<float>(dim);
  for (Index r = 0; r < rows; ++r, x += dim, d_y += dim, d_x += dim) {
    const V16 mean = set1(stats[2 * r]);
    const V16 inv = set1(stats[2 * r + 1]);
    V16 sum = set1(0.0F);
    V16 sum_normed = set1(0.0F);
    columns(dim, [&](Index i, auto block) {
      const V16 g = mul(get(d_y + i, block), get(w + i, block));
      sum = add(sum, g);
      sum_normed = fma(g, mul(sub(get(x + i, block), mean), inv), sum_normed);
    });
    const V16 shift = set1(sum_tree(sum) / count);
    const V16 pull = set1(sum_tree(sum_normed) / count);
    columns(dim, [&](Index i, auto block) {
      const V16 d = get(d_y + i, block);
      const V16 normed = mul(sub(get(x + i, block), mean), inv);
      accumulate(d_x + i, inv, fnma(normed, pull, sub(mul(d, get(w + i, block)), shift)), block);
      if (d_w != nullptr) accumulate(d_w + i, d, normed, block);
      if (d_b != nullptr) put(d_b + i, add(get(d_b + i, block), d), block);
    });
  }
}

// d_x += scale * inv * (d_y - x * (d_y . x) * inv^2)
void l2_norm_backward(const float* x, const float* inv, const float* d_y, Index rows, Index dim, float scale,
                      float* d_x) {
  for (Index r = 0; r < rows; ++r, x += dim, d_y += dim, d_x += dim) {
    const V16 pull = set1(dot(d_y, x, dim) * inv[r] * inv[r]);
    const V16 factor = set1(scale * inv[r]);
    columns(dim, [&](Index i, auto block) {
      accumulate(d_x + i, factor, fnma(get(x + i, block), pull, get(d_y + i, block)), block);
    });
  }
}

void silu_glu_backward(const float* gate, const float* up, const float* d_y, Index n, float* d_gate, float* d_up) {
  columns(n, [&](Index i, auto block) {
    const V16 g = get(gate + i, block);
    const V16 d = get(d_y + i, block);
    const V16 s = vsigmoid(g);
    accumulate(d_gate + i, mul(d, get(up + i, block)), silu_slope(g, s), block);
    accumulate(d_up + i, d, mul(g, s), block);
  });
}

// y = a * s * b with a = beta * tanh(gate / beta), s = sigmoid(gate), b = linear_beta * tanh(up / linear_beta).
void situ_glu_backward(const float* gate, const float* up, const float* d_y, Index n, float beta, float linear_beta,
                       float* d_gate, float* d_up) {
  const V16 one = set1(1.0F);
  const V16 beta16 = set1(beta);
  const V16 linear16 = set1(linear_beta);
  columns(n, [&](Index i, auto block) {
    const V16 g = get(gate + i, block);
    const V16 d = get(d_y + i, block);
    const V16 tanh_gate = vtanh(div(g, beta16));
    const V16 tanh_up = vtanh(div(get(up + i, block), linear16));
    const V16 s = vsigmoid(g);
    const V16 a = mul(beta16, tanh_gate);
    // a' s + a s' = s * (1 - tanh^2 + a * (1 - s))
    const V16 slope = mul(s, fma(a, one_minus(s), fnma(tanh_gate, tanh_gate, one)));
    accumulate(d_gate + i, mul(d, mul(linear16, tanh_up)), slope, block);
    accumulate(d_up + i, mul(d, mul(a, s)), fnma(tanh_up, tanh_up, one), block);
  });
}

void sigmoid_gate_backward(const float* x, const float* gate, const float* d_y, Index n, float* d_x, float* d_gate) {
  columns(n, [&](Index i, auto block) {
    const V16 d = get(d_y + i, block);
    const V16 s = vsigmoid(get(gate + i, block));
    accumulate(d_x + i, d, s, block);
    accumulate(d_gate + i, mul(d, get(x + i, block)), mul(s, one_minus(s)), block);
  });
}

// With d_u = d_y * silu'(u):  d_z[t] += w3 d_u[t] + w2 d_u[t+1] + w1 d_u[t+2] + w0 d_u[t+3];  d_w[j] += d_u[t]
// z[t-3+j]. Row t of d_z is complete three rows later; rows beyond either end count as zero.
void causal_conv_backward(const float* z, const float* w, const float* u, const float* d_y, Index rows, Index channels,
                          float* d_z, float* d_w) {
  columns(channels, [&](Index c, auto block) {
    const V16 zero = set1(0.0F);
    V16 tap[4];
    V16 d_tap[4];
    V16 z_window[4] = {zero, zero, zero, zero};  // z[t-3..t]
    V16 d_window[4] = {zero, zero, zero, zero};  // d_u[t-3..t]
    for (int j = 0; j < 4; ++j) {
      tap[j] = get(w + j * channels + c, block);
      d_tap[j] = d_w != nullptr ? get(d_w + j * channels + c, block) : zero;
    }
    for (Index t = 0; t < rows + 3; ++t) {
      for (int j = 0; j < 3; ++j) {
        z_window[j] = z_window[j + 1];
        d_window[j] = d_window[j + 1];
      }
      d_window[3] = zero;
      if (t < rows) {
        const Index at = t * channels + c;
        const V16 x = get(u + at, block);
        z_window[3] = get(z + at, block);
        d_window[3] = mul(get(d_y + at, block), silu_slope(x, vsigmoid(x)));
        for (int j = 0; j < 4; ++j) d_tap[j] = fma(d_window[3], z_window[j], d_tap[j]);
      }
      if (t < 3) continue;
      float* target = d_z + (t - 3) * channels + c;
      V16 sum = get(target, block);
      for (int j = 3; j >= 0; --j) sum = fma(tap[j], d_window[3 - j], sum);
      put(target, sum, block);
    }
    if (d_w == nullptr) return;
    for (int j = 0; j < 4; ++j) put(d_w + j * channels + c, d_tap[j], block);
  });
}

// With x = raw + dt_bias and e = exp(a_log):
//   bounded:   dg/dx = lower_bound * s(1 - s) * e, dg/da_log = that * x, s = sigmoid(e x)
//   unbounded: dg/dx = -e * sigmoid(x),            dg/da_log = -e * softplus(x)
// d_a_log takes one strided sum and tree per row.
void kda_gate_backward(const GateShape& shape, const float* raw, const float* dt_bias, const float* a_log,
                       const float* d_g, Index rows, float* d_raw, float* d_dt_bias, float* d_a_log) {
  const V16 bound = set1(shape.lower_bound);
  for (Index h = 0; h < shape.heads; ++h) {
    const float* bias = dt_bias + h * shape.dim;
    const float rate = scalar_exp(a_log[h]);
    const V16 positive = set1(rate);
    const V16 negative = set1(-rate);
    for (Index r = 0; r < rows; ++r) {
      const Index at = (r * shape.heads + h) * shape.dim;
      V16 sum = set1(0.0F);
      columns(shape.dim, [&](Index i, auto block) {
        const V16 x = add(get(raw + at + i, block), get(bias + i, block));
        const V16 d = get(d_g + at + i, block);
        V16 slope;
        V16 rate_slope;
        if (shape.bounded) {
          const V16 s = vsigmoid(mul(positive, x));
          slope = mul(mul(bound, mul(s, one_minus(s))), positive);
          rate_slope = mul(slope, x);
        } else {
          slope = mul(negative, vsigmoid(x));
          rate_slope = d_a_log != nullptr ? mul(negative, vsoftplus(x)) : slope;
        }
        accumulate(d_raw + at + i, d, slope, block);
        if (d_dt_bias != nullptr) accumulate(d_dt_bias + h * shape.dim + i, d, slope, block);
        sum = fma(d, rate_slope, sum);  // an absent element has d = 0 and a finite slope
      });
      if (d_a_log != nullptr) d_a_log[h] = d_a_log[h] + sum_tree(sum);
    }
  }
}

// w_k = s_k / S * scale with S = sum of s + epsilon:  d_s_k = scale / S * (d_w_k - sum over j of d_w_j s_j / S).
void route_backward(const RouterShape& shape, const float* logits, const std::int32_t* ids, const float*,
                    const float* d_weights, Index rows, float* d_logits) {
  float score[kMaxExperts];
  for (Index r = 0; r < rows; ++r) {
    for (Index k = 0; k < shape.top_k; ++k) score[k] = vsigmoid(F1{logits[ids[k]]}).v;
    float factor = shape.scale;
    float pull = 0.0F;
    if (shape.renormalize) {
      float sum = 0.0F;
      for (Index k = 0; k < shape.top_k; ++k) sum = sum + score[k];
      sum = sum + kRouterEpsilon;
      factor = shape.scale / sum;
      for (Index k = 0; k < shape.top_k; ++k) pull = pull + d_weights[k] * (score[k] / sum);
    }
    for (Index k = 0; k < shape.top_k; ++k) {
      const float d_score = factor * (d_weights[k] - pull);
      float& target = d_logits[ids[k]];
      target = target + d_score * (score[k] * (1.0F - score[k]));
    }
    logits += shape.experts;
    d_logits += shape.experts;
    ids += shape.top_k;
    d_weights += shape.top_k;
  }
}

// What one source contributes to a row: its inverse root mean square, its product with w, and its product with d_out.
struct SourceTerms {
  float inv, product, d_prob;
};
inline SourceTerms source_terms(const float* v, const float* w, const float* d_out, Index dim, float eps) {
  V16 squares = set1(0.0F);
  V16 product = set1(0.0F);
  V16 d_prob = set1(0.0F);
  columns(dim, [&](Index i, auto block) {
    const V16 x = get(v + i, block);
    squares = fma(x, x, squares);
    product = fma(x, get(w + i, block), product);
    d_prob = fma(x, get(d_out + i, block), d_prob);
  });
  return {scalar_rsqrt(sum_tree(squares) / static_cast<float>(dim) + eps), sum_tree(product), sum_tree(d_prob)};
}

// With r = inverse rms and c = v . w:  d_score_i = p_i (d_p_i - sum over j of p_j d_p_j);
// d_v += p d_out + d_score (r w - r^3 c / dim v);  d_w += d_score r v, sources ascending within a row.
void block_mix_backward(const float* const* sources, int n_sources, const float* w, const float* probs,
                        const float* d_out, Index rows, Index dim, float eps, float* const* d_sources, float* d_w) {
  SourceTerms terms[kMaxSources];
  for (Index r = 0; r < rows; ++r, probs += n_sources, d_out += dim) {
    const Index at = r * dim;
    float mean = 0.0F;
    for (int s = 0; s < n_sources; ++s) {
      terms[s] = source_terms(sources[s] + at, w, d_out, dim, eps);
      mean = mean + probs[s] * terms[s].d_prob;
    }
    for (int s = 0; s < n_sources; ++s) {
      const float inv = terms[s].inv;
      const float d_score = probs[s] * (terms[s].d_prob - mean) * inv;
      const V16 p = set1(probs[s]);
      const V16 along_w = set1(d_score);
      const V16 pull = set1(d_score * inv * inv * terms[s].product / static_cast<float>(dim));
      const float* v = sources[s] + at;
      float* d_v = d_sources[s] + at;
      columns(dim, [&](Index i, auto block) {
        const V16 x = get(v + i, block);
        const V16 from_mix = fma(p, get(d_out + i, block), get(d_v + i, block));
        put(d_v + i, fnma(pull, x, fma(along_w, get(w + i, block), from_mix)), block);
        if (d_w != nullptr) accumulate(d_w + i, along_w, x, block);
      });
    }
  }
}

constexpr RowKernels make_kernels(const char* name) {
  return {.name = name,
          .exp = elementwise<vexp<V16>>,
          .log = elementwise<vlog<V16>>,
          .sigmoid = elementwise<vsigmoid<V16>>,
          .tanh = elementwise<vtanh<V16>>,
          .softplus = elementwise<vsoftplus<V16>>,
          .rsqrt = elementwise<vrsqrt<V16>>,
          .round_to_bf16 = round_to_bf16,
          .rms_norm = rms_norm,
          .layer_norm = layer_norm,
          .l2_norm = l2_norm,
          .silu_glu = silu_glu,
          .situ_glu = situ_glu,
          .sigmoid_rows = sigmoid_rows,
          .sigmoid_gate = sigmoid_gate,
          .axpy = axpy,
          .causal_conv = causal_conv,
          .kda_gate = kda_gate,
          .route = route,
          .block_mix = block_mix,
          .log_sum_exp = log_sum_exp,
          .softmax_accumulate = softmax_accumulate,
          .rms_norm_backward = rms_norm_backward,
          .layer_norm_backward = layer_norm_backward,
          .l2_norm_backward = l2_norm_backward,
          .silu_glu_backward = silu_glu_backward,
          .situ_glu_backward = situ_glu_backward,
          .sigmoid_gate_backward = sigmoid_gate_backward,
          .causal_conv_backward = causal_conv_backward,
          .kda_gate_backward = kda_gate_backward,
          .route_backward = route_backward,
          .block_mix_backward = block_mix_backward};
}

}  // namespace
}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE
