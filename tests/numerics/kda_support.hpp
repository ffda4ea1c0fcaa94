// Inputs and an independent float64 model for the tests of the KDA row function.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "base/random.hpp"
#include "numerics/attention_support.hpp"
#include "numerics/kda.hpp"

namespace tidelock::numerics::testing {

using Vector = std::vector<float>;

struct KdaInputs {
  KdaShape shape;
  std::int64_t rows;
  Vector q, k, v, g, beta;
};

enum class Gates { ordinary, none, lowest, deep };  // deep: -30 per token, unbounded only

inline float draw_gate(Random& random, Gates gates) {
  switch (gates) {
    case Gates::none:
      return -1e-6F * random.uniform();
    case Gates::lowest:
      return -5.0F;
    case Gates::deep:
      return -30.0F * (random.below(4) == 0 ? 1.0F : random.uniform() * 0.01F);
    case Gates::ordinary:
      break;
  }
  return random.below(5) == 0 ? -5.0F * random.uniform() : -0.3F * random.uniform();
}

inline KdaInputs make_kda_inputs(const KdaShape& shape, std::int64_t rows, std::uint64_t seed,
                                 Gates gates = Gates::ordinary) {
  Random random(seed, 17);
  KdaInputs in{shape, rows, {}, {}, {}, {}, {}};
  const auto unit_rows = [&](Vector& x, float scale) {
    for (std::int64_t r = 0; r < rows * shape.heads; ++r) {
      float sum = 0.0F;
      const std::size_t at = x.size();
      for (int d = 0; d < shape.key_dim; ++d) {
        x.push_back(random.normal());
        sum += x.back() * x.back();
      }
      for (std::size_t i = at; i < x.size(); ++i) x[i] *= scale / std::sqrt(sum);
    }
  };
  unit_rows(in.q, 1.0F / std::sqrt(static_cast<float>(shape.key_dim)));
  unit_rows(in.k, 1.0F);
  for (std::int64_t i = 0; i < rows * shape.heads * shape.value_dim; ++i) in.v.push_back(random.normal());
  for (std::int64_t i = 0; i < rows * shape.heads * shape.key_dim; ++i) in.g.push_back(draw_gate(random, gates));
  for (std::int64_t i = 0; i < rows * shape.heads; ++i) in.beta.push_back(random.uniform());
  return in;
}

struct KdaResult {
  Vector out, state;
};

inline KdaResult empty_result(const KdaInputs& in) {
  return {Vector(static_cast<std::size_t>(in.rows * in.shape.heads * in.shape.value_dim)),
          Vector(static_cast<std::size_t>(in.shape.heads) * kda_head_state_floats(in.shape))};
}

// Rows [begin, end) on top of `result`.
inline void run_kda(const KdaInputs& in, std::int64_t begin, std::int64_t end, KdaResult& result,
                    float* chunk_states = nullptr) {
  const std::int64_t key = begin * in.shape.heads * in.shape.key_dim;
  const std::int64_t value = begin * in.shape.heads * in.shape.value_dim;
  kda_forward(in.shape, 0, in.shape.heads, begin, end - begin, in.q.data() + key, in.k.data() + key,
              in.v.data() + value, in.g.data() + key, in.beta.data() + begin * in.shape.heads, result.state.data(),
              result.out.data() + value, chunk_states);
}

inline KdaResult run_kda(const KdaInputs& in) {
  KdaResult result = empty_result(in);
  run_kda(in, 0, in.rows, result);
  return result;
}

inline KdaResult run_kda_reference(const KdaInputs& in) {
  KdaResult result = empty_result(in);
  reference::kda_forward(in.shape, 0, in.rows, in.q.data(), in.k.data(), in.v.data(), in.g.data(), in.beta.data(),
                         result.state.data(), result.out.data());
  return result;
}

// One head of the token recurrence (spec/model.md 2.1) in float64: no chunks, no factored gates.
struct KdaHead64 {
  int key_dim, value_dim;
  std::int64_t rows;
  std::vector<double> q, k, v, g, beta;

  std::vector<double> forward(std::vector<double>* final_state = nullptr) const {
    std::vector<double> s(static_cast<std::size_t>(key_dim * value_dim));
    std::vector<double> out(static_cast<std::size_t>(rows * value_dim));
    for (std::int64_t t = 0; t < rows; ++t) {
      for (int d = 0; d < key_dim; ++d)
        for (int c = 0; c < value_dim; ++c) s[d * value_dim + c] *= std::exp(g[t * key_dim + d]);
      for (int c = 0; c < value_dim; ++c) {
        double dot = 0;
        for (int d = 0; d < key_dim; ++d) dot += s[d * value_dim + c] * k[t * key_dim + d];
        const double u = beta[t] * (v[t * value_dim + c] - dot);
        double o = 0;
        for (int d = 0; d < key_dim; ++d) {
          s[d * value_dim + c] += k[t * key_dim + d] * u;
          o += s[d * value_dim + c] * q[t * key_dim + d];
        }
        out[t * value_dim + c] = o;
      }
    }
    if (final_state != nullptr) *final_state = s;
    return out;
  }
};

inline KdaHead64 head64(const KdaInputs& in, int head) {
  KdaHead64 h{in.shape.key_dim, in.shape.value_dim, in.rows, {}, {}, {}, {}, {}};
  const auto take = [&](const Vector& x, int dim, std::vector<double>& to) {
    for (std::int64_t t = 0; t < in.rows; ++t)
      for (int d = 0; d < dim; ++d) to.push_back(x[(t * in.shape.heads + head) * dim + d]);
  };
  take(in.q, in.shape.key_dim, h.q);
  take(in.k, in.shape.key_dim, h.k);
  take(in.v, in.shape.value_dim, h.v);
  take(in.g, in.shape.key_dim, h.g);
  take(in.beta, 1, h.beta);
  return h;
}

// RMS of a - b over RMS of b.
template <class A, class B>
double relative_rms(const A& a, const B& b) {
  double error = 0;
  double size = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    error += (a[i] - b[i]) * (a[i] - b[i]);
    size += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(error / (size + 1e-300));
}

}  // namespace tidelock::numerics::testing
