#include "sandbox/microvm_victim.hpp"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "base/error.hpp"
#include "sandbox/vm/store.hpp"

extern char** environ;

namespace tidelock::sandbox::testing {

bool kill_microvm_program(const std::filesystem::path& directory, const std::string& operation, const std::string& step,
                          const std::string& id) {
  std::string texts[] = {"/proc/self/exe", "microvm-victim", directory.string(), operation, step, id};
  char* argv[] = {texts[0].data(), texts[1].data(), texts[2].data(), texts[3].data(),
                  texts[4].data(), texts[5].data(), nullptr};
  pid_t pid = 0;
  if (posix_spawn(&pid, argv[0], nullptr, nullptr, argv, environ) != 0) {
    return false;
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

int microvm_victim_main(int argc, char** argv) {
  if (argc != 6) {
    return 2;
  }
  static std::string wanted;
  wanted = argv[4];
  const std::string operation = argv[3], id = argv[5];
  MicrovmOptions options;
  options.directory = argv[2];
  options.at_step = [](const char* step) {
    if (wanted == step) {
      raise(SIGKILL);
    }
  };
  try {
    vm::Store store(options);
    if (operation == "pause") {
      store.pause(id);
    } else if (operation == "resume") {
      store.resume(id);
    } else if (operation == "checkpoint") {
      store.checkpoint(id);
    } else if (operation == "fork") {
      store.fork(id, 2);
    } else if (operation == "revert") {
      store.revert(id, "");
    } else if (operation == "remove") {
      store.remove(id);
    } else if (operation == "create") {
      Spec spec;
      spec.limits.memory_bytes = 128ULL << 20;
      spec.limits.disk_bytes = 32ULL << 20;
      store.create(spec);
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "victim: %s\n", error.what());
  }
  return 1;  // it came to the end: the step was never reached
}

}  // namespace tidelock::sandbox::testing
