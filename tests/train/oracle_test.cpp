// Forward and backward against the float64 PyTorch oracle (tests/oracle): two claims, two tests, and twins that must be
// caught.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/base.hpp"
#include "model/npy.hpp"
#include "model/safetensors.hpp"
#include "train/train.hpp"

namespace tidelock::train {
namespace oracle_test {

namespace fs = std::filesystem;

fs::path fixture(const std::string& name) {
  return fs::path(TIDELOCK_SOURCE_DIR) / "tests/oracle/fixtures" / name;
}

struct Case {
  std::string name;
  std::unique_ptr<model::Model> model;
  FullParameters parameters;
  std::vector<std::int32_t> tokens;
  std::vector<float> coefficients;
  std::vector<std::uint8_t> mask;

  explicit Case(const std::string& n)
      : name(n), model(std::make_unique<model::Model>(model::load_config(fixture(n)), true)), parameters(*model) {
    model = model::load_model(fixture(n), true, [&](ParameterId id, std::span<const float> v) {
      std::copy(v.begin(), v.end(), parameters.of(id).begin());
    });
    tokens = model::read_tokens(fixture(n) / "tokens.txt");
    coefficients = std::get<std::vector<float>>(model::read_npy(fixture(n) / "coeffs.npy").values);
    mask.assign(tokens.size(), 1);
    mask[0] = 0;
  }
};

std::vector<float> run_logits(const Case& c, const model::Adapter* adapter = nullptr) {
  const model::StateLayout layout(c.model->config());
  state::Pool pool(layout);
  state::SequenceState sequence(pool);
  model::Workspace workspace;
  const auto n = static_cast<std::int64_t>(c.tokens.size());
  const model::Span span{sequence.extend(n), 0, c.tokens, adapter};
  const float* hidden = model::forward(*c.model, layout, std::span(&span, 1), {}, workspace, solo_team());
  std::vector<float> logits(static_cast<std::size_t>(n * c.model->config().vocab));
  model::head_forward(*c.model, hidden, n, logits.data(), workspace, solo_team());
  return logits;
}

double relative_rms(std::span<const float> x, std::span<const float> expected) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += std::pow(static_cast<double>(x[i]) - static_cast<double>(expected[i]), 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(error / std::max(norm, 1e-30));
}

// loss = sum of c[t] * logprob(token[t + 1]); its gradient by our backward.
std::vector<float> run_gradient(const Case& c, const GradientOptions& options, const GradientWorker::GradientView& view,
                                std::size_t size, const model::Adapter* adapter = nullptr, double* loss = nullptr,
                                double* index_loss = nullptr) {
  Team team(2);
  GradientWorker worker(*c.model, team);
  std::vector<float> flat(size, 0.0F);
  const TrainSequence sequence{c.tokens, c.mask, adapter};
  const auto result = worker.run(
      std::span(&sequence, 1),
      [&](std::size_t, std::span<const float> logprobs, std::span<float> d) {
        double total = 0;
        for (std::size_t i = 0; i < d.size(); ++i) {
          total += static_cast<double>(c.coefficients[i]) * static_cast<double>(logprobs[i]);
          d[i] = c.coefficients[i];
        }
        return total;
      },
      options, view, flat);
  if (loss != nullptr) *loss = result.loss;
  if (index_loss != nullptr) *index_loss = result.index_loss;
  return flat;
}

// A gradient tensor of the fixture in our layout.
std::vector<float> expected_gradient(const model::SafetensorsFile& file, const model::Parameter& p) {
  const auto it = file.tensors().find(p.name);
  if (it == file.tensors().end()) return {};
  std::vector<float> values = model::read_f32(it->second, it->second.shape);
  values.resize(static_cast<std::size_t>(p.count()));
  if (p.kind != model::ParameterKind::conv) return values;
  std::vector<float> turned(values.size());
  const std::size_t channels = values.size() / 4;
  for (std::size_t ch = 0; ch < channels; ++ch)
    for (std::size_t tap = 0; tap < 4; ++tap) turned[tap * channels + ch] = values[ch * 4 + tap];
  return turned;
}

// Largest error over tensors, relative to the tensor's norm plus a share of the whole gradient's typical tensor norm.
double worst_gradient_error(const Case& c, std::span<const float> flat, const std::string& file_name, bool only_present,
                            std::string* where = nullptr) {
  const model::SafetensorsFile file(fixture(c.name) / file_name);
  auto mutable_flat = std::vector<float>(flat.begin(), flat.end());
  const auto pointers = c.parameters.gradients(mutable_flat).parameters;
  double worst = 0;
  std::size_t compared = 0;
  for (std::size_t i = 0; i < c.model->parameters().size(); ++i) {
    const auto& p = c.model->parameters()[i];
    if (p.name.ends_with("e_score_correction_bias")) continue;
    const std::vector<float> expected = expected_gradient(file, p);
    if (expected.empty()) {
      EXPECT_TRUE(only_present) << p.name << " has no gradient in the fixture";
      continue;
    }
    ++compared;
    const std::span<const float> ours(pointers[i], expected.size());
    double error = 0, norm = 0;
    for (std::size_t j = 0; j < expected.size(); ++j) {
      error += std::pow(static_cast<double>(ours[j]) - static_cast<double>(expected[j]), 2);
      norm += std::pow(static_cast<double>(expected[j]), 2);
    }
    const double relative = std::sqrt(error) / (std::sqrt(norm) + 1e-3);
    if (relative > worst) {
      worst = relative;
      if (where != nullptr) *where = p.name;
    }
  }
  EXPECT_GE(compared, 5U);
  return worst;
}

class Oracle : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Family, Oracle, ::testing::Values("linear", "k3", "k31", "k31_wide"),
                         [](const auto& test) { return test.param; });

TEST_P(Oracle, LogitsAgreeWithFloat64) {
  const Case c(GetParam());
  const auto expected = std::get<std::vector<float>>(model::read_npy(fixture(GetParam()) / "logits.npy").values);
  const auto logits = run_logits(c);
  ASSERT_EQ(logits.size(), expected.size());
  EXPECT_LT(relative_rms(logits, expected), 1e-5);
}

TEST_P(Oracle, AChangedWeightIsCaught) {
  Case c(GetParam());
  const auto expected = std::get<std::vector<float>>(model::read_npy(fixture(GetParam()) / "logits.npy").values);
  const auto id = c.model->layers[0].attention_norm;
  std::vector<float> values(c.parameters.of(id).begin(), c.parameters.of(id).end());
  values[3] *= 1.01F;
  c.model->set(id, values);
  EXPECT_GT(relative_rms(run_logits(c), expected), 1e-5);
}

TEST_P(Oracle, GradientsAgreeWithAutograd) {
  const Case c(GetParam());
  for (const auto tape : {model::TapeMode::full, model::TapeMode::recompute}) {
    GradientOptions options;
    options.tape = tape;
    const auto flat = run_gradient(
        c, options, [&](std::span<float> f) { return c.parameters.gradients(f); }, c.parameters.values().size());
    std::string where;
    EXPECT_LT(worst_gradient_error(c, flat, "grads.safetensors", false, &where), 1e-4) << where;
  }
}

TEST_P(Oracle, AWrongGradientIsCaught) {
  Case c(GetParam());
  c.coefficients[c.coefficients.size() / 2] *= -1.0F;
  const auto flat = run_gradient(
      c, {}, [&](std::span<float> f) { return c.parameters.gradients(f); }, c.parameters.values().size());
  EXPECT_GT(worst_gradient_error(c, flat, "grads.safetensors", false), 1e-3);
}

TEST(OracleRecompute, GivesTheSameBits) {
  const Case c("k31");
  GradientOptions full, recompute;
  recompute.tape = model::TapeMode::recompute;
  const auto view = [&](std::span<float> f) { return c.parameters.gradients(f); };
  EXPECT_EQ(run_gradient(c, full, view, c.parameters.values().size()),
            run_gradient(c, recompute, view, c.parameters.values().size()));
}

TEST(OracleIndex, IndexerLossAgrees) {
  for (const char* name : {"k31", "k31_wide"}) {
    const Case c(name);
    Case zero(name);
    std::fill(zero.coefficients.begin(), zero.coefficients.end(), 0.0F);
    GradientOptions options;
    options.index_loss_weight = 1;
    const auto flat = run_gradient(
        zero, options, [&](std::span<float> f) { return c.parameters.gradients(f); }, c.parameters.values().size());
    std::string where;
    EXPECT_LT(worst_gradient_error(c, flat, "index_grads.safetensors", true, &where), 1e-4) << name << " " << where;
  }
}

TEST(OracleAdapter, LogitsAndGradientsAgree) {
  for (const char* name : {"linear", "k31"}) {
    const Case c(name);
    const auto values = model::load_adapter(*c.model, fixture(name) / "adapter");
    const auto adapter = model::make_adapter(*c.model, values);
    const auto expected = std::get<std::vector<float>>(model::read_npy(fixture(name) / "lora_logits.npy").values);
    EXPECT_LT(relative_rms(run_logits(c, adapter.get()), expected), 1e-5) << name;
    EXPECT_GT(relative_rms(run_logits(c), expected), 1e-3) << name << ": the adapter must matter";

    LoraParameters lora(*c.model, values.rank, values.alpha, {"all-linear"});
    lora.load(values);
    const auto flat = run_gradient(
        c, {}, [&](std::span<float> f) { return lora.gradients(f); }, lora.values().size(), adapter.get());
    // Through the same names as the fixture: gradients take the place of values.
    LoraParameters gradient(*c.model, values.rank, values.alpha, {"all-linear"});
    std::copy(flat.begin(), flat.end(), gradient.values().begin());
    const model::SafetensorsFile file(fixture(name) / "lora_grads.safetensors");
    std::size_t compared = 0;
    for (const auto& pair : gradient.adapter_values().pairs) {
      const auto& p = c.model->parameter(pair.id);
      const std::string module = "base_model.model." + p.name.substr(0, p.name.size() - 7);
      for (const auto& [suffix, ours] : {std::pair{".lora_A.weight", &pair.a}, std::pair{".lora_B.weight", &pair.b}}) {
        const auto it = file.tensors().find(module + suffix);
        ASSERT_NE(it, file.tensors().end()) << module << suffix;
        const auto reference = model::read_f32(it->second, it->second.shape);
        double norm = 0, error = 0;
        for (std::size_t i = 0; i < reference.size(); ++i) {
          error += std::pow(static_cast<double>((*ours)[i]) - static_cast<double>(reference[i]), 2);
          norm += std::pow(static_cast<double>(reference[i]), 2);
        }
        EXPECT_LT(std::sqrt(error), 1e-4 * (std::sqrt(norm) + 1e-3)) << name << " " << module << suffix;
        ++compared;
      }
    }
    EXPECT_EQ(compared, file.tensors().size()) << name;
  }
}

}  // namespace oracle_test
}  // namespace tidelock::train
