#include "sandbox/command.hpp"

#include "base/error.hpp"

namespace tidelock::sandbox {

void need_no_zero_byte(const std::string& text, const char* what) {
  if (text.find('\0') != std::string::npos) {
    fail(ErrorCode::invalid_argument, "sandbox: {} holds a zero byte, which no system call can pass on", what);
  }
}

std::string shell_word(const std::string& text) {
  std::string out = "'";
  for (const char c : text) {
    out += c == '\'' ? "'\\''" : std::string(1, c);
  }
  return out + "'";
}

std::vector<std::string> environment_of(const std::string& sandbox_id, const ExecRequest& request) {
  std::map<std::string, std::string> environment = request.environment;
  environment.insert({{"PATH", "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"},
                      {"HOME", "/root"},
                      {"USER", "agent"},
                      {"LOGNAME", "agent"},
                      {"LANG", "C.UTF-8"},
                      {"TERM", "dumb"}});
  std::vector<std::string> out;
  out.reserve(environment.size());
  for (const auto& [name, value] : environment) {
    if (name.empty() || name.find('=') != std::string::npos) {
      fail(ErrorCode::invalid_argument, "sandbox {}: '{}' cannot name an environment variable", sandbox_id, name);
    }
    need_no_zero_byte(name, "the environment");
    need_no_zero_byte(value, "the environment");
    out.push_back(fmt::format("{}={}", name, value));
  }
  return out;
}

}  // namespace tidelock::sandbox
