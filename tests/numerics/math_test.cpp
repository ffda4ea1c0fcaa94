// The contract's exp, log, sigmoid, tanh, softplus, rsqrt: error in ULP against double libm, values at the edges, equal
// bits on every instruction set, and no dependence on flush-to-zero.
#include <immintrin.h>

#include <functional>

#include "numerics/rowops_support.hpp"

namespace tidelock::numerics::testing {
namespace math_test {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::uint32_t kNanBits = 0x7FC00000U;

struct Function {
  const char* name;
  float (*f)(float);
  double (*exact)(double);
  RowKernels::Elementwise RowKernels::*vector;
  double max_ulp;  // as stated in rowops.hpp
};

const Function kFunctions[] = {
    {"exp", exp, [](double x) { return std::exp(x); }, &RowKernels::exp, 1.01},
    {"log", log, [](double x) { return std::log(x); }, &RowKernels::log, 0.86},
    {"sigmoid", sigmoid, [](double x) { return 1 / (1 + std::exp(-x)); }, &RowKernels::sigmoid, 2.49},
    {"tanh", tanh, [](double x) { return std::tanh(x); }, &RowKernels::tanh, 1.34},
    {"softplus", softplus, [](double x) { return std::fmax(x, 0) + std::log1p(std::exp(-std::fabs(x))); },
     &RowKernels::softplus, 1.71},
    {"rsqrt", rsqrt, [](double x) { return 1 / std::sqrt(x); }, &RowKernels::rsqrt, 1.50},
};

// |got - want| in units of the float spacing at want. Zero when the rule for NaN, overflow or underflow is met,
// infinite when it is not.
double error_ulp(float got, double want) {
  if (std::isnan(want)) return bits(got) == kNanBits ? 0 : kInfinity;
  // Half a spacing above the greatest float, "nearest" turns into +inf.
  if (std::fabs(want) >= 0x1.ffffffp127) return got == (want > 0 ? kInfinity : -kInfinity) ? 0 : kInfinity;
  if (std::fabs(want) < 0x1p-126) return bits(got) == 0 ? 0 : kInfinity;
  const double spacing = std::ldexp(1.0, std::ilogb(want) - 23);
  const double error = std::fabs(static_cast<double>(got) - want) / spacing;
  return std::isnan(error) ? kInfinity : error;
}

float flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? 0.0F : x;
}

// Every sign, exponent and leading mantissa pattern, with random trailing bits: 2^22 inputs.
template <class Body>
void stratified(std::uint64_t seed, Body body) {
  Random random(seed);
  for (std::uint32_t top = 0; top < (1U << 22); ++top)
    body(std::bit_cast<float>((top << 10) | (random.next_u32() & 1023U)));
}

double worst_error(const std::function<float(float)>& f, double (*exact)(double)) {
  double worst = 0;
  stratified(1, [&](float x) {
    // An input below the smallest normal counts as zero.
    worst = std::fmax(worst, error_ulp(f(x), exact(static_cast<double>(flushed(x)))));
  });
  return worst;
}

class Math : public RowOps {};

TEST_F(Math, ErrorIsWithinTheStatedMaximum) {
  for (const Function& function : kFunctions) {
    const double worst = worst_error(function.f, function.exact);
    EXPECT_LE(worst, function.max_ulp) << function.name;
    EXPECT_GE(worst, 0.8 * function.max_ulp) << function.name << ": the stated maximum is far from what it does";
  }
}

TEST_F(Math, AnErrorOfTwoUlpIsCaught) {
  for (const Function& function : kFunctions) {
    const auto off = [&](float x) {
      const float y = function.f(x);
      return std::nextafter(std::nextafter(y, kInfinity), kInfinity);
    };
    EXPECT_GT(worst_error(off, function.exact), function.max_ulp) << function.name;
  }
}

TEST_F(Math, EveryInstructionSetGivesTheScalarBits) {
  std::vector<const RowKernels*> tables = {&row_kernels_scalar()};
  if (isa_available(Isa::avx2)) tables.push_back(&row_kernels_avx2());
  if (isa_available(Isa::avx512)) tables.push_back(&row_kernels_avx512());
  Floats x;
  x.reserve(1U << 22);
  stratified(2, [&](float v) { x.push_back(v); });
  Floats want(x.size());
  Floats got(x.size());
  for (const Function& function : kFunctions) {
    for (std::size_t i = 0; i < x.size(); ++i) want[i] = function.f(x[i]);
    for (const RowKernels* table : tables) {
      (table->*function.vector)(x.data(), static_cast<Index>(x.size()), got.data());
      std::size_t differing = 0;
      for (std::size_t i = 0; i < x.size(); ++i) differing += bits(got[i]) != bits(want[i]) ? 1 : 0;
      EXPECT_EQ(differing, 0U) << function.name << " on " << table->name;
    }
  }
}

TEST_F(Math, FlushToZeroChangesNothing) {
  const unsigned flush = _mm_getcsr();
  for (const Function& function : kFunctions) {
    std::size_t differing = 0;
    stratified(3, [&](float x) {
      const float with = function.f(x);
      _mm_setcsr(flush & ~0x8040U);
      const float without = function.f(x);
      _mm_setcsr(flush);
      differing += bits(with) != bits(without) ? 1 : 0;
    });
    EXPECT_EQ(differing, 0U) << function.name;
  }
}

TEST_F(Math, Edges) {
  const float nan = std::nanf("");
  for (const Function& function : kFunctions) EXPECT_EQ(bits(function.f(-nan)), kNanBits) << function.name;
  EXPECT_EQ(bits(exp(-kInfinity)), 0U);
  EXPECT_EQ(exp(kInfinity), kInfinity);
  EXPECT_EQ(exp(0.0F), 1.0F);
  EXPECT_EQ(exp(-1e-42F), 1.0F);
  EXPECT_LT(exp(88.7228317F), kInfinity);
  EXPECT_EQ(exp(88.7228394F), kInfinity);
  EXPECT_GE(exp(-87.3365402F), std::numeric_limits<float>::min());
  EXPECT_EQ(bits(exp(-87.3365479F)), 0U);
  EXPECT_EQ(bits(log(1.0F)), 0U);
  EXPECT_EQ(log(0.0F), -kInfinity);
  EXPECT_EQ(log(-0.0F), -kInfinity);
  EXPECT_EQ(log(1e-42F), -kInfinity);
  EXPECT_EQ(log(kInfinity), kInfinity);
  EXPECT_EQ(bits(log(-1.0F)), kNanBits);
  EXPECT_EQ(bits(log(-kInfinity)), kNanBits);
  EXPECT_EQ(sigmoid(0.0F), 0.5F);
  EXPECT_EQ(sigmoid(kInfinity), 1.0F);
  EXPECT_EQ(bits(sigmoid(-kInfinity)), 0U);
  EXPECT_EQ(bits(tanh(-0.0F)), 0U);
  EXPECT_EQ(tanh(kInfinity), 1.0F);
  EXPECT_EQ(tanh(-kInfinity), -1.0F);
  EXPECT_EQ(softplus(kInfinity), kInfinity);
  EXPECT_EQ(bits(softplus(-kInfinity)), 0U);
  EXPECT_EQ(rsqrt(0.0F), kInfinity);
  EXPECT_EQ(rsqrt(4.0F), 0.5F);
  EXPECT_EQ(bits(rsqrt(kInfinity)), 0U);
  EXPECT_EQ(bits(rsqrt(-1.0F)), kNanBits);
}

TEST_F(Math, TanhIsOdd) {
  stratified(4, [](float x) {
    if (std::isnan(x) || flushed(x) == 0.0F) return;
    ASSERT_EQ(bits(tanh(-x)), bits(tanh(x)) ^ 0x80000000U) << x;
  });
}

}  // namespace math_test
}  // namespace tidelock::numerics::testing
