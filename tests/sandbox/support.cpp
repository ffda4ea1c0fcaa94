#include "sandbox/support.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

#include "sandbox/container.hpp"

extern char** environ;

namespace tidelock::sandbox::testing {

ExecRequest command(std::vector<std::string> argv) {
  ExecRequest request;
  request.argv = std::move(argv);
  return request;
}

ExecRequest shell(const std::string& script, std::chrono::milliseconds timeout) {
  ExecRequest request = command({"sh", "-c", script});
  request.timeout = timeout;
  return request;
}

ErrorCode code_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "no error was thrown";
  return ErrorCode::internal;
}

Folder::Folder() {
  std::string name = (fs::temp_directory_path() / "sandbox-test-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) {
    fail_errno("make", name);
  }
  path_ = name;
  fs::permissions(path_, fs::perms(0755));
}

Folder::~Folder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::string slurp(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string unique_marker() {
  static int counter = 0;
  // A number, so that it can be the argument of `sleep`.
  return fmt::format("7{}0{}3", getpid(), ++counter);
}

std::set<int> processes_with(const std::string& marker) {
  std::set<int> found;
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc")) {
    const int pid = std::atoi(entry.path().filename().c_str());
    if (pid > 0 && pid != getpid() && slurp(entry.path() / "cmdline").find(marker) != std::string::npos) {
      found.insert(pid);
    }
  }
  return found;
}

bool alive(int pid) {
  const std::string stat = slurp("/proc/" + std::to_string(pid) + "/stat");
  const std::size_t paren = stat.rfind(')');
  return paren != std::string::npos && stat[paren + 2] != 'Z';
}

long ticks_of(const std::string& marker) {
  long total = 0;
  for (const int pid : processes_with(marker)) {
    const std::string stat = slurp("/proc/" + std::to_string(pid) + "/stat");
    std::istringstream fields(stat.substr(std::min(stat.size(), stat.rfind(')') + 1)));
    std::string skipped;
    for (int i = 3; i < 14; ++i) {  // utime and stime are the fields 14 and 15; 3 is the first after the name
      fields >> skipped;
    }
    long user = 0, system = 0;
    fields >> user >> system;
    total += user + system;
  }
  return total;
}

void expect_freeze_works(Sandbox& box) {
  const std::string marker = unique_marker();
  box.exec(shell("sh -c 'while :; do :; done' " + marker + " > /dev/null 2>&1 &"));
  const auto runs = [&] {
    const long before = ticks_of(marker);
    return eventually([&] { return ticks_of(marker) > before; });
  };
  EXPECT_TRUE(runs());
  box.freeze();
  std::this_thread::sleep_for(50ms);
  const long still = ticks_of(marker);
  std::this_thread::sleep_for(500ms);
  EXPECT_EQ(ticks_of(marker), still);
  box.thaw();
  EXPECT_TRUE(runs());
  box.freeze();
  EXPECT_EQ(box.exec(shell("echo awake")).output, "awake\n");  // exec thaws
  EXPECT_TRUE(runs());
  box.exec(shell("kill -9 -1"));
}

std::vector<std::string> runs_under(const fs::path& base) {
  std::vector<std::string> runs;
  for (const fs::directory_entry& entry : fs::directory_iterator(base)) {
    if (entry.path().filename().string().starts_with("tidelock-sandbox-")) {
      runs.push_back(entry.path().filename().string());
    }
  }
  return runs;
}

std::vector<fs::path> cgroups() {
  for (;;) {
    std::vector<fs::path> found;
    std::error_code vanished;  // others make and remove cgroups while we walk: then the walk starts again
    fs::recursive_directory_iterator at("/sys/fs/cgroup", fs::directory_options::skip_permission_denied, vanished);
    for (; !vanished && at != fs::recursive_directory_iterator(); at.increment(vanished)) {
      found.push_back(at->path());
    }
    if (!vanished) {
      return found;
    }
  }
}

std::vector<std::string> traces_of(const fs::path& base) {
  static std::set<std::string> seen;  // a run's folder may be gone when its cgroups are not
  std::vector<std::string> traces;
  for (const std::string& run : runs_under(base)) {
    traces.push_back("folder " + run);
    seen.insert(run);
  }
  for (const fs::path& cgroup : cgroups()) {
    if (seen.contains(cgroup.filename().string())) {
      traces.push_back("cgroup " + cgroup.string());
    }
  }
  std::istringstream mounts(slurp("/proc/self/mountinfo"));
  for (std::string line; std::getline(mounts, line);) {
    if (line.find(base.string()) != std::string::npos) {
      traces.push_back("mount " + line);
    }
  }
  return traces;
}

bool eventually(const std::function<bool()>& condition, std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) {
      return false;
    }
    std::this_thread::sleep_for(5ms);
  }
  return true;
}

Victim::Victim(const fs::path& base, const std::string& marker) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    fail_errno("make", "a pipe");
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  std::string name = "test_sandbox", verb = "victim", folder = base.string(), mark = marker;
  char* argv[] = {name.data(), verb.data(), folder.data(), mark.data(), nullptr};
  const int error = posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  std::string text;
  char byte = 0;
  while (error == 0 && read(ends[0], &byte, 1) == 1 && byte != '\n') {
    text += byte;
  }
  close(ends[0]);
  helper_pid_ = std::atoi(text.c_str());
  if (error != 0 || helper_pid_ <= 0) {
    fail(ErrorCode::internal, "the victim did not come up: {}", text);
  }
}

void Victim::kill_now() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
}

Victim::~Victim() {
  kill_now();
}

int victim_main(int argc, char** argv) {
  if (argc != 4) {
    return 2;
  }
  ContainerOptions options;
  options.directory = argv[2];
  ContainerRuntime runtime(options, Features{});
  std::vector<std::unique_ptr<Sandbox>> boxes;
  for (int i = 0; i < 2; ++i) {
    boxes.push_back(runtime.create({}));
    boxes.back()->exec(shell("sleep " + std::string(argv[3]) + " & setsid sleep " + argv[3] + " &"));
  }
  boxes[1]->freeze();
  std::cout << runtime.helper().pid() << std::endl;
  while (true) {
    pause();
  }
}

}  // namespace tidelock::sandbox::testing
