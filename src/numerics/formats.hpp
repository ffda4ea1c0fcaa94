// Number formats of the contract.
#pragma once

#include <bit>
#include <cstdint>

namespace tidelock::numerics {

// The contract's name and version: part of every checkpoint, adapter, cache key and oracle file; a mismatch is refused.
inline constexpr const char* kContractName = "tidelock-1";

// bfloat16: the upper half of a float32.
struct bf16 {
  std::uint16_t bits = 0;
  friend bool operator==(bf16, bf16) = default;
};

// How a matrix, or a stored state, is kept; it fixes how the inputs that meet it are rounded. f32 meets float32 inputs,
// all others meet bf16 inputs. The block formats (quant.hpp) are for matrices only.
enum class Format : std::uint8_t { f32, bf16, q8_0, q4_k, q5_k, q6_k, mxfp4, q5_1 };

inline float to_float(bf16 x) {
  return std::bit_cast<float>(std::uint32_t{x.bits} << 16);
}

// Round to nearest, ties to even; denormals become a zero of their sign (as vcvtneps2bf16 does); NaN becomes quiet.
inline bf16 to_bf16(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t exponent = u & 0x7F800000U;
  if (exponent == 0) return {static_cast<std::uint16_t>((u >> 16) & 0x8000U)};
  if (exponent == 0x7F800000U && (u & 0x007FFFFFU) != 0) return {static_cast<std::uint16_t>((u >> 16) | 0x0040U)};
  return {static_cast<std::uint16_t>((u + 0x7FFFU + ((u >> 16) & 1U)) >> 16)};
}

// IEEE half: exact to float32; from float32 to nearest, ties to even, beyond the range infinite.
float f16_to_float(std::uint16_t bits);
std::uint16_t float_to_f16(float x);

}  // namespace tidelock::numerics
