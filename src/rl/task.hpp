// Tasks: episodes to work on, and how they are graded.
//
// A family makes episodes from (seed, difficulty, split). Everything about an episode is fixed when it is made; the
// sandbox gets its files before the agent starts, and the verifier's files only after the agent has ended.
//
// Split: an episode belongs to the held-out set exactly when sha256(content key) is 0 modulo 5. The key says what is
// asked in canonical form ("calc:37*58", factors in ascending order), so the same question cannot be on both sides,
// whatever seeds or wording produced it.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/random.hpp"
#include "model/chat.hpp"
#include "sandbox/sandbox.hpp"

namespace tidelock::rl {

struct SandboxFile {
  std::string path;  // absolute, inside the sandbox
  std::string content;
  int mode = 0644;
};

// How an episode is graded: `files` are uploaded after the agent ended, then `command` runs and leaves a reward in
// /logs/verifier/reward.json (a number or an object of numbers) or reward.txt. It finds the answer in
// /logs/agent/answer.txt.
struct Verifier {
  std::vector<SandboxFile> files;
  std::vector<std::string> command;
  std::map<std::string, std::string> environment;
  std::string directory = "/";
  std::chrono::milliseconds timeout{10'000};
};

struct Episode {
  std::string id;  // unique within a run: family, difficulty and seed, or the Harbor task's name
  std::string family;
  std::string key;                       // canonical content: what the split is decided by
  std::vector<model::Message> messages;  // system (maybe) and user
  std::vector<model::ToolSpec> tools;
  std::vector<SandboxFile> files;  // written before the agent starts
  Verifier verifier;
  std::string reference_answer;  // for demonstrations and views; never in the sandbox while the agent works
  std::string image = "busybox";
  sandbox::Limits limits;
  std::string directory = "/root";                 // where commands run
  std::map<std::string, std::string> environment;  // of commands
  std::chrono::milliseconds command_timeout{10'000};
  std::chrono::milliseconds agent_timeout{0};  // for the whole trajectory; 0: none
};

enum class Split { train, held_out };

// The split that a content key belongs to.
Split split_of(std::string_view key);

// How well demonstrations are made: each field is a probability. The defaults leave reinforcement learning room.
struct Skill {
  double use_tool = 0.6;        // use the tool at all; otherwise guess at once (the guess is wrong)
  double wrong_command = 0.1;   // a digit or letter of the command differs from what was asked
  double wrong_copy = 0.1;      // the answer's digits differ from what is right
  double stop_early = 0.2;      // where several calls are needed: answer with a guess after the first
  double separate_calls = 0.5;  // vault: one call for each file instead of one for both
  double tool_sum = 0.5;        // vault: add with the tool instead of in the head
  static Skill perfect();       // always right, with the tool
};

// One turn of a demonstration: a tool call with its output, or (command empty) the final answer.
struct DemoTurn {
  std::string answer;   // assistant's final text
  std::string command;  // of the shell tool
  std::string output;   // exactly the observation that run_shell_tool gives for `command` in this episode's sandbox
};

class TaskFamily {
 public:
  virtual ~TaskFamily() = default;
  virtual std::string name() const = 0;
  // Deterministic. Draws again until the content falls into `split`. Throws Error{invalid_argument} when difficulty is
  // out of the family's range, Error{not_found} when the split is empty.
  virtual Episode make(std::uint64_t seed, double difficulty, Split split) const = 0;
  // A way to work on an episode of this family: any number of calls, then an answer. Throws Error{not_supported} for
  // families without demonstrations.
  virtual std::vector<DemoTurn> demonstrate(const Episode& episode, Random& random, const Skill& skill) const = 0;
};

// calc, vault, shell. Difficulty (a fraction draws between its neighbours):
//   calc   digits of each factor, 1..6: "37*58?"
//   vault  size of the numbers, 1..4 (1: up to 19, n: n digits): "a+c?" over /vault/a .. /vault/f
//   shell  size of the folder, 1..6 (2 n decoys): "hidden?" - the content of the hidden file in /data
std::vector<std::string> builtin_families();
// Error{invalid_argument} lists the known names.
std::unique_ptr<TaskFamily> make_family(std::string_view name);

// The weighted families of a run.
class TaskMixture {
 public:
  void add(std::unique_ptr<TaskFamily> family, double difficulty, double weight);  // weight > 0
  bool empty() const { return entries_.empty(); }
  // Chooses a family by weight and makes an episode; a pure function of (seed, split).
  Episode make(std::uint64_t seed, Split split) const;
  // The family that made an episode. Throws Error{internal} when it is not of this mixture.
  const TaskFamily& family_of(const Episode& episode) const;

 private:
  struct Entry {
    std::unique_ptr<TaskFamily> family;
    double difficulty, weight;
  };
  std::vector<Entry> entries_;
};

// A sandbox with the episode's image, limits and files. Throws Error{internal} when a file would put the verifier or
// the solution before the agent (/tests, /solution, /logs).
std::unique_ptr<sandbox::Sandbox> open_sandbox(sandbox::Runtime& runtime, const Episode& episode);

struct GradeResult {
  bool graded = false;                   // false: `reason` says what went wrong, reward means nothing
  double reward = 0;                     // in [0, 1]
  std::map<std::string, double> detail;  // further numbers of reward.json
  std::string reason;
  double seconds = 0;
};

// After the agent has ended: ends every process it left, removes what lies at /tests and /logs, then writes the answer,
// uploads the verifier, runs it and reads the reward. A reward that is missing, not finite or outside [0, 1] is a
// failed grading with the reason, as is a verifier that times out. Errors of the sandbox itself are thrown.
GradeResult grade(sandbox::Sandbox& sandbox, const Episode& episode, std::string_view answer);

}  // namespace tidelock::rl
