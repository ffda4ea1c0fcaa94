// The KDA forward pass: every instruction set and every way to cut a sequence gives the bits of the plain-loop
// reference; earlier rows do not see later ones; the values are those of the float64 token recurrence.
#include <gtest/gtest.h>

#include "base/error.hpp"
#include "base/team.hpp"
#include "numerics/kda_kernels.hpp"
#include "numerics/kda_support.hpp"

namespace tidelock::numerics::testing {
namespace kda_test {

class Kda : public RowOps {};

std::vector<KdaShape> shapes() {
  std::vector<KdaShape> all;
  for (const bool bounded : {true, false})
    for (const auto& [heads, key_dim, value_dim] :
         {std::array{1, 16, 16}, std::array{3, 32, 48}, std::array{5, 48, 32}, std::array{2, 80, 112}})
      all.push_back({heads, key_dim, value_dim, bounded});
  return all;
}

std::string label(const KdaShape& s, Isa isa) {
  return std::string(isa_name(isa)) + (s.bounded ? " bounded " : " unbounded ") + std::to_string(s.heads) + "x" +
         std::to_string(s.key_dim) + "x" + std::to_string(s.value_dim);
}

TEST_F(Kda, ForcedInstructionSetIsTheOneThatRuns) {
  for (const Isa isa : available_isas()) {
    force_isa(isa);
    const std::string expected = isa == Isa::avx512bf16 ? "avx512" : isa_name(isa);
    EXPECT_EQ(kda_kernels().name, expected);
  }
  EXPECT_NE(kda_kernels_scalar().forward, kda_kernels_avx2().forward);
  EXPECT_NE(kda_kernels_avx2().forward, kda_kernels_avx512().forward);
}

TEST_F(Kda, EqualsTheReferenceByBits) {
  for (const KdaShape& shape : shapes())
    for (const Gates gates : {Gates::ordinary, Gates::lowest, Gates::none}) {
      const KdaInputs in = make_kda_inputs(shape, 70, 3, gates);
      const KdaResult expected = run_kda_reference(in);
      for (const Isa isa : available_isas()) {
        force_isa(isa);
        const KdaResult got = run_kda(in);
        EXPECT_TRUE(same_bits(got.out, expected.out)) << label(shape, isa);
        EXPECT_TRUE(same_bits(got.state, expected.state)) << label(shape, isa);
      }
    }
}

TEST_F(Kda, RealSizeEqualsTheReferenceByBits) {
  for (const bool bounded : {true, false}) {
    const KdaInputs in = make_kda_inputs({2, 128, 128, bounded}, 37, 4);
    const KdaResult expected = run_kda_reference(in);
    for (const Isa isa : available_isas()) {
      force_isa(isa);
      const KdaResult got = run_kda(in);
      EXPECT_TRUE(same_bits(got.out, expected.out) && same_bits(got.state, expected.state)) << label(in.shape, isa);
    }
  }
}

TEST_F(Kda, EverySplitEqualsWholeEqualsTokenByToken) {
  for (const bool bounded : {true, false}) {
    const KdaInputs in = make_kda_inputs({3, 32, 48, bounded}, 70, 5);
    for (const Isa isa : available_isas()) {
      force_isa(isa);
      const KdaResult whole = run_kda(in);
      for (std::int64_t split = 1; split < in.rows; ++split) {
        KdaResult two = empty_result(in);
        run_kda(in, 0, split, two);
        run_kda(in, split, in.rows, two);
        EXPECT_TRUE(same_bits(two.out, whole.out) && same_bits(two.state, whole.state))
            << label(in.shape, isa) << " split " << split;
      }
      KdaResult tokens = empty_result(in);
      for (std::int64_t t = 0; t < in.rows; ++t) run_kda(in, t, t + 1, tokens);
      EXPECT_TRUE(same_bits(tokens.out, whole.out) && same_bits(tokens.state, whole.state)) << label(in.shape, isa);
    }
  }
}

TEST_F(Kda, HeadRangesEqualAllHeads) {
  const KdaInputs in = make_kda_inputs({5, 32, 32, true}, 40, 6);
  const KdaResult whole = run_kda(in);
  KdaResult parts = empty_result(in);
  for (const auto& [begin, end] : {std::pair{3, 5}, std::pair{0, 1}, std::pair{1, 3}})
    kda_forward(in.shape, begin, end, 0, in.rows, in.q.data(), in.k.data(), in.v.data(), in.g.data(), in.beta.data(),
                parts.state.data(), parts.out.data(), nullptr);
  EXPECT_TRUE(same_bits(parts.out, whole.out) && same_bits(parts.state, whole.state));
}

TEST_F(Kda, ChunkStatesAreTheEntryStates) {
  const KdaInputs in = make_kda_inputs({2, 16, 32, true}, 70, 7);
  const std::size_t entry = 16 * 32;
  const std::size_t head = kda_head_state_floats(in.shape);
  Vector kept(5 * 2 * entry, -1.0F);
  KdaResult result = empty_result(in);
  run_kda(in, 0, 20, result, kept.data());  // begins chunks 0 and 1; the next call begins 2, 3, 4
  run_kda(in, 20, in.rows, result, kept.data());
  KdaResult walk = empty_result(in);
  for (std::size_t chunk = 0; chunk < 5; ++chunk) {
    for (std::size_t h = 0; h < 2; ++h)
      EXPECT_EQ(0,
                std::memcmp(kept.data() + (chunk * 2 + h) * entry, walk.state.data() + h * head, entry * sizeof(float)))
          << chunk;
    const std::int64_t begin = static_cast<std::int64_t>(chunk) * 16;
    run_kda(in, begin, std::min<std::int64_t>(begin + 16, in.rows), walk);
  }
}

TEST_F(Kda, LaterTokensDoNotReachEarlierRows) {
  for (const bool bounded : {true, false}) {
    const KdaInputs in = make_kda_inputs({2, 32, 32, bounded}, 48, 8);
    const KdaResult base = run_kda(in);
    for (std::int64_t t = 1; t < in.rows; ++t) {
      KdaInputs changed = make_kda_inputs(in.shape, in.rows, 900 + static_cast<std::uint64_t>(t));
      const auto keep = [&](const Vector& from, Vector& to, int dim) {
        std::copy_n(from.begin(), t * in.shape.heads * dim, to.begin());
      };
      keep(in.q, changed.q, 32);
      keep(in.k, changed.k, 32);
      keep(in.v, changed.v, 32);
      keep(in.g, changed.g, 32);
      keep(in.beta, changed.beta, 1);
      const KdaResult other = run_kda(changed);
      const std::size_t rows = static_cast<std::size_t>(t) * 2 * 32;
      EXPECT_EQ(0, std::memcmp(other.out.data(), base.out.data(), rows * sizeof(float))) << "row " << t;
      EXPECT_NE(0, std::memcmp(other.out.data() + rows, base.out.data() + rows, 64 * sizeof(float))) << "row " << t;
    }
  }
}

// The fault of public kernels: exponents centred on a row that an earlier row may not know.
Vector pairs_with_anchor(const KdaInputs& in, int anchor_row) {
  const int dim = in.shape.key_dim;
  Vector gate(static_cast<std::size_t>(16 * dim));
  for (int i = 0; i < 16; ++i)
    for (int d = 0; d < dim; ++d) gate[i * dim + d] = in.g[i * dim + d] + (i > 0 ? gate[(i - 1) * dim + d] : 0.0F);
  Vector b;
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j <= i; ++j) {
      float acc = 0.0F;
      for (int d = 0; d < dim; ++d) {
        const float anchor = anchor_row < 0 ? 0.0F : gate[anchor_row * dim + d];
        acc = std::fma(in.q[i * dim + d] * std::exp(gate[i * dim + d] - anchor),
                       in.k[j * dim + d] * std::exp(anchor - gate[j * dim + d]), acc);
      }
      b.push_back(acc);
    }
  return b;
}

TEST_F(Kda, SabotageAnAnchorThatLooksAheadIsSeenByTheCausalityTest) {
  const KdaInputs in = make_kda_inputs({1, 32, 32, true}, 16, 9);
  KdaInputs changed = in;
  changed.g[8 * 32 + 3] -= 1.25F;  // row 8 only; rows 0..7 are compared
  EXPECT_TRUE(same_bits(pairs_with_anchor(in, -1), pairs_with_anchor(changed, -1)));
  EXPECT_FALSE(same_bits(pairs_with_anchor(in, 8), pairs_with_anchor(changed, 8)));
}

TEST_F(Kda, SabotageTwoSwappedTermsAreSeen) {
  for (const bool bounded : {true, false}) {
    const KdaInputs in = make_kda_inputs({1, 32, 32, bounded}, 40, 10);
    KdaInputs swapped = in;  // the same sums with their third and fourth terms exchanged
    for (Vector* x : {&swapped.q, &swapped.k, &swapped.g})
      for (std::int64_t t = 0; t < in.rows; ++t)
        std::swap((*x)[static_cast<std::size_t>(t * 32 + 2)], (*x)[static_cast<std::size_t>(t * 32 + 3)]);
    const KdaResult a = run_kda_reference(in);
    const KdaResult b = run_kda(swapped);
    EXPECT_FALSE(same_bits(a.out, b.out));
    EXPECT_LT(relative_rms(b.out, a.out), 1e-5);
  }
}

TEST_F(Kda, AgreesWithTheFloat64TokenRecurrence) {
  struct Case {
    bool bounded;
    Gates gates;
    double limit;
  };
  for (const Case& c :
       {Case{true, Gates::ordinary, 1e-6}, Case{true, Gates::lowest, 1e-6}, Case{true, Gates::none, 1e-6},
        Case{false, Gates::ordinary, 1e-6}, Case{false, Gates::none, 1e-6}, Case{false, Gates::lowest, 1e-6},
        Case{false, Gates::deep, 1e-5}}) {
    const KdaInputs in = make_kda_inputs({2, 64, 64, c.bounded}, 200, 11, c.gates);
    const KdaResult got = run_kda(in);
    const std::size_t head_floats = kda_head_state_floats(in.shape);
    for (int head = 0; head < 2; ++head) {
      std::vector<double> state;
      KdaHead64 h = head64(in, head);
      const std::vector<double> out = h.forward(&state);
      Vector mine;
      for (std::int64_t t = 0; t < in.rows; ++t)
        for (int x = 0; x < 64; ++x) mine.push_back(got.out[static_cast<std::size_t>((t * 2 + head) * 64 + x)]);
      const double error = relative_rms(mine, out);
      EXPECT_LT(error, c.limit) << "bounded " << c.bounded << " gates " << static_cast<int>(c.gates);
      RecordProperty("rms_" + std::to_string(c.bounded) + "_" + std::to_string(static_cast<int>(c.gates)),
                     std::to_string(error));
      h.rows = 192;  // the last commit
      h.forward(&state);
      const Vector entry(got.state.begin() + static_cast<std::ptrdiff_t>(head * head_floats),
                         got.state.begin() + static_cast<std::ptrdiff_t>(head * head_floats + 64 * 64));
      EXPECT_LT(relative_rms(entry, state), c.limit) << "state, bounded " << c.bounded;
    }
  }
}

TEST_F(Kda, RefusesOtherSizes) {
  float x[1] = {};
  const auto run = [&](int key_dim, int value_dim, int begin, int end) {
    kda_forward({2, key_dim, value_dim, true}, begin, end, 0, 0, x, x, x, x, x, x, x, nullptr);
  };
  EXPECT_THROW(run(24, 32, 0, 2), Error);
  EXPECT_THROW(run(32, 0, 0, 2), Error);
  EXPECT_THROW(run(32, 272, 0, 2), Error);
  EXPECT_THROW(run(32, 32, 0, 3), Error);
  EXPECT_NO_THROW(run(32, 32, 0, 2));
}

}  // namespace kda_test
}  // namespace tidelock::numerics::testing
