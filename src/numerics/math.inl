// exp, log, sigmoid, tanh, softplus, rsqrt of the contract, over V16 or over one lane (F1).
//
// Built from correctly rounded IEEE operations only, in one fixed order, so that every instruction set gives the same
// bits. No result depends on whether the thread flushes denormals: an input below the smallest normal counts as +0, a
// result below it is +0, and NaN in (or a domain error) gives the one quiet NaN 0x7FC00000.
// Include from a kernel file only: the namespace is that of the including file's instruction set.
#pragma once

#include <limits>

#include "numerics/simd.hpp"

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {

// One lane, for values that exist once per row. The same operations as V16, so the same bits.
struct F1 {
  float v;
};
struct M1 {
  bool m;
};
inline F1 add(F1 a, F1 b) {
  return {a.v + b.v};
}
inline F1 sub(F1 a, F1 b) {
  return {a.v - b.v};
}
inline F1 mul(F1 a, F1 b) {
  return {a.v * b.v};
}
inline F1 div(F1 a, F1 b) {
  return {a.v / b.v};
}
inline F1 sqrt(F1 a) {
  return {__builtin_sqrtf(a.v)};
}
inline F1 fma(F1 a, F1 b, F1 c) {
  return {__builtin_fmaf(a.v, b.v, c.v)};
}
inline F1 fnma(F1 a, F1 b, F1 c) {
  return {__builtin_fmaf(-a.v, b.v, c.v)};
}
inline F1 max(F1 a, F1 b) {
  return {a.v > b.v ? a.v : b.v};
}
inline F1 min(F1 a, F1 b) {
  return {a.v < b.v ? a.v : b.v};
}
inline M1 lt(F1 a, F1 b) {
  return {a.v < b.v};
}
inline M1 is_nan(F1 a) {
  return {a.v != a.v};
}
inline F1 select(M1 m, F1 a, F1 b) {
  return m.m ? a : b;
}
inline F1 abs(F1 a) {
  return {__builtin_fabsf(a.v)};
}
inline F1 scale_pow2(F1 p, F1 n) {
  return {p.v * __builtin_bit_cast(float, (static_cast<std::int32_t>(n.v) + 127) << 23)};
}
inline F1 exponent(F1 a) {
  return {static_cast<float>(static_cast<std::int32_t>(__builtin_bit_cast(std::uint32_t, a.v) >> 23) - 127)};
}
inline F1 mantissa(F1 a) {
  return {__builtin_bit_cast(float, (__builtin_bit_cast(std::uint32_t, a.v) & 0x007FFFFFU) | 0x3F800000U)};
}
inline F1 round_int(F1 a) {
  return {(a.v + 12582912.0F) - 12582912.0F};
}

template <class V>
inline V splat(float x);
template <>
inline V16 splat<V16>(float x) {
  return set1(x);
}
template <>
inline F1 splat<F1>(float x) {
  return {x};
}

namespace constants {
inline constexpr float kMinNormal = std::numeric_limits<float>::min();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kExpLow = -87.3365402F;  // the least float whose exponential is normal
inline constexpr float kExpHigh = 88.7228317F;  // the greatest whose exponential is finite
inline constexpr float kLog2E = 1.44269502F;
inline constexpr float kLn2High = 0.693147182F;  // n * this leaves an exact remainder under fma
inline constexpr float kLn2Low = -1.90465421e-09F;
// (e^r - 1 - r) / r^2 on |r| <= ln(2)/2; relative error of e^r 3.7e-9.
inline constexpr float kExp[] = {0.49999994F, 0.166665211F, 0.041668389F, 0.0083687352F, 0.00138145592F};
// (log(1+f) - f + f^2/2) / f^3 on sqrt(1/2) - 1 <= f <= sqrt(2) - 1; relative error of log(1+f) 6.2e-9.
inline constexpr float kLog[] = {0.333333313F, -0.250008225F, 0.200012341F, -0.166232988F,
                                 0.142015532F, -0.131605819F, 0.127633274F, -0.0763565525F};
// (tanh(x) - x) / x^3 in x^2, |x| <= 0.625; relative error of tanh 8.6e-9.
inline constexpr float kTanh[] = {-0.333332807F, 0.133314416F, -0.0537397154F, 0.0206390861F, -0.00570498686F};
}  // namespace constants

template <class V, int N>
inline V horner(const float (&c)[N], V x) {
  V p = splat<V>(c[N - 1]);
  for (int i = N - 2; i >= 0; --i) p = fma(p, x, splat<V>(c[i]));
  return p;
}

// e^x for x already within [kExpLow, kExpHigh].
template <class V>
inline V exp_core(V x) {
  using namespace constants;
  const V n = round_int(mul(x, splat<V>(kLog2E)));
  const V r = fnma(n, splat<V>(kLn2Low), fnma(n, splat<V>(kLn2High), x));
  const V p = add(fma(mul(r, r), horner(kExp, r), r), splat<V>(1.0F));
  const V m = min(n, splat<V>(127.0F));  // n = 128 takes its last doubling apart: 2^128 is no float
  return mul(scale_pow2(p, m), add(sub(n, m), splat<V>(1.0F)));
}

// 0 below kExpLow, +inf above kExpHigh.
template <class V>
inline V vexp(V x) {
  using namespace constants;
  const V low = splat<V>(kExpLow);
  const V high = splat<V>(kExpHigh);
  V y = exp_core(max(min(x, high), low));
  y = select(lt(x, low), splat<V>(0.0F), y);
  y = select(lt(high, x), splat<V>(kInfinity), y);
  return select(is_nan(x), splat<V>(kNan), y);
}

// e * ln 2 + log(1 + f) for f in [sqrt(1/2) - 1, sqrt(2) - 1].
template <class V>
inline V log_core(V e, V f) {
  using namespace constants;
  const V f2 = mul(f, f);
  V y = mul(mul(f2, f), horner(kLog, f));
  y = fma(e, splat<V>(kLn2Low), y);
  y = fnma(splat<V>(0.5F), f2, y);
  return fma(e, splat<V>(kLn2High), add(f, y));
}

// -inf for zero and anything smaller than the smallest normal, NaN for x < 0.
template <class V>
inline V vlog(V x) {
  using namespace constants;
  const V one = splat<V>(1.0F);
  const V m = mantissa(x);
  const auto upper = lt(splat<V>(1.41421354F), m);
  const V e = add(exponent(x), select(upper, one, splat<V>(0.0F)));
  const V f = sub(select(upper, mul(m, splat<V>(0.5F)), m), one);
  V y = log_core(e, f);
  y = select(lt(x, splat<V>(kInfinity)), y, splat<V>(kInfinity));
  y = select(lt(x, splat<V>(0.0F)), splat<V>(kNan), y);
  y = select(lt(abs(x), splat<V>(kMinNormal)), splat<V>(-kInfinity), y);
  return select(is_nan(x), splat<V>(kNan), y);
}

// 1 / (1 + e^-x); 0 below kExpLow.
template <class V>
inline V vsigmoid(V x) {
  using namespace constants;
  const V one = splat<V>(1.0F);
  const V low = splat<V>(kExpLow);
  const V high = splat<V>(-kExpLow);
  const V e = exp_core(max(min(sub(splat<V>(0.0F), x), high), low));
  V y = div(one, add(one, e));
  y = select(lt(x, low), splat<V>(0.0F), y);
  return select(is_nan(x), splat<V>(kNan), y);
}

// An odd polynomial up to 0.625, 1 - 2 / (e^2x + 1) above; the sign last, so that tanh(-x) = -tanh(x) by bits.
template <class V>
inline V vtanh(V x) {
  using namespace constants;
  const V zero = splat<V>(0.0F);
  const V one = splat<V>(1.0F);
  const V a = abs(x);
  const V z = mul(a, a);
  const V small = fma(mul(z, a), horner(kTanh, z), a);
  const V e = exp_core(min(add(a, a), splat<V>(20.0F)));
  const V large = sub(one, div(splat<V>(2.0F), add(e, one)));
  V y = select(lt(a, splat<V>(0.625F)), small, large);
  y = select(lt(x, zero), sub(zero, y), y);
  y = select(lt(a, splat<V>(kMinNormal)), zero, y);
  return select(is_nan(x), splat<V>(kNan), y);
}

// max(x, 0) + log(1 + e^-|x|); 0 below kExpLow.
template <class V>
inline V vsoftplus(V x) {
  using namespace constants;
  const V zero = splat<V>(0.0F);
  const V one = splat<V>(1.0F);
  const V low = splat<V>(kExpLow);
  const V t = exp_core(max(sub(zero, abs(x)), low));
  const auto upper = lt(splat<V>(0.414213538F), t);  // 1 + t > sqrt(2): take a factor 2 out
  const V f = select(upper, mul(sub(t, one), splat<V>(0.5F)), t);
  V y = add(max(x, zero), log_core(select(upper, one, zero), f));
  y = select(lt(x, low), zero, y);
  return select(is_nan(x), splat<V>(kNan), y);
}

// 1 / sqrt(x); +inf for zero and anything smaller than the smallest normal, NaN for x < 0.
template <class V>
inline V vrsqrt(V x) {
  using namespace constants;
  V y = div(splat<V>(1.0F), sqrt(x));
  y = select(lt(x, splat<V>(0.0F)), splat<V>(kNan), y);
  y = select(lt(abs(x), splat<V>(kMinNormal)), splat<V>(kInfinity), y);
  return select(is_nan(x), splat<V>(kNan), y);
}

}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE
