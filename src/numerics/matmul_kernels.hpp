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
//   block formats: [panel][chunk of up to 256 k], a chunk being its scales, padded to 64 bytes, then its codes:
//     q8_0   f16 d[sub-block][16]
//     mxfp4  u8 e[sub-block][16]
//     q4_k, q5_k  f16 d[16], f16 dmin[16], u8 scale[8][16], u8 min[8][16]
//     q6_k   f16 d[16], i8 scale[16][16]
//     codes of 8 bits (q8_0, q5_k, q6_k): [k / 2][even, odd][16] bytes
//     codes of 4 bits (mxfp4, q4_k): [k / 8][16] words of 32 bits: k 0, 2, 4, 6 in the lower half, 1, 3, 5, 7 in the
//     upper
inline std::int64_t panel_count(std::int64_t out) {
  return (out + kPanel - 1) / kPanel;
}

inline constexpr std::int64_t kChunk = 256;
constexpr int code_bits(Format format) {
  return format == Format::mxfp4 || format == Format::q4_k ? 4 : 8;
}
// Where the codes of a chunk of `count` k begin, and the chunk's size.
constexpr std::size_t codes_offset(Format format, std::int64_t count) {
  const std::int64_t bytes = format == Format::q8_0 ? count : format == Format::mxfp4 ? count / 2 : 320;
  return static_cast<std::size_t>((bytes + 63) / 64 * 64);
}
constexpr std::size_t chunk_bytes(Format format, std::int64_t count) {
  return codes_offset(format, count) + static_cast<std::size_t>(count * kPanel * code_bits(format) / 8);
}
inline std::size_t panel_bytes(Format format, std::int64_t in) {
  if (format == Format::f32) return static_cast<std::size_t>(in * kPanel * 4);
  if (format == Format::bf16) return static_cast<std::size_t>((in + 1) / 2 * kPanel * 4);
  const std::int64_t rest = in % kChunk;
  return static_cast<std::size_t>(in / kChunk) * chunk_bytes(format, kChunk) +
         (rest == 0 ? 0 : chunk_bytes(format, rest));
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
  Format format;
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

// Rows [row0, row1) of the panels [panel0, panel1).
using BlockKernel = void (*)(const MatmulJob& job, std::int64_t row0, std::int64_t row1, std::int64_t panel0,
                             std::int64_t panel1);
struct DenseKernels {
  BlockKernel f32, bf16;
  // Rows i in [i0, i1) and columns j in [j0, j1) of c.
  void (*outer)(const OuterJob& job, std::int64_t i0, std::int64_t i1, std::int64_t j0, std::int64_t j1);
};

extern const DenseKernels kMatmulScalar, kMatmulAvx2, kMatmulAvx512, kMatmulAvx512Bf16;
extern const BlockKernel kBlocksScalar, kBlocksAvx2, kBlocksAvx512, kBlocksAvx512Bf16;  // the block formats

}  // namespace tidelock::numerics
