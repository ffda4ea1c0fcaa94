// The KDA backward pass against float64 finite differences of the token recurrence, which knows no chunks; the same
// bits on every instruction set.
#include <gtest/gtest.h>

#include "numerics/kda_support.hpp"

namespace tidelock::numerics::testing {
namespace kda_backward_test {

class KdaBackward : public RowOps {};

struct Gradients {
  Vector q, k, v, g, beta;
};

Vector loss_weights(const KdaInputs& in, std::uint64_t seed, float scale) {
  Random random(seed, 3);
  Vector w(static_cast<std::size_t>(in.rows * in.shape.heads * in.shape.value_dim));
  for (float& x : w) x = random.normal() * scale;
  return w;
}

Gradients run_backward(const KdaInputs& in, const Vector& d_out) {
  const auto chunks = static_cast<std::size_t>((in.rows + 15) / 16);
  Vector states(chunks * static_cast<std::size_t>(in.shape.heads * in.shape.key_dim * in.shape.value_dim));
  KdaResult result = empty_result(in);
  run_kda(in, 0, in.rows, result, states.data());
  Gradients d{Vector(in.q.size()), Vector(in.k.size()), Vector(in.v.size()), Vector(in.g.size()),
              Vector(in.beta.size())};
  kda_backward(in.shape, 0, in.shape.heads, in.rows, in.q.data(), in.k.data(), in.v.data(), in.g.data(), in.beta.data(),
               states.data(), d_out.data(), d.q.data(), d.k.data(), d.v.data(), d.g.data(), d.beta.data());
  return d;
}

std::vector<double> of_head(const Vector& x, const KdaInputs& in, int head, int dim) {
  std::vector<double> out;
  for (std::int64_t t = 0; t < in.rows; ++t)
    for (int d = 0; d < dim; ++d) out.push_back(x[static_cast<std::size_t>((t * in.shape.heads + head) * dim + d)]);
  return out;
}

// d loss / d x by central differences, loss = sum of w * out.
std::vector<double> differences(KdaHead64 h, std::vector<double> KdaHead64::*field, const std::vector<double>& w) {
  constexpr double kStep = 1e-5;
  const auto loss = [&] {
    const std::vector<double> out = h.forward();
    double sum = 0;
    for (std::size_t i = 0; i < out.size(); ++i) sum += w[i] * out[i];
    return sum;
  };
  std::vector<double> d;
  for (std::size_t i = 0; i < (h.*field).size(); ++i) {
    double& x = (h.*field)[i];
    const double before = x;
    x = before + kStep;
    const double up = loss();
    x = before - kStep;
    d.push_back((up - loss()) / (2 * kStep));
    x = before;
  }
  return d;
}

struct Case {
  bool bounded;
  Gates gates;
  std::int64_t rows;
  float scale;  // of the incoming gradient
};

void PrintTo(const Case& c, std::ostream* to) {
  *to << (c.bounded ? "bounded" : "unbounded") << " gates " << static_cast<int>(c.gates) << " rows " << c.rows;
}

class KdaGradients : public KdaBackward, public ::testing::WithParamInterface<Case> {};

TEST_P(KdaGradients, AgreeWithFiniteDifferences) {
  const Case& c = GetParam();
  const double limit = c.gates == Gates::lowest ? 1e-4 : 2e-5;  // there dg is a small difference of large terms
  const KdaInputs in = make_kda_inputs({2, 16, 16, c.bounded}, c.rows, 21, c.gates);
  const Vector w = loss_weights(in, 22, c.scale);
  const Gradients d = run_backward(in, w);
  const int head = 1;  // heads are alike; the second one tests the strides too
  const KdaHead64 h = head64(in, head);
  const std::vector<double> weights = of_head(w, in, head, 16);
  const auto check = [&](const Vector& mine, int dim, std::vector<double> KdaHead64::*field, const char* name) {
    const std::vector<double> expected = differences(h, field, weights);
    std::vector<double> got = of_head(mine, in, head, dim);
    if (field == &KdaHead64::g && in.rows == 1) {  // nothing to decay: zero
      for (const double x : got) EXPECT_LT(std::fabs(x), 1e-7);
      return;
    }
    EXPECT_LT(relative_rms(got, expected), limit) << name;
    // The same comparison refuses one wrong entry out of all: the check can fail.
    const auto largest = std::max_element(expected.begin(), expected.end(),
                                          [](double a, double b) { return std::fabs(a) < std::fabs(b); });
    got[static_cast<std::size_t>(largest - expected.begin())] *= 1.01;
    EXPECT_GT(relative_rms(got, expected), limit) << name;
  };
  check(d.q, 16, &KdaHead64::q, "q");
  check(d.k, 16, &KdaHead64::k, "k");
  check(d.v, 16, &KdaHead64::v, "v");
  check(d.g, 16, &KdaHead64::g, "g");
  check(d.beta, 1, &KdaHead64::beta, "beta");
}

INSTANTIATE_TEST_SUITE_P(Kda, KdaGradients,
                         ::testing::Values(Case{true, Gates::ordinary, 37, 1.0F}, Case{true, Gates::ordinary, 48, 1.0F},
                                           Case{true, Gates::lowest, 32, 1e-6F}, Case{true, Gates::none, 37, 1.0F},
                                           Case{true, Gates::ordinary, 1, 1.0F}, Case{false, Gates::ordinary, 37, 1.0F},
                                           Case{false, Gates::ordinary, 48, 1.0F}, Case{false, Gates::deep, 37, 1.0F},
                                           Case{false, Gates::none, 16, 1e-6F}));

TEST_F(KdaBackward, EveryInstructionSetGivesTheSameBits) {
  for (const bool bounded : {true, false})
    for (const auto& [key_dim, value_dim] : {std::pair{32, 48}, std::pair{128, 128}}) {
      const KdaInputs in = make_kda_inputs({3, key_dim, value_dim, bounded}, 37, 23);
      const Vector w = loss_weights(in, 24, 1.0F);
      force_isa(Isa::scalar);
      const Gradients expected = run_backward(in, w);
      for (const Isa isa : available_isas()) {
        force_isa(isa);
        const Gradients got = run_backward(in, w);
        EXPECT_TRUE(same_bits(got.q, expected.q) && same_bits(got.k, expected.k) && same_bits(got.v, expected.v) &&
                    same_bits(got.g, expected.g) && same_bits(got.beta, expected.beta))
            << isa_name(isa) << " bounded " << bounded << " " << key_dim;
      }
    }
}

TEST_F(KdaBackward, AddsToWhatIsThereHeadByHead) {
  const KdaInputs in = make_kda_inputs({3, 32, 32, true}, 37, 25);
  const Vector w = loss_weights(in, 26, 1.0F);
  const Gradients whole = run_backward(in, w);
  Vector states(3 * 3 * 32 * 32);
  KdaResult result = empty_result(in);
  run_kda(in, 0, in.rows, result, states.data());
  Gradients d{Vector(in.q.size(), 1.0F), Vector(in.k.size()), Vector(in.v.size()), Vector(in.g.size()),
              Vector(in.beta.size())};
  for (const auto& [begin, end] : {std::pair{2, 3}, std::pair{0, 2}})
    kda_backward(in.shape, begin, end, in.rows, in.q.data(), in.k.data(), in.v.data(), in.g.data(), in.beta.data(),
                 states.data(), w.data(), d.q.data(), d.k.data(), d.v.data(), d.g.data(), d.beta.data());
  EXPECT_TRUE(same_bits(d.k, whole.k) && same_bits(d.v, whole.v) && same_bits(d.g, whole.g) &&
              same_bits(d.beta, whole.beta));
  for (std::size_t i = 0; i < d.q.size(); ++i) ASSERT_EQ(d.q[i], 1.0F + whole.q[i]);
}

}  // namespace kda_backward_test
}  // namespace tidelock::numerics::testing
