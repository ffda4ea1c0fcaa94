// What all matrix kernels share: loops with compile-time indices, tiles of accumulators, and the two inner loops of the
// contract's products (matmul.hpp). Included once per instruction set, by the kernels.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "numerics/matmul_kernels.hpp"
#include "numerics/simd.hpp"

#define TIDELOCK_INLINE inline __attribute__((always_inline))

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {

// f(0), f(1), ..., f(N - 1) with compile-time indices: accumulators must stay registers.
template <int N, typename F>
TIDELOCK_INLINE void repeat(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, I>{}), ...);
  }
  (std::make_integer_sequence<int, N>{});
}

template <int R, int P>
struct Accumulators {
  V16 v[R][P];
  TIDELOCK_INLINE void zero() {
    repeat<R>([&](auto r) __attribute__((always_inline)) {
      repeat<P>([&](auto p) __attribute__((always_inline)) { v[r][p] = set1(0.0F); });
    });
  }
};

struct KernelF32 {
  using Element = float;
  static std::int64_t steps(std::int64_t in) { return in; }

  template <int R, int P>
  static TIDELOCK_INLINE void run(Accumulators<R, P>& acc, const float* x, std::int64_t ldx, const std::byte* w_bytes,
                                  std::int64_t panel_stride, std::int64_t count) {
    const auto* w = reinterpret_cast<const float*>(w_bytes);
    panel_stride /= 4;
    for (std::int64_t k = 0; k < count; ++k, w += kPanel) {
      V16 wv[P];
      repeat<P>([&](auto p) __attribute__((always_inline)) { wv[p] = load(w + p * panel_stride); });
      repeat<R>([&](auto r) __attribute__((always_inline)) {
        const V16 xv = set1(x[r * ldx + k]);
        repeat<P>([&](auto p) __attribute__((always_inline)) { acc.v[r][p] = fma(xv, wv[p], acc.v[r][p]); });
      });
    }
  }
};

// A pair (2p, 2p+1) in each 32-bit lane, the even element in the low half.
struct KernelBf16 {
  using Element = bf16;
  static std::int64_t steps(std::int64_t in) { return (in + 1) / 2; }

#if defined(__AVX512BF16__)
  struct Pair {
    __m512i v;
  };
  static TIDELOCK_INLINE Pair load_pairs(const std::uint32_t* w) {
    return {_mm512_loadu_si512(w)};
  }
  static TIDELOCK_INLINE Pair broadcast(std::uint32_t x) {
    return {_mm512_set1_epi32(static_cast<int>(x))};
  }
  static TIDELOCK_INLINE V16 dot(Pair x, Pair w, V16 acc) {
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)x.v, (__m512bh)w.v)};
  }
#else
  struct Pair {
    V16 even, odd;
  };
#if defined(__AVX512F__)
  static TIDELOCK_INLINE Pair load_pairs(const std::uint32_t* w) {
    const __m512i u = _mm512_loadu_si512(w);
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(u, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32(static_cast<int>(0xFFFF0000U))))}};
  }
#elif defined(__AVX2__)
  static TIDELOCK_INLINE Pair load_pairs(const std::uint32_t* w) {
    const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 8));
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xFFFF0000U));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(hi, mask))}};
  }
#else
  static TIDELOCK_INLINE Pair load_pairs(const std::uint32_t* w) {
    return {lanes([&](int i) { return std::bit_cast<float>(w[i] << 16); }),
            lanes([&](int i) { return std::bit_cast<float>(w[i] & 0xFFFF0000U); })};
  }
#endif
  static TIDELOCK_INLINE Pair broadcast(std::uint32_t x) {
    return {set1(std::bit_cast<float>(x << 16)), set1(std::bit_cast<float>(x & 0xFFFF0000U))};
  }
  // Odd element first, then even: the order in which vdpbf16ps rounds.
  static TIDELOCK_INLINE V16 dot(Pair x, Pair w, V16 acc) {
    return fma(x.even, w.even, fma(x.odd, w.odd, acc));
  }
#endif

  template <int R, int P>
  static TIDELOCK_INLINE void step(Accumulators<R, P>& acc, const std::uint32_t (&x)[R], const std::uint32_t* w,
                                   std::int64_t panel_stride) {
    Pair wv[P];
    repeat<P>([&](auto p) __attribute__((always_inline)) { wv[p] = load_pairs(w + p * panel_stride); });
    repeat<R>([&](auto r) __attribute__((always_inline)) {
      const Pair xv = broadcast(x[r]);
      repeat<P>([&](auto p) __attribute__((always_inline)) { acc.v[r][p] = dot(xv, wv[p], acc.v[r][p]); });
    });
  }

  // `count` elements of k; an odd last one meets a zero (the packed weights hold that zero, x does not).
  template <int R, int P>
  static TIDELOCK_INLINE void run(Accumulators<R, P>& acc, const bf16* x, std::int64_t ldx, const std::byte* w_bytes,
                                  std::int64_t panel_stride, std::int64_t count) {
    const auto* w = reinterpret_cast<const std::uint32_t*>(w_bytes);
    panel_stride /= 4;
    std::uint32_t pair[R];
    std::int64_t k = 0;
    for (; k + 1 < count; k += 2, w += kPanel) {
      repeat<R>([&](auto r) __attribute__((always_inline)) { std::memcpy(&pair[r], x + r * ldx + k, 4); });
      step<R, P>(acc, pair, w, panel_stride);
    }
    if (k < count) {
      repeat<R>([&](auto r) __attribute__((always_inline)) { pair[r] = x[r * ldx + k].bits; });
      step<R, P>(acc, pair, w, panel_stride);
    }
  }
};

}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE
