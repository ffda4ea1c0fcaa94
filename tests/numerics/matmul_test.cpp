// Matrix products: every kernel gives the bits of the reference loops, whatever the tile, batch, thread or
// instruction set.
#include "numerics/matmul.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "base/error.hpp"
#include "base/random.hpp"
#include "numerics/paths.hpp"

namespace tidelock::numerics {
namespace matmul_test {

enum class Values {
  plain,    // both signs, 13 exponents: nearly every addition of bf16 products rounds
  spread,   // exponents all over: denormal inputs, results that underflow and overflow
  special,  // plain, with some zeros of both signs, denormals and infinities
};

float value(Random& random, Values kind) {
  const float plain = std::ldexp(random.uniform() * 2 - 1, static_cast<int>(random.below(13)) - 6);
  if (kind == Values::plain) return plain;
  if (kind == Values::spread) return std::ldexp(plain, static_cast<int>(random.below(260)) - 135);
  switch (random.below(40)) {
    case 0:
      return -0.0F;
    case 1:
      return 0.0F;
    case 2:
      return std::bit_cast<float>(0x80012345U);  // a denormal, and one in bf16
    case 3:
      return std::numeric_limits<float>::denorm_min();
    case 4:
      return random.below(8) == 0 ? std::numeric_limits<float>::infinity() : 1.0F;
    case 5:
      return -std::numeric_limits<float>::max() / 4;
    default:
      return plain;
  }
}

// Rows with a stride of their own, so that a kernel which assumes a dense matrix is seen.
template <typename Element>
struct Matrix {
  std::int64_t rows, columns, stride;
  std::vector<Element> data;

  Matrix(std::int64_t r, std::int64_t c, std::int64_t padding)
      : rows(r), columns(c), stride(c + padding), data(static_cast<std::size_t>(r * (c + padding))) {}
  Element& at(std::int64_t r, std::int64_t c) { return data.at(static_cast<std::size_t>(r * stride + c)); }
  const Element& at(std::int64_t r, std::int64_t c) const { return data.at(static_cast<std::size_t>(r * stride + c)); }
  std::vector<Element> dense() const {
    std::vector<Element> d;
    for (std::int64_t r = 0; r < rows; ++r)
      d.insert(d.end(), data.begin() + r * stride, data.begin() + r * stride + columns);
    return d;
  }
};

template <typename Element>
Matrix<Element> random_matrix(Random& random, std::int64_t rows, std::int64_t columns, std::int64_t padding,
                              Values kind) {
  Matrix<Element> m(rows, columns, padding);
  for (auto& element : m.data) {
    if constexpr (std::is_same_v<Element, bf16>) {
      element = {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value(random, kind)) >> 16)};
    } else {
      element = value(random, kind);
    }
  }
  return m;
}

// The first element whose bits differ; any NaN equals any NaN (inf - inf has no agreed sign).
std::optional<std::string> difference(const std::vector<float>& got, const std::vector<float>& want) {
  if (got.size() != want.size()) return "sizes differ";
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(got[i]) && std::isnan(want[i])) continue;
    if (std::bit_cast<std::uint32_t>(got[i]) != std::bit_cast<std::uint32_t>(want[i]))
      return fmt::format("element {}: {:a}, reference {:a}", i, got[i], want[i]);
  }
  return std::nullopt;
}

struct Shape {
  std::int64_t rows, out, in;
  int segments = 1;
};

// One product against the reference, in a y whose padding must stay untouched.
template <typename Element>
void check_product(Random& random, Shape shape, Values kind, Output output, Team& team) {
  const auto [rows, out, in, segments] = shape;
  const auto w = random_matrix<Element>(random, out, in, 0, kind);
  const auto x = random_matrix<Element>(random, rows, in, static_cast<std::int64_t>(random.below(4)), kind);
  auto y = random_matrix<float>(random, rows, out, static_cast<std::int64_t>(random.below(3)), Values::plain);
  const auto before = y;
  auto want = y.dense();
  PackedMatrix packed;
  if constexpr (std::is_same_v<Element, bf16>) {
    packed = PackedMatrix::pack(w.data.data(), out, in, segments);
    reference::matmul_bf16(w.data.data(), x.dense().data(), rows, out, in, segments, want.data(), output);
  } else {
    packed = PackedMatrix::pack(Format::f32, w.data.data(), out, in, segments);
    reference::matmul_f32(w.data.data(), x.dense().data(), rows, out, in, segments, want.data(), output);
  }
  matmul(packed, x.data.data(), x.stride, rows, y.data.data(), y.stride, output, team);
  const auto diff = difference(y.dense(), want);
  EXPECT_FALSE(diff) << *diff << " in " << rows << " x [" << out << ", " << in << "], " << segments << " segments, "
                     << sizeof(Element) << " bytes, " << isa_name(isa()) << ", threads " << team.threads();
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = out; c < y.stride; ++c)
      ASSERT_EQ(y.at(r, c), before.at(r, c)) << "column " << c << " beyond out = " << out << " was written";
}

void check_outer(Random& random, std::int64_t rows, std::int64_t n, std::int64_t k, Values kind, Output output,
                 Team& team) {
  const auto pad = [&] { return static_cast<std::int64_t>(random.below(4)); };
  const auto a = random_matrix<float>(random, rows, n, pad(), kind);
  const auto b = random_matrix<float>(random, rows, k, pad(), kind);
  auto c = random_matrix<float>(random, n, k, pad(), Values::plain);
  const auto before = c;
  auto want = c.dense();
  reference::matmul_transposed_a(a.dense().data(), b.dense().data(), rows, n, k, want.data(), output);
  matmul_transposed_a(a.data.data(), a.stride, b.data.data(), b.stride, rows, n, k, c.data.data(), c.stride, output,
                      team);
  const auto diff = difference(c.dense(), want);
  EXPECT_FALSE(diff) << *diff << " in transposed product [" << rows << ", " << n << "] x [" << rows << ", " << k
                     << "], " << isa_name(isa()) << ", threads " << team.threads();
  for (std::int64_t r = 0; r < n; ++r)
    for (std::int64_t j = k; j < c.stride; ++j)
      ASSERT_EQ(c.at(r, j), before.at(r, j)) << "column " << j << " beyond k = " << k << " was written";
}

class MatmulPath : public ::testing::TestWithParam<Isa> {
 protected:
  static Output either(Random& random) { return random.below(2) == 0 ? Output::store : Output::add; }
  static std::int64_t between(Random& random, std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random.below(static_cast<std::uint32_t>(high - low + 1)));
  }
};

// Every size from 1 to 70 in each dimension, the other two random.
TEST_P(MatmulPath, EqualsReferenceOverOddSizes) {
  const numerics::testing::ForcedIsa forced(GetParam());
  Random random(1);
  for (std::int64_t size = 1; size <= 70; ++size) {
    for (int dimension = 0; dimension < 3; ++dimension) {
      const auto pick = [&](int d) { return d == dimension ? size : between(random, 1, 70); };
      const Shape shape{pick(0), pick(1), pick(2)};
      check_product<bf16>(random, shape, Values::plain, either(random), solo_team());
      check_product<float>(random, shape, Values::plain, either(random), solo_team());
      check_outer(random, shape.rows, shape.out, shape.in, Values::plain, either(random), solo_team());
    }
  }
}

// Every tile shape: 1..17 rows x 1..10 panels, with a full and with a short last panel.
TEST_P(MatmulPath, EqualsReferenceInEveryTileShape) {
  const numerics::testing::ForcedIsa forced(GetParam());
  Random random(2);
  for (std::int64_t rows = 1; rows <= 17; ++rows) {
    for (std::int64_t panels = 1; panels <= 10; ++panels) {
      const std::int64_t out = panels * 16 - (panels % 2 == 0 ? 0 : between(random, 1, 15));
      check_product<bf16>(random, {rows, out, 13}, Values::plain, either(random), solo_team());
      check_product<float>(random, {rows, out, 13}, Values::plain, either(random), solo_team());
      check_outer(random, 13, rows, out, Values::plain, either(random), solo_team());
    }
  }
}

TEST_P(MatmulPath, EqualsReferenceOnDenormalsZerosAndInfinities) {
  const numerics::testing::ForcedIsa forced(GetParam());
  Random random(3);
  for (int i = 0; i < 60; ++i) {
    const Values kind = i % 2 == 0 ? Values::special : Values::spread;
    const Shape shape{between(random, 1, 20), between(random, 1, 60), between(random, 1, 90)};
    check_product<bf16>(random, shape, kind, either(random), solo_team());
    check_product<float>(random, shape, kind, either(random), solo_team());
    check_outer(random, shape.rows, shape.out, shape.in, kind, either(random), solo_team());
  }
}

TEST_P(MatmulPath, EqualsReferenceInSegments) {
  const numerics::testing::ForcedIsa forced(GetParam());
  Random random(4);
  for (const int segments : {2, 3, 4, 8}) {
    for (int i = 0; i < 20; ++i) {
      const std::int64_t length = between(random, 1, 20) * 2;
      const Shape shape{between(random, 1, 20), between(random, 1, 140), segments * length, segments};
      check_product<bf16>(random, shape, Values::plain, either(random), solo_team());
      check_product<float>(random, shape, Values::plain, either(random), solo_team());
      const Shape odd{shape.rows, shape.out, segments * (length - 1), segments};
      check_product<float>(random, odd, Values::special, either(random), solo_team());
    }
  }
}

TEST_P(MatmulPath, EqualsReferenceWithManyThreadsAndLargeSizes) {
  const numerics::testing::ForcedIsa forced(GetParam());
  Random random(5);
  const bool slow = GetParam() == Isa::scalar;
  for (const int threads : {1, 2, 3}) {
    Team team(threads);
    for (int i = 0; i < (slow ? 2 : 6); ++i) {
      // The first is large enough to be cut in both directions, the second is a long row.
      const Shape shape =
          i == 0   ? Shape{between(random, 100, 140), between(random, 300, 500), 2 * between(random, 100, 150)}
          : i == 1 ? Shape{1, between(random, 300, 500), 4 * between(random, 500, 600), 2}
                   : Shape{between(random, 1, 60), between(random, 200, 700), between(random, 50, 600)};
      check_product<bf16>(random, shape, Values::plain, either(random), team);
      check_product<float>(random, shape, Values::plain, either(random), team);
    }
    check_outer(random, between(random, 500, 600), between(random, 60, 90), between(random, 200, 300), Values::plain,
                either(random), team);
  }
}

// A row's bits do not depend on how many rows share the call, nor on its place among them.
TEST_P(MatmulPath, RowsAloneEqualRowsTogether) {
  const numerics::testing::ForcedIsa forced(GetParam());
  Random random(6);
  const std::int64_t rows = 29, out = 150, in = 201;
  const auto w = random_matrix<float>(random, out, in, 0, Values::plain);
  const auto x = random_matrix<float>(random, rows, in, 0, Values::plain);
  const auto xb = random_matrix<bf16>(random, rows, in, 0, Values::plain);
  const auto packed = PackedMatrix::pack(Format::f32, w.data.data(), out, in);
  const auto packed_bf16 = PackedMatrix::pack(Format::bf16, w.data.data(), out, in);
  std::vector<float> together(rows * out), alone(rows * out), together_bf16(rows * out), alone_bf16(rows * out);
  matmul(packed, x.data.data(), in, rows, together.data(), out, Output::store, solo_team());
  matmul(packed_bf16, xb.data.data(), in, rows, together_bf16.data(), out, Output::store, solo_team());
  for (std::int64_t count = 1; count <= 9; ++count) {
    for (std::int64_t row = 0; row < rows; row += count) {
      const std::int64_t n = std::min(count, rows - row);
      matmul(packed, x.data.data() + row * in, in, n, alone.data() + row * out, out, Output::store, solo_team());
      matmul(packed_bf16, xb.data.data() + row * in, in, n, alone_bf16.data() + row * out, out, Output::store,
             solo_team());
    }
    EXPECT_EQ(difference(alone, together), std::nullopt) << count << " rows a call";
    EXPECT_EQ(difference(alone_bf16, together_bf16), std::nullopt) << count << " rows a call";
  }
}

INSTANTIATE_TEST_SUITE_P(AllPaths, MatmulPath, ::testing::ValuesIn(numerics::testing::available_isas()),
                         [](const auto& path) { return std::string(isa_name(path.param)); });

TEST(Matmul, EveryPathOfThisMachineIsTested) {
  // The bf16 path only exists on some machines; that it is in the list where it exists is what this pins down.
  for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512bf16})
    EXPECT_EQ(isa_available(isa), std::ranges::count(numerics::testing::available_isas(), isa) == 1) << isa_name(isa);
  EXPECT_TRUE(isa_available(Isa::scalar));
}

// ---- sabotage: the comparison must see every one of these faults -----------------------------------------------

enum class Fault { none, even_first, swapped_pair, segments_reversed, two_chains };

float faulty_dot(const bf16* w, const bf16* x, std::int64_t in, int segments, Fault fault) {
  const std::int64_t length = in / segments;
  std::vector<float> sums;
  for (int s = 0; s < segments; ++s) {
    float chain[2] = {0, 0};
    for (std::int64_t p = 0; p < length; p += 2) {
      std::int64_t k = s * length + p;
      // Pairs 1 and 2 change places.
      if (fault == Fault::swapped_pair && s == 0) k += p == 2 ? 2 : p == 4 ? -2 : 0;
      float& acc = chain[fault == Fault::two_chains ? p / 2 % 2 : 0];
      for (const int i : {1, 0}) {
        const std::int64_t e = k + (fault == Fault::even_first ? 1 - i : i);
        acc = std::fma(to_float(x[e]), to_float(w[e]), acc);
      }
    }
    sums.push_back(chain[0] + chain[1]);
  }
  if (fault == Fault::segments_reversed) std::ranges::reverse(sums);
  float total = sums.at(0);
  for (std::size_t s = 1; s < sums.size(); ++s) total = total + sums[s];
  return total;
}

TEST(MatmulSabotage, AnotherOrderIsSeen) {
  Random random(7);
  const std::int64_t rows = 8, out = 48, in = 256;
  const int segments = 4;
  const auto w = random_matrix<bf16>(random, out, in, 0, Values::plain);
  const auto x = random_matrix<bf16>(random, rows, in, 0, Values::plain);
  const auto packed = PackedMatrix::pack(w.data.data(), out, in, segments);
  std::vector<float> got(rows * out);
  matmul(packed, x.data.data(), in, rows, got.data(), out, Output::store, solo_team());
  const auto with = [&](Fault fault) {
    std::vector<float> y;
    for (std::int64_t m = 0; m < rows; ++m)
      for (std::int64_t o = 0; o < out; ++o)
        y.push_back(faulty_dot(w.data.data() + o * in, x.data.data() + m * in, in, segments, fault));
    return y;
  };
  EXPECT_EQ(difference(got, with(Fault::none)), std::nullopt);
  EXPECT_NE(difference(got, with(Fault::even_first)), std::nullopt);
  EXPECT_NE(difference(got, with(Fault::swapped_pair)), std::nullopt);
  EXPECT_NE(difference(got, with(Fault::segments_reversed)), std::nullopt);
  EXPECT_NE(difference(got, with(Fault::two_chains)), std::nullopt);
}

TEST(MatmulSabotage, AnUnfusedMultiplyAddIsSeen) {
  Random random(11);
  const std::int64_t rows = 4, out = 20, in = 64;
  const auto w = random_matrix<float>(random, out, in, 0, Values::plain);
  const auto x = random_matrix<float>(random, rows, in, 0, Values::plain);
  std::vector<float> got(rows * out), fused, unfused;
  const auto packed = PackedMatrix::pack(Format::f32, w.data.data(), out, in);
  matmul(packed, x.data.data(), in, rows, got.data(), out, Output::store, solo_team());
  for (std::int64_t m = 0; m < rows; ++m) {
    for (std::int64_t o = 0; o < out; ++o) {
      float with_fma = 0, without = 0;
      for (std::int64_t k = 0; k < in; ++k) {
        with_fma = std::fma(x.at(m, k), w.at(o, k), with_fma);
        without = without + x.at(m, k) * w.at(o, k);
      }
      fused.push_back(with_fma);
      unfused.push_back(without);
    }
  }
  EXPECT_EQ(difference(got, fused), std::nullopt);
  EXPECT_NE(difference(got, unfused), std::nullopt);
}

TEST(MatmulSabotage, OneFlippedBitOfAWeightIsSeen) {
  Random random(8);
  const std::int64_t rows = 3, out = 20, in = 64;
  auto w = random_matrix<float>(random, out, in, 0, Values::plain);
  const auto x = random_matrix<float>(random, rows, in, 0, Values::plain);
  const auto product = [&] {
    std::vector<float> y(rows * out);
    const auto packed = PackedMatrix::pack(Format::f32, w.data.data(), out, in);
    matmul(packed, x.data.data(), in, rows, y.data(), out, Output::store, solo_team());
    return y;
  };
  const auto before = product();
  w.at(19, 63) = std::bit_cast<float>(std::bit_cast<std::uint32_t>(w.at(19, 63)) ^ (1U << 20));
  EXPECT_NE(difference(product(), before), std::nullopt);
}

// ---- packing and errors ----------------------------------------------------------------------------------------

TEST(Packing, TransposedEqualsPackingTheTranspose) {
  Random random(9);
  const std::int64_t out = 37, in = 53, rows = 11;
  const auto w = random_matrix<float>(random, out, in, 0, Values::plain);
  const auto dy = random_matrix<float>(random, rows, out, 0, Values::plain);
  for (const Format format : {Format::f32, Format::bf16}) {
    std::vector<float> transposed;
    for (std::int64_t k = 0; k < in; ++k)
      for (std::int64_t o = 0; o < out; ++o)
        transposed.push_back(format == Format::bf16 ? to_float(to_bf16(w.at(o, k))) : w.at(o, k));
    const auto packed = PackedMatrix::pack_transposed(format, w.data.data(), out, in);
    EXPECT_EQ(packed.out(), in);
    EXPECT_EQ(packed.in(), out);
    EXPECT_EQ(packed.format(), Format::f32);
    std::vector<float> got(rows * in), want(rows * in);
    matmul(packed, dy.data.data(), out, rows, got.data(), in, Output::store, solo_team());
    reference::matmul_f32(transposed.data(), dy.data.data(), rows, in, out, 1, want.data(), Output::store);
    EXPECT_EQ(difference(got, want), std::nullopt);
  }
}

TEST(Packing, RoundsFloatsAsToBf16Does) {
  Random random(10);
  const std::int64_t out = 21, in = 33;
  const auto w = random_matrix<float>(random, out, in, 0, Values::special);
  std::vector<bf16> rounded;
  for (const float v : w.data) rounded.push_back(to_bf16(v));
  const auto a = PackedMatrix::pack(Format::bf16, w.data.data(), out, in);
  const auto b = PackedMatrix::pack(rounded.data(), out, in);
  ASSERT_EQ(a.bytes(), b.bytes());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.bytes()), 0);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data()) % 64, 0U);
}

TEST(Packing, SplitSegmentsKeepsWholePairs) {
  EXPECT_EQ(split_segments(Format::bf16, 4096), 8);
  EXPECT_EQ(split_segments(Format::bf16, 16), 8);
  EXPECT_EQ(split_segments(Format::bf16, 24), 4);  // 8 segments of 3 would cut a pair
  EXPECT_EQ(split_segments(Format::bf16, 12), 2);
  EXPECT_EQ(split_segments(Format::bf16, 6), 1);
  EXPECT_EQ(split_segments(Format::bf16, 7), 1);
}

template <typename F>
ErrorCode code_of(F f) {
  try {
    f();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "no error";
  return ErrorCode::internal;
}

TEST(Packing, RefusesWhatItCannotPack) {
  const std::vector<float> w(64);
  EXPECT_EQ(code_of([&] { PackedMatrix::pack(Format::f32, w.data(), 0, 4); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { PackedMatrix::pack(Format::f32, w.data(), 4, 0); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { PackedMatrix::pack(Format::f32, w.data(), 4, 9, 2); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { PackedMatrix::pack(Format::bf16, w.data(), 4, 6, 2); }), ErrorCode::invalid_argument);
  const auto packed = PackedMatrix::pack(Format::bf16, w.data(), 4, 6);
  std::vector<float> y(4);
  EXPECT_EQ(code_of([&] { matmul(packed, w.data(), 6, 1, y.data(), 4, Output::store, solo_team()); }),
            ErrorCode::internal);
}

TEST(Matmul, EmptyIsNothing) {
  const std::vector<float> w(64, 1.0F);
  const auto packed = PackedMatrix::pack(Format::f32, w.data(), 8, 8);
  std::vector<float> y(8, 3.0F);
  matmul(packed, w.data(), 8, 0, y.data(), 8, Output::store, solo_team());
  EXPECT_EQ(y[0], 3.0F);
  matmul_transposed_a(w.data(), 1, w.data(), 8, 0, 1, 8, y.data(), 8, Output::add, solo_team());
  EXPECT_EQ(y[0], 3.0F);
  matmul_transposed_a(w.data(), 1, w.data(), 8, 0, 1, 8, y.data(), 8, Output::store, solo_team());
  EXPECT_EQ(y[0], 0.0F);  // a gradient over no rows is zero
}

}  // namespace matmul_test
}  // namespace tidelock::numerics
