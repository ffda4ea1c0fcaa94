// Flat vectors of what learns: their layout, their starting values, and what they refuse.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "model/expect_refused.hpp"
#include "model/small_model.hpp"
#include "train/train.hpp"

namespace tidelock::train {
namespace parameters_test {

using namespace model::testing;

class Parameters : public ::testing::TestWithParam<Variant> {
 protected:
  std::unique_ptr<model::Model> model = make_small_model(small_config(GetParam()));
  ParameterId count() const { return static_cast<ParameterId>(model->parameters().size()); }
};
INSTANTIATE_TEST_SUITE_P(Family, Parameters, ::testing::ValuesIn(all_variants()),
                         [](const auto& test) { return test.param.name(); });

TEST_P(Parameters, FullLayoutIsParameterOrderWithoutAHole) {
  FullParameters full(*model);
  std::vector<float> flat(full.values().size());
  const auto gradients = full.gradients(flat);
  ASSERT_EQ(gradients.parameters.size(), model->parameters().size());
  EXPECT_TRUE(gradients.lora_a.empty() && gradients.lora_b.empty());
  std::int64_t offset = 0;
  for (ParameterId id = 0; id < count(); ++id) {
    EXPECT_EQ(full.of(id).data(), full.values().data() + offset) << model->parameter(id).name;
    EXPECT_EQ(gradients.parameters[static_cast<std::size_t>(id)], flat.data() + offset);
    ASSERT_EQ(static_cast<std::int64_t>(full.of(id).size()), model->parameter(id).count());
    offset += model->parameter(id).count();
  }
  EXPECT_EQ(offset, static_cast<std::int64_t>(full.values().size()));
  EXPECT_EQ(offset, model->parameter_count());
}

TEST_P(Parameters, InitializeIsAFunctionOfTheSeed) {
  FullParameters a(*model), b(*model), c(*model);
  a.initialize(*model, 7);
  b.initialize(*model, 7);
  c.initialize(*model, 8);
  EXPECT_TRUE(std::equal(a.values().begin(), a.values().end(), b.values().begin()));
  EXPECT_FALSE(std::equal(a.values().begin(), a.values().end(), c.values().begin()));
  for (ParameterId id = 0; id < count(); ++id) {
    const auto expected = model::initial_values(*model, id, 7);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), a.of(id).begin())) << model->parameter(id).name;
  }
}

TEST_P(Parameters, ApplyPacksEveryParameter) {
  FullParameters full(*model);
  for (ParameterId id = 0; id < count(); ++id) {
    const auto values = small_values(*model, id, 7);
    std::copy(values.begin(), values.end(), full.of(id).begin());
  }
  const auto tokens = random_tokens(40, 1);
  const Rows expected = Runner(*model).whole(tokens);
  for (const int threads : {1, 3}) {
    Team team(threads);
    model::Model fresh(model->config(), true);
    full.apply(fresh, team);
    EXPECT_TRUE(same_bits(Runner(fresh).whole(tokens), expected));
    full.of(model->head)[5] += 0.5F;
    full.apply(fresh, team);
    EXPECT_FALSE(same_bits(Runner(fresh).whole(tokens), expected)) << "a changed master must reach the model";
    full.of(model->head)[5] = small_values(*model, model->head, 7)[5];
  }
}

TEST_P(Parameters, MatricesDecayAndVectorsDoNot) {
  const FullParameters full(*model);
  for (ParameterId id = 0; id < count(); ++id) {
    const auto& p = model->parameter(id);
    const bool matrix = p.shape.size() == 2 && p.shape[0] > 1;
    EXPECT_EQ(full.decays(*model, id), matrix) << p.name;
  }
}

TEST_P(Parameters, LoraStartsAsTheIdentity) {
  LoraParameters lora(*model, 4, 8, {"all-linear"});
  lora.initialize(3);
  const auto values = lora.adapter_values();
  ASSERT_EQ(values.pairs.size(), model::adaptable_parameters(*model).size());
  for (const auto& pair : values.pairs) {
    const auto& p = model->parameter(pair.id);
    ASSERT_EQ(static_cast<std::int64_t>(pair.a.size()), 4 * p.shape[1]);
    ASSERT_EQ(static_cast<std::int64_t>(pair.b.size()), 4 * p.shape[0]);
    const float bound = 1.0F / std::sqrt(static_cast<float>(p.shape[1]));
    float largest = 0;
    for (const float x : pair.a) largest = std::max(largest, std::abs(x));
    EXPECT_LE(largest, bound) << p.name;
    EXPECT_GT(largest, 0.8F * bound) << p.name;
    EXPECT_TRUE(std::all_of(pair.b.begin(), pair.b.end(), [](float x) { return x == 0; })) << p.name;
  }
  const auto adapter = make_adapter(*model, values);
  const auto tokens = random_tokens(40, 1);
  Runner runner(*model);
  EXPECT_TRUE(same_bits(runner.whole(tokens, adapter.get()), runner.whole(tokens)));
}

TEST_P(Parameters, LoraTargetsAreChosenByName) {
  LoraParameters lora(*model, 2, 4, {"o_proj", "w1"});
  const auto values = lora.adapter_values();
  EXPECT_FALSE(values.pairs.empty());
  std::size_t expected = 0;
  for (ParameterId id = 0; id < count(); ++id) {
    const auto& name = model->parameter(id).name;
    expected += name.ends_with(".o_proj.weight") || name.ends_with(".w1.weight") ? 1 : 0;
  }
  EXPECT_EQ(values.pairs.size(), expected);
  std::vector<float> flat(lora.values().size());
  const auto gradients = lora.gradients(flat);
  std::size_t wanted = 0;
  for (std::size_t i = 0; i < gradients.lora_a.size(); ++i) {
    const bool here = std::any_of(values.pairs.begin(), values.pairs.end(),
                                  [&](const auto& p) { return static_cast<std::size_t>(p.id) == i; });
    EXPECT_EQ(gradients.lora_a[i] != nullptr, here);
    EXPECT_EQ(gradients.lora_b[i] != nullptr, here);
    wanted += here ? 1 : 0;
  }
  EXPECT_EQ(wanted, expected);
  EXPECT_TRUE(gradients.parameters.empty());
  // Frozen by design: the router, the indexer, the head.
  for (const char* name : {"gate", "lm_head", "wq_b", "embed_tokens", "norm"})
    expect_refused(ErrorCode::invalid_argument, name, [&] { LoraParameters(*model, 2, 4, {"o_proj", name}); });
  expect_refused(ErrorCode::invalid_argument, "q_porj", [&] { LoraParameters(*model, 2, 4, {"o_proj", "q_porj"}); });
  expect_refused(ErrorCode::invalid_argument, "no targets", [&] { LoraParameters(*model, 2, 4, {}); });
}

TEST_P(Parameters, LoraLoadsWhatItSaved) {
  const auto saved = random_adapter(*model, 3, 0.1F, 5);
  LoraParameters lora(*model, 3, 6, {"all-linear"});
  lora.load(saved);
  EXPECT_EQ(lora.adapter_values().sha256(*model), saved.sha256(*model));
  std::vector<float> before(lora.values().begin(), lora.values().end());
  expect_refused(ErrorCode::mismatch, "rank 4", [&] { lora.load(random_adapter(*model, 4, 0.1F, 5)); });
  auto other = saved;
  other.alpha = 7;
  expect_refused(ErrorCode::mismatch, "alpha 7", [&] { lora.load(other); });
  other = saved;
  other.pairs.pop_back();
  expect_refused(ErrorCode::mismatch, "targets", [&] { lora.load(other); });
  LoraParameters one(*model, 3, 6, {"o_proj"});
  other = one.adapter_values();
  other.pairs[0].id = model->layers[0].kda.q;
  expect_refused(ErrorCode::mismatch, "q_proj", [&] { one.load(other); });
  EXPECT_TRUE(std::equal(before.begin(), before.end(), lora.values().begin()));
}

}  // namespace parameters_test
}  // namespace tidelock::train
