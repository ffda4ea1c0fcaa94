// Attention and the DSA index, forward: every instruction set and every cut gives the bits of the plain loops; dense
// equals a list of everything; later keys are never read; top-k against a full sort.
#include "numerics/attention_support.hpp"

#include <limits>
#include <numeric>

#include "numerics/attention_kernels.hpp"

namespace tidelock::numerics::testing {
namespace attention_test {

class Attention : public RowOps {};

constexpr Format kFormats[] = {Format::f32, Format::bf16};

std::string label(const MlaShape& s, Isa isa, Format format) {
  return std::string(isa_name(isa)) + " " + std::to_string(s.heads) + "x" + std::to_string(s.latent_dim) + "+" +
         std::to_string(s.extra_dim) + (format == Format::f32 ? " f32" : " bf16");
}

TEST_F(Attention, ForcedInstructionSetIsTheOneThatRuns) {
  for (const Isa isa : available_isas()) {
    force_isa(isa);
    EXPECT_EQ(attention_kernels().name, std::string(isa == Isa::avx512bf16 ? "avx512" : isa_name(isa)));
  }
  EXPECT_NE(attention_kernels_scalar().mla_attention, attention_kernels_avx2().mla_attention);
  EXPECT_NE(attention_kernels_avx2().mla_attention, attention_kernels_avx512().mla_attention);
}

TEST_F(Attention, StoredRowsAreRoundedOnceAndReadBack) {
  Random random(1);
  for (const Format format : kFormats) {
    const Floats x = normals(random, 70 * 24);
    Stored stored(24, format, 130);
    store_rows(stored.view(), 60, 70, x.data());
    Floats y(x.size());
    load_rows(stored.view(), 60, 70, y.data());
    for (std::size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(bits(y[i]), bits(format == Format::f32 ? x[i] : to_float(to_bf16(x[i]))));
    Floats again(24);
    load_rows(stored.view(), 64, 1, again.data());
    EXPECT_EQ(0, std::memcmp(again.data(), y.data() + 4 * 24, 24 * sizeof(float)));
  }
}

TEST_F(Attention, EqualsTheReferenceByBits) {
  for (const MlaShape& shape : {MlaShape{1, 32, 8, 0.2F}, MlaShape{3, 32, 16, 0.3F}, MlaShape{5, 48, 64, 0.1F},
                                MlaShape{4, 40, 9, 0.25F}, MlaShape{17, 32, 0, 0.25F}})
    for (const Format format : kFormats) {
      const MlaInputs in = make_mla_inputs(shape, 150, 31);
      const Lists lists = random_lists(32, in.rows, 70);
      const MlaResult dense = run_mla(in, format, nullptr, true);
      const MlaResult sparse = run_mla(in, format, &lists, true);
      EXPECT_FALSE(same_bits(dense, sparse));
      for (const Isa isa : available_isas()) {
        force_isa(isa);
        EXPECT_TRUE(same_bits(run_mla(in, format, nullptr), dense)) << "dense " << label(shape, isa, format);
        EXPECT_TRUE(same_bits(run_mla(in, format, &lists), sparse)) << "selected " << label(shape, isa, format);
      }
    }
}

TEST_F(Attention, RealSizeEqualsTheReferenceByBits) {
  for (const int heads : {32, 96}) {
    const MlaInputs in = make_mla_inputs({heads, 512, 64, 0.0721687824F}, 131, 33);
    const Lists lists = random_lists(34, in.rows, 67);
    MlaResult expected = empty_mla(in);
    MlaResult listed = empty_mla(in);
    run_mla(in, Format::bf16, nullptr, 127, 131, expected, true);
    run_mla(in, Format::bf16, &lists, 127, 131, listed, true);
    for (const Isa isa : available_isas()) {
      force_isa(isa);
      MlaResult got = empty_mla(in);
      run_mla(in, Format::bf16, nullptr, 127, 131, got);
      EXPECT_TRUE(same_bits(got, expected)) << isa_name(isa);
      run_mla(in, Format::bf16, &lists, 127, 131, got);
      EXPECT_TRUE(same_bits(got, listed)) << isa_name(isa);
    }
  }
}

TEST_F(Attention, EverySplitEqualsWholeEqualsRowByRow) {
  const MlaInputs in = make_mla_inputs({3, 32, 8, 0.25F}, 70, 35);
  const Lists lists = random_lists(36, in.rows, 40);
  for (const Isa isa : available_isas())
    for (const Lists* list : {static_cast<const Lists*>(nullptr), &lists}) {
      force_isa(isa);
      const MlaResult whole = run_mla(in, Format::bf16, list);
      for (std::int64_t split = 1; split < in.rows; ++split) {
        MlaResult two = empty_mla(in);
        run_mla(in, Format::bf16, list, 0, split, two);
        run_mla(in, Format::bf16, list, split, in.rows, two);
        EXPECT_TRUE(same_bits(two, whole)) << isa_name(isa) << " split " << split;
      }
      MlaResult rows = empty_mla(in);
      for (std::int64_t t = 0; t < in.rows; ++t) run_mla(in, Format::bf16, list, t, t + 1, rows);
      EXPECT_TRUE(same_bits(rows, whole)) << isa_name(isa);
    }
}

TEST_F(Attention, HeadsMayBeSplitForOneRow) {
  const MlaInputs in = make_mla_inputs({5, 32, 16, 0.25F}, 90, 37);
  const MlaResult whole = run_mla(in, Format::f32, nullptr);
  Stored stored(in.key_dim(), Format::f32, in.rows);
  store_rows(stored.view(), 0, in.rows, in.keys.data());
  const std::size_t pair = 89 * 5;
  MlaResult parts = empty_mla(in);
  for (const auto& [begin, end] : {std::pair{0, 2}, std::pair{2, 5}}) {
    MlaShape shape = in.shape;
    shape.heads = end - begin;
    mla_attention(shape, stored.view(), 89, 1, in.q.data() + (pair + static_cast<std::size_t>(begin)) * 48, nullptr, 0,
                  nullptr, parts.context.data() + (pair + static_cast<std::size_t>(begin)) * 32, nullptr);
  }
  EXPECT_EQ(0, std::memcmp(parts.context.data() + pair * 32, whole.context.data() + pair * 32, 5 * 32 * sizeof(float)));
}

TEST_F(Attention, DenseEqualsAListOfEverything) {
  for (const int heads : {1, 4, 20}) {
    const MlaInputs in = make_mla_inputs({heads, 32, 8, 0.25F}, 200, 38);
    Lists lists = all_positions(in.rows);
    const MlaResult dense = run_mla(in, Format::bf16, nullptr);
    EXPECT_TRUE(same_bits(run_mla(in, Format::bf16, &lists), dense));
    // Sabotage: one row's list loses its first entry, or runs backwards.
    for (std::int64_t i = 0; i < 150; ++i) lists.positions[static_cast<std::size_t>(150 * 200 + i)]++;
    lists.counts[150]--;
    EXPECT_FALSE(same_bits(run_mla(in, Format::bf16, &lists), dense));
    lists = all_positions(in.rows);
    std::reverse(lists.positions.begin() + 180 * 200, lists.positions.begin() + 180 * 200 + 181);
    EXPECT_FALSE(same_bits(run_mla(in, Format::bf16, &lists), dense));
  }
}

TEST_F(Attention, LaterKeysDoNotReachEarlierRows) {
  const MlaInputs in = make_mla_inputs({3, 32, 8, 0.25F}, 80, 39);
  const MlaResult base = run_mla(in, Format::f32, nullptr);
  for (std::int64_t t = 1; t < in.rows; ++t) {
    MlaInputs changed = in;
    std::fill(changed.keys.begin() + t * 40, changed.keys.end(), std::nanf(""));  // even 0 * key would show
    const MlaResult other = run_mla(changed, Format::f32, nullptr);
    const auto rows = static_cast<std::size_t>(t) * 3;
    EXPECT_EQ(0, std::memcmp(other.context.data(), base.context.data(), rows * 32 * sizeof(float))) << t;
    EXPECT_EQ(0, std::memcmp(other.lse.data(), base.lse.data(), rows * sizeof(float))) << t;
    EXPECT_TRUE(std::isnan(other.context[rows * 32])) << t;
  }
}

TEST_F(Attention, SabotageTwoSwappedTermsAreSeen) {
  const MlaInputs in = make_mla_inputs({2, 32, 8, 0.25F}, 70, 40);
  MlaInputs swapped = in;  // the same dot products with two terms exchanged; both lie outside the latent
  for (Floats* x : {&swapped.q, &swapped.keys})
    for (std::size_t i = 0; i < x->size(); i += 40) std::swap((*x)[i + 35], (*x)[i + 36]);
  const MlaResult a = run_mla(in, Format::f32, nullptr);
  const MlaResult b = run_mla(swapped, Format::f32, nullptr);
  EXPECT_FALSE(same_bits(a, b));
  for (std::size_t i = 0; i < a.context.size(); ++i) ASSERT_NEAR(a.context[i], b.context[i], 1e-4);
}

TEST_F(Attention, AgreesWithFloat64) {
  const MlaInputs in = make_mla_inputs({2, 32, 16, 0.3F}, 200, 41);
  const MlaResult got = run_mla(in, Format::f32, nullptr);
  for (const std::int64_t r : {0, 63, 64, 199})
    for (int h = 0; h < 2; ++h) {
      std::vector<double> out(32);
      double sum = 0;
      for (std::int64_t s = 0; s <= r; ++s) {
        double dot = 0;
        for (int d = 0; d < 48; ++d)
          dot += static_cast<double>(in.q[static_cast<std::size_t>((r * 2 + h) * 48 + d)]) *
                 in.keys[static_cast<std::size_t>(s * 48 + d)];
        const double p = std::exp(dot * 0.3F);
        sum += p;
        for (int d = 0; d < 32; ++d)
          out[static_cast<std::size_t>(d)] += p * in.keys[static_cast<std::size_t>(s * 48 + d)];
      }
      for (int d = 0; d < 32; ++d)
        EXPECT_NEAR(got.context[static_cast<std::size_t>((r * 2 + h) * 32 + d)], out[static_cast<std::size_t>(d)] / sum,
                    3e-6);
      EXPECT_NEAR(got.lse[static_cast<std::size_t>(r * 2 + h)], std::log(sum), 3e-6);
    }
}

struct IndexInputs {
  IndexShape shape;
  std::int64_t rows;
  Floats q, w, keys;
};

IndexInputs make_index_inputs(const IndexShape& shape, std::int64_t rows, std::uint64_t seed) {
  Random random(seed, 7);
  return {shape, rows, normals(random, rows * shape.heads * shape.dim), normals(random, rows * shape.heads),
          normals(random, rows * shape.dim)};
}

// Rows [begin, end) into scores [rows, rows].
void run_index(const IndexInputs& in, Format format, std::int64_t begin, std::int64_t end, Floats& scores,
               bool plain = false) {
  Stored stored(in.shape.dim, format, end);
  store_rows(stored.view(), 0, end, in.keys.data());
  const std::int64_t pair = begin * in.shape.heads;
  (plain ? &reference::index_scores : &index_scores)(in.shape, stored.view(), begin, end - begin,
                                                     in.q.data() + pair * in.shape.dim, in.w.data() + pair,
                                                     scores.data() + begin * in.rows, in.rows);
}

TEST_F(Attention, IndexScoresEqualTheReferenceByBitsAndInEveryCut) {
  for (const IndexShape& shape : {IndexShape{1, 16}, IndexShape{3, 24}, IndexShape{16, 32}, IndexShape{37, 128}})
    for (const Format format : kFormats) {
      const IndexInputs in = make_index_inputs(shape, 135, 42);
      Floats expected(static_cast<std::size_t>(in.rows * in.rows), -1.0F);
      Floats whole = expected;
      Floats rows = expected;
      run_index(in, format, 0, in.rows, expected, true);
      for (const Isa isa : available_isas()) {
        force_isa(isa);
        run_index(in, format, 0, in.rows, whole);
        EXPECT_TRUE(same_bits(whole, expected)) << isa_name(isa) << " " << shape.heads;  // nothing beyond a row's end
        for (std::int64_t r = 0; r < in.rows; ++r) run_index(in, format, r, r + 1, rows);
        EXPECT_TRUE(same_bits(rows, expected)) << isa_name(isa) << " " << shape.heads;
      }
    }
}

TEST_F(Attention, SabotageIndexHeadsInAnotherOrderAreSeen) {
  const IndexInputs in = make_index_inputs({37, 16}, 70, 43);
  IndexInputs swapped = in;
  for (std::int64_t r = 0; r < in.rows; ++r) {  // heads 0 and 1 belong to different partial sums
    const auto at = static_cast<std::size_t>(r * 37);
    std::swap(swapped.w[at], swapped.w[at + 1]);
    for (std::size_t d = 0; d < 16; ++d) std::swap(swapped.q[at * 16 + d], swapped.q[at * 16 + 16 + d]);
  }
  Floats a(static_cast<std::size_t>(in.rows * in.rows));
  Floats b = a;
  run_index(in, Format::f32, 0, in.rows, a);
  run_index(swapped, Format::f32, 0, in.rows, b);
  EXPECT_FALSE(same_bits(a, b));
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-4);
}

// The definition: sort everything. `newest_first` false is the sabotage.
std::vector<std::int32_t> sorted_top_k(const Floats& scores, std::int64_t k, bool newest_first = true) {
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](std::int32_t i) {
    const float x = scores[static_cast<std::size_t>(i)];
    return std::isnan(x) ? -std::numeric_limits<float>::infinity() : x;
  };
  std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    if (value(a) != value(b)) return value(a) > value(b);
    return newest_first ? a > b : a < b;
  });
  order.resize(static_cast<std::size_t>(std::min<std::int64_t>(k, static_cast<std::int64_t>(order.size()))));
  std::sort(order.begin(), order.end());
  return order;
}

TEST_F(Attention, TopKEqualsAFullSort) {
  int tie_order_mattered = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed, 8);
    const Index n = random.between(1, 700);
    const Index k = random.between(1, 300);
    Floats scores = seed % 3 == 0 ? specials(random, n) : normals(random, n);
    if (seed % 3 == 1)  // many exact ties, zeros of both signs among them
      for (float& x : scores) x = static_cast<float>(random.between(-2, 2)) * (random.below(2) == 0 ? 0.5F : -0.5F);
    const std::vector<std::int32_t> expected = sorted_top_k(scores, k);
    std::vector<std::int32_t> got(static_cast<std::size_t>(std::min(n, k)), -1);
    const std::int32_t count = select_top_k(scores.data(), n, k, got.data());
    ASSERT_EQ(count, std::min(n, k));
    ASSERT_EQ(got, expected) << "seed " << seed;
    tie_order_mattered += sorted_top_k(scores, k, false) != expected ? 1 : 0;
  }
  EXPECT_GT(tie_order_mattered, 50);  // an implementation with the other tie order would have failed above
}

TEST_F(Attention, TopKEdges) {
  std::int32_t out[4] = {7, 7, 7, 7};
  const float scores[4] = {0.0F, -0.0F, std::nanf(""), -std::numeric_limits<float>::infinity()};
  EXPECT_EQ(select_top_k(scores, 4, 0, out), 0);
  EXPECT_EQ(out[0], 7);
  EXPECT_EQ(select_top_k(scores, 4, 1, out), 1);
  EXPECT_EQ(out[0], 1);  // -0 equals +0: the newer wins
  EXPECT_EQ(select_top_k(scores, 4, 3, out), 3);
  EXPECT_EQ(out[2], 3);  // NaN counts as -infinity: again the newer
  EXPECT_EQ(select_top_k(scores, 4, 9, out), 4);
  EXPECT_EQ(select_top_k(scores, 0, 9, out), 0);
}

}  // namespace attention_test
}  // namespace tidelock::numerics::testing
