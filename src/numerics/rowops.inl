// The forward row kernels over V16; compiled once per instruction set by rowops_{scalar,avx2,avx512}.cpp. The order of
// operations is that of rowops.hpp; rowops_reference.cpp holds the same definitions as plain loops.
#pragma once

#include "numerics/math.inl"
#include "numerics/rowops_kernels.hpp"

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {
namespace {

// A block of columns: all 16, or the first n. Overloads of get and put keep the full blocks free of masks.
struct Full {};
struct Part {
  int n;
};
inline V16 get(const float* p, Full) {
  return load(p);
}
inline V16 get(const float* p, Part part) {
  return load_n(p, part.n);
}
inline void put(float* p, V16 a, Full) {
  store(p, a);
}
inline void put(float* p, V16 a, Part part) {
  store_n(p, a, part.n);
}
inline void put(bf16* p, V16 a, Full) {
  store(p, a);
}
inline void put(bf16* p, V16 a, Part part) {
  store_n(p, a, part.n);
}
inline V16 fill(V16 a, Full, float) {
  return a;
}
inline V16 fill(V16 a, Part part, float absent) {
  return first_n(a, part.n, absent);
}

template <class Body>
inline void columns(Index n, Body body) {
  Index i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, Full{});
  if (i < n) body(i, Part{static_cast<int>(n - i)});
}

inline float scalar_rsqrt(float x) {
  return vrsqrt(F1{x}).v;
}
inline float scalar_exp(float x) {
  return vexp(F1{x}).v;
}

inline float dot(const float* a, const float* b, Index n) {
  V16 sum = set1(0.0F);
  columns(n, [&](Index i, auto block) { sum = fma(get(a + i, block), get(b + i, block), sum); });
  return sum_tree(sum);
}

template <V16 (*function)(V16)>
void elementwise(const float* x, Index n, float* y) {
  columns(n, [&](Index i, auto block) { put(y + i, function(get(x + i, block)), block); });
}

void round_to_bf16(float* x, Index n, bf16* out) {
  columns(n, [&](Index i, auto block) {
    const V16 r = round_bf16(get(x + i, block));
    put(x + i, r, block);
    put(out + i, r, block);
  });
}

void rms_norm(const float* x, const float* w, Index rows, Index dim, float eps, float* y, float* inv_rms) {
  for (Index r = 0; r < rows; ++r, x += dim, y += dim) {
    const float inv = scalar_rsqrt(dot(x, x, dim) / static_cast<float>(dim) + eps);
    if (inv_rms != nullptr) inv_rms[r] = inv;
    const V16 scale = set1(inv);
    columns(dim,
            [&](Index i, auto block) { put(y + i, mul(mul(get(x + i, block), scale), get(w + i, block)), block); });
  }
}

void layer_norm(const float* x, const float* w, const float* b, Index rows, Index dim, float eps, float* y,
                float* stats) {
  for (Index r = 0; r < rows; ++r, x += dim, y += dim) {
    V16 sum = set1(0.0F);
    columns(dim, [&](Index i, auto block) { sum = add(sum, get(x + i, block)); });
    const float mean = sum_tree(sum) / static_cast<float>(dim);
    const V16 centre = set1(mean);
    V16 squares = set1(0.0F);
    columns(dim, [&](Index i, auto block) {
      const V16 d = fill(sub(get(x + i, block), centre), block, 0.0F);
      squares = fma(d, d, squares);
    });
    const float inv = scalar_rsqrt(sum_tree(squares) / static_cast<float>(dim) + eps);
    if (stats != nullptr) {
      stats[2 * r] = mean;
      stats[2 * r + 1] = inv;
    }
    const V16 scale = set1(inv);
    columns(dim, [&](Index i, auto block) {
      const V16 normed = mul(sub(get(x + i, block), centre), scale);
      put(y + i, fma(normed, get(w + i, block), get(b + i, block)), block);
    });
  }
}

void l2_norm(const float* x, Index rows, Index dim, float eps, float scale, float* y, float* inv) {
  const V16 factor = set1(scale);
  for (Index r = 0; r < rows; ++r, x += dim, y += dim) {
    const float norm = scalar_rsqrt(dot(x, x, dim) + eps);
    if (inv != nullptr) inv[r] = norm;
    const V16 unit = set1(norm);
    columns(dim, [&](Index i, auto block) { put(y + i, mul(mul(get(x + i, block), unit), factor), block); });
  }
}

void silu_glu(const float* gate, const float* up, Index n, float* y) {
  columns(n, [&](Index i, auto block) {
    const V16 g = get(gate + i, block);
    put(y + i, mul(mul(g, vsigmoid(g)), get(up + i, block)), block);
  });
}

void situ_glu(const float* gate, const float* up, Index n, float beta, float linear_beta, float* y) {
  const V16 b = set1(beta);
  const V16 l = set1(linear_beta);
  columns(n, [&](Index i, auto block) {
    const V16 g = get(gate + i, block);
    const V16 soft_gate = mul(b, vtanh(div(g, b)));
    const V16 soft_up = mul(l, vtanh(div(get(up + i, block), l)));
    put(y + i, mul(mul(soft_gate, vsigmoid(g)), soft_up), block);
  });
}

void sigmoid_rows(const float* x, Index n, float* y) {
  columns(n, [&](Index i, auto block) { put(y + i, vsigmoid(get(x + i, block)), block); });
}

void sigmoid_gate(const float* x, const float* gate, Index n, float* y) {
  columns(n, [&](Index i, auto block) { put(y + i, mul(get(x + i, block), vsigmoid(get(gate + i, block))), block); });
}

void axpy(float a, const float* x, Index n, float* y) {
  const V16 factor = set1(a);
  columns(n, [&](Index i, auto block) { put(y + i, fma(factor, get(x + i, block), get(y + i, block)), block); });
}

// Sixteen channels at a time down the rows: the window of four inputs stays in registers.
void causal_conv(const float* z, const float* w, Index rows, Index channels, float* tail, float* u, float* y) {
  columns(channels, [&](Index c, auto block) {
    const V16 w0 = get(w + c, block);
    const V16 w1 = get(w + channels + c, block);
    const V16 w2 = get(w + 2 * channels + c, block);
    const V16 w3 = get(w + 3 * channels + c, block);
    V16 z0 = get(tail + c, block);
    V16 z1 = get(tail + channels + c, block);
    V16 z2 = get(tail + 2 * channels + c, block);
    for (Index t = 0; t < rows; ++t) {
      const Index at = t * channels + c;
      const V16 z3 = get(z + at, block);
      const V16 sum = fma(w3, z3, fma(w2, z2, fma(w1, z1, fma(w0, z0, set1(0.0F)))));
      if (u != nullptr) put(u + at, sum, block);
      put(y + at, mul(sum, vsigmoid(sum)), block);
      z0 = z1;
      z1 = z2;
      z2 = z3;
    }
    put(tail + c, z0, block);
    put(tail + channels + c, z1, block);
    put(tail + 2 * channels + c, z2, block);
  });
}

void kda_gate(const GateShape& shape, const float* raw, const float* dt_bias, const float* a_log, Index rows,
              float* g) {
  const V16 bound = set1(shape.lower_bound);
  for (Index h = 0; h < shape.heads; ++h) {
    const float rate = scalar_exp(a_log[h]);
    const V16 positive = set1(rate);
    const V16 negative = set1(-rate);
    for (Index r = 0; r < rows; ++r) {
      const Index at = (r * shape.heads + h) * shape.dim;
      columns(shape.dim, [&](Index i, auto block) {
        const V16 x = add(get(raw + at + i, block), get(dt_bias + h * shape.dim + i, block));
        const V16 y = shape.bounded ? mul(bound, vsigmoid(mul(positive, x))) : mul(negative, vsoftplus(x));
        put(g + at + i, y, block);
      });
    }
  }
}

// The top_k of value[0..experts) by (value descending, index ascending); NaN counts as -inf.
inline void select_top(const float* value, Index experts, Index top_k, std::int32_t* ids) {
  float best[kMaxExperts];
  Index count = 0;
  for (Index e = 0; e < experts; ++e) {
    const float v = value[e] == value[e] ? value[e] : -constants::kInfinity;
    if (count == top_k && !(v > best[count - 1])) continue;
    Index slot = count < top_k ? count++ : count - 1;
    for (; slot > 0 && v > best[slot - 1]; --slot) {
      best[slot] = best[slot - 1];
      ids[slot] = ids[slot - 1];
    }
    best[slot] = v;
    ids[slot] = static_cast<std::int32_t>(e);
  }
}

void route(const RouterShape& shape, const float* logits, const float* bias, Index rows, std::int32_t* ids,
           float* weights) {
  float score[kMaxExperts];
  float value[kMaxExperts];
  for (Index r = 0; r < rows; ++r, logits += shape.experts, ids += shape.top_k, weights += shape.top_k) {
    columns(shape.experts, [&](Index i, auto block) {
      const V16 s = vsigmoid(get(logits + i, block));
      put(score + i, s, block);
      put(value + i, add(s, get(bias + i, block)), block);
    });
    select_top(value, shape.experts, shape.top_k, ids);
    float sum = 0.0F;
    for (Index k = 0; k < shape.top_k; ++k) sum = sum + score[ids[k]];
    sum = sum + kRouterEpsilon;
    for (Index k = 0; k < shape.top_k; ++k) {
      const float s = score[ids[k]];
      weights[k] = (shape.renormalize ? s / sum : s) * shape.scale;
    }
  }
}

void block_mix(const float* const* sources, int n_sources, const float* w, Index rows, Index dim, float eps, float* out,
               float* probs) {
  for (Index r = 0; r < rows; ++r, out += dim) {
    const Index at = r * dim;
    alignas(64) float p[kMaxSources];
    float top = -constants::kInfinity;
    for (int s = 0; s < n_sources; ++s) {
      const float* v = sources[s] + at;
      V16 squares = set1(0.0F);
      V16 product = set1(0.0F);
      columns(dim, [&](Index i, auto block) {
        const V16 x = get(v + i, block);
        squares = fma(x, x, squares);
        product = fma(x, get(w + i, block), product);
      });
      p[s] = scalar_rsqrt(sum_tree(squares) / static_cast<float>(dim) + eps) * sum_tree(product);
      top = p[s] > top ? p[s] : top;
    }
    columns(n_sources, [&](Index i, auto block) { put(p + i, vexp(sub(get(p + i, block), set1(top))), block); });
    float sum = 0.0F;
    for (int s = 0; s < n_sources; ++s) sum = sum + p[s];
    for (int s = 0; s < n_sources; ++s) p[s] = p[s] / sum;
    if (probs != nullptr)
      for (int s = 0; s < n_sources; ++s) probs[r * n_sources + s] = p[s];
    columns(dim, [&](Index i, auto block) {
      V16 mix = set1(0.0F);
      for (int s = 0; s < n_sources; ++s) mix = fma(set1(p[s]), get(sources[s] + at + i, block), mix);
      put(out + i, mix, block);
    });
  }
}

float log_sum_exp(const float* x, Index n) {
  V16 top = set1(-constants::kInfinity);
  columns(n, [&](Index i, auto block) { top = max(fill(get(x + i, block), block, -constants::kInfinity), top); });
  float shift = max_tree(top);
  if (shift == -constants::kInfinity) shift = 0.0F;  // every term is zero: -inf, not the NaN of -inf - -inf
  const V16 m = set1(shift);
  V16 sum = set1(0.0F);
  columns(n, [&](Index i, auto block) { sum = add(sum, fill(vexp(sub(get(x + i, block), m)), block, 0.0F)); });
  return shift + vlog(F1{sum_tree(sum)}).v;
}

void softmax_accumulate(const float* x, Index n, float lse, float scale, float* d_x) {
  const V16 shift = set1(lse);
  const V16 factor = set1(scale);
  columns(n, [&](Index i, auto block) {
    const V16 p = vexp(sub(get(x + i, block), shift));
    put(d_x + i, fma(factor, p, get(d_x + i, block)), block);
  });
}

}  // namespace
}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE
