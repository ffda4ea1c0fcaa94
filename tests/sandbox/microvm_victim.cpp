#include "sandbox/microvm_victim.hpp"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>

#include "base/error.hpp"
#include "sandbox/microvm_support.hpp"
#include "sandbox/vm/store.hpp"
#include "sandbox/wire.hpp"

extern char** environ;

namespace tidelock::sandbox::testing {

void perform(vm::Store& store, const std::string& operation, const std::string& subject) {
  const std::map<std::string, std::function<void()>> operations{
      {"start", [] {}},
      {"create", [&] { store.create(small()); }},
      {"pause", [&] { store.pause(subject); }},
      {"resume", [&] { store.resume(subject); }},
      {"checkpoint", [&] { store.checkpoint(subject); }},
      {"fork", [&] { store.fork(subject, 2); }},
      {"snapshot", [&] { store.snapshot(subject, "new"); }},
      {"revert", [&] { store.revert(subject, ""); }},
      {"remove", [&] { store.remove(subject); }},
      {"drop-snapshot", [&] { store.remove_snapshot(subject); }},
      {"name-snapshot", [&] { store.name_snapshot(subject, "new"); }},
      {"set-defaults",
       [&] {
         store.set_defaults(subject, {{{"A", "b"}}, "/", true});
       }},
  };
  operations.at(operation)();
}

std::optional<std::string> kill_microvm_program(const std::filesystem::path& directory, const std::string& operation,
                                                int number, const std::string& subject) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    fail_errno("make", "a pipe");
  }
  const FileDescriptor ours(ends[0]);
  std::string texts[] = {"/proc/self/exe", "microvm-victim",       directory.string(),
                         operation,        std::to_string(number), subject};
  char* argv[] = {texts[0].data(), texts[1].data(), texts[2].data(), texts[3].data(),
                  texts[4].data(), texts[5].data(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, argv[0], &actions, nullptr, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (error != 0) {
    fail(ErrorCode::io, "cannot start {}: {}", argv[0], std::strerror(error));
  }
  int status = 0;
  waitpid(pid, &status, 0);
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) {
    char step[100];
    const ssize_t got = read(ours.get(), step, sizeof step);
    return std::string(step, static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    fail(ErrorCode::invalid_argument, "{} of {} failed in the other program", operation, subject);
  }
  return std::nullopt;
}

int microvm_victim_main(int argc, char** argv) {
  if (argc != 6) {
    return 2;
  }
  const std::string operation = argv[3], subject = argv[5];
  static std::atomic<int> left;  // steps until the end; steps may be taken on several threads
  static std::atomic<bool> counting;
  left = std::atoi(argv[4]);
  counting = operation == "start";
  MicrovmOptions options = options_for(argv[2]);
  options.at_step = [](const char* step) {
    if (counting && left-- == 0) {
      (void)!write(STDOUT_FILENO, step, std::strlen(step));
      raise(SIGKILL);
    }
  };
  try {
    vm::Store store(options);
    counting = true;
    perform(store, operation, subject);
    return 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "victim: %s\n", error.what());
    return 1;
  }
}

}  // namespace tidelock::sandbox::testing
