// What the tests of rl/ share: small models, recipes, and a runtime of scripted sandboxes that needs no container.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "base/base.hpp"
#include "model/chat.hpp"
#include "model/model.hpp"
#include "rl/recipe.hpp"
#include "rl/rollout.hpp"

namespace tidelock::rl::testing {

inline std::filesystem::path nano_folder() {
  return std::filesystem::path(TIDELOCK_SOURCE_DIR) / "models/nano";
}

inline const model::Tokenizer& nano_tokenizer() {
  static const model::Tokenizer tokenizer = model::Tokenizer::load(nano_folder());
  return tokenizer;
}

// The trained model of the quick start.
inline const model::Model& nano_model() {
  static const auto model = model::load_model(nano_folder(), true);
  return *model;
}

// The same architecture with fresh weights: what it says is noise.
inline const model::Model& random_model() {
  static const auto model = [] {
    auto fresh = std::make_unique<model::Model>(model::load_config(nano_folder()), true);
    for (model::ParameterId id = 0; id < static_cast<model::ParameterId>(fresh->parameters().size()); ++id)
      fresh->set(id, model::initial_values(*fresh, id, 7));
    return fresh;
  }();
  return *model;
}

inline Settings recipe(const std::vector<std::string>& overrides = {},
                       const std::string& model = nano_folder().string()) {
  const std::string text = fmt::format(
      "model.path = \"{}\"\nadapter.rank = 2\nrollout.max_tokens = 64\n[[tasks.mixture]]\nfamily = \"calc\"\n"
      "[[tasks.mixture]]\nfamily = \"vault\"\n[[tasks.mixture]]\nfamily = \"shell\"\n",
      model);
  return Settings::parse(text, "test", rl_schema(), overrides);
}

// Everything but the times.
inline std::vector<Trajectory> without_times(std::vector<Trajectory> batch) {
  for (Trajectory& t : batch) {
    t.sandbox = {};
    for (Turn& turn : t.turns)
      for (ToolUse& call : turn.calls) call.seconds = 0;
  }
  return batch;
}

// A folder of this test, removed at its end.
class Folder {
 public:
  Folder() {
    static std::atomic<int> counter{0};
    path_ = std::filesystem::temp_directory_path() / fmt::format("tidelock-rl-{}-{}", ::getpid(), ++counter);
    std::filesystem::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Sandboxes that answer from a script. `reward` sees the agent's answer; an empty function stands for "0".
struct Script {
  std::string output = "1";                                    // of every command
  std::function<std::string(const std::string&)> reward = {};  // text of reward.txt
  std::string fail_create = {}, fail_exec = {};                // messages of errors to throw; empty: none
};

class ScriptedSandbox final : public sandbox::Sandbox {
 public:
  explicit ScriptedSandbox(const Script& script) : script_(script) {}
  const std::string& id() const override { return id_; }
  sandbox::ExecResult exec(const sandbox::ExecRequest& request) override {
    if (!script_.fail_exec.empty()) fail(ErrorCode::io, "{}", script_.fail_exec);
    sandbox::ExecResult result;
    result.exit_code = 0;
    result.output = script_.output;
    // sh -c SCRIPT sh VERIFIER...: grading, which prints the kind of reward and the reward.
    if (request.argv.size() > 3) result.output = "text\n" + (script_.reward ? script_.reward(answer_) : "0") + "\n";
    return result;
  }
  void write_file(const std::string& path, std::string_view content, int /*mode*/) override {
    if (path == "/logs/agent/answer.txt") answer_ = content;
  }
  std::string read_file(const std::string& path, std::uint64_t /*limit*/) override {
    fail(ErrorCode::not_found, "{} is not there", path);
  }
  void freeze() override {}
  void thaw() override {}
  std::unique_ptr<Sandbox> fork_filesystem() override { fail(ErrorCode::not_supported, "scripted"); }
  sandbox::Times times() const override { return {1, 0.25, 0.5}; }

 private:
  const Script& script_;
  std::string id_ = "scripted", answer_;
};

class ScriptedRuntime final : public sandbox::Runtime {
 public:
  explicit ScriptedRuntime(Script script) : script_(std::move(script)) {}
  sandbox::Capabilities capabilities() const override { return {}; }
  std::unique_ptr<sandbox::Sandbox> create(const sandbox::Spec& /*spec*/) override {
    if (!script_.fail_create.empty()) fail(ErrorCode::exhausted, "{}", script_.fail_create);
    ++created;
    return std::make_unique<ScriptedSandbox>(script_);
  }
  std::atomic<int> created{0};

 private:
  Script script_;
};

}  // namespace tidelock::rl::testing
