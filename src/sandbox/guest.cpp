#include "sandbox/guest.hpp"

#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/openat2.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "sandbox/filter.hpp"

extern char** environ;

namespace tidelock::sandbox {
namespace {

constexpr rlim_t kOpenFiles = 1024;
constexpr rlim_t kLockedBytes = 64U << 10;

[[noreturn]] void quit(int code, const std::string& message) {
  const std::string line = "tidelock: " + message + "\n";
  [[maybe_unused]] const ssize_t ignored = write(STDERR_FILENO, line.data(), line.size());
  _exit(code);
}

bool set_limit(int what, rlim_t value) {
  const rlimit limit{value, value};
  return setrlimit(static_cast<__rlimit_resource>(what), &limit) == 0;
}

bool set_limits(const InitPlan& plan) {
  return set_limit(RLIMIT_CORE, 0) && set_limit(RLIMIT_NOFILE, kOpenFiles) && set_limit(RLIMIT_MEMLOCK, kLockedBytes) &&
         set_limit(RLIMIT_FSIZE, plan.limits.disk_bytes) &&
         set_limit(RLIMIT_NPROC, static_cast<rlim_t>(plan.limits.processes)) &&
         (!plan.limit_memory || set_limit(RLIMIT_AS, plan.limits.memory_bytes));
}

bool become_user(const InitPlan& plan) {
  // In a user namespace the process is the user already, and groups cannot be set.
  if (!plan.user_namespace && (setgroups(0, nullptr) != 0 || setresgid(plan.uid, plan.uid, plan.uid) != 0 ||
                               setresuid(plan.uid, plan.uid, plan.uid) != 0)) {
    return false;
  }
  return limit_capabilities(0) && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0;
}

void reset_signals() {
  for (int signal = 1; signal < NSIG; ++signal) {
    std::signal(signal, SIG_DFL);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

int open_inside(int root, const char* path, std::uint64_t flags, std::uint64_t mode = 0) {
  open_how how{};
  how.flags = flags | O_CLOEXEC;
  how.mode = mode;
  how.resolve = RESOLVE_NO_XDEV | RESOLVE_NO_MAGICLINKS;
  int fd = -1;
  int attempts = 0;
  do {  // EAGAIN: something was renamed during the walk
    fd = static_cast<int>(syscall(SYS_openat2, root, path, &how, sizeof how));
  } while (fd < 0 && errno == EAGAIN && ++attempts < 100);
  return fd;
}

FileExit exit_of(int error) {
  switch (error) {
    case ENOENT:
      return FileExit::not_found;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case ENOMEM:
      return FileExit::exhausted;
    case EXDEV:  // leaves the root overlay
    case ELOOP:
    case EISDIR:
    case ENOTDIR:
    case ENXIO:  // a pipe without a reader, a socket
    case ENAMETOOLONG:
    case EINVAL:
    case ETXTBSY:
      return FileExit::invalid;
    default:
      return FileExit::io;
  }
}

[[noreturn]] void quit_file(const char* step, const std::string& path, int error) {
  const char* reason = error == EXDEV ? "leads out of the sandbox's own files" : std::strerror(error);
  quit(static_cast<int>(exit_of(error)), std::string(step) + " " + path + ": " + reason);
}

FileDescriptor open_root(const std::string& path) {
  FileDescriptor root(open("/", O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!root) {
    quit_file("open the root for", path, errno);
  }
  return root;
}

void make_parents(int root, const InitPlan& plan, const std::string& path) {
  for (std::size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1)) {
    const std::string folder = path.substr(0, slash);
    const FileDescriptor known(open_inside(root, folder.c_str(), O_PATH | O_DIRECTORY));
    if (known) {
      continue;
    }
    if (errno != ENOENT) {
      quit_file("enter", folder, errno);
    }
    const std::size_t last = folder.rfind('/');
    const std::string above = last == 0 ? "/" : folder.substr(0, last), name = folder.substr(last + 1);
    const FileDescriptor parent(open_inside(root, above.c_str(), O_PATH | O_DIRECTORY));
    if (!parent || (mkdirat(parent.get(), name.c_str(), 0755) != 0 && errno != EEXIST) ||
        fchownat(parent.get(), name.c_str(), plan.uid, plan.uid, AT_SYMLINK_NOFOLLOW) != 0) {
      quit_file("make folder", folder, errno);
    }
  }
}

}  // namespace

bool limit_capabilities(std::uint64_t keep) noexcept {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  std::array<__user_cap_data_struct, 2> data{};
  const auto low = static_cast<std::uint32_t>(keep), high = static_cast<std::uint32_t>(keep >> 32);
  data[0] = {low, low, 0};
  data[1] = {high, high, 0};
  return prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) == 0 &&
         syscall(SYS_capset, &header, data.data()) == 0;
}

void become_command(const InitPlan& plan, const RunRequest& request) {
  setsid();
  if (close_range(3, ~0U, 0) != 0) {
    quit(126, std::string("cannot close descriptors: ") + std::strerror(errno));
  }
  reset_signals();
  umask(022);
  // Init is the last to be killed when memory is short; what it starts is the first. In a user namespace init could not
  // exempt itself, and its children have inherited what it set.
  const FileDescriptor score(plan.user_namespace ? -1 : open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC));
  if (!plan.user_namespace && (!score || write(score.get(), "500", 3) != 3)) {
    quit(126, std::string("cannot make itself killable: ") + std::strerror(errno));
  }
  std::vector<char*> argv, environment;
  for (const std::string& text : request.argv) {
    argv.push_back(const_cast<char*>(text.c_str()));
  }
  for (const std::string& text : request.environment) {
    environment.push_back(const_cast<char*>(text.c_str()));
  }
  argv.push_back(nullptr);
  environment.push_back(nullptr);
  if (!become_user(plan) || !set_limits(plan)) {
    quit(126, std::string("cannot give up privileges: ") + std::strerror(errno));
  }
  if (chdir(request.path.c_str()) != 0) {
    quit(126, "cannot enter " + request.path + ": " + std::strerror(errno));
  }
  if (!install_filter(*plan.filter)) {
    quit(126, std::string("cannot install the system call filter: ") + std::strerror(errno));
  }
  environ = environment.data();
  execvp(argv[0], argv.data());
  const int error = errno;
  quit(error == ENOENT ? 127 : 126, std::string("cannot run ") + argv[0] + ": " + std::strerror(error));
}

void write_guest_file(const InitPlan& plan, const RunRequest& request) {
  const FileDescriptor root = open_root(request.path);
  make_parents(root.get(), plan, request.path);
  const char* path = request.path.c_str();
  bool is_new = true;
  FileDescriptor file(open_inside(root.get(), path, O_WRONLY | O_CREAT | O_EXCL | O_NONBLOCK | O_NOCTTY, 0600));
  if (!file && errno == EEXIST) {
    is_new = false;
    file.reset(open_inside(root.get(), path, O_WRONLY | O_NONBLOCK | O_NOCTTY));
  }
  struct stat info {};
  if (!file || fstat(file.get(), &info) != 0) {
    quit_file("write", request.path, errno);
  }
  if (!S_ISREG(info.st_mode)) {
    quit(static_cast<int>(FileExit::invalid), "write " + request.path + ": not a regular file");
  }
  if ((is_new && fchown(file.get(), plan.uid, plan.uid) != 0) || fchmod(file.get(), request.mode & 0777) != 0 ||
      ftruncate(file.get(), 0) != 0) {
    quit_file("write", request.path, errno);
  }
  std::vector<char> buffer(256U << 10);
  for (ssize_t got = 0; (got = read(STDIN_FILENO, buffer.data(), buffer.size())) != 0;) {
    if (got < 0) {
      quit_file("receive", request.path, errno);
    }
    for (ssize_t done = 0; done < got;) {
      const ssize_t put = write(file.get(), buffer.data() + done, static_cast<std::size_t>(got - done));
      if (put <= 0) {
        quit_file("write", request.path, put == 0 ? ENOSPC : errno);
      }
      done += put;
    }
  }
  _exit(static_cast<int>(FileExit::done));
}

void read_guest_file(const RunRequest& request) {
  const FileDescriptor root = open_root(request.path);
  const FileDescriptor file(open_inside(root.get(), request.path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY));
  struct stat info {};
  if (!file || fstat(file.get(), &info) != 0) {
    quit_file("read", request.path, errno);
  }
  if (!S_ISREG(info.st_mode)) {
    quit(static_cast<int>(FileExit::invalid), "read " + request.path + ": not a regular file");
  }
  std::vector<char> buffer(256U << 10);
  std::uint64_t total = 0;
  for (ssize_t got = 0; (got = read(file.get(), buffer.data(), buffer.size())) != 0;) {
    if (got < 0) {
      quit_file("read", request.path, errno);
    }
    total += static_cast<std::uint64_t>(got);
    if (total > request.limit) {
      quit(static_cast<int>(FileExit::exhausted), "read " + request.path + ": " + std::to_string(info.st_size) +
                                                      " bytes, at most " + std::to_string(request.limit) + " expected");
    }
    for (ssize_t done = 0; done < got;) {
      const ssize_t put = write(STDOUT_FILENO, buffer.data() + done, static_cast<std::size_t>(got - done));
      if (put <= 0) {
        quit_file("send", request.path, errno);
      }
      done += put;
    }
  }
  _exit(static_cast<int>(FileExit::done));
}

}  // namespace tidelock::sandbox
