// What runs in the agent's child processes: commands, without privileges unless they are asked for as root.

#include <fcntl.h>
#include <grp.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "sandbox/agent/agent.hpp"

namespace tidelock::sandbox::agent {

std::vector<char*> pointers(std::string& texts) {
  std::vector<char*> out;
  for (std::size_t at = 0; at < texts.size(); at += strlen(&texts[at]) + 1) {
    out.push_back(&texts[at]);
  }
  out.push_back(nullptr);
  return out;
}

namespace {

[[noreturn]] void become_command(const vm::GuestRequest& request) {
  std::string arguments = request.arguments, environment = request.environment;
  const std::vector<char*> argv = pointers(arguments), envp = pointers(environment);
  umask(022);
  const rlimit limit{request.processes, request.processes};
  const bool root = (request.flags & vm::kAsRoot) != 0;
  if (argv[0] == nullptr || setrlimit(RLIMIT_NPROC, &limit) != 0 || setgroups(0, nullptr) != 0 ||
      (!root && (setresgid(kUser, kUser, kUser) != 0 || setresuid(kUser, kUser, kUser) != 0 ||
                 prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0))) {
    quit(126, std::string("cannot give up privileges: ") + strerror(errno));
  }
  if (chdir(request.path.c_str()) != 0) {
    quit(126, "cannot enter " + request.path + ": " + strerror(errno));
  }
  environ = const_cast<char**>(envp.data());
  execvp(argv[0], argv.data());
  const int error = errno;
  quit(error == ENOENT ? 127 : 126, std::string("cannot run ") + argv[0] + ": " + strerror(error));
}

// The terminal that controls the new session, and the only way to speak to it.
void enter_terminal(const std::string& path, uid_t owner) {
  const int fd = open(path.c_str(), O_RDWR | O_NOCTTY);
  if (fd < 0 || ioctl(fd, TIOCSCTTY, 0) != 0 || fchown(fd, owner, owner) != 0) {
    _exit(126);  // there is nowhere to say why
  }
  dup2(fd, 0), dup2(fd, 1), dup2(fd, 2);
}

}  // namespace

void run_child(const vm::GuestRequest& request, const std::string& terminal) {
  setsid();
  if (!terminal.empty()) {
    enter_terminal(terminal, (request.flags & vm::kAsRoot) != 0 ? 0 : kUser);
  }
  close_range(3, ~0U, 0);
  for (int signal = 1; signal < NSIG; ++signal) {
    std::signal(signal, SIG_DFL);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  switch (request.kind) {
    case vm::GuestKind::command:
    case vm::GuestKind::process:
      become_command(request);
    case vm::GuestKind::write_file:
      write_file(request);
    case vm::GuestKind::read_file:
      read_file(request);
    case vm::GuestKind::file_tool:
      run_file_tool(request);
    case vm::GuestKind::watch:
      watch(request);
  }
  _exit(126);
}

}  // namespace tidelock::sandbox::agent
