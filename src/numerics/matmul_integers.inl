// Exact integer dot products for the block kernels: 16 lanes of int32, and 64 unsigned codes (16 outputs x 4 k).
// Compiled once per instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

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
  __m256i v;
#else
  const std::int8_t* v;
#endif
};
TIDELOCK_INLINE Four load_four(const std::int8_t* q) {
#if defined(__AVX512VNNI__)
  std::int32_t bits;
  std::memcpy(&bits, q, 4);
  return {_mm512_set1_epi32(bits)};
#elif defined(__AVX512F__)
  const auto pair = [&](int i) {
    return static_cast<std::int32_t>(static_cast<std::uint16_t>(std::int16_t{q[i]}) |
                                     static_cast<std::uint32_t>(static_cast<std::uint16_t>(std::int16_t{q[i + 2]}))
                                         << 16);
  };
  return {_mm512_set1_epi32(pair(0)), _mm512_set1_epi32(pair(1))};
#elif defined(__AVX2__)
  std::int32_t bits;
  std::memcpy(&bits, q, 4);
  return {_mm256_set1_epi32(bits)};
#else
  return {q};
#endif
}

template <int R, int P>
struct Dots {
  I16 v[R][P];
};

#if defined(__AVX2__) && !defined(__AVX512F__)

// Codes of eight bits come as two planes of four, the lower halves and the upper ones: Zen 2 multiplies integers in one
// of its four pipes, and two products of halves, added in 16 bits, cost it less than one of bytes that has to be
// widened each time.
inline constexpr bool kHalves = true;

struct Halves {
  Codes lower, upper;
};
TIDELOCK_INLINE Halves split(Codes v) {
  const __m256i nibble = _mm256_set1_epi8(15);
  const auto low = [&](__m256i x) { return _mm256_and_si256(x, nibble); };
  const auto high = [&](__m256i x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble); };
  return {{low(v.lo), low(v.hi)}, {high(v.lo), high(v.hi)}};
}
TIDELOCK_INLINE void store_codes(std::uint8_t* to, Codes v) {
  auto* halves = reinterpret_cast<__m256i*>(to);
  _mm256_storeu_si256(halves, v.lo);
  _mm256_storeu_si256(halves + 1, v.hi);
}

// Sums, as assembler: those of intrinsics GCC 12 puts into another order, in which every product waits in memory.
template <bool kFirst>
TIDELOCK_INLINE void add_products(I16& acc, Codes w, Four x) {
  const I16 pairs{_mm256_maddubs_epi16(w.lo, x.v), _mm256_maddubs_epi16(w.hi, x.v)};
  if constexpr (kFirst) {
    acc = pairs;
  } else {
    asm("vpaddw %1, %0, %0" : "+x"(acc.lo) : "x"(pairs.lo));
    asm("vpaddw %1, %0, %0" : "+x"(acc.hi) : "x"(pairs.hi));
  }
}
// acc + kTimes the sums of 16 bits.
template <int kTimes>
TIDELOCK_INLINE void add_wider(I16& acc, I16 pairs) {
  const __m256i times = _mm256_set1_epi16(kTimes);
  acc.lo = _mm256_add_epi32(acc.lo, _mm256_madd_epi16(pairs.lo, times));
  acc.hi = _mm256_add_epi32(acc.hi, _mm256_madd_epi16(pairs.hi, times));
}

// How many steps' products of codes up to kLargest are summed in 16 bits: steps * 2 * kLargest * 127 < 2^15.
template <int kLargest>
inline constexpr int kStepsIn16 = [] {
  constexpr int kMost = 32767 / (2 * kLargest * 127);
  return kMost >= 8 ? 8 : kMost >= 4 ? 4 : kMost;
}();

// dots + the products of 4 * kSteps codes in each lane with inputs, rows of which are `in` apart. codes(step): Codes of
// a step, Halves when kLargest, the largest code, has eight bits. Exact.
template <int kLargest, int kSteps, int R, typename Source>
TIDELOCK_INLINE void add_dots(Dots<R, 1>& dots, const std::int8_t* q, std::int64_t in, Source&& codes) {
  if constexpr (kLargest == 255) {
    static_assert(kSteps <= kStepsIn16<15>);
    constexpr int kRows = std::min(R, 2);  // at once: their sums fit the registers
    repeat<R / kRows>([&](auto part) __attribute__((always_inline)) {
      if (part > 0) asm volatile("" ::: "memory");  // codes are read again, not kept on the stack
      I16 low[kRows], high[kRows];
      repeat<kSteps>([&](auto step) __attribute__((always_inline)) {
        const Halves w = codes(step);
        repeat<kRows>([&](auto r) __attribute__((always_inline)) {
          const Four x = load_four(q + (part * kRows + r) * in + step * 4);
          add_products<step == 0>(low[r], w.lower, x);
          add_products<step == 0>(high[r], w.upper, x);
        });
      });
      repeat<kRows>([&](auto r) __attribute__((always_inline)) {
        add_wider<1>(dots.v[part * kRows + r][0], low[r]);
        add_wider<16>(dots.v[part * kRows + r][0], high[r]);
      });
    });
  } else {
    constexpr int kRun = std::min(kStepsIn16<kLargest>, kSteps);
    static_assert(kSteps % kRun == 0);
    repeat<kSteps / kRun>([&](auto run) __attribute__((always_inline)) {
      I16 sums[R];
      repeat<kRun>([&](auto i) __attribute__((always_inline)) {
        constexpr std::integral_constant<int, run * kRun + i> kStep;
        const Codes w = codes(kStep);
        repeat<R>([&](auto r) __attribute__((always_inline)) {
          add_products<i == 0>(sums[r], w, load_four(q + r * in + kStep * 4));
        });
      });
      repeat<R>([&](auto r) __attribute__((always_inline)) { add_wider<1>(dots.v[r][0], sums[r]); });
    });
  }
}

#else

inline constexpr bool kHalves = false;

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
#else
  for (int o = 0; o < 16; ++o)
    for (int i = 0; i < 4; ++i) acc.v[o] += w.v[o * 4 + i] * x.v[i];
  return acc;
#endif
}

// dots + the products of 4 * steps codes in each lane with inputs. Codes of panels are codes_stride apart, rows of
// inputs `in`.
template <int R, int P>
TIDELOCK_INLINE void add_dots(Dots<R, P>& dots, const std::int8_t* q, std::int64_t in, const std::uint8_t* codes,
                              std::int64_t codes_stride, int steps) {
  for (int step = 0; step < steps; ++step) {
    Codes w[P];
    repeat<P>([&](auto p) __attribute__((always_inline)) { w[p] = load_codes(codes + p * codes_stride + step * 64); });
    repeat<R>([&](auto r) __attribute__((always_inline)) {
      const Four x = load_four(q + r * in + step * 4);
      repeat<P>([&](auto p) __attribute__((always_inline)) { dots.v[r][p] = dot(w[p], x, dots.v[r][p]); });
    });
  }
}

#endif

}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE
