// The forward row operations of rowops.hpp as plain loops, one element at a time, without vectors: what the kernels are
// compared with by bits. Signatures, shapes and orders are those of rowops.hpp.
#pragma once

#include "numerics/rowops.hpp"

namespace tidelock::numerics::reference {

void round_to_bf16(float* x, Index n, bf16* out);
void rms_norm(const float* x, const float* w, Index rows, Index dim, float eps, float* y, float* inv_rms);
void layer_norm(const float* x, const float* w, const float* b, Index rows, Index dim, float eps, float* y,
                float* stats);
void l2_norm(const float* x, Index rows, Index dim, float eps, float scale, float* y, float* inv);
void silu_glu(const float* gate, const float* up, Index n, float* y);
void situ_glu(const float* gate, const float* up, Index n, float beta, float linear_beta, float* y);
void sigmoid_rows(const float* x, Index n, float* y);
void sigmoid_gate(const float* x, const float* gate, Index n, float* y);
void axpy(float a, const float* x, Index n, float* y);
void causal_conv(const float* z, const float* w, Index rows, Index channels, float* tail, float* u, float* y);
void kda_gate(const GateShape& shape, const float* raw, const float* dt_bias, const float* a_log, Index rows, float* g);
void route(const RouterShape& shape, const float* logits, const float* bias, Index rows, std::int32_t* ids,
           float* weights);
void block_mix(const float* const* sources, int n_sources, const float* w, Index rows, Index dim, float eps, float* out,
               float* probs);
float log_sum_exp(const float* x, Index n);
void softmax_accumulate(const float* x, Index n, float lse, float scale, float* d_x);

}  // namespace tidelock::numerics::reference
