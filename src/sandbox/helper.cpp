// The helper process: makes containers, knows which live, removes what they leave. See sandbox.hpp, helper_main.

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/sched.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>

#include "base/error.hpp"
#include "base/log.hpp"
#include "sandbox/cgroup.hpp"
#include "sandbox/filter.hpp"
#include "sandbox/init.hpp"
#include "sandbox/root.hpp"
#include "sandbox/run_directory.hpp"
#include "sandbox/sandbox.hpp"
#include "sandbox/wire.hpp"

namespace tidelock::sandbox {
namespace {

// Users of containers: far above any account, one for each container, so that limits counted per user (pipes, watches,
// locked memory) are not shared between containers. 2^14 runs of 2^16 containers.
constexpr std::uint32_t kFirstUid = 0x40000000;
constexpr std::uint32_t kUsersPerRun = 1U << 16;
constexpr std::uint32_t kUserInNamespace = 1000;

struct Container {
  pid_t pid = 0;
  ContainerCgroup cgroup;
  FileDescriptor gone;  // write end: closed when nothing of the container is left
};

bool write_text(const char* path, const std::string& text) {
  const FileDescriptor file(open(path, O_WRONLY | O_CLOEXEC));
  return file && write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
}

// Whether we may make namespaces and mounts as we are: root, and not a root that is itself confined.
bool may_administer() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  return geteuid() == 0 && syscall(SYS_capget, &header, data) == 0 && (data[0].effective & (1U << CAP_SYS_ADMIN)) != 0;
}

class Helper {
 public:
  Helper(int control, const Hello& hello, FileDescriptor lock, const sigset_t& watched)
      : control_(control),
        run_(hello.run_directory),
        lock_(std::move(lock)),
        signals_(signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK)),
        user_namespace_(!may_administer()),
        filter_(compile_filter()),
        cgroups_(run_.filename().string(), hello.features,
                 [this](const std::filesystem::path& path) { record_cgroup(run_, path); }) {}

  void welcome() const {
    Welcome answer;
    answer.freezer = cgroups_.freezer();
    answer.isolation =
        std::string("namespaces (pid, mount, network, ipc, uts, cgroup") + (user_namespace_ ? ", user" : "") +
        "), own root on an overlay in memory, " + (user_namespace_ ? "" : "a user of its own, ") +
        "no capabilities, no new privileges, system call allow-list, no network; limits: " + cgroups_.describe();
    send_message(control_, MessageType::welcome, encode(answer));
  }

  // Until the program is gone or asks to end.
  void serve() {
    while (true) {
      pollfd entries[2] = {{control_, POLLIN, 0}, {signals_.get(), POLLIN, 0}};
      if (poll(entries, 2, -1) < 0 && errno != EINTR) {
        fail(ErrorCode::io, "sandbox helper: poll: {}", std::strerror(errno));
      }
      if (entries[1].revents != 0 && on_signals()) {
        return;
      }
      if (entries[0].revents != 0) {
        std::optional<Message> message = receive_message(control_);
        if (!message) {
          return;
        }
        handle(*message);
      }
    }
  }

  void end_all() {
    for (auto& [id, container] : containers_) {
      end(container);
    }
    while (!containers_.empty()) {
      int status = 0;
      const pid_t pid = waitpid(-1, &status, 0);
      if (pid > 0) {
        forget(pid);
      } else if (errno != EINTR) {
        break;
      }
    }
    cgroups_.remove();
    remove_run_directory(run_);
  }

 private:
  // True when asked to end.
  bool on_signals() {
    bool stop = false;
    signalfd_siginfo info{};
    while (read(signals_.get(), &info, sizeof info) == sizeof info) {
      stop = stop || info.ssi_signo == SIGTERM;
    }
    int status = 0;
    for (pid_t pid = 0; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
      forget(pid);
    }
    return stop;
  }

  void handle(Message& message) {
    if (message.type == MessageType::create) {
      try {
        create(message);
      } catch (const Error& error) {
        send_message(control_, MessageType::failed, error.what());
      }
    } else if (message.type == MessageType::destroy) {
      const auto found = containers_.find(message.body);
      if (found != containers_.end()) {
        end(found->second);
      }
    } else {
      fail(ErrorCode::corrupt_data, "sandbox helper: message {} is not for it", static_cast<int>(message.type));
    }
  }

