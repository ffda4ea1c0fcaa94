// Grading: every family, built-in or Harbor, goes through here.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/error.hpp"
#include "model/json.hpp"
#include "rl/task.hpp"

namespace tidelock::rl {
namespace {

constexpr const char* kAnswerPath = "/logs/agent/answer.txt";
constexpr std::uint64_t kRewardLimit = 64 << 10;

// Before anything of the verifier comes in: no process of the agent may be left to read it or to write a reward, and no
// file of the agent's may lie where the verifier's will. (kill -1 spares its caller and the sandbox's init.)
constexpr const char* kEndAgent =
    "kill -9 -1 2>/dev/null; if [ -e /tests ] || [ -e /logs ]; then rm -rf /tests /logs 2>/dev/null; fi; :";

// Runs the verifier and prints which kind of reward it left, then the reward: one process instead of one more for each
// file to look for.
constexpr const char* kRunVerifier = R"(mkdir -p /logs/verifier
"$@" >/logs/verifier/test-stdout.txt 2>&1
code=$?
cd /logs/verifier
if [ -e reward.json ]; then echo json; cat reward.json
elif [ -e reward.txt ]; then echo text; cat reward.txt
else echo none; tail -c 400 test-stdout.txt; fi
exit $code)";

std::string shortened(std::string_view text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
  return text.size() <= 200 ? std::string(text) : fmt::format("...{}", text.substr(text.size() - 200));
}

void end_agent(sandbox::Sandbox& sandbox) {
  sandbox::ExecRequest request;
  request.argv = {"sh", "-c", kEndAgent};
  request.directory = std::string("/");
  if (const auto run = sandbox.exec(request); run.exit_code != 0)
    fail(ErrorCode::io, "sandbox {}: the agent's processes could not be ended: {}", sandbox.id(), run.error);
}

// Puts the number into `result`, or the reason why it is no reward.
void accept(GradeResult& result, double reward, const std::string& where) {
  if (!std::isfinite(reward) || reward < 0 || reward > 1) {
    result.reason = fmt::format("{}: the reward is {}, expected 0..1", where, reward);
    return;
  }
  result.reward = reward;
  result.graded = true;
}

void read_json_reward(GradeResult& result, std::string_view text) {
  const char* where = "/logs/verifier/reward.json";
  model::Json value;
  try {
    value = model::parse_json(text, where, {.bytes = kRewardLimit, .depth = 4});
  } catch (const Error& error) {
    result.reason = error.what();
    return;
  }
  if (value.is_number()) return accept(result, value.get<double>(), where);
  if (!value.is_object() || value.empty()) {
    result.reason = fmt::format("{}: found {}, expected a number or an object of numbers", where, value.type_name());
    return;
  }
  for (const auto& [name, number] : value.items()) {
    if (!number.is_number() || !std::isfinite(number.get<double>())) {
      result.reason = fmt::format("{}: {} is no finite number", where, name);
      return;
    }
    result.detail[name] = number.get<double>();
  }
  const auto named = value.find("reward");
  if (named == value.end() && value.size() > 1) {
    result.reason = fmt::format("{}: {} numbers and none of them is named reward", where, value.size());
    return;
  }
  accept(result, (named == value.end() ? *value.begin() : *named).get<double>(), where);
}

void read_text_reward(GradeResult& result, std::string_view text) {
  const char* where = "/logs/verifier/reward.txt";
  const std::string_view blank = " \t\r\n";
  text.remove_prefix(std::min(text.find_first_not_of(blank), text.size()));
  text = text.substr(0, text.find_last_not_of(blank) + 1);
  double reward = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), reward);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) {
    result.reason = fmt::format("{}: found \"{}\", expected a number", where, shortened(text));
    return;
  }
  accept(result, reward, where);
}

}  // namespace

GradeResult grade(sandbox::Sandbox& sandbox, const Episode& episode, std::string_view answer) {
  end_agent(sandbox);
  sandbox.write_file(kAnswerPath, answer);
  for (const SandboxFile& file : episode.verifier.files) sandbox.write_file(file.path, file.content, file.mode);
  sandbox::ExecRequest request;
  request.argv = {"sh", "-c", kRunVerifier, "sh"};
  request.argv.insert(request.argv.end(), episode.verifier.command.begin(), episode.verifier.command.end());
  request.environment = episode.verifier.environment;
  request.directory = episode.verifier.directory;
  request.timeout = episode.verifier.timeout;
  request.output_limit = kRewardLimit;
  const sandbox::ExecResult run = sandbox.exec(request);
  GradeResult result;
  result.seconds = run.seconds;
  if (run.timed_out) {
    result.reason = fmt::format("the verifier did not end within {} ms", episode.verifier.timeout.count());
    return result;
  }
  const std::string_view printed = run.output;
  const std::string_view kind = printed.substr(0, printed.find('\n'));
  const std::string_view reward = printed.substr(std::min(kind.size() + 1, printed.size()));
  if (run.truncated)
    result.reason = fmt::format("the reward in /logs/verifier is longer than {} bytes", kRewardLimit);
  else if (kind == "json")
    read_json_reward(result, reward);
  else if (kind == "text")
    read_text_reward(result, reward);
  else
    result.reason = fmt::format("the verifier ended with exit code {} and left no reward in /logs/verifier: {}",
                                run.exit_code, shortened(kind == "none" ? reward : run.error));
  return result;
}

}  // namespace tidelock::rl
