#include "numerics/quant.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/error.hpp"

namespace tidelock::numerics {
namespace {

constexpr std::int64_t kSuper = 256;

template <typename T>
T read(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
float read_f16(const std::byte* from) {
  return f16_to_float(read<std::uint16_t>(from));
}
unsigned byte_at(const std::byte* from, std::int64_t i) {
  return std::to_integer<unsigned>(from[i]);
}

constexpr std::array<std::int8_t, 16> kE2m1{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled

void unpack_q8_0(const std::byte* block, std::int8_t* codes, float* scales, float* mins) {
  scales[0] = read_f16(block);
  mins[0] = 0;
  for (int i = 0; i < 32; ++i) codes[i] = read<std::int8_t>(block + 2 + i);
}

void unpack_mxfp4(const std::byte* block, std::int8_t* codes, float* scales, float* mins) {
  const unsigned e = byte_at(block, 0);
  scales[0] = e <= 1 ? 0.0F : std::bit_cast<float>((e - 1) << 23);
  mins[0] = 0;
  for (int i = 0; i < 16; ++i) {
    const unsigned q = byte_at(block, 1 + i);
    codes[i] = kE2m1[q & 15U];
    codes[i + 16] = kE2m1[q >> 4];
  }
}

void unpack_q5_1(const std::byte* block, std::int8_t* codes, float* scales, float* mins) {
  scales[0] = read_f16(block);
  mins[0] = -read_f16(block + 2);
  const auto high = read<std::uint32_t>(block + 4);
  for (int i = 0; i < 32; ++i)
    codes[i] = static_cast<std::int8_t>((byte_at(block, 8 + i % 16) >> (i / 16 * 4) & 15U) | (high >> i & 1U) << 4);
}

void unpack_q4_q5(const std::byte* block, bool five, std::int8_t* codes, float* scales, float* mins) {
  const float d = read_f16(block), dmin = read_f16(block + 2);
  const std::byte* high = block + 16;
  const std::byte* low = block + (five ? 48 : 16);
  for (int j = 0; j < 8; ++j) {
    const SixBits pair = six_bits(block + 4, j);
    scales[j] = d * static_cast<float>(pair.scale);
    mins[j] = dmin * static_cast<float>(pair.min);
    for (int i = 0; i < 32; ++i) {
      const unsigned both = byte_at(low, j / 2 * 32 + i);
      unsigned code = j % 2 == 0 ? both & 15U : both >> 4;
      if (five) code |= (byte_at(high, i) >> j & 1U) << 4;
      codes[j * 32 + i] = static_cast<std::int8_t>(code);
    }
  }
}

void unpack_q6_k(const std::byte* block, std::int8_t* codes, float* scales, float* mins) {
  const float d = read_f16(block + 208);
  for (int j = 0; j < 16; ++j) {
    scales[j] = d * static_cast<float>(read<std::int8_t>(block + 192 + j));
    mins[j] = 0;
  }
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
    const unsigned low = byte_at(block, half * 64 + quarter % 2 * 32 + at) >> (quarter / 2 * 4) & 15U;
    const unsigned high = byte_at(block, 128 + half * 32 + at) >> (quarter * 2) & 3U;
    codes[i] = static_cast<std::int8_t>(static_cast<int>(low | high << 4) - 32);
  }
}

void quantize_q8_0(const float* x, std::byte* block) {
  float largest = 0;
  for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(x[i]));
  const std::uint16_t d = float_to_f16(largest / 127.0F);
  std::memcpy(block, &d, 2);
  const float scale = f16_to_float(d);
  for (int i = 0; i < 32; ++i) {
    const float q = scale == 0 ? 0 : std::nearbyint(x[i] / scale);
    block[2 + i] = static_cast<std::byte>(static_cast<std::int8_t>(std::clamp(q, -127.0F, 127.0F)));
  }
}

// The code whose value is nearest, ties to the even code; magnitudes beyond 6 become 6. Counts the midpoints passed.
unsigned nearest_e2m1(float x) {
  const float m = std::fabs(x);
  const int code = (m > 0.25F) + (m >= 0.75F) + (m > 1.25F) + (m >= 1.75F) + (m > 2.5F) + (m >= 3.5F) + (m > 5.0F);
  return static_cast<unsigned>(code) | (std::signbit(x) && code != 0 ? 8U : 0U);
}

void quantize_mxfp4(const float* x, std::byte* block) {
  float largest = 0;
  for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(x[i]));
  // floor(log2(largest)) - 2 brings the largest magnitude into [4, 8).
  const int exponent = largest == 0 ? -127 : std::clamp(std::ilogb(largest) - 2, -126, 125);
  block[0] = static_cast<std::byte>(exponent + 127);
  const float inverse = largest == 0 ? 0.0F : std::ldexp(1.0F, -exponent);
  for (int i = 0; i < 16; ++i)
    block[1 + i] = static_cast<std::byte>(nearest_e2m1(x[i] * inverse) | nearest_e2m1(x[i + 16] * inverse) << 4);
}

void unpack_block(Format format, const std::byte* block, std::int8_t* codes, float* scales, float* mins) {
  switch (format) {
    case Format::q8_0:
      return unpack_q8_0(block, codes, scales, mins);
    case Format::mxfp4:
      return unpack_mxfp4(block, codes, scales, mins);
    case Format::q5_1:
      return unpack_q5_1(block, codes, scales, mins);
    case Format::q4_k:
    case Format::q5_k:
      return unpack_q4_q5(block, format == Format::q5_k, codes, scales, mins);
    case Format::q6_k:
      return unpack_q6_k(block, codes, scales, mins);
    case Format::f32:
    case Format::bf16:
      fail(ErrorCode::internal, "{} has no blocks", format_name(format));
  }
}

bool block_is_finite(Format format, const std::byte* block) {
  const auto finite = [](const std::byte* at) { return std::isfinite(read_f16(at)); };
  switch (format) {
    case Format::f32:
      return std::isfinite(read<float>(block));
    case Format::bf16:
      return std::isfinite(to_float(read<bf16>(block)));
    case Format::q8_0:
      return finite(block);
    case Format::q4_k:
    case Format::q5_k:
    case Format::q5_1:
      return finite(block) && finite(block + 2);
    case Format::q6_k:
      return finite(block + 208);
    case Format::mxfp4:
      return byte_at(block, 0) <= 252;  // 6 * 2^(252 - 127) is below 2^128, 6 * 2^(253 - 127) is not
  }
  return false;
}

}  // namespace

