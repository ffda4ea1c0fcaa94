// Grading: every family, built-in or Harbor, goes through here.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "base/error.hpp"
#include "model/json.hpp"
#include "rl/task.hpp"

namespace tidelock::rl {
namespace {

constexpr const char* kAnswerPath = "/logs/agent/answer.txt";
constexpr std::uint64_t kRewardLimit = 64 << 10;

// What a verifier sees as its own: an old reward must not survive, the agent may have written one.
constexpr const char* kRunVerifier =
    "rm -rf /logs/verifier && mkdir -p /logs/verifier && exec \"$@\" >/logs/verifier/test-stdout.txt 2>&1";

std::string shortened(std::string_view text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
  return text.size() <= 200 ? std::string(text) : fmt::format("...{}", text.substr(text.size() - 200));
}

std::optional<std::string> read_if_there(sandbox::Sandbox& sandbox, const std::string& path) {
  try {
    return sandbox.read_file(path, kRewardLimit);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::not_found) return std::nullopt;
    throw;
  }
}

void clean(sandbox::Sandbox& sandbox) {
  sandbox::ExecRequest request;
  request.argv = {"rm", "-rf", "/tests", "/logs"};
  request.directory = std::string("/");
  sandbox.exec(request);
}

void upload(sandbox::Sandbox& sandbox, const Episode& episode, std::string_view answer) {
  sandbox.write_file(kAnswerPath, answer);
  for (const SandboxFile& file : episode.verifier.files) sandbox.write_file(file.path, file.content, file.mode);
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

void read_json_reward(GradeResult& result, const std::string& text) {
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
  if (episode.verifier.clean_tests) clean(sandbox);
  try {
    upload(sandbox, episode, answer);
  } catch (const Error&) {
    // The agent put something in the way (a file named /logs, say). What cannot be written even then is thrown.
    clean(sandbox);
    upload(sandbox, episode, answer);
  }
  sandbox::ExecRequest request;
  request.argv = {"sh", "-c", kRunVerifier, "sh"};
  request.argv.insert(request.argv.end(), episode.verifier.command.begin(), episode.verifier.command.end());
  request.environment = episode.verifier.environment;
  request.directory = episode.verifier.directory;
  request.timeout = episode.verifier.timeout;
  const sandbox::ExecResult run = sandbox.exec(request);
  GradeResult result;
  result.seconds = run.seconds;
  if (run.timed_out) {
    result.reason = fmt::format("the verifier did not end within {} ms", episode.verifier.timeout.count());
    return result;
  }
  if (const auto json = read_if_there(sandbox, "/logs/verifier/reward.json")) {
    read_json_reward(result, *json);
  } else if (const auto text = read_if_there(sandbox, "/logs/verifier/reward.txt")) {
    read_text_reward(result, *text);
  } else {
    const auto printed = read_if_there(sandbox, "/logs/verifier/test-stdout.txt");
    result.reason = fmt::format("the verifier ended with exit code {} and left no reward in /logs/verifier: {}",
                                run.exit_code, shortened(printed.value_or(run.error)));
  }
  return result;
}

}  // namespace tidelock::rl