  static void end(const Container& container) {
    kill(container.pid, SIGKILL);  // takes its whole pid namespace with it
    container.cgroup.thaw();
  }

  // Init is gone, and with it all of its namespace; no process is left in the cgroups.
  void forget(pid_t pid) {
    for (auto entry = containers_.begin(); entry != containers_.end(); ++entry) {
      if (entry->second.pid == pid) {
        if (!entry->second.cgroup.remove()) {
          spdlog::warn("sandbox: a cgroup of {} cannot be removed now: {}", entry->first, std::strerror(errno));
        }
        containers_.erase(entry);
        return;
      }
    }
  }

  void create(Message& message) {
    const CreateRequest request = decode_create(message.body);
    if (message.descriptors.size() < 2 || message.descriptors.size() > 3 || containers_.contains(request.id)) {
      fail(ErrorCode::corrupt_data, "sandbox helper: create '{}' with {} descriptors", request.id,
           message.descriptors.size());
    }
    const std::uint32_t uid = request.uid != 0 ? request.uid : next_uid();
    Container container{0, cgroups_.create(request), std::move(message.descriptors[1])};
    try {
      const std::vector<FileDescriptor> freezer = container.cgroup.open_freezer();
      container.pid = spawn(request, container.cgroup, uid, message.descriptors);
      std::vector<int> sent;
      sent.reserve(freezer.size());
      for (const FileDescriptor& file : freezer) {
        sent.push_back(file.get());
      }
      const Created answer{container.pid, uid};
      containers_.emplace(request.id, std::move(container));
      send_message(control_, MessageType::created, encode(answer), sent);
    } catch (const Error&) {
      container.cgroup.remove();
      throw;
    }
  }

  std::uint32_t next_uid() {
    if (user_namespace_) {
      return kUserInNamespace;
    }
    const auto run = static_cast<std::uint32_t>(getpid()) & 0x3fff;
    return kFirstUid + run * kUsersPerRun + (counter_++ & (kUsersPerRun - 1));
  }

  pid_t spawn(const CreateRequest& request, const ContainerCgroup& cgroup, std::uint32_t uid,
              std::vector<FileDescriptor>& descriptors) {
    const FileDescriptor version2 = cgroup.open_version2();
    clone_args args{};
    args.flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS;
    args.exit_signal = SIGCHLD;
    if (user_namespace_) {
      args.flags |= CLONE_NEWUSER;
    }
    if (version2) {
      args.flags |= CLONE_INTO_CGROUP;
      args.cgroup = static_cast<std::uint64_t>(version2.get());
    }
    const uid_t outer_uid = geteuid();
    const gid_t outer_gid = getegid();
    const auto pid = static_cast<pid_t>(syscall(SYS_clone3, &args, sizeof args));
    if (pid < 0) {
      const int error = errno;
      fail(error == EAGAIN || error == ENOMEM ? ErrorCode::exhausted : ErrorCode::not_supported,
           "sandbox: this host refuses a process in new namespaces: {}", std::strerror(error));
    }
    if (pid == 0) {
      become_init(request, cgroup, uid, outer_uid, outer_gid, descriptors);
    }
    return pid;
  }

  // In the new process. Failures are told to the program on the container's own socket: the helper does not wait.
  [[noreturn]] void become_init(const CreateRequest& request, const ContainerCgroup& cgroup, std::uint32_t uid,
                                uid_t outer_uid, gid_t outer_gid, std::vector<FileDescriptor>& descriptors) {
    InitPlan plan;
    plan.socket = std::move(descriptors[0]);
    const int socket = plan.socket.get();
    try {
      prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
      close_inherited();
      if (user_namespace_) {
        enter_user(uid, outer_uid, outer_gid);
      }
      cgroup.enter_version1();
      if (unshare(CLONE_NEWCGROUP) != 0) {  // after entering: what it shows as / is the container's own
        fail(ErrorCode::not_supported, "sandbox: no cgroup namespace: {}", std::strerror(errno));
      }
      // Init must not die for what a command has eaten; where it may not say so, all of the container goes first.
      write_text("/proc/self/oom_score_adj", user_namespace_ ? "500" : "-1000");
      if (sethostname("sandbox", 7) != 0) {
        fail(ErrorCode::io, "sandbox: host name: {}", std::strerror(errno));
      }
      raise_loopback();
      plan.uid = uid;
      plan.limits = request.limits;
      plan.user_namespace = user_namespace_;
      plan.limit_memory = !cgroups_.limits_memory();
      plan.filter = &filter_;
      const int copy_from = descriptors.size() > 2 ? descriptors[2].get() : -1;
      FileDescriptor upper = enter_root(
          {request.image_root, (run_ / "mnt").string(), request.limits.disk_bytes, uid, user_namespace_, copy_from});
      if (descriptors.size() > 2) {
        descriptors[2].reset();
      }
      serve_init(std::move(plan), std::move(upper));
    } catch (const std::exception& exception) {
      try {
        send_message(socket, MessageType::failed, exception.what());
      } catch (const std::exception&) {
        _exit(1);
      }
    }
    _exit(1);
  }

