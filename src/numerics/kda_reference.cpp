// The KDA row function as plain loops, one row of one head at a time: the definition, and every rounding in it.
#include <cmath>
#include <vector>

#include "numerics/kda_kernels.hpp"
#include "numerics/rowops.hpp"

namespace tidelock::numerics::reference {
namespace {

struct Row {
  const float *q, *k, *v, *g;
  float beta;
  float* out;
};

struct Head {
  float *s, *keys, *u, *gates;
};

// sum over d of decayed[d] * S[d][c], ascending, with the centre taken back out.
float state_product(const KdaShape& shape, const float* s, const float* x, int c) {
  float acc = 0.0F;
  for (int d = 0; d < shape.key_dim; ++d) acc = std::fma(x[d], s[d * shape.value_dim + c], acc);
  return shape.bounded ? acc * (1.0F / kKdaCentre) : acc;
}

// a_ij or b_ij: x is k_i or q_i, decayed is x e^{G_i} (times the centre when bounded).
float pair_product(const KdaShape& shape, const Head& h, const float* x, const float* decayed, const float* gate,
                   int j) {
  float acc = 0.0F;
  for (int d = 0; d < shape.key_dim; ++d) {
    const float key = h.keys[d * kKdaChunk + j];
    if (shape.bounded)
      acc = std::fma(decayed[d], key, acc);
    else
      acc = std::fma(x[d] * key, exp(gate[d] - h.gates[d * kKdaChunk + j]), acc);
  }
  return acc;
}

void commit(const KdaShape& shape, const Head& h, const float* gate) {
  for (int d = 0; d < shape.key_dim; ++d) {
    const float decay = exp(gate[d]);
    float kr[kKdaChunk];
    for (int j = 0; j < kKdaChunk; ++j) {
      const float key = h.keys[d * kKdaChunk + j];
      kr[j] = key * (shape.bounded ? decay * kKdaCentre : exp(gate[d] - h.gates[d * kKdaChunk + j]));
    }
    for (int c = 0; c < shape.value_dim; ++c) {
      float acc = decay * h.s[d * shape.value_dim + c];
      for (int j = 0; j < kKdaChunk; ++j) acc = std::fma(kr[j], h.u[j * shape.value_dim + c], acc);
      h.s[d * shape.value_dim + c] = acc;
    }
  }
  const KdaStateLayout layout(shape);
  for (float* p = h.keys; p != h.s + layout.size; ++p) *p = 0.0F;
}

void row_function(const KdaShape& shape, const Head& h, int i, const Row& row) {
  const int stride = shape.bounded ? 1 : kKdaChunk;
  std::vector<float> gate(shape.key_dim), kd(shape.key_dim), qd(shape.key_dim);
  for (int d = 0; d < shape.key_dim; ++d) {
    const float* before = h.gates + d * stride + (shape.bounded ? 0 : i - 1);
    gate[d] = i == 0 ? row.g[d] : *before + row.g[d];
    h.gates[d * stride + (shape.bounded ? 0 : i)] = gate[d];
    const float decay = shape.bounded ? exp(gate[d]) * kKdaCentre : exp(gate[d]);
    kd[d] = row.k[d] * decay;
    qd[d] = row.q[d] * decay;
    h.keys[d * kKdaChunk + i] = shape.bounded ? row.k[d] * (exp(-gate[d]) * (1.0F / kKdaCentre)) : row.k[d];
  }
  float a[kKdaChunk];
  float b[kKdaChunk];
  for (int j = 0; j < i; ++j) a[j] = pair_product(shape, h, row.k, kd.data(), gate.data(), j);
  for (int j = 0; j <= i; ++j) b[j] = pair_product(shape, h, row.q, qd.data(), gate.data(), j);
  for (int c = 0; c < shape.value_dim; ++c) {
    float acc = state_product(shape, h.s, kd.data(), c);
    for (int j = 0; j < i; ++j) acc = std::fma(a[j], h.u[j * shape.value_dim + c], acc);
    h.u[i * shape.value_dim + c] = row.beta * (row.v[c] - acc);
  }
  for (int c = 0; c < shape.value_dim; ++c) {
    float acc = state_product(shape, h.s, qd.data(), c);
    for (int j = 0; j <= i; ++j) acc = std::fma(b[j], h.u[j * shape.value_dim + c], acc);
    row.out[c] = acc;
  }
  if (i == kKdaChunk - 1) commit(shape, h, gate.data());
}

}  // namespace

void kda_forward(const KdaShape& shape, std::int64_t position, std::int64_t rows, const float* q, const float* k,
                 const float* v, const float* g, const float* beta, float* state, float* out) {
  const KdaStateLayout layout(shape);
  for (std::int64_t r = 0; r < rows; ++r)
    for (int head = 0; head < shape.heads; ++head) {
      float* s = state + static_cast<std::size_t>(head) * layout.size;
      const std::int64_t at = r * shape.heads + head;
      row_function(shape, {s, s + layout.keys, s + layout.corrected, s + layout.gates},
                   static_cast<int>((position + r) % kKdaChunk),
                   {q + at * shape.key_dim, k + at * shape.key_dim, v + at * shape.value_dim, g + at * shape.key_dim,
                    beta[at], out + at * shape.value_dim});
    }
}

}  // namespace tidelock::numerics::reference
