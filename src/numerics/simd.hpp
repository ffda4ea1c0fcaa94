// The contract's lane model: a vector of 16 float32 lanes, the same on every instruction set.
//
// Row kernels are written once over V16 (in *.inl files) and compiled once per instruction set (in *_scalar.cpp,
// *_avx2.cpp,
// *_avx512.cpp). Everything here lives in a namespace named after the instruction set of the including file, so that
// the linker never merges code that was compiled with different flags. Only IEEE operations that are correctly rounded
// everywhere are offered: add, subtract, multiply, divide, square root, fused multiply-add.
#pragma once

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
// For the rest of the file: GCC 12's avx512fintrin.h initialises "undefined" vectors with themselves and then warns
// about it wherever they are inlined (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>

#include "numerics/formats.hpp"

#if defined(__AVX512BF16__)
#define TIDELOCK_ISA_NAMESPACE isa_avx512bf16
#elif defined(__AVX512F__)
#define TIDELOCK_ISA_NAMESPACE isa_avx512
#elif defined(__AVX2__)
#define TIDELOCK_ISA_NAMESPACE isa_avx2
#else
#define TIDELOCK_ISA_NAMESPACE isa_scalar
#endif

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {

inline constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct V16 {
  __m512 v;
};
struct M16 {
  __mmask16 m;
};
inline V16 set1(float x) {
  return {_mm512_set1_ps(x)};
}
inline V16 load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
inline void store(float* p, V16 a) {
  _mm512_storeu_ps(p, a.v);
}
// The first n (0..16) elements; the other lanes are +0 and their memory is not touched.
inline V16 load_n(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1U << n) - 1U), p)};
}
inline void store_n(float* p, V16 a, int n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1U << n) - 1U), a.v);
}
inline V16 load(const bf16* p) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
inline V16 add(V16 a, V16 b) {
  return {_mm512_add_ps(a.v, b.v)};
}
inline V16 sub(V16 a, V16 b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
inline V16 mul(V16 a, V16 b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
inline V16 div(V16 a, V16 b) {
  return {_mm512_div_ps(a.v, b.v)};
}
inline V16 sqrt(V16 a) {
  return {_mm512_sqrt_ps(a.v)};
}
inline V16 fma(V16 a, V16 b, V16 c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}  // a * b + c
inline V16 fnma(V16 a, V16 b, V16 c) {
  return {_mm512_fnmadd_ps(a.v, b.v, c.v)};
}  // c - a * b
inline V16 max(V16 a, V16 b) {
  return {_mm512_max_ps(a.v, b.v)};
}  // a > b ? a : b
inline V16 min(V16 a, V16 b) {
  return {_mm512_min_ps(a.v, b.v)};
}  // a < b ? a : b
inline M16 lt(V16 a, V16 b) {
  return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)};
}
inline M16 is_nan(V16 a) {
  return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)};
}
inline V16 select(M16 m, V16 a, V16 b) {
  return {_mm512_mask_blend_ps(m.m, b.v, a.v)};
}  // m ? a : b
// p * 2^n for integral n in [-126, 127].
inline V16 scale_pow2(V16 p, V16 n) {
  const __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
  return {_mm512_mul_ps(p.v, _mm512_castsi512_ps(e))};
}
// For positive normal a: the exponent e and the mantissa m in [1, 2) with a = m * 2^e.
inline V16 exponent(V16 a) {
  return {
      _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(_mm512_castps_si512(a.v), 23), _mm512_set1_epi32(127)))};
}
inline V16 mantissa(V16 a) {
  const __m512i m = _mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x007FFFFF));
  return {_mm512_castsi512_ps(_mm512_or_si512(m, _mm512_set1_epi32(0x3F800000)))};
}
inline V16 abs(V16 a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7FFFFFFF)))};
}

