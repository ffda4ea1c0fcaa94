// The exact derivative of the KDA row function over V16, chunk by chunk from the end of the sequence.
//
// With A, B the pair products, kd, qd the decayed rows, kr the commit factors and dS' the gradient of the next chunk's
// entry state:
//   dU = B^T dO + kr dS',  then for i = 15 .. 0:  dU_i += sum over l > i of A_li dX_l,  dX_i = -beta_i dU_i
//   dV_i = beta_i dU_i,  dbeta_i = dU_i . (V_i - X_i),  dA_ij = dX_i . U_j (j < i),  dB_ij = dO_i . U_j (j <= i)
//   dS = e^{G_15} dS' + sum over i of kd_i dX_i + qd_i dO_i
// dq and dk follow through the decayed rows and the pairs. Every gate enters as e^{G_i} beside q_i or k_i (as row) or
// as e^{-G_j} beside k_j (as key), hence dG_i = q_i dq_i + k_i (dk_i as row - dk_i as key), and e^{G_15} adds to dG_15.
// The whole chunk is known here, so the bounded form may centre its exponents on half of G_15: factors e^{+-40} keep
// small gradients from being flushed.
#pragma once

#include "numerics/kda.inl"
#include "numerics/scratch.hpp"

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {
namespace {

constexpr int kN = kKdaChunk;
constexpr int kD = kKdaMaxDim;

// Row-major [16][dim] unless said otherwise. Rows past the end of a short last chunk are zero.
struct BackwardScratch {
  ChunkScratch forward;
  alignas(64) float q[kN * kD], k[kN * kD], v[kN * kD], g[kN * kD], beta[kN];
  alignas(64) float keys[kD * kN], u[kN * kD], gates[kD * kN];  // the open chunk of the recomputed forward
  alignas(64) float gate[kN * kD];                              // G
  alignas(64) float residual[kN * kD];                          // V - X
  alignas(64) float kr[kD * kN], decay[kD];                     // [key_dim][16]; e^{G_15}
  alignas(64) float d_u[kN * kD], d_x[2 * kN * kD];             // d_x: dX, then dO
  alignas(64) float d_x_lanes[kD * 2 * kN], u_lanes[kD * kN];   // turned: [value_dim][32], [value_dim][16]
  alignas(64) float d_pairs[2 * kN * kN];                       // dA, then dB: [32][16]
  alignas(64) float d_decayed[kD * 2 * kN];                     // [key_dim][32]
  alignas(64) float d_kr[kD * kN];                              // [key_dim][16]
  alignas(64) float state_dot[kD];                              // S . dS' per key channel
  alignas(64) float pair_rows[2 * kN * kD];                     // bounded: k_i e^{G_i - c}, then q_i e^{G_i - c}
  alignas(64) float pair_keys[kN * kD];                         // bounded: k_j e^{c - G_j}
  alignas(64) float d_k_row[kN * kD], d_q_row[kN * kD], d_k_key[kN * kD], d_g[kN * kD];
};

struct BackwardHead {
  const float *q, *k, *v, *g, *beta, *d_out;
  float *d_q, *d_k, *d_v, *d_g, *d_beta;
  Stride key_stride, value_stride, beta_stride;
};

inline void copy_rows(const float* from, Stride stride, int rows, int dim, float* to) {
  for (int i = 0; i < kN; ++i)
    for (int d = 0; d < dim; d += kLanes) store(to + i * dim + d, i < rows ? load(from + i * stride + d) : set1(0.0F));
}

// Columns of a [dim][row] array back to rows [16][dim].
inline void to_rows(const float* columns, Stride column_row, int dim, float* rows) {
  for (int d = 0; d < dim; d += kLanes) to_lanes(columns + d * column_row, column_row, kLanes, kN, rows + d, dim);
}

// Repeats the forward pass of the chunk: pairs, u, residual and gates.
inline void recompute(const KdaShape& shape, const BackwardHead& h, int n, const float* s, BackwardScratch& w) {
  copy_rows(h.q, h.key_stride, n, shape.key_dim, w.q);
  copy_rows(h.k, h.key_stride, n, shape.key_dim, w.k);
  copy_rows(h.g, h.key_stride, n, shape.key_dim, w.g);
  copy_rows(h.v, h.value_stride, n, shape.value_dim, w.v);
  copy_rows(h.d_out, h.value_stride, n, shape.value_dim, w.d_x + kN * shape.value_dim);
  for (int i = 0; i < kN; ++i) w.beta[i] = i < n ? h.beta[i * h.beta_stride] : 0.0F;
  const ChunkRows c{0, kN, w.q, w.k, w.v, w.g, w.beta, shape.key_dim, shape.value_dim, 1};
  const OpenChunk open{w.keys, w.u, w.gates};
  decay_and_pairs(shape, c, open, w.forward);
  product(kN, shape.value_dim, shape.key_dim, {w.forward.decayed, shape.key_dim, 1}, s, shape.value_dim,
          w.forward.product, shape.value_dim);
  correct(shape, c, open, w.forward, w.residual);
  for (int at = 0; at < 2 * kN * shape.key_dim; at += kLanes)  // from here on as it stands beside S
    store(w.forward.decayed + at, mul(load(w.forward.decayed + at), set1(uncentre(shape))));
  for (int i = 0; i < kN; ++i) {  // beyond the triangles the pairs mean nothing: make them zero
    float* a = w.forward.pairs + i * kN;
    float* b = a + kN * kN;
    for (int j = i; j < kN; ++j) a[j] = 0.0F;
    for (int j = i + 1; j < kN; ++j) b[j] = 0.0F;
  }
  for (int d = 0; d < shape.key_dim; d += kLanes) {
    V16 gate = load(w.g + d);
    for (int i = 0; i < kN; ++i) {
      if (i > 0) gate = add(gate, load(w.g + i * shape.key_dim + d));
      store(w.gate + i * shape.key_dim + d, gate);
    }
    V16 decay;
    commit_factors(shape, open, d, decay, w.kr + d * kN);
    store(w.decay + d, decay);
  }
}

// dU, dX, dV and dbeta.
inline void backward_corrected(const KdaShape& shape, const BackwardHead& h, int n, const float* d_s,
                               BackwardScratch& w) {
  const int dim = shape.value_dim;
  const float* d_o = w.d_x + kN * dim;
  product(kN, dim, kN, {w.forward.pairs + kN * kN, 1, kN}, d_o, dim, w.d_u, dim);
  if (d_s != nullptr) product(kN, dim, shape.key_dim, {w.kr, 1, kN}, d_s, dim, w.d_u, dim, Start::out);
  for (int i = kN - 1; i >= 0; --i) {
    const V16 beta = set1(w.beta[i]);
    V16 dot = set1(0.0F);
    for (int c = 0; c < dim; c += kLanes) {
      V16 d_u = load(w.d_u + i * dim + c);
      for (int l = i + 1; l < kN; ++l) d_u = fma(set1(w.forward.pairs[l * kN + i]), load(w.d_x + l * dim + c), d_u);
      const V16 d_v = mul(beta, d_u);
      store(w.d_x + i * dim + c, sub(set1(0.0F), d_v));
      dot = fma(d_u, load(w.residual + i * dim + c), dot);
      if (i < n) {
        float* to = h.d_v + i * h.value_stride + c;
        store(to, add(load(to), d_v));
      }
    }
    if (i < n) h.d_beta[i * h.beta_stride] += sum_tree(dot);
  }
}

// Gradients of the pairs, of the decayed rows (through S), and of the commit factors.
inline void backward_products(const KdaShape& shape, const float* s, const float* d_s, BackwardScratch& w) {
  const int dim = shape.value_dim;
  to_lanes(w.u, dim, kN, dim, w.u_lanes, kN);
  to_lanes(w.d_x, dim, kN, dim, w.d_x_lanes, 2 * kN);
  to_lanes(w.d_x + kN * dim, dim, kN, dim, w.d_x_lanes + kN, 2 * kN);
  product(2 * kN, kN, dim, {w.d_x, dim, 1}, w.u_lanes, kN, w.d_pairs, kN);
  for (int i = 0; i < kN; ++i) {
    for (int j = i; j < kN; ++j) w.d_pairs[i * kN + j] = 0.0F;
    for (int j = i + 1; j < kN; ++j) w.d_pairs[(kN + i) * kN + j] = 0.0F;
  }
  product(shape.key_dim, 2 * kN, dim, {s, dim, 1}, w.d_x_lanes, 2 * kN, w.d_decayed, 2 * kN);
  if (d_s == nullptr) return;
  product(shape.key_dim, kN, dim, {d_s, dim, 1}, w.u_lanes, kN, w.d_kr, kN);
  for (int d = 0; d < shape.key_dim; ++d) {
    V16 dot = set1(0.0F);
    for (int c = 0; c < dim; c += kLanes) dot = fma(load(s + d * dim + c), load(d_s + d * dim + c), dot);
    w.state_dot[d] = sum_tree(dot);
  }
}

// d_k_row, d_q_row, d_k_key through the pairs of the bounded form.
inline void backward_pairs_bounded(const KdaShape& shape, BackwardScratch& w) {
  const int dim = shape.key_dim;
  const Elements d_b{w.d_pairs + kN * kN, kN, 1};
  const float* last = w.gate + (kN - 1) * dim;
  const auto centre = [&](int d) { return mul(set1(0.5F), load(last + d)); };
  for (int i = 0; i < kN; ++i)
    for (int d = 0; d < dim; d += kLanes) {
      const V16 gate = sub(load(w.gate + i * dim + d), centre(d));
      const V16 decay = vexp(gate);
      const V16 key = load(w.k + i * dim + d);
      store(w.pair_rows + i * dim + d, mul(key, decay));
      store(w.pair_rows + (kN + i) * dim + d, mul(load(w.q + i * dim + d), decay));
      store(w.pair_keys + i * dim + d, mul(key, vexp(sub(set1(0.0F), gate))));
    }
  product(kN, dim, kN, {w.d_pairs, kN, 1}, w.pair_keys, dim, w.d_k_row, dim);
  product(kN, dim, kN, d_b, w.pair_keys, dim, w.d_q_row, dim);
  product(kN, dim, 2 * kN, {w.d_pairs, 1, kN}, w.pair_rows, dim, w.d_k_key, dim);
  for (int i = 0; i < kN; ++i)
    for (int d = 0; d < dim; d += kLanes) {
      const int at = i * dim + d;
      const V16 gate = sub(load(w.gate + at), centre(d));
      const V16 decay = vexp(gate);
      store(w.d_k_row + at, mul(load(w.d_k_row + at), decay));
      store(w.d_q_row + at, mul(load(w.d_q_row + at), decay));
      store(w.d_k_key + at, mul(load(w.d_k_key + at), vexp(sub(set1(0.0F), gate))));
    }
}

inline void backward_pairs_unbounded(const KdaShape& shape, BackwardScratch& w) {
  const int dim = shape.key_dim;
  const float* d_a = w.d_pairs;
  const float* d_b = d_a + kN * kN;
  for (int d = 0; d < dim; d += kLanes) {
    V16 d_key[kN];
    for (auto& x : d_key) x = set1(0.0F);
    for (int i = 0; i < kN; ++i) {
      const V16 gate = load(w.gate + i * dim + d);
      const V16 k = load(w.k + i * dim + d);
      const V16 q = load(w.q + i * dim + d);
      V16 d_k = set1(0.0F);
      V16 d_q = set1(0.0F);
      for (int j = 0; j <= i; ++j) {
        const V16 a = set1(d_a[i * kN + j]);
        const V16 b = set1(d_b[i * kN + j]);
        const V16 decay = vexp(sub(gate, load(w.gate + j * dim + d)));
        const V16 key = mul(load(w.k + j * dim + d), decay);
        d_k = fma(a, key, d_k);
        d_q = fma(b, key, d_q);
        d_key[j] = fma(fma(a, k, mul(b, q)), decay, d_key[j]);
      }
      store(w.d_k_row + i * dim + d, d_k);
      store(w.d_q_row + i * dim + d, d_q);
    }
    for (int j = 0; j < kN; ++j) store(w.d_k_key + j * dim + d, d_key[j]);
  }
}

// Adds what comes through S and through the commit, then writes dq, dk and dg (dg_i = sum over l >= i of dG_l).
inline void backward_rows(const KdaShape& shape, const BackwardHead& h, int n, bool committed, BackwardScratch& w) {
  const int dim = shape.key_dim;
  float* d_kd = w.pair_rows;  // their contents are spent
  float* d_qd = w.pair_rows + kN * dim;
  float* d_kr = w.pair_keys;
  to_rows(w.d_decayed, 2 * kN, dim, d_kd);
  to_rows(w.d_decayed + kN, 2 * kN, dim, d_qd);
  if (committed) to_rows(w.d_kr, kN, dim, d_kr);
  for (int d = 0; d < dim; d += kLanes) {
    const V16 last = load(w.gate + (kN - 1) * dim + d);
    V16 d_last = set1(0.0F);
    if (committed) d_last = mul(load(w.decay + d), load(w.state_dot + d));
    V16 d_gate[kN];
    for (int i = 0; i < n; ++i) {
      const int at = i * dim + d;
      const V16 gate = load(w.gate + at);
      const V16 decay = vexp(gate);
      const V16 k = load(w.k + at);
      const V16 d_k_row = fma(decay, load(d_kd + at), load(w.d_k_row + at));
      const V16 d_q = fma(decay, load(d_qd + at), load(w.d_q_row + at));
      V16 d_k_key = load(w.d_k_key + at);
      if (committed) {
        const V16 through = mul(vexp(sub(last, gate)), load(d_kr + at));
        d_k_key = add(d_k_key, through);
        d_last = fma(k, through, d_last);
      }
      d_gate[i] = fma(load(w.q + at), d_q, mul(k, sub(d_k_row, d_k_key)));
      float* to_q = h.d_q + i * h.key_stride + d;
      float* to_k = h.d_k + i * h.key_stride + d;
      store(to_q, add(load(to_q), d_q));
      store(to_k, add(load(to_k), add(d_k_row, d_k_key)));
    }
    V16 sum = d_last;
    for (int i = n - 1; i >= 0; --i) {
      sum = add(sum, d_gate[i]);
      float* to = h.d_g + i * h.key_stride + d;
      store(to, add(load(to), sum));
    }
  }
}

// d_s = e^{G_15} d_s (or 0) + sum over i of kd_i dX_i + qd_i dO_i.
inline void backward_state(const KdaShape& shape, bool committed, float* d_s, const BackwardScratch& w) {
  const int dim = shape.value_dim;
  for (int d = 0; d < shape.key_dim && committed; ++d)
    for (int c = 0; c < dim; c += kLanes) store(d_s + d * dim + c, mul(set1(w.decay[d]), load(d_s + d * dim + c)));
  product(shape.key_dim, dim, 2 * kN, {w.forward.decayed, 1, shape.key_dim}, w.d_x, dim, d_s, dim,
          committed ? Start::out : Start::zero);
}

inline void backward_chunk(const KdaShape& shape, const BackwardHead& h, int n, const float* s, bool committed,
                           float* d_s, BackwardScratch& w) {
  recompute(shape, h, n, s, w);
  backward_corrected(shape, h, n, committed ? d_s : nullptr, w);
  backward_products(shape, s, committed ? d_s : nullptr, w);
  if (shape.bounded)
    backward_pairs_bounded(shape, w);
  else
    backward_pairs_unbounded(shape, w);
  backward_rows(shape, h, n, committed, w);
  backward_state(shape, committed, d_s, w);
}

void kda_backward(const KdaShape& shape, int head_begin, int head_end, std::int64_t rows, const float* q,
                  const float* k, const float* v, const float* g, const float* beta, const float* chunk_states,
                  const float* d_out, float* d_q, float* d_k, float* d_v, float* d_g, float* d_beta) {
  const std::size_t state_floats = static_cast<std::size_t>(shape.key_dim) * static_cast<std::size_t>(shape.value_dim);
  constexpr std::size_t kOwn = sizeof(BackwardScratch) / sizeof(float);
  float* memory = kernel_scratch(kOwn + state_floats);
  BackwardScratch& w = *reinterpret_cast<BackwardScratch*>(memory);
  float* d_s = memory + kOwn;
  const std::int64_t chunks = (rows + kN - 1) / kN;
  for (int head = head_begin; head < head_end; ++head)
    for (std::int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      const std::int64_t row = chunk * kN;
      const std::int64_t key = (row * shape.heads + head) * shape.key_dim;
      const std::int64_t value = (row * shape.heads + head) * shape.value_dim;
      const std::int64_t scalar = row * shape.heads + head;
      const BackwardHead h{q + key,
                           k + key,
                           v + value,
                           g + key,
                           beta + scalar,
                           d_out + value,
                           d_q + key,
                           d_k + key,
                           d_v + value,
                           d_g + key,
                           d_beta + scalar,
                           Stride{shape.heads} * shape.key_dim,
                           Stride{shape.heads} * shape.value_dim,
                           shape.heads};
      const int n = static_cast<int>(rows - row < kN ? rows - row : kN);
      const float* s = chunk_states + static_cast<std::size_t>(chunk * shape.heads + head) * state_floats;
      backward_chunk(shape, h, n, s, chunk + 1 < chunks, d_s, w);
    }
}

}  // namespace
}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE
