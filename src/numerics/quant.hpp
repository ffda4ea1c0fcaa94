// Quantised weights: rows of blocks in the layouts of ggml, which GGUF files hold as they are; and the quantised inputs
// that meet them.
//
// Whatever the format, a weight is  scale * code - min  where scale and min belong to a sub-block of consecutive k and
// every code is an integer of at most eight bits.
//
//   format  block  bytes  layout                                                      sub-block  code     scale, min
//   q8_0    32     34     f16 d; i8 q[32]                                             32         q        d, 0
//   q5_1    32     24     f16 d, m; u32 high; u8 q[16]: as mxfp4, bit j of high above 32         0..31    d, -m
//   mxfp4   32     17     u8 e; u8 q[16]: j in the low, j + 16 in the high nibble     32         2 E2M1   2^(e-128), 0
//   q4_k    256    144    f16 d, dmin; u8 sc[12]: 6-bit pairs; u8 q[128]              32         0..15    d sc, dmin m
//   q5_k    256    176    f16 d, dmin; u8 sc[12]; u8 high[32]; u8 q[128]              32         0..31    d sc, dmin m
//   q6_k    256    210    u8 low[128]; u8 high[64]; i8 sc[16]; f16 d                  16         -32..31  d sc, 0
//
// In q4_k and q5_k 64 elements share 32 bytes: the first 32 are the low nibbles. In q6_k 128 elements share 64 bytes of
// low nibbles and 32 of high pairs. An mxfp4 scale of e <= 1 stands for zero: half of it is no normal float32.
// (Source: the block definitions of ggml and the OCP MX specification, as spec/model.md 3.8 and 5 describe them.)
#pragma once

#include <cstddef>
#include <cstdint>

#include "numerics/formats.hpp"

namespace tidelock::numerics {

const char* format_name(Format format);      // "f32", "q8_0", ...
std::int64_t block_elements(Format format);  // 1 for f32 and bf16
std::size_t block_bytes(Format format);      // of that many elements
std::int64_t sub_block(Format format);       // elements that share a scale; 1 for f32 and bf16
bool is_quantized(Format format);
bool has_minimum(Format format);
// Bytes of n elements; n must be a multiple of block_elements.
std::size_t row_bytes(Format format, std::int64_t n);

// Values of n elements (a multiple of the block). scale * code - min in one rounding.
void dequantize(Format format, const std::byte* blocks, std::int64_t n, float* out);

// Codes of n elements, and one scale and one min for each sub-block. Quantised formats only.
void unpack_codes(Format format, const std::byte* blocks, std::int64_t n, std::int8_t* codes, float* scales,
                  float* mins);

// Inputs for the block formats: every 32 consecutive x of a row become integers and one scale.
//   m = max |x|;  d = m / 127 and q = round(x * (127 / m)), ties to even, held to [-127, 127];  m < 2^-100: d = q = 0
inline constexpr std::int64_t kInputBlock = 32;
inline constexpr float kSmallestInput = 0x1p-100F;

// The 6-bit scale and minimum of sub-block j (0 to 7) of a q4_k or q5_k block, from the twelve bytes they share.
struct SixBits {
  unsigned scale, min;
};
SixBits six_bits(const std::byte* sc, int j);

// To f32, bf16, q8_0 (d = largest magnitude / 127, codes to nearest, ties to even) or mxfp4 (the scale that brings the
// largest magnitude into [4, 8), codes to nearest, ties to the even code, at most 6). Other formats:
// Error{not_supported}.
void quantize(Format format, const float* values, std::int64_t n, std::byte* blocks);

// ggml's q4_0 (18 bytes: f16 d; u8 q[16]; code q - 8) and q5_0 (22 bytes: f16 d; u8 high[4]; u8 q[16]; code q - 16), j
// in the low and j + 16 in the high nibble, to the q8_0 blocks of the same values. bits: 4 or 5.
void widen_to_q8_0(int bits, const std::byte* blocks, std::int64_t n, std::byte* to);
// ggml's iq4_nl (18 bytes: f16 d; u8 q[16], looked up in a table of sixteen int8) to the q8_0 blocks of the same
// values, and its q4_1 (20 bytes: f16 d, m; u8 q[16]) to those of q5_1.
void widen_iq4_nl_to_q8_0(const std::byte* blocks, std::int64_t n, std::byte* to);
void widen_to_q5_1(const std::byte* blocks, std::int64_t n, std::byte* to);

// The first element whose block holds a scale that is not finite (or, in mxfp4, one whose values would not be), else n.
std::int64_t find_not_finite(Format format, const std::byte* blocks, std::int64_t n);

}  // namespace tidelock::numerics