float f16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t{bits} << 16 & 0x80000000U;
  const std::uint32_t exponent = bits >> 10 & 31U, mantissa = bits & 1023U;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000U | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  if (mantissa == 0) return std::bit_cast<float>(sign);
  const int lead = 31 - std::countl_zero(mantissa);  // a denormal half is a normal float32: mantissa * 2^-24
  return std::bit_cast<float>(sign | static_cast<std::uint32_t>(lead + 103) << 23 |
                              (mantissa << (23 - lead) & 0x7FFFFFU));
}

std::uint16_t float_to_f16(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>(u >> 16 & 0x8000U);
  const std::uint32_t magnitude = u & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<std::uint16_t>(sign | 0x7E00U);
  if (magnitude >= 0x477FF000U) return static_cast<std::uint16_t>(sign | 0x7C00U);  // 65520 and more round to infinity
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  if (exponent < -25) return sign;
  // Bits to drop: 13 for a normal half, more the deeper the value lies among the denormals.
  const int drop = exponent >= -14 ? 13 : -exponent - 1;
  const std::uint32_t value = exponent >= -14 ? magnitude - (112U << 23) : (magnitude & 0x7FFFFFU) | 0x800000U;
  const std::uint32_t kept = value >> drop, rest = value & ((1U << drop) - 1U), half = 1U << (drop - 1);
  return static_cast<std::uint16_t>(sign | (kept + (rest > half || (rest == half && kept % 2 == 1) ? 1 : 0)));
}

SixBits six_bits(const std::byte* sc, int j) {
  if (j < 4) return {byte_at(sc, j) & 63U, byte_at(sc, j + 4) & 63U};
  return {(byte_at(sc, j + 4) & 15U) | (byte_at(sc, j - 4) >> 6) << 4, (byte_at(sc, j + 4) >> 4) | (byte_at(sc, j) >> 6)
                                                                                                       << 4};
}

const char* format_name(Format format) {
  static constexpr std::array<const char*, 8> names{"f32", "bf16", "q8_0", "q4_k", "q5_k", "q6_k", "mxfp4", "q5_1"};
  return names[static_cast<std::size_t>(format)];
}

bool is_quantized(Format format) {
  return format != Format::f32 && format != Format::bf16;
}

bool has_minimum(Format format) {
  return format == Format::q4_k || format == Format::q5_k || format == Format::q5_1;
}

std::int64_t block_elements(Format format) {
  static constexpr std::array<std::int64_t, 8> elements{1, 1, 32, kSuper, kSuper, kSuper, 32, 32};
  return elements[static_cast<std::size_t>(format)];
}

std::size_t block_bytes(Format format) {
  static constexpr std::array<std::size_t, 8> bytes{4, 2, 34, 144, 176, 210, 17, 24};
  return bytes[static_cast<std::size_t>(format)];
}

std::int64_t sub_block(Format format) {
  static constexpr std::array<std::int64_t, 8> elements{1, 1, 32, 32, 32, 16, 32, 32};
  return elements[static_cast<std::size_t>(format)];
}

