// Which token is drawn.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/base.hpp"
#include "engine/engine.hpp"

namespace tidelock::engine {
namespace sampler_test {

// ---- sample ---------------------------------------------------------------------------------------------------------

// Logits whose soft-max is `probabilities`.
std::vector<float> logits_of(const std::vector<double>& probabilities, double temperature = 1) {
  std::vector<float> out;
  for (const double p : probabilities) out.push_back(static_cast<float>(temperature * std::log(p) + 3));
  return out;
}

std::vector<int> draw_many(const std::vector<float>& logits, SamplingParams p, int draws) {
  std::vector<int> counts(logits.size());
  for (int i = 0; i < draws; ++i) {
    p.seed = static_cast<std::uint64_t>(i / 100);
    ++counts[static_cast<std::size_t>(
        sample(logits.data(), static_cast<std::int64_t>(logits.size()), p, static_cast<std::uint64_t>(i % 100)))];
  }
  return counts;
}

// Pearson's statistic over the tokens that may be drawn; a token that may not must have no draw.
double chi_square(const std::vector<int>& counts, const std::vector<double>& probabilities) {
  double draws = 0, sum = 0;
  for (const int n : counts) draws += n;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (probabilities[i] == 0) {
      EXPECT_EQ(counts[i], 0) << "token " << i << " was cut";
      continue;
    }
    sum += std::pow(counts[i] - draws * probabilities[i], 2) / (draws * probabilities[i]);
  }
  return sum;
}

const std::vector<double> kSpread = {0.05, 0.4, 0.1, 0.25, 0.15, 0.05};
constexpr double kBound = 30;  // with 5 degrees of freedom, passed by chance once in 70,000
constexpr int kDraws = 20000;

TEST(Sample, GreedyTakesTheLowerIdOfATie) {
  SamplingParams p;
  p.temperature = 0;
  const std::vector<float> logits = {1, 5, -2, 5, 5, 0};
  EXPECT_EQ(sample(logits.data(), 6, p, 0), 1);
  const std::vector<float> flat(6, -3.5F);
  EXPECT_EQ(sample(flat.data(), 6, p, 9), 0);
}

TEST(Sample, SameSeedAndCounterGiveTheSameToken) {
  const auto logits = logits_of(std::vector<double>(50, 0.02));
  SamplingParams p;
  p.seed = 12;
  std::vector<std::int32_t> first, again, other_seed;
  for (std::uint64_t i = 0; i < 40; ++i) first.push_back(sample(logits.data(), 50, p, i));
  for (std::uint64_t i = 40; i-- > 0;) again.insert(again.begin(), sample(logits.data(), 50, p, i));
  p.seed = 13;
  for (std::uint64_t i = 0; i < 40; ++i) other_seed.push_back(sample(logits.data(), 50, p, i));
  EXPECT_EQ(first, again);
  EXPECT_NE(first, other_seed);
  EXPECT_GT(std::set(first.begin(), first.end()).size(), 10U) << "the counter must matter";
}

TEST(Sample, FrequenciesFollowTheDistribution) {
  const auto counts = draw_many(logits_of(kSpread), {}, kDraws);
  EXPECT_LT(chi_square(counts, kSpread), kBound);
  std::vector<double> wrong = kSpread;
  std::swap(wrong[1], wrong[3]);
  EXPECT_GT(chi_square(counts, wrong), kBound) << "the check must be able to fail";
}

TEST(Sample, TemperatureSharpensAndFlattens) {
  for (const float temperature : {0.5F, 1.7F}) {
    SamplingParams p;
    p.temperature = temperature;
    // Logits scaled by the temperature: the draw must follow kSpread again, and not what temperature 1 would give.
    const auto logits = logits_of(kSpread, static_cast<double>(temperature));
    EXPECT_LT(chi_square(draw_many(logits, p, kDraws), kSpread), kBound) << temperature;
    EXPECT_GT(chi_square(draw_many(logits, {}, kDraws), kSpread), kBound) << temperature;
  }
}

TEST(Sample, TopKKeepsTheMostLikely) {
  SamplingParams p;
  p.top_k = 1;
  const auto logits = logits_of(kSpread);
  for (std::uint64_t i = 0; i < 100; ++i) EXPECT_EQ(sample(logits.data(), 6, p, i), 1);
  p.top_k = 3;  // of 0.4, 0.25, 0.15
  EXPECT_LT(chi_square(draw_many(logits, p, kDraws), {0, 0.5, 0, 0.3125, 0.1875, 0}), kBound);
  // Of equal tokens the lower ids stay: 0.05 stands at 0 and 5.
  p.top_k = 5;
  EXPECT_EQ(draw_many(logits, p, kDraws)[5], 0);
  p.top_k = 100;
  EXPECT_LT(chi_square(draw_many(logits, p, kDraws), kSpread), kBound);
}

// Powers of two: every partial sum and product is exact, so the cut can be checked at its very edge.
TEST(Sample, TopPCutsExactly) {
  const std::vector<float> logits(8, 2.0F);  // eight tokens of 1/8
  SamplingParams p;
  for (int kept = 1; kept <= 8; ++kept)
    for (const int off : {-1, 0, 1}) {
      p.top_p = static_cast<float>(kept) / 8;
      if (off != 0) p.top_p = std::nextafter(p.top_p, off < 0 ? 0.0F : 2.0F);
      if (p.top_p > 1) continue;
      const int expected = off > 0 ? kept + 1 : kept;
      const auto counts = draw_many(logits, p, 2000);
      for (int token = 0; token < 8; ++token)
        EXPECT_EQ(counts[static_cast<std::size_t>(token)] != 0, token < expected)
            << "top_p " << kept << "/8, off " << off;
    }
  p.top_p = std::numeric_limits<float>::min();
  EXPECT_EQ(draw_many(logits, p, 100)[0], 100) << "at least one token stays";
}

TEST(Sample, TopPIsTakenAfterTopK) {
  SamplingParams p;
  p.top_k = 3;     // 0.4, 0.25, 0.15: 0.5, 0.3125, 0.1875 of what is left
  p.top_p = 0.6F;  // of the three
  EXPECT_LT(chi_square(draw_many(logits_of(kSpread), p, kDraws), {0, 0.4 / 0.65, 0, 0.25 / 0.65, 0, 0}), kBound);
}

TEST(Sample, WhatIsNotAllowedHasNoPart) {
  const std::vector<double> left = {0, 0.4 / 0.65, 0, 0.25 / 0.65, 0, 0};
  const std::vector<std::uint32_t> allowed = {0b001010};
  const auto logits = logits_of(kSpread);
  std::vector<int> counts(kSpread.size());
  SamplingParams p;
  for (int i = 0; i < kDraws; ++i) {
    p.seed = static_cast<std::uint64_t>(i);
    ++counts[static_cast<std::size_t>(sample(logits.data(), 6, p, 0, allowed))];
  }
  EXPECT_LT(chi_square(counts, left), kBound);
  p.temperature = 0;
  EXPECT_EQ(sample(logits.data(), 6, p, 0, std::vector<std::uint32_t>{0b110000}), 4);
  p.temperature = 1;
  p.top_k = 1;  // of those that are allowed
  EXPECT_EQ(sample(logits.data(), 6, p, 0, std::vector<std::uint32_t>{0b110101}), 4);
  p.top_k = 0;
  p.top_p = 0.5F;
  EXPECT_EQ(sample(logits.data(), 6, p, 0, allowed), 1);
  const std::vector<float> wide(70, 0.0F);
  EXPECT_EQ(sample(wide.data(), 70, {}, 5, std::vector<std::uint32_t>{0, 0, 0b10000}), 68);
}

TEST(TopLogprobs, AreTheLikeliestInOrderWithTheRolloutsBits) {
  const std::vector<float> logits{1, 3, 2, 3, -5};
  const auto top = top_logprobs(logits.data(), 5, 3);
  ASSERT_EQ(top.size(), 3U);
  EXPECT_EQ(top[0].token, 1);  // a tie goes to the lower id
  EXPECT_EQ(top[1].token, 3);
  EXPECT_EQ(top[2].token, 2);
  for (const auto& t : top) EXPECT_EQ(t.logprob, model::token_logprob(logits.data(), 5, t.token));
  EXPECT_EQ(top_logprobs(logits.data(), 5, 9).size(), 5U);
  EXPECT_TRUE(top_logprobs(logits.data(), 5, 0).empty());
  SamplingParams params;
  params.top_logprobs = -1;
  EXPECT_THROW(check(params), Error);
}

TEST(Sample, ExtremeLogitsStayInTheVocabulary) {
  SamplingParams p;
  for (const float temperature : {1e-30F, 1e-3F, 1.0F, 100.0F})
    for (const float top_p : {0.5F, 1.0F}) {
      p.temperature = temperature;
      p.top_p = top_p;
      const std::vector<float> logits = {-1e30F, 1e30F, 1e30F, -1e30F};
      for (std::uint64_t i = 0; i < 50; ++i) {
        const auto token = sample(logits.data(), 4, p, i);
        EXPECT_TRUE(token == 1 || token == 2) << token << " at temperature " << temperature;
      }
    }
}

}  // namespace sampler_test
}  // namespace tidelock::engine
