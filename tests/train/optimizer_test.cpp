// AdamW against the same rule in double; clipping; what a restart must restore.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "base/base.hpp"
#include "train/train.hpp"

namespace tidelock::train {
namespace optimizer_test {

// Loshchilov and Hutter, algorithm 2, in double, one value.
struct Reference {
  double value, m = 0, v = 0;
  int t = 0;
  void step(double g, const AdamWOptions& o, bool decays) {
    ++t;
    const double b1 = static_cast<double>(o.beta1), b2 = static_cast<double>(o.beta2);
    m = b1 * m + (1 - b1) * g;
    v = b2 * v + (1 - b2) * g * g;
    const double m_hat = m / (1 - std::pow(b1, t)), v_hat = v / (1 - std::pow(b2, t));
    const double decay = decays ? static_cast<double>(o.weight_decay) * value : 0;
    value -=
        static_cast<double>(o.learning_rate) * (m_hat / (std::sqrt(v_hat) + static_cast<double>(o.epsilon)) + decay);
  }
};

std::vector<float> random_values(std::size_t n, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> out(n);
  for (float& x : out) x = random.normal();
  return out;
}

// Largest error after some steps; `decay` as AdamW takes it, `expected` by element.
double worst_error(const AdamWOptions& o, float scale, std::span<const std::uint8_t> decay,
                   const std::vector<bool>& expected) {
  const std::size_t n = expected.size();
  std::vector<float> values = random_values(n, 1);
  std::vector<Reference> reference;
  for (const float x : values) reference.push_back({static_cast<double>(x)});
  AdamW optimizer(n);
  for (std::uint64_t t = 0; t < 12; ++t) {
    const auto gradient = random_values(n, 100 + t);
    optimizer.step(values, gradient, scale, o, decay);
    for (std::size_t i = 0; i < n; ++i)
      reference[i].step(static_cast<double>(gradient[i]) * static_cast<double>(scale), o, expected[i]);
  }
  EXPECT_EQ(optimizer.steps(), 12);
  double worst = 0;
  for (std::size_t i = 0; i < n; ++i)
    worst = std::max(worst, std::abs(static_cast<double>(values[i]) - reference[i].value));
  return worst;
}

TEST(AdamW, FollowsTheRuleInDouble) {
  const AdamWOptions o{.learning_rate = 0.01F, .beta1 = 0.9F, .beta2 = 0.95F, .epsilon = 1e-8F, .weight_decay = 0.1F};
  const std::vector<bool> all(20, true), none(20, false);
  EXPECT_LT(worst_error(o, 1, {}, all), 2e-6);
  EXPECT_LT(worst_error(o, 0.125F, {}, all), 2e-6);
  EXPECT_GT(worst_error(o, 1, {}, none), 1e-4) << "the decay must be seen";
  AdamWOptions other = o;
  other.epsilon = 0.3F;
  EXPECT_LT(worst_error(other, 1, {}, all), 2e-6);
}

TEST(AdamW, OnlyMarkedValuesDecay) {
  const AdamWOptions o{.learning_rate = 0.01F, .weight_decay = 0.5F};
  std::vector<std::uint8_t> marks(20);
  std::vector<bool> expected(20);
  for (std::size_t i = 0; i < 20; i += 3) marks[i] = 1, expected[i] = true;
  EXPECT_LT(worst_error(o, 1, marks, expected), 2e-6);
  expected[1] = true;
  EXPECT_GT(worst_error(o, 1, marks, expected), 1e-4);
}

TEST(AdamW, TheFirstStepIsTheLearningRate) {
  // m_hat / sqrt(v_hat) of one gradient is its sign, whatever its size: what bias correction is for.
  AdamW optimizer(3);
  std::vector<float> values = {1, 1, 1};
  const std::vector<float> gradient = {1e-3F, -50, 0};
  optimizer.step(values, gradient, 1, {.learning_rate = 0.25F});
  EXPECT_NEAR(values[0], 0.75F, 1e-4F);
  EXPECT_NEAR(values[1], 1.25F, 1e-4F);
  EXPECT_EQ(values[2], 1.0F);
}

TEST(AdamW, RestoredMomentsAndStepsContinueByBits) {
  const AdamWOptions o{.learning_rate = 0.01F, .weight_decay = 0.1F};
  AdamW straight(20), restored(20), forgetful(20);
  std::vector<float> a = random_values(20, 1);
  for (std::uint64_t t = 0; t < 3; ++t) straight.step(a, random_values(20, 100 + t), 1, o);
  std::vector<float> b = a, c = a;
  for (AdamW* other : {&restored, &forgetful}) {
    std::copy(straight.m().begin(), straight.m().end(), other->m().begin());
    std::copy(straight.v().begin(), straight.v().end(), other->v().begin());
  }
  restored.restore_steps(straight.steps());
  const auto gradient = random_values(20, 103);
  straight.step(a, gradient, 1, o);
  restored.step(b, gradient, 1, o);
  forgetful.step(c, gradient, 1, o);
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c) << "the step count must matter";
}

struct Scratch {
  std::filesystem::path path = std::filesystem::temp_directory_path() / fmt::format("tidelock-away-{}", ::getpid());
  ~Scratch() { std::filesystem::remove_all(path); }
};

// The nameless file in `folder`, by way of this process's open files.
std::filesystem::path nameless(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto target = std::filesystem::read_symlink(entry.path(), gone);
    if (target.string().starts_with(folder.string() + "/")) return entry.path();
  }
  return {};
}

TEST(AdamW, MomentsThatWereAwayContinueByBits) {
  const Scratch scratch;
  const AdamWOptions o{.learning_rate = 0.01F, .weight_decay = 0.1F};
  AdamW stays(5000), travels(5000);
  std::vector<float> a = random_values(5000, 1), b = a;
  for (std::uint64_t t = 0; t < 4; ++t) {
    EXPECT_EQ(travels.put_away(scratch.path), 2 * 5000 * sizeof(float));
    EXPECT_EQ(travels.put_away(scratch.path), 0U) << "it is away already";
    EXPECT_TRUE(travels.m().empty() && travels.v().empty());
    EXPECT_TRUE(std::filesystem::is_empty(scratch.path)) << "no name, so that nothing is left of a killed process";
    EXPECT_EQ(std::filesystem::file_size(nameless(scratch.path)), 2 * 5000 * sizeof(float));
    EXPECT_ANY_THROW(travels.step(b, random_values(5000, 100 + t), 1, o));
    travels.retrieve();
    travels.retrieve();
    EXPECT_EQ(nameless(scratch.path), "");
    stays.step(a, random_values(5000, 100 + t), 1, o);
    travels.step(b, random_values(5000, 100 + t), 1, o);
    ASSERT_EQ(a, b);
  }
}

TEST(AdamW, MomentsThatChangedWhileTheyWereAwayAreRefused) {
  const Scratch scratch;
  AdamW optimizer(100);
  optimizer.put_away(scratch.path);
  {
    std::fstream file(nameless(scratch.path), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(70);
    file.put('x');
  }
  EXPECT_THROW(optimizer.retrieve(), Error);
  EXPECT_TRUE(optimizer.m().empty());
  std::filesystem::resize_file(nameless(scratch.path), 300);
  EXPECT_THROW(optimizer.retrieve(), Error);
}

TEST(AdamW, MomentsStayWhereTheyCannotGo) {
  const Scratch scratch;
  std::ofstream(scratch.path) << "a file";
  AdamW optimizer(100);
  optimizer.m()[7] = 3;
  EXPECT_ANY_THROW(optimizer.put_away(scratch.path / "below"));
  ASSERT_EQ(optimizer.m().size(), 100U);
  EXPECT_EQ(optimizer.m()[7], 3);
}

TEST(AdamW, RefusesOtherSizes) {
  AdamW optimizer(4);
  std::vector<float> four(4), five(5);
  EXPECT_THROW(optimizer.step(five, four, 1, {}), Error);
  EXPECT_THROW(optimizer.step(four, five, 1, {}), Error);
  EXPECT_EQ(optimizer.steps(), 0);
}

TEST(Clip, BringsTheNormToTheLimit) {
  EXPECT_EQ(clip_scale(10, 1), 0.1F);
  EXPECT_EQ(clip_scale(1, 1), 1.0F);
  EXPECT_EQ(clip_scale(0.5, 1), 1.0F);
  EXPECT_EQ(clip_scale(10, 0), 1.0F) << "no limit";
  EXPECT_EQ(clip_scale(0, 1), 1.0F);
  const std::vector<float> gradient = {3, 0, -4};
  EXPECT_EQ(gradient_norm(gradient), 5.0);
  EXPECT_EQ(gradient_norm({}), 0.0);
  const std::vector<float> large(4, 1e30F);  // its square does not fit float32
  EXPECT_NEAR(gradient_norm(large), 2e30, 1e24);
}

}  // namespace optimizer_test
}  // namespace tidelock::train
