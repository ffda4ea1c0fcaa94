#include "rl/tool.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "model/json.hpp"

namespace tidelock::rl {
namespace {

// The bytes of the UTF-8 sequence that starts at text[i], or 0 when none does.
std::size_t sequence_length(std::string_view text, std::size_t i) {
  const auto byte = [&](std::size_t j) { return static_cast<unsigned char>(text[j]); };
  const unsigned char lead = byte(i);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xF0 && lead <= 0xF4  ? 4
                             : lead >= 0xE0 && lead < 0xF0 ? 3
                             : lead >= 0xC2 && lead < 0xE0 ? 2
                                                           : 0;
  if (length == 0 || i + length > text.size()) return 0;
  for (std::size_t j = 1; j < length; ++j)
    if ((byte(i + j) & 0xC0) != 0x80) return 0;
  const unsigned char second = byte(i + 1);
  // Overlong forms, surrogates and what lies above U+10FFFF.
  if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) || (lead == 0xF0 && second < 0x90) ||
      (lead == 0xF4 && second > 0x8F))
    return 0;
  return length;
}

std::string valid_utf8(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = sequence_length(text, i);
    if (length == 0)
      out += "\xEF\xBF\xBD";
    else
      out += text.substr(i, length);
    i += std::max<std::size_t>(length, 1);
  }
  return out;
}

// One stream as shown: cut, made valid, without its last newline.
std::string shown(std::string_view text, std::uint64_t limit) {
  const bool cut = text.size() > limit;
  if (cut) {
    std::size_t end = limit;
    // Not within a sequence: step back over at most three continuation bytes.
    for (int i = 0; i < 3 && end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80; ++i) --end;
    text = text.substr(0, end);
  }
  if (text.ends_with('\n')) text.remove_suffix(1);
  std::string out = valid_utf8(text);
  if (cut) out += fmt::format("\n[cut at {} bytes]", limit);
  return out;
}

void add_line(std::string& text, const std::string& line) {
  if (line.empty()) return;
  if (!text.empty()) text += '\n';
  text += line;
}

ToolResult malformed(const std::string& why) {
  ToolResult result;
  result.malformed = true;
  result.text = "bad call: " + why;
  return result;
}

}  // namespace

model::ToolSpec shell_tool() {
  return {.json = R"({"type":"function","function":{"name":"shell","description":"Run a command.","parameters":)"
                  R"({"type":"object","properties":{"command":{"type":"string"}},"required":["command"]}}})"};
}

std::string shell_arguments(std::string_view command) {
  return fmt::format("{{\"command\":{}}}", model::json_quote(command));
}

std::string observation_text(const sandbox::ExecResult& result, std::chrono::milliseconds timeout,
                             std::uint64_t limit) {
  std::string text = shown(result.output, limit);
  add_line(text, shown(result.error, limit));
  if (result.timed_out)
    add_line(text, fmt::format("[no end within {} s]", static_cast<double>(timeout.count()) / 1000));
  else if (result.exit_code != 0)
    add_line(text, fmt::format("exit {}", result.exit_code));
  return text;
}

ToolResult run_shell_tool(sandbox::Sandbox& sandbox, const Episode& episode, std::string_view arguments_json,
                          std::uint64_t limit) {
  model::Json arguments;
  try {
    arguments = model::parse_json(arguments_json, "arguments", {.bytes = 64 << 10, .depth = 8});
  } catch (const Error&) {
    return malformed("the arguments are not JSON");
  }
  if (!arguments.is_object()) return malformed("the arguments are not an object");
  const auto found = arguments.find("command");
  if (found == arguments.end() || !found->is_string()) return malformed("command is missing");
  if (arguments.size() > 1) return malformed("command is the only argument");
  const std::string command = found->get<std::string>();
  if (command.find('\0') != std::string::npos) return malformed("command holds a NUL");

  sandbox::ExecRequest request;
  request.argv = {"sh", "-c", command};
  request.environment = episode.environment;
  request.directory = episode.directory;
  request.timeout = episode.command_timeout;
  request.output_limit = limit + 1;  // one more tells that there was more
  const sandbox::ExecResult run = sandbox.exec(request);
  ToolResult result;
  result.text = observation_text(run, episode.command_timeout, limit);
  result.timed_out = run.timed_out;
  result.exit_code = run.exit_code;
  result.seconds = run.seconds;
  return result;
}

}  // namespace tidelock::rl
