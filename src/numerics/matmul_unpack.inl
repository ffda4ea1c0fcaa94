// Scales and codes out of the packed form of the block formats (matmul_kernels.hpp, quant.hpp). Compiled once per
// instruction set.
#pragma once

#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

#include "numerics/matmul_integers.inl"
#include "numerics/quant.hpp"

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {

inline constexpr int kSteps = 8;  // of 4 k, in a group of 32

inline V16 load_f16(const std::byte* from) {
#if defined(__AVX512F__)
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
#elif defined(__AVX2__)
  const auto* halves = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
#else
  return lanes([&](int i) {
    std::uint16_t bits;
    std::memcpy(&bits, from + 2 * i, 2);
    return f16_to_float(bits);
  });
#endif
}

// 16 bytes as numbers.
template <typename Byte>
inline V16 load_bytes(const std::byte* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {_mm512_cvtepi32_ps(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes))};
#elif defined(__AVX2__)
  const auto half = [](const std::byte* at) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
    return _mm256_cvtepi32_ps(std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
  };
  return {half(from), half(from + 8)};
#else
  alignas(64) float x[16];
  for (int i = 0; i < 16; ++i) x[i] = static_cast<float>(static_cast<Byte>(from[i]));
  return load(x);
#endif
}

// 2^(e - 128) for bytes e; zero for e <= 1.
inline V16 load_exponents(const std::byte* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m512i e = _mm512_subs_epu16(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(1));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
#elif defined(__AVX2__)
  const auto half = [](const std::byte* at) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
    const __m256i e = _mm256_subs_epu16(_mm256_cvtepu8_epi32(bytes), _mm256_set1_epi32(1));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
  };
  return {half(from), half(from + 8)};
#else
  alignas(64) float x[16];
  for (int i = 0; i < 16; ++i) {
    const auto e = std::to_integer<std::uint32_t>(from[i]);
    x[i] = std::bit_cast<float>((e <= 1 ? 0 : e - 1) << 23);
  }
  return load(x);
#endif
}

// What all sub-blocks of a chunk share of the scales and minima of 16 outputs (layout: matmul_kernels.hpp).
struct Shared {
  V16 d, dmin;
};
template <Format F>
inline Shared load_shared(const std::byte* chunk) {
  if constexpr (F == Format::q6_k) return {load_f16(chunk), V16{}};
  if constexpr (F == Format::q4_k || F == Format::q5_k) return {load_f16(chunk), load_f16(chunk + 32)};
  return {V16{}, V16{}};
}

// Scales and minima of 16 outputs for sub-block b of a chunk. The products are exact.
template <Format F>
inline V16 load_scale(const Shared& shared, const std::byte* chunk, std::int64_t b) {
  if constexpr (F == Format::q8_0) return load_f16(chunk + b * 32);
  if constexpr (F == Format::mxfp4) return load_exponents(chunk + b * 16);
  if constexpr (F == Format::q5_1) return load_f16(chunk + b * 64);
  if constexpr (F == Format::q6_k) return mul(shared.d, load_bytes<std::int8_t>(chunk + 32 + b * 16));
  return mul(shared.d, load_bytes<std::uint8_t>(chunk + 64 + b * 16));
}
template <Format F>
inline V16 load_min(const Shared& shared, const std::byte* chunk, std::int64_t b) {
  if constexpr (F == Format::q5_1) return load_f16(chunk + b * 64 + 32);
  return mul(shared.dmin, load_bytes<std::uint8_t>(chunk + 192 + b * 16));
}

// ---- unpacking

// E2M1, doubled, plus 12.
alignas(16) inline constexpr std::array<std::uint8_t, 16> kE2m1Codes{12, 13, 14, 15, 16, 18, 20, 24,
                                                                     12, 11, 10, 9,  8,  6,  4,  0};

#if defined(__AVX512F__)
// Codes of step kStep (4 k) of a packed group of 32 k.
template <Format F, int kStep>
TIDELOCK_INLINE __m512i unpack_step(const std::byte* group) {
  if constexpr (code_bits(F) == 8) return _mm512_loadu_si512(group + kStep * 64);
  const __m512i v = _mm512_loadu_si512(group + kStep / 2 * 64), nibble = _mm512_set1_epi8(15);
  const __m512i low = _mm512_and_si512(kStep % 2 == 0 ? v : _mm512_srli_epi16(v, 4), nibble);
  if constexpr (F == Format::mxfp4) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kE2m1Codes.data()));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), low);
  }
  if constexpr (code_bits(F) == 5) {  // low | (bit kStep, moved to bit 4)
    const __m512i h = _mm512_loadu_si512(group + 256);
    constexpr int kUp = kStep < 4 ? 4 - kStep : 0, kDown = kStep > 4 ? kStep - 4 : 0;
    const __m512i moved = kDown == 0 ? _mm512_slli_epi16(h, kUp) : _mm512_srli_epi16(h, kDown);
    return _mm512_ternarylogic_epi32(low, moved, _mm512_set1_epi8(16), 0xF8);
  }
  if constexpr (code_bits(F) == 6) {  // low | (pair kStep % 4, moved to bits 4 and 5)
    const __m512i h = _mm512_loadu_si512(group + 256 + kStep / 4 * 64);
    constexpr int kPair = kStep % 4;
    const __m512i moved = kPair <= 2 ? _mm512_slli_epi16(h, kPair <= 2 ? 4 - 2 * kPair : 0) : _mm512_srli_epi16(h, 2);
    return _mm512_ternarylogic_epi32(low, moved, _mm512_set1_epi8(48), 0xF8);
  }
  return low;
}
TIDELOCK_INLINE void store_step(std::uint8_t* to, __m512i codes) {
  _mm512_storeu_si512(to, codes);
}
#elif defined(__AVX2__)
// As above, of half the outputs.
template <Format F, int kStep>
TIDELOCK_INLINE __m256i unpack_half(const std::byte* group) {
  const auto load = [](const std::byte* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); };
  if constexpr (code_bits(F) == 8) return load(group + kStep * 64);
  const __m256i v = load(group + kStep / 2 * 64);
  const __m256i low = _mm256_and_si256(kStep % 2 == 0 ? v : _mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
  if constexpr (F == Format::mxfp4) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kE2m1Codes.data()));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), low);
  }
  if constexpr (code_bits(F) == 5) {
    const __m256i h = load(group + 256);
    constexpr int kUp = kStep < 4 ? 4 - kStep : 0, kDown = kStep > 4 ? kStep - 4 : 0;
    const __m256i moved = kDown == 0 ? _mm256_slli_epi16(h, kUp) : _mm256_srli_epi16(h, kDown);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(16)));
  }
  if constexpr (code_bits(F) == 6) {
    const __m256i h = load(group + 256 + kStep / 4 * 64);
    constexpr int kPair = kStep % 4;
    const __m256i moved = kPair <= 2 ? _mm256_slli_epi16(h, kPair <= 2 ? 4 - 2 * kPair : 0) : _mm256_srli_epi16(h, 2);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(48)));
  }
  return low;
}
template <Format F, int kStep>
TIDELOCK_INLINE Codes unpack_step(const std::byte* group) {
  return {unpack_half<F, kStep>(group), unpack_half<F, kStep>(group + 32)};
}
TIDELOCK_INLINE void store_step(std::uint8_t* to, Codes codes) {
  store_codes(to, codes);
}
#endif

// A packed group of 32 k as [8][64] bytes.
template <Format F>
void unpack_group(const std::byte* group, std::uint8_t* to) {
#if defined(__AVX2__)
  repeat<kSteps>([&](auto t) __attribute__((always_inline)) { store_step(to + t * 64, unpack_step<F, t>(group)); });
#else
  const auto* g = reinterpret_cast<const std::uint8_t*>(group);
  for (int t = 0; t < kSteps; ++t) {
    for (int i = 0; i < 64; ++i) {
      if constexpr (code_bits(F) == 8) {
        to[t * 64 + i] = g[t * 64 + i];
        continue;
      }
      unsigned code = g[t / 2 * 64 + i] >> (t % 2 * 4) & 15U;
      if constexpr (F == Format::mxfp4) code = kE2m1Codes[code];
      if constexpr (code_bits(F) == 5) code |= (g[256 + i] >> t & 1U) << 4;
      if constexpr (code_bits(F) == 6) code |= (g[256 + t / 4 * 64 + i] >> (t % 4 * 2) & 3U) << 4;
      to[t * 64 + i] = static_cast<std::uint8_t>(code);
    }
  }
#endif
}

// The upper halves of a group of bytes (kHalves) lie this far behind the lower ones.
inline constexpr int kUpper = kSteps * 64;
#if defined(__AVX2__) && !defined(__AVX512F__)
inline void split_group(const std::byte* group, std::uint8_t* to) {
  for (int i = 0; i < kUpper; i += 64) {
    const Halves halves = split(load_codes(reinterpret_cast<const std::uint8_t*>(group) + i));
    store_codes(to + i, halves.lower);
    store_codes(to + kUpper + i, halves.upper);
  }
}
#else
inline void split_group(const std::byte*, std::uint8_t*) {}
#endif

}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE
