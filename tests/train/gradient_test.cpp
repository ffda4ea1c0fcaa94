// Gradients are deterministic: threads, recomputation and the packing of others change no bit, and a failing loss comes
// back as it was thrown. (That they are right is oracle_test.cpp's claim; one directional difference is checked here.)
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "model/small_model.hpp"
#include "train/train.hpp"

namespace tidelock::train {
namespace gradient_test {

using namespace model::testing;
using Tokens = std::vector<std::int32_t>;

bool same_floats(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

struct Outcome {
  GradientResult result;
  std::vector<float> flat;
  friend bool operator==(const Outcome& a, const Outcome& b) {
    if (!same_floats(a.flat, b.flat) || a.result.loss != b.result.loss || a.result.index_loss != b.result.index_loss ||
        a.result.expert_load != b.result.expert_load || a.result.tokens != b.result.tokens ||
        a.result.logprobs.size() != b.result.logprobs.size())
      return false;
    for (std::size_t i = 0; i < a.result.logprobs.size(); ++i)
      if (!same_floats(a.result.logprobs[i], b.result.logprobs[i])) return false;
    return true;
  }
};

// Some sequences over one model, with a loss that weighs every masked token differently.
class Gradient : public ::testing::TestWithParam<Variant> {
 protected:
  std::unique_ptr<model::Model> model;
  std::unique_ptr<model::Adapter> adapter = make_adapter(*model, random_adapter(*model, 3, 0.05F, 5));
  FullParameters full{*model};
  LoraParameters lora{*model, 3, 6, {"all-linear"}};
  std::vector<Tokens> tokens;
  std::vector<std::vector<std::uint8_t>> masks;

  explicit Gradient(const model::Config& config = small_config(GetParam())) : model(make_small_model(config)) {
    const std::int64_t lengths[] = {33, 17, 40, 2, 16, 65, 30};
    for (std::size_t i = 0; i < std::size(lengths); ++i) {
      tokens.push_back(random_tokens(lengths[i], 40 + i));
      masks.emplace_back(static_cast<std::size_t>(lengths[i]), 0);
      for (std::size_t t = 1; t < masks[i].size(); ++t) masks[i][t] = t % 3 != 0;
    }
  }
  std::vector<TrainSequence> sequences(const model::Adapter* with) const {
    std::vector<TrainSequence> out;
    for (std::size_t i = 0; i < tokens.size(); ++i) out.push_back({tokens[i], masks[i], with});
    return out;
  }
  static double weighted(std::size_t sequence, std::span<const float> logprobs, std::span<float> d) {
    double loss = 0;
    for (std::size_t i = 0; i < d.size(); ++i) {
      d[i] = 0.1F * static_cast<float>((7 * sequence + 3 * i) % 11) - 0.5F;
      loss += static_cast<double>(d[i]) * static_cast<double>(logprobs[i]);
    }
    return loss;
  }
  // `only`: these of the sequences, in this order; their loss keeps the number it has among all.
  Outcome run(int threads, GradientOptions options, bool with_lora, std::vector<std::size_t> only = {},
              std::vector<float> start = {}) const {
    Team team(threads);
    GradientWorker worker(*model, team);
    const auto all = sequences(with_lora ? adapter.get() : nullptr);
    if (only.empty())
      for (std::size_t i = 0; i < all.size(); ++i) only.push_back(i);
    std::vector<TrainSequence> chosen;
    for (const std::size_t i : only) chosen.push_back(all[i]);
    Outcome out;
    out.flat = std::move(start);
    out.flat.resize(with_lora ? lora.values().size() : full.values().size());
    const auto loss = [&](std::size_t s, std::span<const float> logprobs, std::span<float> d) {
      return weighted(only[s], logprobs, d);
    };
    const auto view = [&](std::span<float> flat) { return with_lora ? lora.gradients(flat) : full.gradients(flat); };
    out.result = worker.run(chosen, loss, options, view, out.flat);
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(Family, Gradient, ::testing::ValuesIn(all_variants()),
                         [](const auto& test) { return test.param.name(); });

TEST_P(Gradient, ThreadsChangeNoBit) {
  for (const bool with_lora : {false, true}) {
    GradientOptions options;
    options.micro_batch_tokens = 40;
    options.index_loss_weight = 0.01F;
    const Outcome one = run(1, options, with_lora);
    EXPECT_GT(std::count_if(one.flat.begin(), one.flat.end(), [](float x) { return x != 0; }),
              static_cast<std::ptrdiff_t>(one.flat.size() / 3));
    for (const int threads : {2, 4}) EXPECT_EQ(run(threads, options, with_lora), one) << threads << " threads";
    EXPECT_FALSE(run(1, options, with_lora, {0, 1, 2, 3, 4, 6, 5}) == one) << "another order must be seen";
  }
}

TEST_P(Gradient, MicroBatchesAreAddedInOrder) {
  GradientOptions options;
  options.micro_batch_tokens = 70;  // {33, 17}, {40, 2, 16}, {65}, {30}
  const Outcome whole = run(3, options, true);
  Outcome parts;
  for (const std::vector<std::size_t>& batch : {std::vector<std::size_t>{0, 1}, {2, 3, 4}, {5}, {6}})
    parts = run(1, options, true, batch, parts.flat);
  EXPECT_TRUE(same_floats(parts.flat, whole.flat));
  Outcome turned;
  for (const std::vector<std::size_t>& batch : {std::vector<std::size_t>{6}, {5}, {2, 3, 4}, {0, 1}})
    turned = run(1, options, true, batch, turned.flat);
  EXPECT_FALSE(same_floats(turned.flat, whole.flat)) << "the order must be seen by bits";
}

TEST_P(Gradient, PackingChangesNoLogProbability) {
  GradientOptions options;
  const Outcome together = run(1, options, true);
  options.micro_batch_tokens = 1;  // every sequence by itself
  const Outcome apart = run(2, options, true);
  Team team(2);
  GradientWorker worker(*model, team);
  options.micro_batch_tokens = 50;
  const auto scored = worker.score(sequences(adapter.get()), options);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    EXPECT_TRUE(same_floats(together.result.logprobs[i], apart.result.logprobs[i]));
    EXPECT_TRUE(same_floats(together.result.logprobs[i], scored[i])) << "score() is the same forward";
  }
  const auto base = worker.score(sequences(nullptr), options);
  EXPECT_FALSE(same_floats(base[0], scored[0])) << "the adapter must matter";
}

TEST_P(Gradient, RecomputationChangesNoBit) {
  for (const bool with_lora : {false, true})
    for (const bool dense : {false, true}) {
      GradientOptions options;
      options.dense_attention = dense;
      options.index_loss_weight = with_lora ? 0.0F : 0.01F;
      options.micro_batch_tokens = 100;
      const Outcome kept = run(1, options, with_lora);
      options.tape = model::TapeMode::recompute;
      EXPECT_EQ(run(1, options, with_lora), kept) << "lora " << with_lora << ", dense " << dense;
    }
}

TEST_P(Gradient, ExpertLoadCountsEveryRow) {
  const auto& c = model->config();
  const Outcome out = run(2, {}, true);
  ASSERT_EQ(out.result.expert_load.size(), static_cast<std::size_t>(c.layer_count() * c.experts.count));
  for (int layer = 0; layer < c.layer_count(); ++layer) {
    const auto begin = out.result.expert_load.begin() + layer * c.experts.count;
    const auto sum = std::accumulate(begin, begin + c.experts.count, std::int64_t{0});
    EXPECT_EQ(sum, c.is_dense_ffn(layer) ? 0 : out.result.tokens * c.experts.top_k) << "layer " << layer;
  }
}

TEST_P(Gradient, AFailingLossComesBackAsThrown) {
  Team team(4);
  GradientWorker worker(*model, team);
  const auto all = sequences(adapter.get());
  GradientOptions options;
  options.micro_batch_tokens = 1;
  const auto view = [&](std::span<float> flat) { return lora.gradients(flat); };
  for (int round = 0; round < 5; ++round)
    for (std::size_t bad = 0; bad < all.size(); ++bad) {
      std::vector<float> flat(lora.values().size());
      const auto loss = [&](std::size_t s, std::span<const float> logprobs, std::span<float> d) {
        if (s == bad) throw std::runtime_error("the loss of sequence " + std::to_string(s));
        return weighted(s, logprobs, d);
      };
      try {
        worker.run(all, loss, options, view, flat);
        FAIL() << "sequence " << bad << ": nothing was thrown";
      } catch (const std::exception& error) {
        EXPECT_EQ(std::string(error.what()), "the loss of sequence " + std::to_string(bad));
      }
    }
  // The worker is as good as new.
  std::vector<float> flat(lora.values().size());
  worker.run(
      all, [](std::size_t s, std::span<const float> l, std::span<float> d) { return weighted(s, l, d); }, options, view,
      flat);
  EXPECT_TRUE(same_floats(flat, run(1, options, true).flat));
}

TEST_P(Gradient, BadSequencesAreRefused) {
  GradientWorker worker(*model, solo_team());
  const std::vector<std::uint8_t> first_masked = {1, 1}, short_mask = {0};
  const Tokens two = {1, 2}, outside = {1, model->config().vocab};
  const std::vector<std::uint8_t> mask = {0, 1};
  for (const TrainSequence& bad : {TrainSequence{two, first_masked}, TrainSequence{two, short_mask},
                                   TrainSequence{{}, {}}, TrainSequence{outside, mask}})
    EXPECT_THROW(worker.score(std::span(&bad, 1), {}), Error);
}

// The loss as a function of one step along a direction, against the gradient's product with it. A set that changes has
// no derivative, so here every token goes to every expert and sees every key. In float32: rounding hides a small step.
class SmoothGradient : public Gradient {
 protected:
  SmoothGradient() : Gradient(smooth(GetParam())) {}
  static model::Config smooth(Variant variant) {
    model::Config config = small_config(variant);
    config.experts.top_k = config.experts.count;
    return config;
  }
};
INSTANTIATE_TEST_SUITE_P(Family, SmoothGradient,
                         ::testing::Values(Variant{Family::linear, Format::f32}, Variant{Family::k3, Format::f32},
                                           Variant{Family::k31, Format::f32}),
                         [](const auto& test) { return test.param.name(); });

TEST_P(SmoothGradient, PointsWhereTheLossGoes) {
  GradientOptions options;
  options.dense_attention = true;
  const model::AdapterValues values = random_adapter(*model, 3, 0.05F, 5);
  const Outcome at = run(1, options, true);
  Random random(9);
  std::vector<float> direction(lora.values().size());
  for (float& x : direction) x = random.normal();
  const auto loss_at = [&](float step) {
    LoraParameters moved(*model, 3, 6, {"all-linear"});
    moved.load(values);
    for (std::size_t i = 0; i < direction.size(); ++i) moved.values()[i] += step * direction[i];
    const auto there = make_adapter(*model, moved.adapter_values());
    GradientWorker worker(*model, solo_team());
    const auto logprobs = worker.score(sequences(there.get()), options);
    double loss = 0;
    for (std::size_t s = 0; s < logprobs.size(); ++s) {
      std::vector<float> d(logprobs[s].size());
      loss += weighted(s, logprobs[s], d);
    }
    return loss;
  };
  double slope = 0;
  for (std::size_t i = 0; i < direction.size(); ++i)
    slope += static_cast<double>(direction[i]) * static_cast<double>(at.flat[i]);
  constexpr float kStep = 1e-4F;
  const double measured = (loss_at(kStep) - loss_at(-kStep)) / (2 * static_cast<double>(kStep));
  EXPECT_NEAR(measured / slope, 1.0, 0.02) << measured << " against " << slope;
}

}  // namespace gradient_test
}  // namespace tidelock::train
