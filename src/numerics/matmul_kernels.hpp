// The kernels behind matmul.hpp: one set per instruction set, all with the same chains and therefore the same bits.
// Private to numerics/; the kernels are written once in matmul_kernels.inl.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numerics/formats.hpp"

namespace tidelock::numerics {

inline constexpr std::int64_t kPanel = 16;  // output columns that a packed panel interleaves

// Packed weights, per panel of 16 outputs (columns past `out` are zero):
//   f32:   [panel][k][16]
//   bf16:  [panel][k / 2][16][2], an odd last k paired with a zero
inline std::int64_t panel_count(std::int64_t out) {
  return (out + kPanel - 1) / kPanel;
}
inline std::size_t panel_bytes(Format format, std::int64_t in) {
  const auto steps = static_cast<std::size_t>(format == Format::bf16 ? (in + 1) / 2 : in);
  return steps * kPanel * 4;
}

// One product, shared by all of its pieces.
struct MatmulJob {
  const std::byte* w;  // packed
  const void* x;       // [rows, in] float or bf16, row stride ldx in elements
  std::int64_t ldx;
  float* y;  // [rows, out], row stride ldy
  std::int64_t ldy;
  std::int64_t out, in;
  int segments;
  bool add;  // y = y + result
};

// c[i][j] over ascending m in [m0, m1), starting from zero when `fresh` and from c otherwise.
struct OuterJob {
  const float* a;  // [rows, n], stride lda
  std::int64_t lda;
  const float* b;  // [rows, k], stride ldb
  std::int64_t ldb;
  float* c;  // [n, k], stride ldc
  std::int64_t ldc;
  std::int64_t rows, n, k;
  bool fresh;
};

struct MatmulKernels {
  // Rows [row0, row1) of the panels [panel0, panel1).
  void (*f32)(const MatmulJob& job, std::int64_t row0, std::int64_t row1, std::int64_t panel0, std::int64_t panel1);
  void (*bf16)(const MatmulJob& job, std::int64_t row0, std::int64_t row1, std::int64_t panel0, std::int64_t panel1);
  // Rows i in [i0, i1) and columns j in [j0, j1) of c.
  void (*outer)(const OuterJob& job, std::int64_t i0, std::int64_t i1, std::int64_t j0, std::int64_t j1);
};

extern const MatmulKernels kMatmulScalar, kMatmulAvx2, kMatmulAvx512, kMatmulAvx512Bf16;

}  // namespace tidelock::numerics
