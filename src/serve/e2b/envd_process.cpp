// Processes: process.Process, but for what streams; whose rights a call has; what a sandbox uses.
#include <signal.h>

#include <sstream>

#include "base/base.hpp"
#include "serve/e2b/envd.hpp"
#include "serve/e2b/text.hpp"

namespace tidelock::serve::e2b {
namespace {

const Json& member(const Json& message, const char* name) {
  static const Json none;
  const auto found = message.find(name);
  return found == message.end() ? none : *found;
}

std::string text_of(const Json& value, const char* name, const std::string& otherwise = {}) {
  if (value.is_null()) return otherwise;
  if (!value.is_string()) throw RpcError("invalid_argument", fmt::format("{}: expected a string", name));
  return value.get<std::string>();
}

Json config_json(const sandbox::ProcessRequest& request) {
  Json args = Json::array();
  for (std::size_t i = 1; i < request.argv.size(); ++i) args.push_back(request.argv[i]);
  return {{"cmd", request.argv.empty() ? "" : request.argv[0]},
          {"args", args},
          {"envs", request.environment},
          {"cwd", request.directory}};
}

void send_input(sandbox::Sandbox& box, int pid, const Json& message) {
  const Json& input = member(message, "input");
  if (!input.is_object()) throw RpcError("invalid_argument", "input: expected an object");
  const char* to = input.contains("pty") ? "pty" : "stdin";
  const auto bytes = base64_decode(text_of(member(input, to), to));
  if (!bytes) throw RpcError("invalid_argument", fmt::format("input.{}: expected base64", to));
  box.write_input(pid, *bytes);
}

// {"size": {"cols", "rows"}}; JSON leaves out what is 0.
sandbox::WindowSize size_of(const Json& terminal) {
  static const Json none;
  const Json& size = terminal.is_object() ? member(terminal, "size") : none;
  const auto side = [&](const char* name) {
    const Json& value = size.is_object() ? member(size, name) : none;
    if (!value.is_number_integer() || value.get<std::int64_t>() < 1 || value.get<std::int64_t>() > UINT16_MAX)
      throw RpcError("invalid_argument", fmt::format("pty.size.{}: expected 1 to {}", name, UINT16_MAX));
    return value.get<std::uint16_t>();
  };
  return {.rows = side("rows"), .columns = side("cols")};
}

int signal_of(const Json& message) {
  const Json& signal = member(message, "signal");
  if (signal == "SIGNAL_SIGKILL" || signal == 9) return SIGKILL;
  if (signal == "SIGNAL_SIGTERM" || signal == 15) return SIGTERM;
  throw RpcError("invalid_argument", "signal: expected SIGNAL_SIGTERM or SIGNAL_SIGKILL");
}

}  // namespace

bool is_root(const std::string& name) {
  if (name == "root") return true;
  if (name.empty() || name == "user") return false;
  throw RpcError("unauthenticated",
                 fmt::format("there is no user '{}' here; expected root or user", name.substr(0, 60)));
}

bool is_root_of(const std::string& authorization) {
  if (!authorization.starts_with("Basic ")) return false;
  const auto plain = base64_decode(std::string_view(authorization).substr(6));
  if (!plain) throw RpcError("unauthenticated", "Authorization: expected Basic and base64 of NAME:");
  return is_root(plain->substr(0, plain->find(':')));
}

sandbox::ProcessRequest parse_start(const Json& message, const SandboxRecord& record, bool root) {
  const Json& process = member(message, "process");
  if (!process.is_object()) throw RpcError("invalid_argument", "process: expected an object");
  sandbox::ProcessRequest out;
  out.argv.push_back(text_of(member(process, "cmd"), "process.cmd"));
  if (out.argv[0].empty()) throw RpcError("invalid_argument", "process.cmd: expected a program");
  const Json &args = member(process, "args"), &envs = member(process, "envs"), &input = member(message, "stdin");
  if ((!args.is_null() && !args.is_array()) || (!envs.is_null() && !envs.is_object()) ||
      (!input.is_null() && !input.is_boolean()))
    throw RpcError("invalid_argument",
                   "expected process.args as a list, process.envs as an object, stdin as a boolean");
  for (const Json& argument : args) out.argv.push_back(text_of(argument, "process.args"));
  out.environment = record.environment;
  for (const auto& [name, value] : envs.items()) out.environment[name] = text_of(value, "process.envs");
  const std::string cwd = text_of(member(process, "cwd"), "process.cwd");
  out.directory = cwd.empty() ? "" : guest_path(cwd);
  out.root = root;
  out.open_input = input.is_null() || input.get<bool>();  // as envd: absent is true
  out.tag = text_of(member(message, "tag"), "tag");
  if (const Json& terminal = member(message, "pty"); !terminal.is_null()) out.terminal = size_of(terminal);
  return out;
}

sandbox::ProcessRequest with_defaults(sandbox::ProcessRequest request, const sandbox::Defaults& defaults,
                                      bool no_user) {
  if (request.directory.empty()) request.directory = defaults.working_directory();
  request.root = request.root || (no_user && defaults.root);
  return request;
}

int select_process(sandbox::Sandbox& box, const Json& message) {
  const Json& selector = member(message, "process");
  if (selector.is_object() && selector.contains("pid")) {
    const Json& pid = selector["pid"];
    if (!pid.is_number_integer() || pid.get<std::int64_t>() < 1 || pid.get<std::int64_t>() > INT32_MAX)
      throw RpcError("invalid_argument", "process.pid: expected the number of a process");
    return pid.get<int>();
  }
  const std::string tag = selector.is_object() ? text_of(member(selector, "tag"), "process.tag") : "";
  if (tag.empty()) throw RpcError("invalid_argument", "process: expected {\"pid\": NUMBER} or {\"tag\": NAME}");
  for (const sandbox::ProcessInfo& one : box.processes())
    if (one.request.tag == tag) return one.pid;
  throw RpcError("not_found", fmt::format("no process has the tag '{}'", tag.substr(0, 100)));
}

Reply answer_process(sandbox::Sandbox& box, const std::string& method, const Request& request) {
  if (method == "StreamInput") throw RpcError("unimplemented", "StreamInput is not built here; SendInput is");
  const Json message = parse_message(request.body);
  Json out = Json::object();
  if (method == "List") {
    out["processes"] = Json::array();
    for (const sandbox::ProcessInfo& one : box.processes()) {
      Json item{{"config", config_json(one.request)}, {"pid", one.pid}};
      if (!one.request.tag.empty()) item["tag"] = one.request.tag;
      out["processes"].push_back(item);
    }
  } else if (method == "SendSignal") {
    const int number = signal_of(message);
    box.signal(select_process(box, message), number);
  } else if (method == "SendInput") {
    send_input(box, select_process(box, message), message);
  } else if (method == "Update") {
    if (const Json& terminal = member(message, "pty"); !terminal.is_null())
      box.resize(select_process(box, message), size_of(terminal));
  } else if (method == "CloseStdin") {
    box.close_input(select_process(box, message));
  } else {
    throw RpcError("unimplemented", fmt::format("process.Process/{} is not built here", method.substr(0, 60)));
  }
  return json_reply(200, out);
}

Usage parse_usage(const std::string& text) {
  Usage out;
  std::int64_t busy[2] = {0, 0}, total[2] = {0, 0};
  int seen = 0;
  std::int64_t available = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string first;
    words >> first;
    if (first == "cpu" && seen < 2) {
      std::int64_t value = 0;
      for (int field = 0; words >> value; ++field) {
        total[seen] += value;
        busy[seen] += field == 3 || field == 4 ? 0 : value;  // all but idle and waiting for the disk
      }
      ++seen;
    } else if (first == "MemTotal:" || first == "MemAvailable:" || first == "Cached:") {
      std::int64_t kib = 0;
      words >> kib;
      (first == "MemTotal:" ? out.memory_total : first == "Cached:" ? out.memory_cache : available) = kib << 10;
    } else if (line.ends_with(" /")) {
      std::int64_t all = 0, used = 0;
      words >> all >> used;
      out.disk_total = all << 10, out.disk_used = used << 10;
    }
  }
  if (seen < 2 || out.memory_total == 0 || out.disk_total == 0)
    fail(ErrorCode::not_supported,
         "this sandbox's image cannot tell what it uses; needed are sh, cat, df, head, sleep");
  out.memory_used = out.memory_total - available;
  if (total[1] > total[0])
    out.cpu_percent = 100.0 * static_cast<double>(busy[1] - busy[0]) / static_cast<double>(total[1] - total[0]);
  return out;
}

Usage measure(sandbox::Sandbox& box) {
  sandbox::ExecRequest request;
  request.argv = {"sh", "-c", "head -1 /proc/stat; cat /proc/meminfo; df -kP /; sleep 0.1; head -1 /proc/stat"};
  return parse_usage(box.exec(request).output);
}

}  // namespace tidelock::serve::e2b
