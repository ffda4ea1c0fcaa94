// Templates from recipes: the steps run inside a microVM of ours, which has no network; each leaves a snapshot named by
// everything that led to it, so that a later build goes on behind the last step that it shares with an earlier one.
//
// A template is a snapshot with a name: sandboxes are made from it with Spec::snapshot, with what START started running
// in them. The name is given at the very end, in place of what it named before: a build that fails, or is killed at any
// step, leaves the old template whole. What it was building in is a passing sandbox, which the next start removes.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>

#include "base/error.hpp"
#include "sandbox/build/recipe.hpp"

namespace tidelock::sandbox {

struct BuildOptions {
  std::string name;  // of the template
  Limits limits;     // of what is built from an image; a template keeps its own
  // The files of a COPY step, as a tar archive (plain or gzip) with their paths below the recipe's folder.
  std::function<std::string(const BuildStep&)> files;
  // Each line as it comes; `step`: its number from 1, 0 for what is about the whole.
  std::function<void(int step, const std::string& line)> log;
  std::chrono::seconds step_patience{1800};
  std::chrono::seconds ready_patience{300};
  const std::atomic<bool>* stop = nullptr;  // looked at often; set: the build ends with Error{exhausted}
  int kept_steps = 64;                      // snapshots of steps that stay; the oldest go
};

struct BuildResult {
  int done = 0, cached = 0;  // steps
};

// The prefix of the snapshots that steps leave.
inline constexpr const char* kStepPrefix = "step-";

// A build that failed in one of its steps: its number, from 1; 0: START or READY.
class BuildError : public Error {
 public:
  BuildError(int number, ErrorCode code, const std::string& message, std::string remedy)
      : Error(code, message, std::move(remedy)), number_(number) {}
  int number() const { return number_; }

 private:
  int number_;
};

// Throws BuildError, or Error for what is wrong with the whole. The runtime must keep snapshots and run processes.
BuildResult build_template(Runtime& runtime, const BuildRecipe& recipe, const BuildOptions& options);

}  // namespace tidelock::sandbox
