#include "sandbox/init.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>

#include "base/error.hpp"
#include "sandbox/guest.hpp"

namespace tidelock::sandbox {
namespace {

// The most pipes of background processes that are kept empty; past it the oldest is closed (and its writer gets
// SIGPIPE).
constexpr std::size_t kMaxAdopted = 64;
constexpr int kKillRounds = 20;
constexpr std::size_t kDrainPerRound = 1U << 20;

constexpr std::uint64_t bit(int capability) {
  return std::uint64_t{1} << capability;
}
// What init itself needs: to become the user, to signal it, to put files anywhere in the root. SETPCAP lets children
// empty their sets.
constexpr std::uint64_t kInitCapabilities = bit(CAP_SETUID) | bit(CAP_SETGID) | bit(CAP_KILL) | bit(CAP_CHOWN) |
                                            bit(CAP_DAC_OVERRIDE) | bit(CAP_FOWNER) | bit(CAP_SETPCAP);

class Init {
 public:
  Init(InitPlan plan, const sigset_t& watched)
      : plan_(std::move(plan)), signals_(signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK)) {}

  void serve() {
    std::vector<pollfd> entries;
    while (true) {
      entries.assign({{plan_.socket.get(), POLLIN, 0}, {signals_.get(), POLLIN, 0}});
      for (const FileDescriptor& pipe : adopted_) {
        entries.push_back({pipe.get(), POLLIN, 0});
      }
      if (poll(entries.data(), entries.size(), -1) < 0 && errno != EINTR) {
        return;
      }
      drain_adopted(entries);
      if (entries[1].revents != 0) {
        reap();
      }
      if (entries[0].revents != 0) {
        std::optional<Message> message = receive_message(plan_.socket.get());
        if (!message) {
          return;  // the program is gone: so is the container
        }
        handle(*message);
      }
    }
  }

 private:
  void handle(Message& message) {
    switch (message.type) {
      case MessageType::run:
        start(decode_run(message.body), message.descriptors);
        return;
      case MessageType::kill:
        end_session();
        return;
      case MessageType::adopt:
        for (FileDescriptor& pipe : message.descriptors) {
          fcntl(pipe.get(), F_SETFL, O_NONBLOCK);
          adopted_.push_back(std::move(pipe));
        }
        if (adopted_.size() > kMaxAdopted) {
          adopted_.erase(adopted_.begin(), adopted_.end() - kMaxAdopted);
        }
        return;
      case MessageType::stop:
      case MessageType::resume:
        ::kill(-1, message.type == MessageType::stop ? SIGSTOP : SIGCONT);  // all but init itself
        send_message(plan_.socket.get(), MessageType::done);
        return;
      default:
        fail(ErrorCode::corrupt_data, "container init: message {} is not for it", static_cast<int>(message.type));
    }
  }

  void start(const RunRequest& request, const std::vector<FileDescriptor>& descriptors) {
    if (descriptors.size() != 3 || main_ > 0) {
      fail(ErrorCode::corrupt_data, "container init: {} descriptors with a command, expected 3", descriptors.size());
    }
    const pid_t child = fork();
    if (child == 0) {
      for (int i = 0; i < 3; ++i) {
        if (dup2(descriptors[static_cast<std::size_t>(i)].get(), i) < 0) {
          _exit(126);
        }
      }
      switch (request.kind) {
        case RunKind::command:
          become_command(plan_, request);
        case RunKind::write_file:
          write_guest_file(plan_, request);
        case RunKind::read_file:
          read_guest_file(request);
      }
      _exit(126);
    }
    if (child < 0) {
      send_message(plan_.socket.get(), MessageType::failed, std::strerror(errno));
      return;
    }
    main_ = child;
  }

  void reap() {
    signalfd_siginfo info{};
    while (read(signals_.get(), &info, sizeof info) == sizeof info) {
    }
    int status = 0;
    for (pid_t pid = 0; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
      if (pid == main_) {
        main_ = 0;
        const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
        send_message(plan_.socket.get(), MessageType::exited,
                     encode(Exited{signal != 0 ? 128 + signal : WEXITSTATUS(status), signal}));
      }
    }
  }

  // Ends the running command and all that still belongs to its session; daemons that made a session of their own stay.
  void end_session() const {
    if (main_ <= 0) {
      return;
    }
    ::kill(-main_, SIGKILL);
    ::kill(main_, SIGKILL);  // it may not have come to setsid yet
    std::set<pid_t> killed{main_};
    bool found = true;
    for (int round = 0; round < kKillRounds && found; ++round) {
      found = kill_members(main_, killed);
    }
    if (found) {
      ::kill(-1, SIGKILL);  // forks faster than we list: end everything at once, which no fork can outrun
    }
  }

  // Kills every process of the session that is not in `killed` yet; whether there was one.
  static bool kill_members(pid_t session, std::set<pid_t>& killed) {
    const std::unique_ptr<DIR, int (*)(DIR*)> proc(opendir("/proc"), closedir);
    bool found = false;
    while (const dirent* entry = proc ? readdir(proc.get()) : nullptr) {
      const pid_t pid = std::atoi(entry->d_name);
      if (pid > 1 && getsid(pid) == session && killed.insert(pid).second) {
        found = ::kill(pid, SIGKILL) == 0 || found;
      }
    }
    return found;
  }

  void drain_adopted(const std::vector<pollfd>& entries) {
    static std::array<char, 64U << 10> sink;
    std::vector<FileDescriptor> open;
    for (std::size_t i = 0; i < adopted_.size(); ++i) {
      ssize_t got = 1;
      std::size_t total = 0;
      while (entries[i + 2].revents != 0 && total < kDrainPerRound &&
             (got = read(adopted_[i].get(), sink.data(), sink.size())) > 0) {
        total += static_cast<std::size_t>(got);
      }
      if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR))) {
        open.push_back(std::move(adopted_[i]));
      }
    }
    adopted_ = std::move(open);
  }

  InitPlan plan_;
  FileDescriptor signals_;
  pid_t main_ = 0;
  std::vector<FileDescriptor> adopted_;
};

void drop_bounding_set() {
  for (int capability = 0; prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0; ++capability) {
    prctl(PR_CAPBSET_DROP, capability, 0, 0, 0);
  }
}

}  // namespace

void serve_init(InitPlan plan, FileDescriptor upper) {
  const int socket = plan.socket.get();
  try {
    drop_bounding_set();
    if (!limit_capabilities(kInitCapabilities)) {
      fail(ErrorCode::not_supported, "container init: cannot limit its capabilities: {}", std::strerror(errno));
    }
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);  // commands of the same user (in a user namespace) must not look into init
    prctl(PR_SET_NAME, "init", 0, 0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);  // the helper's death; here, because a change of credentials clears it
    sigset_t watched;
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigprocmask(SIG_BLOCK, &watched, nullptr);
    std::signal(SIGPIPE, SIG_IGN);
    Init init(std::move(plan), watched);
    const int sent = upper.get();
    send_message(socket, MessageType::ready, {}, {&sent, 1});
    upper.reset();
    init.serve();
  } catch (const std::exception& exception) {
    try {
      send_message(socket, MessageType::failed, exception.what());
    } catch (const std::exception&) {
      _exit(1);  // nobody left to tell
    }
  }
  _exit(0);
}

}  // namespace tidelock::sandbox
