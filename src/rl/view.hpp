// The terminal view of a run.
//
// render() is a pure function from a state to lines, so that it can be tested; Terminal only draws them. When standard
// output is no terminal, plain_line() gives one line per step instead.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "rl/statistics.hpp"

namespace tidelock::rl {

struct ViewEvaluation {
  std::int64_t step = 0;
  Evaluation result;
};

struct ViewSample {  // one trajectory, shortened when drawn
  std::string question, answer;
  std::vector<std::pair<std::string, std::string>> calls;  // command, output
  double reward = 0;
};

struct ViewState {
  std::string run, model, recipe;
  std::uint64_t seed = 0;
  std::string loss = "dr_grpo";
  std::string phase;                 // what is being done now: "rollout", "train", "evaluate"
  double phase_fraction = 0;         // of it done, in [0, 1]
  std::int64_t step = 0, steps = 0;  // finished, in all
  double elapsed_s = 0;
  std::vector<double> rewards;  // mean reward of every finished step
  std::vector<ViewEvaluation> evaluations;
  std::int64_t compared_tokens = 0, mismatch_tokens = 0;  // over the whole run
  double mismatch_max_abs = 0;
  double rollout_tokens_per_s = 0, train_tokens_per_s = 0;        // of the last step
  double rollout_s = 0, sandbox_s = 0, train_s = 0, other_s = 0;  // wall time over the whole run
  double sandbox_wait_fraction = 0, sandbox_frozen_fraction = 0;  // of the sandboxes' life
  double tool_rate = 0, alive_fraction = 0;  // last step: tool calls a trajectory; groups that taught something
  std::uint64_t weight_version = 0;
  ViewSample sample;
};

// Lines for a terminal of `width` columns (clamped to 60..200), no newline at the end. With color: ANSI colours, only
// SGR sequences. No line is wider than `width` columns.
std::vector<std::string> render(const ViewState& state, int width, bool color);

// "step 3/60  reward 0.412  ..." for logs.
std::string plain_line(const ViewState& state);

// Columns that `text` takes: SGR sequences count nothing, every other code point one.
int display_width(std::string_view text);

// Draws frames in place on standard output. At most one object at a time. Restores the cursor when destroyed, on exit()
// and on SIGINT, SIGTERM and SIGHUP (which then act as before).
class Terminal {
 public:
  Terminal();
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;
  bool interactive() const;  // standard output is a terminal that understands ANSI sequences
  bool color() const;        // and NO_COLOR is not set
  // Interactive: replaces the last frame. Otherwise: prints plain_line when a step has finished since the last call.
  void draw(const ViewState& state);
  // Prints a line that stays, above the frame.
  void note(const std::string& line);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tidelock::rl
