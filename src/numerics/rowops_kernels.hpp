// Private: one table of row kernels per instruction set; rowops.cpp calls through the one that isa() names.
#pragma once

#include "numerics/isa.hpp"
#include "numerics/rowops.hpp"

namespace tidelock::numerics {

struct RowKernels {
  const char* name;  // the instruction set that the table was compiled for
  // y[i] = f(x[i]): the vector forms of the scalar functions, for the tests that compare them by bits.
  using Elementwise = void (*)(const float* x, Index n, float* y);
  Elementwise exp, log, sigmoid, tanh, softplus, rsqrt;

  decltype(&numerics::round_to_bf16) round_to_bf16;
  decltype(&numerics::rms_norm) rms_norm;
  decltype(&numerics::layer_norm) layer_norm;
  decltype(&numerics::l2_norm) l2_norm;
  decltype(&numerics::silu_glu) silu_glu;
  decltype(&numerics::situ_glu) situ_glu;
  decltype(&numerics::sigmoid_rows) sigmoid_rows;
  decltype(&numerics::sigmoid_gate) sigmoid_gate;
  decltype(&numerics::axpy) axpy;
  decltype(&numerics::causal_conv) causal_conv;
  decltype(&numerics::kda_gate) kda_gate;
  decltype(&numerics::route) route;
  decltype(&numerics::block_mix) block_mix;
  decltype(&numerics::log_sum_exp) log_sum_exp;
  decltype(&numerics::softmax_accumulate) softmax_accumulate;

  decltype(&numerics::rms_norm_backward) rms_norm_backward;
  decltype(&numerics::layer_norm_backward) layer_norm_backward;
  decltype(&numerics::l2_norm_backward) l2_norm_backward;
  decltype(&numerics::silu_glu_backward) silu_glu_backward;
  decltype(&numerics::situ_glu_backward) situ_glu_backward;
  decltype(&numerics::sigmoid_gate_backward) sigmoid_gate_backward;
  decltype(&numerics::causal_conv_backward) causal_conv_backward;
  decltype(&numerics::kda_gate_backward) kda_gate_backward;
  decltype(&numerics::route_backward) route_backward;
  decltype(&numerics::block_mix_backward) block_mix_backward;
};

inline constexpr Index kMaxExperts = 1024;
inline constexpr int kMaxSources = 32;
inline constexpr float kRouterEpsilon = 1e-20F;

const RowKernels& row_kernels_scalar();
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();

// The table in use. avx512bf16 uses that of avx512: no row operation has a bf16 product.
const RowKernels& row_kernels();

}  // namespace tidelock::numerics
