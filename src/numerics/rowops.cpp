// Chooses the instruction set's kernels; the scalar math functions.
#include "numerics/rowops.hpp"

#include "base/error.hpp"
#include "numerics/math.inl"
#include "numerics/rowops_kernels.hpp"

namespace tidelock::numerics {
namespace {

using isa_scalar::F1;

void check_router(const RouterShape& shape) {
  if (shape.experts < 1 || shape.experts > kMaxExperts || shape.top_k < 1 || shape.top_k > shape.experts)
    fail(ErrorCode::invalid_argument, "router: {} experts, top_k {}: expected 1 <= top_k <= experts <= {}",
         shape.experts, shape.top_k, kMaxExperts);
}

void check_sources(int n_sources) {
  if (n_sources < 1 || n_sources > kMaxSources)
    fail(ErrorCode::invalid_argument, "block_mix: {} sources: expected 1 to {}", n_sources, kMaxSources);
}

}  // namespace

const RowKernels& row_kernels() {
  switch (isa()) {
    case Isa::scalar:
      return row_kernels_scalar();
    case Isa::avx2:
      return row_kernels_avx2();
    case Isa::avx512:
    case Isa::avx512bf16:
      break;
  }
  return row_kernels_avx512();
}

float exp(float x) {
  return isa_scalar::vexp(F1{x}).v;
}
float log(float x) {
  return isa_scalar::vlog(F1{x}).v;
}
float sigmoid(float x) {
  return isa_scalar::vsigmoid(F1{x}).v;
}
float tanh(float x) {
  return isa_scalar::vtanh(F1{x}).v;
}
float softplus(float x) {
  return isa_scalar::vsoftplus(F1{x}).v;
}
float rsqrt(float x) {
  return isa_scalar::vrsqrt(F1{x}).v;
}

void round_to_bf16(float* x, Index n, bf16* out) {
  row_kernels().round_to_bf16(x, n, out);
}

void rms_norm(const float* x, const float* w, Index rows, Index dim, float eps, float* y, float* inv_rms) {
  row_kernels().rms_norm(x, w, rows, dim, eps, y, inv_rms);
}

void rms_norm_backward(const float* x, const float* w, const float* inv_rms, const float* d_y, Index rows, Index dim,
                       float* d_x, float* d_w) {
  row_kernels().rms_norm_backward(x, w, inv_rms, d_y, rows, dim, d_x, d_w);
}

void layer_norm(const float* x, const float* w, const float* b, Index rows, Index dim, float eps, float* y,
                float* stats) {
  row_kernels().layer_norm(x, w, b, rows, dim, eps, y, stats);
}

void layer_norm_backward(const float* x, const float* w, const float* stats, const float* d_y, Index rows, Index dim,
                         float* d_x, float* d_w, float* d_b) {
  row_kernels().layer_norm_backward(x, w, stats, d_y, rows, dim, d_x, d_w, d_b);
}

void l2_norm(const float* x, Index rows, Index dim, float eps, float scale, float* y, float* inv) {
  row_kernels().l2_norm(x, rows, dim, eps, scale, y, inv);
}

void l2_norm_backward(const float* x, const float* inv, const float* d_y, Index rows, Index dim, float scale,
                      float* d_x) {
  row_kernels().l2_norm_backward(x, inv, d_y, rows, dim, scale, d_x);
}

void silu_glu(const float* gate, const float* up, Index n, float* y) {
  row_kernels().silu_glu(gate, up, n, y);
}

void silu_glu_backward(const float* gate, const float* up, const float* d_y, Index n, float* d_gate, float* d_up) {
  row_kernels().silu_glu_backward(gate, up, d_y, n, d_gate, d_up);
}

void situ_glu(const float* gate, const float* up, Index n, float beta, float linear_beta, float* y) {
  row_kernels().situ_glu(gate, up, n, beta, linear_beta, y);
}

void situ_glu_backward(const float* gate, const float* up, const float* d_y, Index n, float beta, float linear_beta,
                       float* d_gate, float* d_up) {
  row_kernels().situ_glu_backward(gate, up, d_y, n, beta, linear_beta, d_gate, d_up);
}

void sigmoid_rows(const float* x, Index n, float* y) {
  row_kernels().sigmoid_rows(x, n, y);
}

void sigmoid_gate(const float* x, const float* gate, Index n, float* y) {
  row_kernels().sigmoid_gate(x, gate, n, y);
}

void sigmoid_gate_backward(const float* x, const float* gate, const float* d_y, Index n, float* d_x, float* d_gate) {
  row_kernels().sigmoid_gate_backward(x, gate, d_y, n, d_x, d_gate);
}

void axpy(float a, const float* x, Index n, float* y) {
  row_kernels().axpy(a, x, n, y);
}

void causal_conv(const float* z, const float* w, Index rows, Index channels, float* tail, float* u, float* y) {
  row_kernels().causal_conv(z, w, rows, channels, tail, u, y);
}

void causal_conv_backward(const float* z, const float* w, const float* u, const float* d_y, Index rows, Index channels,
                          float* d_z, float* d_w) {
  row_kernels().causal_conv_backward(z, w, u, d_y, rows, channels, d_z, d_w);
}

void kda_gate(const GateShape& shape, const float* raw, const float* dt_bias, const float* a_log, Index rows,
              float* g) {
  row_kernels().kda_gate(shape, raw, dt_bias, a_log, rows, g);
}

void kda_gate_backward(const GateShape& shape, const float* raw, const float* dt_bias, const float* a_log,
                       const float* d_g, Index rows, float* d_raw, float* d_dt_bias, float* d_a_log) {
  row_kernels().kda_gate_backward(shape, raw, dt_bias, a_log, d_g, rows, d_raw, d_dt_bias, d_a_log);
}

void route(const RouterShape& shape, const float* logits, const float* bias, Index rows, std::int32_t* ids,
           float* weights) {
  check_router(shape);
  row_kernels().route(shape, logits, bias, rows, ids, weights);
}

void route_backward(const RouterShape& shape, const float* logits, const std::int32_t* ids, const float* weights,
                    const float* d_weights, Index rows, float* d_logits) {
  check_router(shape);
  row_kernels().route_backward(shape, logits, ids, weights, d_weights, rows, d_logits);
}

void block_mix(const float* const* sources, int n_sources, const float* w, Index rows, Index dim, float eps, float* out,
               float* probs) {
  check_sources(n_sources);
  row_kernels().block_mix(sources, n_sources, w, rows, dim, eps, out, probs);
}

void block_mix_backward(const float* const* sources, int n_sources, const float* w, const float* probs,
                        const float* d_out, Index rows, Index dim, float eps, float* const* d_sources, float* d_w) {
  check_sources(n_sources);
  row_kernels().block_mix_backward(sources, n_sources, w, probs, d_out, rows, dim, eps, d_sources, d_w);
}

float log_sum_exp(const float* x, Index n) {
  return row_kernels().log_sum_exp(x, n);
}

void softmax_accumulate(const float* x, Index n, float lse, float scale, float* d_x) {
  row_kernels().softmax_accumulate(x, n, lse, scale, d_x);
}

}  // namespace tidelock::numerics
