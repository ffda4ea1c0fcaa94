#include "rl/loss.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/random.hpp"

namespace tidelock::rl {
namespace loss_test {

struct Sequence {
  std::vector<float> logprobs, old, reference;
  std::vector<std::uint8_t> mask;
  float advantage;
};

// Written from the papers' formulas, in float64, over the whole batch at once: no code shared with sequence_loss.
double whole_batch_loss(const LossOptions& o, const std::vector<Sequence>& batch) {
  double total = 0, all_tokens = 0, dapo_sum = 0;
  for (const auto& s : batch) {
    double sum = 0, tokens = 0;
    for (std::size_t t = 0; t < s.logprobs.size(); ++t) {
      if (s.mask[t] == 0) continue;
      const double w = std::exp(double{s.logprobs[t]} - s.old[t]), a = s.advantage;
      const double c = w < 1 - o.clip_low ? 1 - o.clip_low : w > 1 + o.clip_high ? 1 + o.clip_high : w;
      const double r = double{s.reference[t]} - s.logprobs[t];
      sum += -(w * a < c * a ? w * a : c * a) + o.kl_coefficient * (std::exp(r) - r - 1);
      tokens += 1;
    }
    all_tokens += tokens;
    dapo_sum += sum;
    if (tokens == 0) continue;
    if (o.kind == LossKind::grpo) total += sum / tokens / static_cast<double>(batch.size());
    if (o.kind == LossKind::dr_grpo)
      total += sum / static_cast<double>(o.max_tokens) / static_cast<double>(batch.size());
  }
  return o.kind == LossKind::dapo ? dapo_sum / all_tokens : total;
}

std::vector<Sequence> random_batch(std::uint64_t seed) {
  Random random(seed);
  std::vector<Sequence> batch(5);
  for (auto& s : batch) {
    const int n = random.between(1, 9);
    for (int t = 0; t < n; ++t) {
      s.logprobs.push_back(-3 * random.uniform());
      s.old.push_back(s.logprobs.back() + 0.6F * random.uniform() - 0.3F);  // ratios on both sides of both clips
      s.reference.push_back(s.logprobs.back() + 0.5F * random.normal());
      s.mask.push_back(random.below(5) == 0 ? 0 : 1);
    }
    s.advantage = random.normal();
  }
  return batch;
}

BatchSize size_of(const std::vector<Sequence>& batch) {
  BatchSize size{static_cast<std::int64_t>(batch.size()), 0};
  for (const auto& s : batch) size.tokens += std::count(s.mask.begin(), s.mask.end(), 1);
  return size;
}

class LossKinds : public ::testing::TestWithParam<LossKind> {};

TEST_P(LossKinds, SumOverSequencesIsTheBatchLossAndGradientsAreItsDifferences) {
  LossOptions options = LossOptions::defaults(GetParam(), 16);
  options.kl_coefficient = 0.04;
  std::int64_t clipped = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    auto batch = random_batch(seed);
    const BatchSize size = size_of(batch);
    double total = 0;
    for (auto& s : batch) {
      std::vector<float> gradient(s.logprobs.size());
      const auto value = sequence_loss(options, size, {s.logprobs, s.old, s.reference, s.mask, s.advantage}, gradient);
      total += value.loss;
      clipped += value.clipped;
      for (std::size_t t = 0; t < gradient.size(); ++t) {
        const float kept = s.logprobs[t];
        const float h = 0x1p-10F;
        s.logprobs[t] = kept + h;
        const double above = whole_batch_loss(options, batch);
        const double step_up = double{s.logprobs[t]} - kept;
        s.logprobs[t] = kept - h;
        const double below = whole_batch_loss(options, batch);
        const double step = step_up + (kept - double{s.logprobs[t]});
        s.logprobs[t] = kept;
        const double ratio = std::exp(double{kept} - s.old[t]);
        // At the corner of a clip the difference quotient mixes both sides; stay 2 h away from it.
        if (std::abs(ratio - 1 + options.clip_low) < 4 * h || std::abs(ratio - 1 - options.clip_high) < 4 * h) continue;
        EXPECT_NEAR(gradient[t], (above - below) / step, 2e-6) << "seed " << seed << " token " << t;
      }
    }
    EXPECT_NEAR(total, whole_batch_loss(options, batch), 1e-9);
  }
  EXPECT_GT(clipped, 20) << "the clipped branch was not tested";
}

INSTANTIATE_TEST_SUITE_P(All, LossKinds, ::testing::Values(LossKind::grpo, LossKind::dr_grpo, LossKind::dapo),
                         [](const auto& kind) { return std::string(name_of(kind.param)); });

struct OneToken {
  LossValue value;
  float gradient;
};

OneToken one_token(LossKind kind, double ratio, float advantage) {
  const std::vector<float> logprobs{static_cast<float>(std::log(ratio)) - 1}, old{-1};
  std::vector<float> gradient(1);
  const auto value =
      sequence_loss(LossOptions::defaults(kind, 1), {1, 1}, {logprobs, old, {}, {}, advantage}, gradient);
  return {value, gradient[0]};
}

TEST(Loss, ClipsByHand) {
  for (const auto kind : {LossKind::grpo, LossKind::dr_grpo}) {
    EXPECT_NEAR(one_token(kind, 1.25, 2).value.loss, -1.2 * 2, 1e-6);  // clipped above
    EXPECT_EQ(one_token(kind, 1.25, 2).gradient, 0);
    EXPECT_NEAR(one_token(kind, 0.7, 2).value.loss, -0.7 * 2, 1e-6);  // not clipped: the minimum is w A
    EXPECT_NEAR(one_token(kind, 0.7, 2).gradient, -0.7 * 2, 1e-6);
    EXPECT_NEAR(one_token(kind, 0.7, -2).value.loss, 0.8 * 2, 1e-6);  // clipped below
    EXPECT_EQ(one_token(kind, 0.7, -2).gradient, 0);
    EXPECT_NEAR(one_token(kind, 1.5, -2).gradient, 1.5 * 2, 1e-6);  // a bad token may be pushed down at any ratio
    EXPECT_EQ(one_token(kind, 1.25, 2).value.clipped, 1);
  }
  EXPECT_NEAR(one_token(LossKind::dapo, 1.25, 2).gradient, -1.25 * 2, 1e-5);  // clip-higher lets it pass
  EXPECT_EQ(one_token(LossKind::dapo, 1.3, 2).gradient, 0);
}

TEST(Loss, OnPolicyGradientIsTheAdvantage) {
  const std::vector<float> logprobs{-1.5F, -0.25F};
  std::vector<float> gradient(2);
  const auto value =
      sequence_loss(LossOptions::defaults(LossKind::dapo), {1, 4}, {logprobs, logprobs, {}, {}, 3}, gradient);
  EXPECT_EQ(gradient, (std::vector<float>{-0.75F, -0.75F}));  // exactly: the ratio of equal bits is 1
  EXPECT_EQ(value.ratio_max, 1.0);
  EXPECT_EQ(value.policy_kl, 0.0);
}

TEST(Loss, AggregationsDifferAsTheirPapersSay) {
  // Two sequences of 1 and 3 tokens, advantage 1, ratio 1, every token's term -1.
  const std::vector<float> one{-1}, three{-1, -1, -1};
  const auto weight = [&](LossKind kind, const std::vector<float>& s) {
    std::vector<float> gradient(s.size());
    sequence_loss(LossOptions::defaults(kind, 10), {2, 4}, {s, s, {}, {}, 1}, gradient);
    return -gradient[0];
  };
  EXPECT_FLOAT_EQ(weight(LossKind::grpo, one), 1.0F / 2);
  EXPECT_FLOAT_EQ(weight(LossKind::grpo, three), 1.0F / 6);
  EXPECT_FLOAT_EQ(weight(LossKind::dr_grpo, one), 1.0F / 20);
  EXPECT_FLOAT_EQ(weight(LossKind::dr_grpo, three), 1.0F / 20);
  EXPECT_FLOAT_EQ(weight(LossKind::dapo, one), 1.0F / 4);
  EXPECT_FLOAT_EQ(weight(LossKind::dapo, three), 1.0F / 4);
}

TEST(Loss, RefusesWhatDoesNotFit) {
  const std::vector<float> two{-1, -1}, one{-1};
  std::vector<float> gradient(2);
  const auto grpo = LossOptions::defaults(LossKind::grpo);
  EXPECT_THROW(sequence_loss(grpo, {1, 2}, {two, one, {}, {}, 1}, gradient), Error);
  EXPECT_THROW(sequence_loss(grpo, {1, 1}, {two, two, {}, {}, 1}, gradient), Error);
  EXPECT_THROW(sequence_loss(LossOptions::defaults(LossKind::dr_grpo), {1, 2}, {two, two, {}, {}, 1}, gradient), Error);
  auto kl = grpo;
  kl.kl_coefficient = 0.1;
  EXPECT_THROW(sequence_loss(kl, {1, 2}, {two, two, {}, {}, 1}, gradient), Error);
  try {
    parse_loss("gspo");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("grpo, dr_grpo, dapo"), std::string::npos);
  }
}

}  // namespace loss_test
}  // namespace tidelock::rl