  // Nothing of the helper may stay open in a container: not its control socket, not other containers' ends, not the
  // lock.
  void close_inherited() {
    const FileDescriptor null(open("/dev/null", O_RDWR | O_CLOEXEC));
    for (int standard = 0; standard < 3; ++standard) {
      dup2(null.get(), standard);
    }
    close(control_);
    lock_.reset();
    signals_.reset();
    for (auto& [id, container] : containers_) {
      container.gone.reset();
    }
  }

  static void enter_user(std::uint32_t uid, uid_t outer_uid, gid_t outer_gid) {
    const auto line = [&](unsigned outer) { return std::to_string(uid) + " " + std::to_string(outer) + " 1"; };
    if (!write_text("/proc/self/setgroups", "deny") || !write_text("/proc/self/uid_map", line(outer_uid)) ||
        !write_text("/proc/self/gid_map", line(outer_gid))) {
      fail(ErrorCode::not_supported, "sandbox: no user namespace: {}", std::strerror(errno));
    }
  }

  int control_;
  std::filesystem::path run_;
  FileDescriptor lock_, signals_;
  bool user_namespace_;
  std::vector<sock_filter> filter_;
  CgroupTree cgroups_;
  std::map<std::string, Container> containers_;
  std::uint32_t counter_ = 0;
};

// A command line shows to everyone in the container as that of process 1: it becomes "init".
void hide_command_line(int argc, char** argv) {
  char* const end = argv[argc - 1] + std::strlen(argv[argc - 1]);
  std::memset(argv[0], 0, static_cast<std::size_t>(end - argv[0]));
  std::memcpy(argv[0], "init", std::min<std::size_t>(4, static_cast<std::size_t>(end - argv[0])));
}

}  // namespace

int helper_main(int argc, char** argv) {
  if (!spdlog::get("tidelock")) {
    init_log();
  }
  char* rest = nullptr;
  const long number = argc >= 2 ? std::strtol(argv[argc - 1], &rest, 10) : -1;
  if (number < 3 || *rest != '\0') {
    spdlog::error("sandbox-helper: is started by tidelock itself, with the number of an open socket");
    return 2;
  }
  const int control = static_cast<int>(number);
  fcntl(control, F_SETFD, FD_CLOEXEC);
  if (control > 3) {
    close_range(3, static_cast<unsigned>(control) - 1, 0);  // whatever a library of the program leaked
  }
  close_range(static_cast<unsigned>(control) + 1, ~0U, 0);
  raise_file_limit();
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGHUP, SIG_IGN);
  std::signal(SIGCHLD, SIG_DFL);  // were it ignored, as it may be inherited, children would end unseen
  sigset_t watched;
  sigemptyset(&watched);
  sigaddset(&watched, SIGCHLD);
  sigaddset(&watched, SIGTERM);
  sigprocmask(SIG_BLOCK, &watched, nullptr);
  try {
    std::optional<Message> message = receive_message(control);
    if (!message || message->type != MessageType::hello || message->descriptors.size() != 1) {
      return 1;
    }
    const Hello hello = decode_hello(message->body);
    try {
      hide_command_line(argc, argv);
      Helper helper(control, hello, std::move(message->descriptors[0]), watched);
      helper.welcome();
      try {
        helper.serve();
      } catch (const std::exception& exception) {
        spdlog::error("{}", exception.what());
      }
      helper.end_all();
    } catch (const Error& error) {
      // First: when the program was killed before the welcome reached it, there is nobody left to tell.
      remove_run_directory(hello.run_directory);
      send_message(control, MessageType::failed, error.what());
    }
  } catch (const std::exception& exception) {
    spdlog::error("sandbox helper: {}", exception.what());
    return 1;
  }
  return 0;
}

}  // namespace tidelock::sandbox