// round_bf16 is to_bf16 (formats.hpp) kept as a float32: the lower half of every lane is zero.
inline V16 round_bf16(V16 a) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __m512i magnitude = _mm512_and_si512(u, _mm512_set1_epi32(0x7FFFFFFF));
  const __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7F800000));
  const __mmask16 tiny = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x00800000));
  __m512i r = _mm512_mask_or_epi32(up, nan, u, _mm512_set1_epi32(0x00400000));
  r = _mm512_mask_and_epi32(r, tiny, u, _mm512_set1_epi32(static_cast<int>(0x80000000U)));
  return {_mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32(static_cast<int>(0xFFFF0000U))))};
}
// Stores the upper halves.
inline void store(bf16* p, V16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(a.v), 16)));
}

#elif defined(__AVX2__)

struct V16 {
  __m256 lo, hi;
};
struct M16 {
  __m256 lo, hi;
};
inline V16 set1(float x) {
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
inline V16 load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
inline void store(float* p, V16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline __m256i mask8(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline V16 load_n(const float* p, int n) {
  return {_mm256_maskload_ps(p, mask8(n)), _mm256_maskload_ps(p + 8, mask8(n - 8))};
}
inline void store_n(float* p, V16 a, int n) {
  _mm256_maskstore_ps(p, mask8(n), a.lo);
  _mm256_maskstore_ps(p + 8, mask8(n - 8), a.hi);
}
inline V16 load(const bf16* p) {
  const auto widen = [](const bf16* q) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  };
  return {widen(p), widen(p + 8)};
}
inline V16 add(V16 a, V16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline V16 sub(V16 a, V16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline V16 mul(V16 a, V16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline V16 div(V16 a, V16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline V16 sqrt(V16 a) {
  return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)};
}
inline V16 fma(V16 a, V16 b, V16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline V16 fnma(V16 a, V16 b, V16 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
inline V16 max(V16 a, V16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline V16 min(V16 a, V16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline M16 lt(V16 a, V16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
inline M16 is_nan(V16 a) {
  return {_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)};
}
inline V16 select(M16 m, V16 a, V16 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
inline V16 scale_pow2(V16 p, V16 n) {
  const auto half = [](__m256 x, __m256 k) {
    const __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(k), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(e));
  };
  return {half(p.lo, n.lo), half(p.hi, n.hi)};
}
inline V16 exponent(V16 a) {
  const auto half = [](__m256 x) {
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(_mm256_castps_si256(x), 23), _mm256_set1_epi32(127)));
  };
  return {half(a.lo), half(a.hi)};
}
inline V16 mantissa(V16 a) {
  const auto half = [](__m256 x) {
    const __m256i m = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x007FFFFF));
    return _mm256_castsi256_ps(_mm256_or_si256(m, _mm256_set1_epi32(0x3F800000)));
  };
  return {half(a.lo), half(a.hi)};
}
inline V16 abs(V16 a) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  return {_mm256_and_ps(a.lo, m), _mm256_and_ps(a.hi, m)};
}

inline V16 round_bf16(V16 a) {
  const auto half = [](__m256 x) {
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i magnitude = _mm256_and_si256(u, _mm256_set1_epi32(0x7FFFFFFF));
    const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F800000));
    const __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), magnitude);
    const __m256i sign = _mm256_andnot_si256(_mm256_set1_epi32(0x7FFFFFFF), u);
    __m256i r = _mm256_blendv_epi8(up, _mm256_or_si256(u, _mm256_set1_epi32(0x00400000)), nan);
    r = _mm256_blendv_epi8(r, sign, tiny);
    return _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32(static_cast<int>(0xFFFF0000U))));
  };
  return {half(a.lo), half(a.hi)};
}
inline void store(bf16* p, V16 a) {
  const __m256i lo = _mm256_srli_epi32(_mm256_castps_si256(a.lo), 16);
  const __m256i hi = _mm256_srli_epi32(_mm256_castps_si256(a.hi), 16);
  const __m256i both = _mm256_packus_epi32(lo, hi);  // quarters: lo 0, hi 0, lo 1, hi 1
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xD8));
}

#else

struct V16 {
  float v[16];
};
struct M16 {
  bool m[16];
};
template <typename F>
inline V16 lanes(F f) {
  V16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}
inline V16 set1(float x) {
  return lanes([&](int) { return x; });
}
inline V16 load(const float* p) {
  return lanes([&](int i) { return p[i]; });
}
inline void store(float* p, V16 a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
inline V16 load_n(const float* p, int n) {
  return lanes([&](int i) { return i < n ? p[i] : 0.0F; });
}
inline void store_n(float* p, V16 a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
inline V16 load(const bf16* p) {
  return lanes([&](int i) { return to_float(p[i]); });
}
inline V16 add(V16 a, V16 b) {
  return lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline V16 sub(V16 a, V16 b) {
  return lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline V16 mul(V16 a, V16 b) {
  return lanes([&](int i) { return a.v[i] * b.v[i]; });
}
inline V16 div(V16 a, V16 b) {
  return lanes([&](int i) { return a.v[i] / b.v[i]; });
}
inline V16 sqrt(V16 a) {
  return lanes([&](int i) { return std::sqrt(a.v[i]); });
}
inline V16 fma(V16 a, V16 b, V16 c) {
  return lanes([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline V16 fnma(V16 a, V16 b, V16 c) {
  return lanes([&](int i) { return std::fma(-a.v[i], b.v[i], c.v[i]); });
}
inline V16 max(V16 a, V16 b) {
  return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline V16 min(V16 a, V16 b) {
  return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline M16 lt(V16 a, V16 b) {
  M16 r;
  for (int i = 0; i < 16; ++i) r.m[i] = a.v[i] < b.v[i];
  return r;
}
inline M16 is_nan(V16 a) {
  M16 r;
  for (int i = 0; i < 16; ++i) r.m[i] = a.v[i] != a.v[i];
  return r;
}
inline V16 select(M16 m, V16 a, V16 b) {
  return lanes([&](int i) { return m.m[i] ? a.v[i] : b.v[i]; });
}
inline V16 scale_pow2(V16 p, V16 n) {
  return lanes([&](int i) { return p.v[i] * std::bit_cast<float>((static_cast<std::int32_t>(n.v[i]) + 127) << 23); });
}
inline V16 exponent(V16 a) {
  return lanes([&](int i) {
    return static_cast<float>(static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(a.v[i]) >> 23) - 127);
  });
}
inline V16 mantissa(V16 a) {
  return lanes(
      [&](int i) { return std::bit_cast<float>((std::bit_cast<std::uint32_t>(a.v[i]) & 0x007FFFFFU) | 0x3F800000U); });
}
inline V16 abs(V16 a) {
  return lanes([&](int i) { return std::fabs(a.v[i]); });
}

inline V16 round_bf16(V16 a) {
  return lanes([&](int i) { return to_float(to_bf16(a.v[i])); });
}
inline void store(bf16* p, V16 a) {
  for (int i = 0; i < 16; ++i) p[i] = {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(a.v[i]) >> 16)};
}

#endif

// The nearest integer (ties to even) for |a| < 2^22.
inline V16 round_int(V16 a) {
  const V16 magic = set1(12582912.0F);  // 1.5 * 2^23: adding it leaves no fraction bits
  return sub(add(a, magic), magic);
}

// The first n lanes of a; `fill` in the others.
inline V16 first_n(V16 a, int n, float fill) {
  alignas(64) float x[16];
  store(x, a);
  for (int i = n; i < 16; ++i) x[i] = fill;
  return load(x);
}
inline void store_n(bf16* p, V16 a, int n) {
  bf16 x[16];
  store(x, a);
  for (int i = 0; i < n; ++i) p[i] = x[i];
}

// The contract's fixed tree: lane i meets i+8, then i+4, i+2, i+1.
#if defined(__AVX2__)
inline float sum_tree(V16 a) {
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float sum_tree(V16 a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] + a.v[i + half];
  return a.v[0];
}
#endif
inline float max_tree(V16 a) {
  alignas(64) float x[16];
  store(x, a);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  return x[0];
}

}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE
