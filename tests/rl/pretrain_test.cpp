// Supervised training: a pure function of its recipe.
#include "rl/pretrain.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "rl/support.hpp"

namespace tidelock::rl {
namespace pretrain_test {

namespace fs = std::filesystem;
using testing::Folder;

std::vector<PretrainProgress> train(const fs::path& out, const std::vector<std::string>& overrides = {},
                                    int threads = 2) {
  const std::string folder = testing::nano_folder().string();
  const std::string text = fmt::format(
      "model.config = \"{}/config.json\"\nmodel.tokenizer = \"{}\"\ntrain.steps = 3\ntrain.batch_tokens = 256\n"
      "train.index_warmup_steps = 1\ntrain.warmup_steps = 0\ntrain.learning_rate = 3e-3\ntrain.log_every = 1\n"
      "[[tasks.mixture]]\nfamily = \"calc\"\ndifficulty = 1\n",
      folder, folder);
  std::vector<PretrainProgress> steps;
  pretrain(Settings::parse(text, "test", pretrain_schema(), overrides), out, threads,
           [&](const PretrainProgress& p) { steps.push_back(p); });
  return steps;
}

double nano_vocab() {
  return model::load_config(testing::nano_folder()).vocab;
}

std::vector<std::string> hashes(const std::vector<PretrainProgress>& steps) {
  std::vector<std::string> out;
  for (const auto& p : steps) out.push_back(p.weights_sha256);
  return out;
}

TEST(Pretrain, LearnsAndWritesAModelThatLoads) {
  const Folder folder;
  const fs::path out = folder.path() / "model";
  const auto steps = train(out, {"train.steps=6"});
  ASSERT_EQ(steps.size(), 6U);
  EXPECT_NEAR(steps[0].loss, std::log(nano_vocab()), 1.0);  // a fresh model knows nothing
  EXPECT_LT(steps[5].loss, steps[0].loss - 1);
  EXPECT_EQ(steps[0].index_loss >= 0, true);
  const auto model = model::load_model(out, false);
  EXPECT_EQ(model->config().vocab, static_cast<int>(nano_vocab()));
  EXPECT_EQ(model::Tokenizer::load(out).vocab_size(), testing::nano_tokenizer().vocab_size());
}

TEST(Pretrain, OnlyTheRecipeDecidesTheBits) {
  const auto steps = hashes(train({}, {"train.stop_after=3", "train.steps=9"}));
  EXPECT_EQ(steps.size(), 3U);
  EXPECT_EQ(hashes(train({}, {"train.stop_after=3", "train.steps=9"}, 1)), steps);
  EXPECT_EQ(hashes(train({}, {"train.stop_after=3", "train.steps=9", "train.recompute=true"})), steps);
  EXPECT_NE(hashes(train({}, {"train.stop_after=3", "train.steps=9", "train.seed=2"})), steps);
  EXPECT_NE(hashes(train({}, {"train.stop_after=3", "train.steps=9", "skill.use_tool=0"})), steps);
}

TEST(Pretrain, StoppedEarlyItLeavesTheFolderAlone) {
  const Folder folder;
  const fs::path out = folder.path() / "model";
  train(out, {"train.stop_after=1"});
  EXPECT_FALSE(fs::exists(out));
}

TEST(Pretrain, AVocabularyThatIsTooSmallIsRefused) {
  const Folder folder;
  std::string config = read_file(testing::nano_folder() / "config.json");
  const std::string found = fmt::format("\"vocab_size\": {}", nano_vocab());
  ASSERT_NE(config.find(found), std::string::npos);
  write_file_atomic(folder.path() / "config.json",
                    config.replace(config.find(found), found.size(), "\"vocab_size\": 300"));
  try {
    train({}, {fmt::format("model.config=\"{}\"", (folder.path() / "config.json").string())});
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("vocab"), std::string::npos) << error.what();
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  }
}

}  // namespace pretrain_test
}  // namespace tidelock::rl
