// Row operations of the contract: norms, activations, gates, the router, residual mixing, log-sum-exp - and their
// derivatives.
//
// All arrays are float32, row-major, contiguous unless a stride is named. A row's result depends on that row alone.
// Reductions use 16 strided partial sums (lane i takes elements i, i+16, ...; absent elements count as +0) and the
// fixed tree of simd.hpp. A formula is evaluated from left to right, one rounding per operation; which NaN a NaN is, is
// not part of the contract. Callers parallelise over rows; these functions run on the calling thread. Backward
// functions ADD into the gradients that they name d_*; parameter gradients are summed over rows in ascending order.
#pragma once

#include <cstdint>

#include "numerics/formats.hpp"

namespace tidelock::numerics {

using Index = std::int64_t;

// ---- scalar functions, equal by bits to the vector forms used inside the kernels (math.inl). Maximum errors in ULP
// were measured over all 2^32 inputs and are tested on a sample. An input below the smallest normal counts as +0, a
// result below it is +0 (also -0 becomes +0), and NaN gives the quiet NaN 0x7FC00000, whether or not the thread flushes
// denormals.
float exp(float x);       // 1.01 ULP; 0 for x < -87.33654, +inf for x > 88.72283
float log(float x);       // 0.86 ULP; -inf for 0, NaN for x < 0, +inf for +inf
float sigmoid(float x);   // 2.49 ULP; 0 for x < -87.33654
float tanh(float x);      // 1.34 ULP; odd by bits
float softplus(float x);  // 1.71 ULP: log(1 + e^x); 0 for x < -87.33654
float rsqrt(float x);     // 1.50 ULP: 1 / sqrt(x), both correctly rounded; +inf for 0, NaN for x < 0

// ---- rounding
// out[i] = to_bf16(x[i]) and x[i] = to_float(out[i]): the activation as the matrix product will see it, in both forms.
void round_to_bf16(float* x, Index n, bf16* out);

// ---- norms over rows of `dim`
// y = x * rsqrt(mean(x^2) + eps) * w. inv_rms [rows] may be null. Squares are summed by fma; the mean divides by dim.
void rms_norm(const float* x, const float* w, Index rows, Index dim, float eps, float* y, float* inv_rms);
void rms_norm_backward(const float* x, const float* w, const float* inv_rms, const float* d_y, Index rows, Index dim,
                       float* d_x, float* d_w /* may be null */);
// y = fma((x - mean) * rsqrt(var + eps), w, b); stats [rows, 2] = {mean, inverse deviation}, may be null.
void layer_norm(const float* x, const float* w, const float* b, Index rows, Index dim, float eps, float* y,
                float* stats);
void layer_norm_backward(const float* x, const float* w, const float* stats, const float* d_y, Index rows, Index dim,
                         float* d_x, float* d_w, float* d_b);
// y = x * rsqrt(sum(x^2) + eps) * scale, for `rows` rows of `dim` (a row is one head of one token). inv [rows] may be
// null.
void l2_norm(const float* x, Index rows, Index dim, float eps, float scale, float* y, float* inv);
void l2_norm_backward(const float* x, const float* inv, const float* d_y, Index rows, Index dim, float scale,
                      float* d_x);

// ---- activations, elementwise over n
void silu_glu(const float* gate, const float* up, Index n, float* y);  // gate * sigmoid(gate) * up
void silu_glu_backward(const float* gate, const float* up, const float* d_y, Index n, float* d_gate, float* d_up);
// SiTU: beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)   (spec/model.md 3.5)
void situ_glu(const float* gate, const float* up, Index n, float beta, float linear_beta, float* y);
void situ_glu_backward(const float* gate, const float* up, const float* d_y, Index n, float beta, float linear_beta,
                       float* d_gate, float* d_up);
void sigmoid_rows(const float* x, Index n, float* y);
// y = x * sigmoid(gate): the output gates.
void sigmoid_gate(const float* x, const float* gate, Index n, float* y);
void sigmoid_gate_backward(const float* x, const float* gate, const float* d_y, Index n, float* d_x, float* d_gate);
// y = fma(a, x, y)
void axpy(float a, const float* x, Index n, float* y);

// ---- causal depthwise convolution of width 4 with SiLU (spec/model.md 1.3)
// u[t][c] = sum over j = 0..3 ascending of w[j][c] * z[t-3+j][c] (fma chain from 0), y = u * sigmoid(u).
// w is [4, channels] (tap-major). tail [3, channels] holds the three inputs before the first row (oldest first) and is
// updated. u may be null; training keeps it.
void causal_conv(const float* z, const float* w, Index rows, Index channels, float* tail, float* u, float* y);
// For a sequence that started at position 0 (tail of zeros).
void causal_conv_backward(const float* z, const float* w, const float* u, const float* d_y, Index rows, Index channels,
                          float* d_z, float* d_w /* [4, channels], may be null */);

// ---- KDA gate (log decay, <= 0) from raw [rows, heads, dim] (f_b(f_a(x))), dt_bias [heads, dim], a_log [heads]
// bounded:   g = lower_bound * sigmoid(exp(a_log) * (raw + dt_bias))
// unbounded: g = -exp(a_log) * softplus(raw + dt_bias)
struct GateShape {
  Index heads, dim;
  bool bounded;
  float lower_bound;
};
void kda_gate(const GateShape& shape, const float* raw, const float* dt_bias, const float* a_log, Index rows, float* g);
void kda_gate_backward(const GateShape& shape, const float* raw, const float* dt_bias, const float* a_log,
                       const float* d_g, Index rows, float* d_raw, float* d_dt_bias,
                       float* d_a_log /* both may be null */);

// ---- router (spec/model.md 1.3, MoE)
struct RouterShape {
  Index experts, top_k;
  bool renormalize;
  float scale;
};
// s = sigmoid(logits); the top_k of s + bias by (value descending, index ascending) go to ids [rows, top_k] in that
// order; weights = s[id] (/ (their sum in slot order + 1e-20)) * scale. A NaN value counts as -inf. experts <= 1024,
// otherwise Error{invalid_argument}.
void route(const RouterShape& shape, const float* logits, const float* bias, Index rows, std::int32_t* ids,
           float* weights);
void route_backward(const RouterShape& shape, const float* logits, const std::int32_t* ids, const float* weights,
                    const float* d_weights, Index rows, float* d_logits);

// ---- block attention residuals (spec/model.md 3.3)
// score_i = rsqrt(mean(v_i^2) + eps) * (v_i . w); p = softmax(score) over sources in order; out = sum p_i v_i
// (ascending i, by fma). sources: 1 to 32 (otherwise Error{invalid_argument}) pointers to [rows, dim]. probs [rows,
// n_sources] may be null in the forward.
void block_mix(const float* const* sources, int n_sources, const float* w, Index rows, Index dim, float eps, float* out,
               float* probs);
void block_mix_backward(const float* const* sources, int n_sources, const float* w, const float* probs,
                        const float* d_out, Index rows, Index dim, float eps, float* const* d_sources,
                        float* d_w /* may be null */);

// ---- soft-max over a vocabulary row
// log(sum(exp(x))) with the maximum taken out. -inf when every x is -inf (or n is 0); NaN when some x is NaN or +inf.
float log_sum_exp(const float* x, Index n);
// d_x[i] = fma(scale, exp(x[i] - lse), d_x[i])
void softmax_accumulate(const float* x, Index n, float lse, float scale, float* d_x);

}  // namespace tidelock::numerics
