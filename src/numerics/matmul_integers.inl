// Exact integer dot products for the block kernels: 16 lanes of int32, and 64 unsigned codes (16 outputs x 4 k).
// Compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "numerics/matmul_core.inl"

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {

struct I16 {
#if defined(__AVX512F__)
  __m512i v;
#elif defined(__AVX2__)
  __m256i lo, hi;
#else
  std::int32_t v[16];
#endif
};
TIDELOCK_INLINE I16 set1_int(std::int32_t x) {
#if defined(__AVX512F__)
  return {_mm512_set1_epi32(x)};
#elif defined(__AVX2__)
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
#else
  I16 r;
  for (auto& lane : r.v) lane = x;
  return r;
#endif
}
TIDELOCK_INLINE V16 to_floats(I16 a) {
#if defined(__AVX512F__)
  return {_mm512_cvtepi32_ps(a.v)};
#elif defined(__AVX2__)
  return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)};
#else
  return lanes([&](int i) { return static_cast<float>(a.v[i]); });
#endif
}

struct Codes {
#if defined(__AVX512F__)
  __m512i v;
#elif defined(__AVX2__)
  __m256i lo, hi;
#else
  const std::uint8_t* v;
#endif
};
TIDELOCK_INLINE Codes load_codes(const std::uint8_t* from) {
#if defined(__AVX512F__)
  return {_mm512_loadu_si512(from)};
#elif defined(__AVX2__)
  const auto* halves = reinterpret_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
#else
  return {from};
#endif
}

// Four inputs, as the dot product takes them.
struct Four {
#if defined(__AVX512VNNI__)
  __m512i v;
#elif defined(__AVX512F__)
  __m512i even, odd;  // 0 and 2, 1 and 3, as 16-bit pairs
#elif defined(__AVX2__)
  __m256i even, odd;
#else
  const std::int8_t* v;
#endif
};
TIDELOCK_INLINE Four load_four(const std::int8_t* q) {
#if defined(__AVX512VNNI__)
  std::int32_t bits;
  std::memcpy(&bits, q, 4);
  return {_mm512_set1_epi32(bits)};
#elif defined(__AVX2__)
  const auto pair = [&](int i) {
    return static_cast<std::int32_t>(static_cast<std::uint16_t>(std::int16_t{q[i]}) |
                                     static_cast<std::uint32_t>(static_cast<std::uint16_t>(std::int16_t{q[i + 2]}))
                                         << 16);
  };
#if defined(__AVX512F__)
  return {_mm512_set1_epi32(pair(0)), _mm512_set1_epi32(pair(1))};
#else
  return {_mm256_set1_epi32(pair(0)), _mm256_set1_epi32(pair(1))};
#endif
#else
  return {q};
#endif
}

// acc + the products of four codes with four inputs, in each lane. Exact: no path may saturate.
TIDELOCK_INLINE I16 dot(Codes w, Four x, I16 acc) {
#if defined(__AVX512VNNI__)
  // As assembler: from the intrinsic GCC 12 makes copies of the accumulators, and twice the time.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
  return acc;
#elif defined(__AVX512F__)
  const __m512i even = _mm512_and_si512(w.v, _mm512_set1_epi16(0xFF)), odd = _mm512_srli_epi16(w.v, 8);
  const __m512i sum = _mm512_add_epi32(_mm512_madd_epi16(even, x.even), _mm512_madd_epi16(odd, x.odd));
  return {_mm512_add_epi32(acc.v, sum)};
#elif defined(__AVX2__)
  const auto half = [&](__m256i v, __m256i sum) {
    const __m256i even = _mm256_and_si256(v, _mm256_set1_epi16(0xFF)), odd = _mm256_srli_epi16(v, 8);
    return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(even, x.even), _mm256_madd_epi16(odd, x.odd)));
  };
  return {half(w.lo, acc.lo), half(w.hi, acc.hi)};
#else
  for (int o = 0; o < 16; ++o)
    for (int i = 0; i < 4; ++i) acc.v[o] += w.v[o * 4 + i] * x.v[i];
  return acc;
#endif
}

template <int R, int P>
struct Dots {
  I16 v[R][P];
};

}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE
