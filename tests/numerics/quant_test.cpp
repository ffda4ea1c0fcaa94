// Block formats: values, products and their bits.
//
// What must never break: a product over packed blocks has the bits of the reference on every path, in every tile shape,
// at every length; a packed matrix is the file's blocks and nothing else.
#include "numerics/quant.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.hpp"
#include "base/random.hpp"
#include "numerics/matmul.hpp"
#include "numerics/paths.hpp"

namespace tidelock::numerics {
namespace quant_test {

constexpr Format kBlockFormats[] = {Format::q8_0, Format::q4_k,  Format::q5_k,
                                    Format::q6_k, Format::mxfp4, Format::q5_1};

// Random bytes with scales of a sane size: whatever a file can hold.
std::vector<std::byte> random_blocks(Random& random, Format format, std::int64_t n) {
  std::vector<std::byte> bytes(row_bytes(format, n));
  for (auto& b : bytes) b = static_cast<std::byte>(random.below(256));
  const auto put_half = [&](std::size_t at, float x) {
    const std::uint16_t h = float_to_f16(x);
    std::memcpy(bytes.data() + at, &h, 2);
  };
  for (std::size_t at = 0; at < bytes.size(); at += block_bytes(format)) {
    const float d = std::ldexp(random.uniform() - 0.3F, static_cast<int>(random.below(12)) - 8);
    if (format == Format::mxfp4) {
      bytes[at] = static_cast<std::byte>(random.below(10) == 0 ? 0 : 110 + random.below(30));
    } else if (format == Format::q6_k) {
      put_half(at + 208, d);
    } else {
      put_half(at, d);
      if (has_minimum(format)) put_half(at + 2, d * random.uniform());
    }
  }
  return bytes;
}

std::vector<bf16> random_rows(Random& random, std::int64_t n) {
  std::vector<bf16> x(static_cast<std::size_t>(n));
  for (auto& e : x) e = to_bf16(std::ldexp(random.uniform() * 2 - 1, static_cast<int>(random.below(13)) - 6));
  return x;
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<Isa, Format>>& info) {
  return std::string(isa_name(std::get<0>(info.param))) + "_" + format_name(std::get<1>(info.param));
}

class BlockProduct : public ::testing::TestWithParam<std::tuple<Isa, Format>> {
 protected:
  const numerics::testing::ForcedIsa forced{std::get<0>(GetParam())};
  const Format format = std::get<1>(GetParam());
  Random random{11};

  void check(std::int64_t rows, std::int64_t out, std::int64_t in, int segments, Output output, Team& team) {
    const auto w = random_blocks(random, format, out * in);
    const std::int64_t ldx = in + static_cast<std::int64_t>(random.below(3)), ldy = out + 2;
    const auto x = random_rows(random, rows * ldx);
    std::vector<bf16> dense;
    for (std::int64_t r = 0; r < rows; ++r) dense.insert(dense.end(), x.begin() + r * ldx, x.begin() + r * ldx + in);
    std::vector<float> y(static_cast<std::size_t>(rows * ldy), 0.75F),
        want(static_cast<std::size_t>(rows * out), 0.75F);
    const auto packed = PackedMatrix::pack_blocks(format, w.data(), row_bytes(format, in), out, in, segments);
    matmul(packed, x.data(), ldx, rows, y.data(), ldy, output, team);
    reference::matmul_blocks(format, w.data(), dense.data(), rows, out, in, segments, want.data(), output);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t o = 0; o < ldy; ++o) {
        const float got = y[static_cast<std::size_t>(r * ldy + o)];
        const float expected = o < out ? want[static_cast<std::size_t>(r * out + o)] : 0.75F;
        ASSERT_EQ(std::bit_cast<std::uint32_t>(got), std::bit_cast<std::uint32_t>(expected))
            << got << " for " << expected << " at [" << r << ", " << o << "] of " << rows << " x [" << out << ", " << in
            << "], " << segments << " segments, threads " << team.threads();
      }
    }
  }
  std::int64_t lengths() const { return block_elements(format); }
};

TEST_P(BlockProduct, EqualsReferenceInEveryTileShape) {
  for (std::int64_t rows = 1; rows <= 19; ++rows) {
    for (std::int64_t panels = 1; panels <= 9; panels += rows <= 4 ? 1 : 3) {
      const std::int64_t out = panels * 16 - (panels % 2 == 0 ? 0 : 1 + random.below(15));
      check(rows, out, lengths() * (1 + random.below(2)), 1, random.below(2) == 0 ? Output::store : Output::add,
            solo_team());
    }
  }
}

TEST_P(BlockProduct, EqualsReferenceAtEveryLengthAndSegmentation) {
  for (std::int64_t blocks = 1; blocks <= (lengths() == 32 ? 20 : 4); ++blocks) {
    const std::int64_t in = blocks * lengths();
    for (const int segments : {1, 2, 3, 4, 8})
      if (in % (segments * 32) == 0)
        for (const std::int64_t rows : {1, 3, 12}) check(rows, 37, in, segments, Output::store, solo_team());
  }
}

TEST_P(BlockProduct, EqualsReferenceWithManyThreads) {
  for (const int threads : {2, 3}) {
    Team team(threads);
    for (const std::int64_t rows : {1, 16, 150}) check(rows, 200, 512, 2, Output::store, team);
  }
}

TEST_P(BlockProduct, RowsAloneEqualRowsTogether) {
  const std::int64_t rows = 13, out = 70, in = 768;
  const auto w = random_blocks(random, format, out * in);
  const auto x = random_rows(random, rows * in);
  const auto packed = PackedMatrix::pack_blocks(format, w.data(), row_bytes(format, in), out, in, 4);
  std::vector<float> together(rows * out), alone(rows * out);
  matmul(packed, x.data(), in, rows, together.data(), out, Output::store, solo_team());
  for (std::int64_t r = 0; r < rows; ++r)
    matmul(packed, x.data() + r * in, in, 1, alone.data() + r * out, out, Output::store, solo_team());
  EXPECT_EQ(std::memcmp(together.data(), alone.data(), together.size() * 4), 0);
}

// Rows that are said to be the same serve again; rows that changed without that word are taken anew.
TEST_P(BlockProduct, InputsAreKeptOnlyWhenTheyAreTheSame) {
  const std::int64_t rows = 6, in = 512;
  const auto w = random_blocks(random, format, 32 * in), v = random_blocks(random, format, 32 * in);
  const auto first = PackedMatrix::pack_blocks(format, w.data(), row_bytes(format, in), 32, in);
  const auto second = PackedMatrix::pack_blocks(format, v.data(), row_bytes(format, in), 32, in);
  auto x = random_rows(random, rows * in);
  const auto product = [&](const PackedMatrix& m, Input input) {
    std::vector<float> y(static_cast<std::size_t>(rows * 32));
    matmul(m, x.data(), in, rows, y.data(), m.out(), Output::store, solo_team(), input);
    return y;
  };
  const auto want = product(second, Input::fresh);
  product(first, Input::fresh);
  EXPECT_EQ(product(second, Input::same), want);
  x = random_rows(random, rows * in);
  const auto changed = product(second, Input::fresh);
  EXPECT_NE(changed, want);
  const auto narrow = PackedMatrix::pack(x.data(), 1, in);
  x[0] = to_bf16(1000);
  product(narrow, Input::fresh);  // another format ends what was kept, too
  EXPECT_NE(product(second, Input::same), changed);
}

INSTANTIATE_TEST_SUITE_P(All, BlockProduct,
                         ::testing::Combine(::testing::ValuesIn(numerics::testing::available_isas()),
                                            ::testing::ValuesIn(kBlockFormats)),
                         name_of);

// The sabotage twin: one flipped bit of a code, a scale or a minimum changes the product.
TEST(BlockProductSabotage, OneFlippedBitIsSeen) {
  Random random(5);
  for (const Format format : kBlockFormats) {
    const std::int64_t in = 256;
    auto w = random_blocks(random, format, in);
    if (format == Format::mxfp4)  // scales of one size, or small terms vanish beside large ones
      for (std::size_t at = 0; at < w.size(); at += 17) w[at] = std::byte{127};
    if (format == Format::q8_0)
      for (std::size_t at = 0; at < w.size(); at += 34) w[at] = std::byte{0}, w[at + 1] = std::byte{0x38};
    std::vector<bf16> x(in);
    for (auto& e : x) e = to_bf16(1 + random.uniform());
    const auto product = [&](const std::vector<std::byte>& bytes) {
      float y = 0;
      matmul(PackedMatrix::pack_blocks(format, bytes.data(), bytes.size(), 1, in), x.data(), in, 1, &y, 1,
             Output::store, solo_team());
      return std::bit_cast<std::uint32_t>(y);
    };
    const std::uint32_t before = product(w);
    for (std::size_t at = 0; at < w.size(); ++at) {
      if (format == Format::mxfp4 && at / 17 * 17 < w.size() && w[at / 17 * 17] == std::byte{0})
        continue;  // times zero
      auto changed = w;
      changed[at] ^= std::byte{4};
      EXPECT_NE(product(changed), before) << format_name(format) << " byte " << at;
    }
  }
}

// Each format against values worked out by hand from its definition.
TEST(Quant, ValuesOfHandMadeBlocks) {
  std::vector<float> v(256);
  std::vector<std::byte> q8(34);
  q8[1] = std::byte{0x38};  // d = 0.5
  q8[2] = std::byte{0x81};  // -127
  q8[33] = std::byte{3};
  dequantize(Format::q8_0, q8.data(), 32, v.data());
  EXPECT_EQ(v[0], -63.5F);
  EXPECT_EQ(v[31], 1.5F);

  std::vector<std::byte> mx(17);
  mx[0] = std::byte{128};   // 2
  mx[1] = std::byte{0xF1};  // element 0: 0.5; element 16: -6
  dequantize(Format::mxfp4, mx.data(), 32, v.data());
  EXPECT_EQ(v[0], 1.0F);
  EXPECT_EQ(v[16], -12.0F);
  EXPECT_EQ(v[1], 0.0F);

  std::vector<std::byte> q4(144);
  q4[1] = std::byte{0x3C};        // d = 1
  q4[3] = std::byte{0x38};        // dmin = 0.5
  q4[4] = std::byte{0x40 | 3};    // scale of 0: 3; upper bits of scale 4: 1
  q4[8] = std::byte{0x80 | 4};    // min of 0: 4; upper bits of min 4: 2
  q4[12] = std::byte{0x52};       // scale 4: 2 | 1 << 4 = 18; min 4: 5 | 2 << 4 = 37
  q4[16] = std::byte{0x07};       // element 0: 7
  q4[16 + 64] = std::byte{0x09};  // element 128, of sub-block 4: 9
  dequantize(Format::q4_k, q4.data(), 256, v.data());
  EXPECT_EQ(v[0], 7 * 3 - 0.5F * 4);
  EXPECT_EQ(v[128], 9 * 18 - 0.5F * 37);
  EXPECT_EQ(v[1], -2.0F);

  std::vector<std::byte> q5(176);
  q5[1] = std::byte{0x3C};
  q5[5] = std::byte{2};          // scale of sub-block 1
  q5[16 + 3] = std::byte{2};     // fifth bit of element 3 of sub-block 1
  q5[48 + 3] = std::byte{0xA0};  // its low bits: 10
  dequantize(Format::q5_k, q5.data(), 256, v.data());
  EXPECT_EQ(v[32 + 3], 26 * 2.0F);
  EXPECT_EQ(v[3], 0.0F);

  std::vector<std::byte> q6(210);
  q6[209] = std::byte{0x3C};
  for (std::size_t i = 0; i < 16; ++i) q6[192 + i] = static_cast<std::byte>(i + 1);
  q6[64 + 32] = std::byte{0xB5};   // second half: element 32 low 5, element 96 high nibble 11
  q6[128 + 32] = std::byte{0xC4};  // second half, position 0: pairs 0, 1, 0, 3
  dequantize(Format::q6_k, q6.data(), 256, v.data());
  EXPECT_EQ(v[128 + 32], (5 + 16 - 32) * 11.0F);
  EXPECT_EQ(v[128 + 96], (11 + 48 - 32) * 15.0F);
  EXPECT_EQ(v[0], -32.0F);
}

