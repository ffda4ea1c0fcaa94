#include "base/settings.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "base/error.hpp"
#include "base/files.hpp"

namespace tidelock {
namespace settings_test {

Schema example() {
  Schema schema;
  schema.text("name", "name of the run").fallback("run");
  schema.integer("rl.steps", "optimizer steps").range(1, 1000).fallback(60);
  schema.number("rl.lr", "learning rate").at_least(0).fallback(1e-5);
  schema.text("rl.loss", "policy-gradient loss").choices({"grpo", "dr_grpo", "dapo"}).fallback("dr_grpo");
  schema.flag("rl.shuffle", "control: shuffled rewards").fallback(false);
  schema.text("model.path", "folder of the model");
  schema.numbers("train.betas", "AdamW").range(0, 1).fallback(std::vector<double>{0.9, 0.95});
  schema.integers("eval.at", "steps").fallback(std::vector<std::int64_t>{});
  schema.texts("model.stop", "stop texts").fallback(std::vector<std::string>{"\n"});
  Schema& task = schema.table_array("tasks", "the mixture");
  task.text("family", "who makes the episodes").choices({"calc", "vault"});
  task.number("difficulty", "of the family").fallback(1);
  task.number("weight", "share").at_least(0).fallback(1);
  return schema;
}

constexpr const char* kRecipe = R"(name = "quick"
[model]
path = "models/nano"
[rl]
steps = 30
lr = 1
[[tasks]]
family = "calc"
difficulty = 2.5
[[tasks]]
family = "vault"
)";

Settings parse(const std::string& text, const std::vector<std::string>& overrides = {}) {
  static const Schema schema = example();
  return Settings::parse(text, "r.toml", schema, overrides);
}

// The message of the error that reading must end in.
std::string refusal(const std::string& text, const std::vector<std::string>& overrides = {}) {
  try {
    parse(text, overrides);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    return error.what();
  }
  return "accepted";
}

TEST(Settings, ReadsValuesAndDefaults) {
  const Settings s = parse(kRecipe);
  EXPECT_EQ(s.text("name"), "quick");
  EXPECT_EQ(s.integer("rl.steps"), 30);
  EXPECT_EQ(s.number("rl.lr"), 1.0);  // an integer is a number
  EXPECT_EQ(s.text("rl.loss"), "dr_grpo");
  EXPECT_FALSE(s.flag("rl.shuffle"));
  EXPECT_EQ(s.numbers("train.betas"), (std::vector<double>{0.9, 0.95}));
  EXPECT_EQ(s.texts("model.stop"), std::vector<std::string>{"\n"});
  EXPECT_TRUE(s.integers("eval.at").empty());
  ASSERT_EQ(s.tables("tasks").size(), 2U);
  EXPECT_EQ(s.tables("tasks")[0].number("difficulty"), 2.5);
  EXPECT_EQ(s.tables("tasks")[1].text("family"), "vault");
  EXPECT_EQ(s.tables("tasks")[1].number("weight"), 1.0);
  EXPECT_TRUE(s.given("rl.steps"));
  EXPECT_FALSE(s.given("rl.loss"));
}

TEST(Settings, RefusalsNameFileLineKeyFoundAndExpected) {
  const std::string model = "[model]\npath = \"m\"\n";
  EXPECT_EQ(refusal(model + "[rl]\nstep = 3"), "r.toml:4: unknown key rl.step; did you mean rl.steps?");
  EXPECT_EQ(refusal("steps = 3\n" + model), "r.toml:1: unknown key steps; did you mean rl.steps?");
  EXPECT_EQ(refusal(model + "[zebra]\nstripes = 3"), "r.toml:3: unknown key zebra");
  EXPECT_EQ(refusal(model + "[rl]\nsteps = 3.5"), "r.toml:4: rl.steps is 3.5, expected integer in 1..1000");
  EXPECT_EQ(refusal(model + "[rl]\nsteps = 0"), "r.toml:4: rl.steps is 0, expected integer in 1..1000");
  EXPECT_EQ(refusal(model + "[rl]\nlr = nan"), "r.toml:4: rl.lr is nan, expected number >= 0");
  EXPECT_EQ(refusal(model + "[rl]\nloss = \"ppo\""), "r.toml:4: rl.loss is \"ppo\", expected grpo | dr_grpo | dapo");
  EXPECT_EQ(refusal(model + "[rl]\nshuffle = 1"), "r.toml:4: rl.shuffle is 1, expected true or false");
  EXPECT_EQ(refusal(model + "[train]\nbetas = [0.9, 1.5]"),
            "r.toml:4: train.betas is 1.5, expected list of numbers in 0..1");
  EXPECT_EQ(refusal(model + "[train]\nbetas = [0.5, \"x\"]"),
            "r.toml:4: train.betas is [ 0.5, 'x' ], expected list of numbers in 0..1");
  EXPECT_EQ(refusal("rl = 3\n" + model), "r.toml:1: rl is 3, expected a table");
  EXPECT_EQ(refusal(model + "[rl.steps]\nx = 1"), "r.toml:3: rl.steps is a table, expected integer in 1..1000");
  EXPECT_EQ(refusal("[rl]\nsteps = 3"), "r.toml: model.path is missing; expected text: folder of the model");
  EXPECT_EQ(refusal(model + "[[tasks]]\nweight = 2"),
            "r.toml:3: tasks[0].family is missing; expected calc | vault: who makes the episodes");
  EXPECT_EQ(refusal(model + "[[tasks]]\nfamily = \"calc\"\nwieght = 2"),
            "r.toml:5: unknown key tasks[0].wieght; did you mean tasks[0].weight?");
}

TEST(Settings, SyntaxErrorsNameTheLine) {
  EXPECT_EQ(refusal("a = 1\nb = = 2").find("r.toml:2: not valid TOML"), 0U);
  EXPECT_EQ(refusal("name = \"a\"\nname = \"b\"").find("r.toml:2: not valid TOML"), 0U);
  EXPECT_THROW(Settings::load("/nonexistent.toml", example()), Error);
}

TEST(Settings, OverridesComeAfterTheFile) {
  const Settings s =
      parse(kRecipe, {"rl.steps=5", "rl.loss=grpo", "model.path=/a b/c=d", "train.betas=[0.5]", "rl.shuffle=true",
                      "tasks[1].weight=4", "tasks[2].family=calc", "name=\"5\"", "rl.steps=6", "model.stop=[\"x\"]"});
  EXPECT_EQ(s.integer("rl.steps"), 6);
  EXPECT_EQ(s.text("rl.loss"), "grpo");
  EXPECT_EQ(s.text("model.path"), "/a b/c=d");
  EXPECT_EQ(s.text("name"), "5");
  EXPECT_TRUE(s.flag("rl.shuffle"));
  EXPECT_EQ(s.tables("tasks")[1].number("weight"), 4.0);
  EXPECT_EQ(s.tables("tasks").at(2).text("family"), "calc");
  EXPECT_EQ(s.texts("model.stop"), std::vector<std::string>{"x"});
  EXPECT_EQ(parse(kRecipe, {"name=5"}).text("name"), "5");  // a bare word for a text
}

TEST(Settings, OverridesAreRefusedInTheirOwnWords) {
  EXPECT_EQ(refusal(kRecipe, {"rl.stpes=5"}), "--set rl.stpes=5: unknown key rl.stpes; did you mean rl.steps?");
  EXPECT_EQ(refusal(kRecipe, {"rl.steps=many"}), "--set rl.steps=many: found many, expected integer in 1..1000");
  EXPECT_EQ(refusal(kRecipe, {"rl.steps=5000"}), "--set rl.steps=5000: rl.steps is 5000, expected integer in 1..1000");
  EXPECT_EQ(refusal(kRecipe, {"rl.steps=5\nrl.loss='grpo'"}).find("--set rl.steps=5"), 0U);
  EXPECT_EQ(refusal(kRecipe, {"rl.steps"}).find("--set rl.steps: no value"), 0U);
  EXPECT_EQ(refusal(kRecipe, {"=5"}).find("--set =5: the key is not a key"), 0U);
  EXPECT_EQ(refusal(kRecipe, {"rl..steps=5"}).find("--set rl..steps=5: the key is not a key"), 0U);
  EXPECT_EQ(refusal(kRecipe, {"tasks[9].weight=1"}), "--set tasks[9].weight=1: tasks has 2 tables");
  EXPECT_EQ(refusal(kRecipe, {"tasks[x].weight=1"}).find("--set tasks[x].weight=1: the index"), 0U);
  EXPECT_EQ(refusal(kRecipe, {"name.x=1"}), "--set name.x=1: name is not a table");
  EXPECT_EQ(refusal(kRecipe, {"rl=1"}), "--set rl=1: rl is 1, expected a table");
  EXPECT_EQ(refusal(kRecipe, {"tasks[0]=1"}), "--set tasks[0]=1: tasks[0] is not a table");
  EXPECT_EQ(refusal(kRecipe, {"tasks[0].weight=-1"}),
            "--set tasks[0].weight=-1: tasks[0].weight is -1, expected number >= 0");
}

TEST(Settings, ResolvedRecipeHasEveryKeyAndReadsBackToItself) {
  const Settings s = parse(kRecipe, {"model.stop=[\"a\\\"b\\n\\u0001\"]", "rl.lr=1e-5"});
  const std::string resolved = s.resolved_toml();
  EXPECT_EQ(resolved, R"(name = "quick"

[rl]
steps = 30
lr = 1e-05
loss = "dr_grpo"
shuffle = false

[model]
path = "models/nano"
stop = ["a\"b\n\u0001"]

[train]
betas = [0.9, 0.95]

[eval]
at = []

[[tasks]]
family = "calc"
difficulty = 2.5
weight = 1.0

[[tasks]]
family = "vault"
difficulty = 1.0
weight = 1.0
)");
  EXPECT_EQ(parse(resolved).resolved_toml(), resolved);
  EXPECT_EQ(parse(resolved).number("rl.lr"), 1e-5);
}

TEST(Settings, AccessOutsideTheSchemaIsOurFault) {
  const Settings s = parse(kRecipe);
  const auto code = [](auto&& access) {
    try {
      access();
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::io;
  };
  EXPECT_EQ(code([&] { s.integer("rl.nothing"); }), ErrorCode::internal);
  EXPECT_EQ(code([&] { s.number("rl.steps"); }), ErrorCode::internal);
  EXPECT_EQ(code([&] { s.tables("rl.steps"); }), ErrorCode::internal);
  EXPECT_EQ(code([&] { Schema().integer("a", "").fallback("text"); }), ErrorCode::internal);
  EXPECT_EQ(code([&] {
              Schema schema;
              schema.text("a", "");
              schema.text("a.b", "");
            }),
            ErrorCode::internal);
  EXPECT_EQ(code([&] {
              Schema schema;
              schema.integer("a", "").range(1, 2).fallback(3);
              Settings::parse("", "x", schema);
            }),
            ErrorCode::internal);
}

TEST(Settings, DescribeListsEveryKey) {
  const Schema schema = example();
  const std::string text = schema.describe(), markdown = schema.describe(true);
  for (const char* key : {"rl.steps", "model.path", "train.betas", "tasks[].family"}) {
    EXPECT_NE(text.find(key), std::string::npos) << key;
    EXPECT_NE(markdown.find(fmt::format("| `{}` |", key)), std::string::npos) << key;
  }
  EXPECT_NE(text.find("integer in 1..1000"), std::string::npos);
  EXPECT_NE(markdown.find("| `model.path` | text | required | folder of the model |"), std::string::npos);
  EXPECT_NE(markdown.find("grpo \\| dr_grpo \\| dapo"), std::string::npos);
}

TEST(Settings, LoadReadsAFile) {
  const auto path = std::filesystem::temp_directory_path() / fmt::format("tidelock-settings-{}.toml", ::getpid());
  write_file_atomic(path, kRecipe);
  EXPECT_EQ(Settings::load(path, example()).integer("rl.steps"), 30);
  std::filesystem::remove(path);
}

}  // namespace settings_test
}  // namespace tidelock
