// What the tests of the row operations share: bit comparison, random rows, and tables of implementations to compare.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/random.hpp"
#include "base/team.hpp"
#include "numerics/isa.hpp"
#include "numerics/paths.hpp"
#include "numerics/rowops_kernels.hpp"
#include "numerics/rowops_reference.hpp"

namespace tidelock::numerics::testing {

using Floats = std::vector<float>;

inline std::uint32_t bits(float x) {
  return std::bit_cast<std::uint32_t>(x);
}

// Equal by bits; which NaN it is does not count (x86 returns the first NaN operand, and compilers swap operands).
inline bool same(float a, float b) {
  return bits(a) == bits(b) || (std::isnan(a) && std::isnan(b));
}

// The first index at which they differ; -1 if none.
inline std::int64_t first_difference(const Floats& a, const Floats& b) {
  if (a.size() != b.size()) return 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!same(a[i], b[i])) return static_cast<std::int64_t>(i);
  return -1;
}

// Restores the instruction set; the thread flushes denormals, as every computing thread does.
class RowOps : public ::testing::Test {
 protected:
  void SetUp() override {
    set_flush_to_zero();
    before_ = isa();
  }
  void TearDown() override { force_isa(before_); }

 private:
  Isa before_{};
};

inline Floats normals(Random& random, Index n, float scale = 1.0F) {
  Floats x(static_cast<std::size_t>(n));
  for (float& v : x) v = random.normal() * scale;
  return x;
}

// Normal numbers among which every eighth, on average, is a special value.
inline Floats specials(Random& random, Index n) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const float values[] = {0.0F,  -0.0F,  1e-42F, -1e-42F, 1.17549435e-38F, -1.17549435e-38F, 3e38F,        -3e38F,
                          1e20F, 1e-20F, 88.5F,  -87.4F,  infinity,        -infinity,        std::nanf("")};
  Floats x = normals(random, n);
  for (float& v : x)
    if (random.below(8) == 0) v = values[random.below(std::size(values))];
  return x;
}

// The public functions, so that force_isa decides which kernels run.
inline RowKernels public_table() {
  RowKernels t{};
  t.name = "public";
  t.round_to_bf16 = round_to_bf16;
  t.rms_norm = rms_norm;
  t.layer_norm = layer_norm;
  t.l2_norm = l2_norm;
  t.silu_glu = silu_glu;
  t.situ_glu = situ_glu;
  t.sigmoid_rows = sigmoid_rows;
  t.sigmoid_gate = sigmoid_gate;
  t.axpy = axpy;
  t.causal_conv = causal_conv;
  t.kda_gate = kda_gate;
  t.route = route;
  t.block_mix = block_mix;
  t.log_sum_exp = log_sum_exp;
  t.softmax_accumulate = softmax_accumulate;
  return t;
}

inline RowKernels reference_table() {
  RowKernels t{};
  t.name = "reference";
  t.round_to_bf16 = reference::round_to_bf16;
  t.rms_norm = reference::rms_norm;
  t.layer_norm = reference::layer_norm;
  t.l2_norm = reference::l2_norm;
  t.silu_glu = reference::silu_glu;
  t.situ_glu = reference::situ_glu;
  t.sigmoid_rows = reference::sigmoid_rows;
  t.sigmoid_gate = reference::sigmoid_gate;
  t.axpy = reference::axpy;
  t.causal_conv = reference::causal_conv;
  t.kda_gate = reference::kda_gate;
  t.route = reference::route;
  t.block_mix = reference::block_mix;
  t.log_sum_exp = reference::log_sum_exp;
  t.softmax_accumulate = reference::softmax_accumulate;
  return t;
}

}  // namespace tidelock::numerics::testing
