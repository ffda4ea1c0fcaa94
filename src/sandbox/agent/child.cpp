// What runs in the agent's child processes: commands without privileges, and file operations.

#include <fcntl.h>
#include <grp.h>
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
namespace {

// The same numbers as FileExit in sandbox/guest.hpp: the program reads both with one table.
constexpr int kNotFound = 10, kInvalid = 11, kExhausted = 12, kIo = 13;

[[noreturn]] void quit(int code, const std::string& text) {
  dprintf(STDERR_FILENO, "%s\n", text.c_str());
  _exit(code);
}

[[noreturn]] void quit_file(const char* step, const std::string& path, int error) {
  int code = kIo;
  if (error == ENOENT) {
    code = kNotFound;
  } else if (error == ENOSPC || error == EDQUOT || error == EFBIG || error == ENOMEM) {
    code = kExhausted;
  } else if (error == ELOOP || error == EISDIR || error == ENOTDIR || error == ENXIO || error == ENAMETOOLONG ||
             error == EINVAL || error == ETXTBSY) {
    code = kInvalid;
  }
  quit(code, std::string(step) + " " + path + ": " + strerror(error));
}

std::vector<char*> pointers(std::string& texts) {
  std::vector<char*> out;
  for (std::size_t at = 0; at < texts.size(); at += strlen(&texts[at]) + 1) {
    out.push_back(&texts[at]);
  }
  out.push_back(nullptr);
  return out;
}

[[noreturn]] void become_command(const vm::GuestRequest& request) {
  std::string arguments = request.arguments, environment = request.environment;
  const std::vector<char*> argv = pointers(arguments), envp = pointers(environment);
  umask(022);
  const rlimit limit{request.processes, request.processes};
  if (argv[0] == nullptr || setrlimit(RLIMIT_NPROC, &limit) != 0 || setgroups(0, nullptr) != 0 ||
      setresgid(kUser, kUser, kUser) != 0 || setresuid(kUser, kUser, kUser) != 0 ||
      prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
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

void make_parents(const std::string& path) {
  for (std::size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1)) {
    const std::string folder = path.substr(0, slash);
    if (mkdir(folder.c_str(), 0755) == 0) {
      if (chown(folder.c_str(), kUser, kUser) != 0) {
        quit_file("make folder", folder, errno);
      }
    } else if (errno != EEXIST) {
      quit_file("make folder", folder, errno);
    }
  }
}

void copy(int from, int to, const char* step, const std::string& path, std::uint64_t limit) {
  static char buffer[64U << 10];
  std::uint64_t total = 0;
  for (ssize_t got = 0; (got = read(from, buffer, sizeof buffer)) != 0;) {
    if (got < 0) {
      quit_file(step, path, errno);
    }
    total += static_cast<std::uint64_t>(got);
    if (total > limit) {
      quit(kExhausted, std::string(step) + " " + path + ": more than the " + std::to_string(limit) + " bytes expected");
    }
    for (ssize_t done = 0; done < got;) {
      const ssize_t put = write(to, buffer + done, static_cast<std::size_t>(got - done));
      if (put <= 0) {
        quit_file(step, path, put == 0 ? ENOSPC : errno);
      }
      done += put;
    }
  }
}

[[noreturn]] void write_file(const vm::GuestRequest& request) {
  make_parents(request.path);
  const char* path = request.path.c_str();
  const bool is_new = access(path, F_OK) != 0;
  const int file = open(path, O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0600);
  struct stat info {};
  if (file < 0 || fstat(file, &info) != 0) {
    quit_file("write", request.path, errno);
  }
  if (!S_ISREG(info.st_mode)) {
    quit(kInvalid, "write " + request.path + ": not a regular file");
  }
  if ((is_new && fchown(file, kUser, kUser) != 0) || fchmod(file, request.mode & 0777) != 0 ||
      ftruncate(file, 0) != 0) {
    quit_file("write", request.path, errno);
  }
  copy(STDIN_FILENO, file, "write", request.path, UINT64_MAX);
  _exit(0);
}

[[noreturn]] void read_file(const vm::GuestRequest& request) {
  const int file = open(request.path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  struct stat info {};
  if (file < 0 || fstat(file, &info) != 0) {
    quit_file("read", request.path, errno);
  }
  if (!S_ISREG(info.st_mode)) {
    quit(kInvalid, "read " + request.path + ": not a regular file");
  }
  copy(file, STDOUT_FILENO, "read", request.path, request.limit);
  _exit(0);
}

}  // namespace

void run_child(const vm::GuestRequest& request) {
  setsid();
  close_range(3, ~0U, 0);
  for (int signal = 1; signal < NSIG; ++signal) {
    std::signal(signal, SIG_DFL);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  switch (request.kind) {
    case vm::GuestKind::command:
      become_command(request);
    case vm::GuestKind::write_file:
      write_file(request);
    case vm::GuestKind::read_file:
      read_file(request);
  }
  _exit(126);
}

}  // namespace tidelock::sandbox::agent
