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
//     q5_1   f16 { d[16], -m[16] } [sub-block]
//     q4_k, q5_k  f16 d[16], f16 dmin[16], u8 scale[8][16], u8 min[8][16]
//     q6_k   f16 d[16], i8 scale[16][16]
//     codes are kept unsigned, code + code_offset, by 32 k:
//       8 bits  [k / 4][16][4] bytes
//       4 bits  [k / 8][16][4] bytes: k 0..3 in the low nibbles, 4..7 in the high ones
//       5 bits  as 4, then 64 bytes [16][4] of fifth bits: bit t is that of k = 4 t + j
//       6 bits  as 4, then 2 x 64 bytes [16][4] of upper pairs: pair t is that of k = 4 t + j, and of 16 + 4 t + j
inline std::int64_t panel_count(std::int64_t out) {
  return (out + kPanel - 1) / kPanel;
}

inline constexpr std::int64_t kChunk = 256;
constexpr int code_bits(Format format) {
  return format == Format::q8_0                             ? 8
         : format == Format::q6_k                           ? 6
         : format == Format::q5_k || format == Format::q5_1 ? 5
                                                            : 4;
}
constexpr int code_offset(Format format) {
  return format == Format::q8_0 ? 128 : format == Format::q6_k ? 32 : format == Format::mxfp4 ? 12 : 0;
}
// Where the codes of a chunk of `count` k begin, and the chunk's size.
constexpr std::size_t codes_offset(Format format, std::int64_t count) {
  const std::int64_t bytes = format == Format::q8_0    ? count
                             : format == Format::mxfp4 ? count / 2
                             : format == Format::q5_1  ? count * 2
                                                       : 320;
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

// Inputs in blocks of 32 (quant.hpp), of the rows of a job.
struct QuantizedInputs {
  const std::int8_t* q;      // [rows, in]
  const float* d;            // [rows, in / 32]
  const std::int32_t* sums;  // [rows, in / 16]: of 16 q each
};

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
  QuantizedInputs quantized{};  // instead of x, for block formats
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

// The block formats: the product, and the inputs of rows [row0, row1) quantised into the arrays given.
struct QuantKernels {
  BlockKernel product;
  void (*quantize)(const bf16* x, std::int64_t ldx, std::int64_t in, std::int64_t row0, std::int64_t row1,
                   std::int8_t* q, float* d, std::int32_t* sums);
};
extern const QuantKernels kQuantScalar, kQuantAvx2, kQuantAvx512, kQuantAvx512Bf16;

}  // namespace tidelock::numerics