std::size_t row_bytes(Format format, std::int64_t n) {
  if (n % block_elements(format) != 0)
    fail(ErrorCode::invalid_argument, "{} elements are no whole number of {} blocks of {}", n, format_name(format),
         block_elements(format));
  return static_cast<std::size_t>(n / block_elements(format)) * block_bytes(format);
}

void unpack_codes(Format format, const std::byte* blocks, std::int64_t n, std::int8_t* codes, float* scales,
                  float* mins) {
  const std::int64_t step = block_elements(format), subs = step / sub_block(format);
  for (std::int64_t at = 0; at < n; at += step, blocks += block_bytes(format), scales += subs, mins += subs)
    unpack_block(format, blocks, codes + at, scales, mins);
}

void dequantize(Format format, const std::byte* blocks, std::int64_t n, float* out) {
  if (format == Format::f32) {
    std::memcpy(out, blocks, static_cast<std::size_t>(n) * 4);
    return;
  }
  if (format == Format::bf16) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = to_float(read<bf16>(blocks + 2 * i));
    return;
  }
  std::array<float, 16> scales{}, mins{};
  std::array<std::int8_t, kSuper> codes{};
  const std::int64_t step = block_elements(format), sub = sub_block(format);
  for (std::int64_t at = 0; at < n; at += step, blocks += block_bytes(format)) {
    unpack_block(format, blocks, codes.data(), scales.data(), mins.data());
    for (std::int64_t i = 0; i < step; ++i) {
      const auto s = static_cast<std::size_t>(i / sub);
      out[at + i] = std::fma(scales[s], static_cast<float>(codes[static_cast<std::size_t>(i)]), -mins[s]);
    }
  }
}

void quantize(Format format, const float* values, std::int64_t n, std::byte* blocks) {
  if (format == Format::f32) {
    std::memcpy(blocks, values, static_cast<std::size_t>(n) * 4);
    return;
  }
  const std::int64_t step = block_elements(format);
  for (std::int64_t at = 0; at < n; at += step, blocks += block_bytes(format)) {
    if (format == Format::bf16) {
      const bf16 x = to_bf16(values[at]);
      std::memcpy(blocks, &x, 2);
    } else if (format == Format::q8_0) {
      quantize_q8_0(values + at, blocks);
    } else if (format == Format::mxfp4) {
      quantize_mxfp4(values + at, blocks);
    } else {
      fail(ErrorCode::not_supported, "quantising to {}: expected f32, bf16, q8_0 or mxfp4", format_name(format));
    }
  }
}

void widen_to_q5_1(const std::byte* blocks, std::int64_t n, std::byte* to) {
  for (std::int64_t at = 0; at < n; at += 32, blocks += 20, to += 24) {
    std::memcpy(to, blocks, 4);
    std::memset(to + 4, 0, 4);
    std::memcpy(to + 8, blocks + 4, 16);
  }
}

void widen_iq4_nl_to_q8_0(const std::byte* blocks, std::int64_t n, std::byte* to) {
  static constexpr std::array<std::int8_t, 16> values{-127, -104, -83, -65, -49, -35, -22, -10,
                                                      1,    13,   25,  38,  53,  69,  89,  113};
  for (std::int64_t at = 0; at < n; at += 32, blocks += 18, to += 34) {
    std::memcpy(to, blocks, 2);
    for (int i = 0; i < 32; ++i)
      to[2 + i] = static_cast<std::byte>(values[byte_at(blocks, 2 + i % 16) >> (i / 16 * 4) & 15U]);
  }
}

void widen_to_q8_0(int bits, const std::byte* blocks, std::int64_t n, std::byte* to) {
  const int header = bits == 5 ? 6 : 2, middle = bits == 5 ? 16 : 8;
  for (std::int64_t at = 0; at < n; at += 32, blocks += header + 16, to += 34) {
    std::memcpy(to, blocks, 2);
    const std::uint32_t high = bits == 5 ? read<std::uint32_t>(blocks + 2) : 0;
    for (int i = 0; i < 32; ++i) {
      const unsigned low = byte_at(blocks, header + i % 16) >> (i / 16 * 4) & 15U;
      const int code = static_cast<int>(low | (high >> i & 1U) << 4) - middle;
      to[2 + i] = static_cast<std::byte>(static_cast<std::int8_t>(code));
    }
  }
}

std::int64_t find_not_finite(Format format, const std::byte* blocks, std::int64_t n) {
  const std::int64_t step = block_elements(format);
  for (std::int64_t at = 0; at < n; at += step, blocks += block_bytes(format))
    if (!block_is_finite(format, blocks)) return at;
  return n;
}

}  // namespace tidelock::numerics
