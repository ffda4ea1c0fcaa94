// A trajectory: what one agent did on one episode, token in and token out.
//
// The tokens are the record; text is only kept for people. Sampled tokens are never turned into text and back. A
// sampled token carries the log-probability and the weight version it was sampled with; prompt and tool tokens carry
// neither, so a missing log-probability cannot be mistaken for a zero.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tidelock::rl {

enum class Source : std::uint8_t { prompt, sampled, tool };

enum class Status : std::uint8_t {
  completed,  // the model ended its turn and was graded
  truncated,  // out of tokens or turns; graded with what it had
  aborted,    // the run stopped it; not graded
  failed,     // the sandbox or the grading failed; its reward means nothing
  malformed,  // the model wrote something that is not a turn or a tool call; reward 0
};

std::string_view name_of(Source source);
std::string_view name_of(Status status);
// Inverse of name_of. Throws Error{corrupt_data} naming the text and the known names.
Source parse_source(std::string_view name);
Status parse_status(std::string_view name);

// A run of tokens [begin, end) of one origin.
struct Span {
  std::int64_t begin = 0, end = 0;
  Source source = Source::prompt;
  std::uint64_t weight_version = 0;  // of the weights that sampled it; 0 where source is not `sampled`
  bool operator==(const Span&) const = default;
};

// One tool call and what came back, as text for people and for ATIF.
struct ToolUse {
  std::string id, name, arguments;  // arguments: the JSON text of the call
  std::string output;               // the observation that the model was shown
  double seconds = 0;               // wall time of the tool
  bool operator==(const ToolUse&) const = default;
};

// One assistant turn: its text and the calls it made.
struct Turn {
  std::string text;
  std::vector<ToolUse> calls;
  bool operator==(const Turn&) const = default;
};

// What the sandbox of this trajectory did, in seconds.
struct SandboxTime {
  double alive = 0, busy = 0, frozen = 0;
  bool operator==(const SandboxTime&) const = default;
};

struct Trajectory {
  std::string task_id, family;
  std::int64_t group = 0, member = 0;  // which episode of the step, which sample of the episode
  std::uint64_t seed = 0;              // of the sampler
  std::vector<std::int32_t> tokens;    // [tokens]
  std::vector<std::uint8_t> mask;      // [tokens] 1 where the model sampled the token: what the loss is taken over
  std::vector<float> logprobs;         // [sampled tokens], in order; of the unmodified distribution, exact f32 bits
  std::vector<Span> spans;             // cover tokens without gaps, ascending
  std::vector<Turn> turns;
  Status status = Status::completed;
  double reward = 0;                            // in [0, 1]
  std::map<std::string, double> reward_detail;  // further numbers of the grader
  std::string failure;                          // why, when status is failed, malformed or aborted
  std::int64_t tool_calls = 0;
  SandboxTime sandbox;
  std::string answer;  // the final text that was graded

  void append_prompt(std::span<const std::int32_t> ids) { append(ids, Source::prompt, {}, 0); }
  void append_tool(std::span<const std::int32_t> ids) { append(ids, Source::tool, {}, 0); }
  // logprobs: one for each id. Extends the last span when it was sampled with the same version.
  void append_sampled(std::span<const std::int32_t> ids, std::span<const float> ids_logprobs, std::uint64_t version) {
    append(ids, Source::sampled, ids_logprobs, version);
  }

  // Positions in `tokens` of the sampled tokens: logprobs[i] belongs to tokens[sampled_positions()[i]].
  std::vector<std::int64_t> sampled_positions() const;
  // Throws Error{internal} naming the trajectory and the rule when mask, log-probabilities and spans disagree, when a
  // log-probability is not a finite number <= 0, or when the reward is outside [0, 1].
  void check() const;
  bool operator==(const Trajectory&) const = default;

 private:
  void append(std::span<const std::int32_t> ids, Source source, std::span<const float> ids_logprobs,
              std::uint64_t version);
};

// A batch in which every grading failed says nothing about the model. Throws Error{io} with the first failure when some
// failed and none succeeded; `what` names the batch.
void check_gradings(std::span<const Trajectory> trajectories, const std::string& what);

}  // namespace tidelock::rl