TEST(Quant, HalfWidensExactly) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const int exponent = (half >> 10) & 31, mantissa = half & 1023;
    const double sign = (half & 0x8000) != 0 ? -1.0 : 1.0;
    const float wide = f16_to_float(half);
    if (exponent == 31) {
      EXPECT_TRUE(mantissa != 0 ? std::isnan(wide) : std::isinf(wide));
    } else {
      const double value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
      ASSERT_EQ(wide, static_cast<float>(sign * value)) << bits;
      ASSERT_EQ(std::signbit(wide), sign < 0);
    }
  }
}

TEST(Quant, FourAndFiveBitsWidenToTheSameValues) {
  std::vector<float> v(32);
  std::vector<std::byte> q4(18), q5(22), wide(34);
  q4[1] = std::byte{0x38};  // d = 0.5
  q4[2] = std::byte{0x1F};  // element 0: 15 - 8; element 16: 1 - 8
  widen_to_q8_0(4, q4.data(), 32, wide.data());
  dequantize(Format::q8_0, wide.data(), 32, v.data());
  EXPECT_EQ(v[0], 3.5F);
  EXPECT_EQ(v[16], -3.5F);
  EXPECT_EQ(v[1], -4.0F);
  q5[1] = std::byte{0x38};
  q5[2] = std::byte{0x02};      // fifth bit of element 1
  q5[5] = std::byte{0x80};      // of element 31
  q5[6 + 1] = std::byte{0x0F};  // element 1: 31 - 16; element 17: 0 - 16
  q5[6 + 15] = std::byte{0x30};
  widen_to_q8_0(5, q5.data(), 32, wide.data());
  dequantize(Format::q8_0, wide.data(), 32, v.data());
  EXPECT_EQ(v[1], 7.5F);
  EXPECT_EQ(v[17], -8.0F);
  EXPECT_EQ(v[31], 1.5F);  // 19 - 16
}

TEST(Quant, TypesWithMinimaAndTablesHoldTheirValues) {
  std::vector<float> v(32);
  std::vector<std::byte> q5(24), q4(20), nl(18), five(24), eight(34);
  for (auto* block : {&q5, &q4, &nl}) (*block)[1] = std::byte{0x38};  // d = 0.5
  for (auto* block : {&q5, &q4}) (*block)[3] = std::byte{0xBC};       // m = -1
  q5[4] = std::byte{0x02};                                            // fifth bit of element 1
  q5[7] = std::byte{0x80};                                            // of element 31
  q5[8 + 1] = std::byte{0x2F};
  q5[8 + 15] = std::byte{0x30};
  dequantize(Format::q5_1, q5.data(), 32, v.data());
  EXPECT_EQ(v[0], -1.0F);
  EXPECT_EQ(v[1], 31 * 0.5F - 1);
  EXPECT_EQ(v[17], 2 * 0.5F - 1);
  EXPECT_EQ(v[31], 19 * 0.5F - 1);
  q4[4 + 2] = std::byte{0x9F};
  widen_to_q5_1(q4.data(), 32, five.data());
  dequantize(Format::q5_1, five.data(), 32, v.data());
  EXPECT_EQ(v[2], 15 * 0.5F - 1);
  EXPECT_EQ(v[18], 9 * 0.5F - 1);
  nl[2] = std::byte{0xF7};
  widen_iq4_nl_to_q8_0(nl.data(), 32, eight.data());
  dequantize(Format::q8_0, eight.data(), 32, v.data());
  EXPECT_EQ(v[0], -10 * 0.5F);
  EXPECT_EQ(v[16], 113 * 0.5F);
  EXPECT_EQ(v[1], -127 * 0.5F);
}

TEST(Quant, HalvesRoundTripAndRoundToEven) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float x = f16_to_float(static_cast<std::uint16_t>(bits));
    if (std::isnan(x)) continue;
    ASSERT_EQ(float_to_f16(x), bits);
  }
  EXPECT_EQ(f16_to_float(1), std::ldexp(1.0F, -24));
  EXPECT_EQ(float_to_f16(1 + std::ldexp(1.0F, -11)), 0x3C00);  // a tie, to even
  EXPECT_EQ(float_to_f16(1 + std::ldexp(1.0F, -11) + std::ldexp(1.0F, -20)), 0x3C01);
  EXPECT_EQ(float_to_f16(65519.0F), 0x7BFF);
  EXPECT_EQ(float_to_f16(65520.0F), 0x7C00);
  EXPECT_EQ(float_to_f16(std::ldexp(1.0F, -25)), 0);  // half of the smallest: to even
  EXPECT_EQ(float_to_f16(std::ldexp(1.25F, -25)), 1);
}

TEST(Quant, QuantisingStaysWithinTheFormatsRounding) {
  Random random(3);
  for (int round = 0; round < 200; ++round) {
    float x[32], y[32];
    for (float& e : x) e = std::ldexp(random.normal(), static_cast<int>(random.below(20)) - 10);
    if (round == 0) std::fill_n(x, 32, 0.0F);
    float largest = 0;
    for (const float e : x) largest = std::max(largest, std::fabs(e));
    std::byte block[34];
    quantize(Format::q8_0, x, 32, block);
    dequantize(Format::q8_0, block, 32, y);
    for (int i = 0; i < 32; ++i) EXPECT_LE(std::fabs(x[i] - y[i]), largest / 127 * 0.5F * 1.1F + std::ldexp(1.0F, -24));
    quantize(Format::mxfp4, x, 32, block);
    dequantize(Format::mxfp4, block, 32, y);
    // The largest magnitude lies in [4, 8) units: up to 2 off at the top, else half a step of at most 2.
    for (int i = 0; i < 32; ++i) EXPECT_LE(std::fabs(x[i] - y[i]), largest / 4 * 2);
    std::byte again[34];
    quantize(Format::mxfp4, y, 32, again);
    float z[32];
    dequantize(Format::mxfp4, again, 32, z);
    for (int i = 0; i < 32; ++i) EXPECT_EQ(z[i], y[i]);  // what is exact already stays
  }
  std::byte block[144];
  float x[256] = {};
  EXPECT_THROW(quantize(Format::q4_k, x, 256, block), Error);
}

TEST(Quant, WrongShapesAreRefused) {
  std::vector<std::byte> bytes(1 << 16);
  EXPECT_THROW(row_bytes(Format::q8_0, 33), Error);
  EXPECT_THROW(PackedMatrix::pack_blocks(Format::q4_k, bytes.data(), 144, 4, 128), Error);
  EXPECT_THROW(PackedMatrix::pack_blocks(Format::q8_0, bytes.data(), 68, 4, 64, 4), Error);
  std::vector<float> x(64), y(4);
  const auto w = PackedMatrix::pack_blocks(Format::q8_0, bytes.data(), 68, 4, 64);
  EXPECT_THROW(matmul(w, x.data(), 64, 1, y.data(), 4, Output::store, solo_team()), Error);
  EXPECT_EQ(split_segments(Format::bf16, 64), 8);
  EXPECT_EQ(split_segments(Format::q8_0, 64), 2);
  EXPECT_EQ(split_segments(Format::q8_0, 1024), 8);
}

TEST(Quant, WhatIsNotFiniteIsFound) {
  for (const Format format :
       {Format::f32, Format::bf16, Format::q8_0, Format::q4_k, Format::q6_k, Format::mxfp4, Format::q5_1}) {
    std::vector<std::byte> w(4 * block_bytes(format));
    const std::int64_t n = 4 * block_elements(format);
    EXPECT_EQ(find_not_finite(format, w.data(), n), n);
    const std::size_t at = 2 * block_bytes(format) + (format == Format::q6_k ? 208 : 0);
    if (format == Format::mxfp4) {
      w[at] = std::byte{253};
    } else if (format == Format::f32) {
      w[at + 2] = std::byte{0x80}, w[at + 3] = std::byte{0x7F};
    } else {
      const bool narrow = format == Format::bf16;
      w[at] = narrow ? std::byte{0x80} : std::byte{1};
      w[at + 1] = narrow ? std::byte{0x7F} : std::byte{0x7C};
    }
    EXPECT_EQ(find_not_finite(format, w.data(), n), 2 * block_elements(format)) << format_name(format);
  }
}

}  // namespace quant_test
}  // namespace tidelock::numerics
