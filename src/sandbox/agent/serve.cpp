// The agent's loop: never waits for anything but its one poll, never grows past fixed bounds.

#include <dirent.h>
#include <fcntl.h>
#include <linux/random.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <list>
#include <vector>

#include "sandbox/agent/agent.hpp"

namespace tidelock::sandbox::agent {
using vm::Frame;
using vm::FrameType;
namespace {

constexpr std::size_t kQueueBound = 256U << 10;  // of frames on their way out; past it no output is read
constexpr long kMaxProcesses = 256;              // streams at once, with those whose pipes are only kept empty
constexpr long kMaxEnded = 64;                   // processes whose end is remembered
constexpr int kKillRounds = 20;

struct Process {
  std::uint32_t stream = 0;
  pid_t pid = 0;       // 0: reaped
  bool heard = true;   // the program that started it is still connected
  bool ended = false;  // its end was reported; the pipes are kept empty for what it left in the background
  int status = 0;
  int in = -1, out = -1, err = -1;
  std::string input;
  bool input_end = false;
  std::size_t unacknowledged = 0;  // bytes of output on their way to the program
  bool stays = false;              // a GuestKind::process: goes on unheard, and its end is remembered
  bool recalled = false;           // an ended one was attached to: its end is to be told once more
  pid_t number = 0;                // its pid, also when it was reaped
  time_t ended_at = 0;
  std::string listed;  // its request, for lists
};

time_t seconds_now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec;
}

class Agent {
 public:
  Agent(int port, int edges, int signals) : port_(port), edges_(edges), signals_(signals) {}

  [[noreturn]] void serve() {
    while (true) {
      wait();
      take_signals();
      receive();
      for (Process& process : processes_) {
        feed(process);
        drain(process, process.out, FrameType::output);
        drain(process, process.err, FrameType::error);
        report(process);
      }
      const time_t now = seconds_now();
      processes_.remove_if([now](const Process& p) {
        return p.ended && p.out < 0 && p.err < 0 && (!p.stays || now >= p.ended_at + vm::kEndedSeconds);
      });
      send();
    }
  }

 private:
  void wait() {
    std::vector<pollfd> entries;
    entries.push_back({edges_, POLLIN, 0});
    entries.push_back({signals_, POLLIN, 0});
    const bool room = queue_.size() < kQueueBound;
    int patience = -1;
    for (const Process& p : processes_) {
      if (!p.input.empty() && p.in >= 0) {
        entries.push_back({p.in, POLLOUT, 0});
      }
      if (p.ended && p.stays) {
        patience = vm::kEndedSeconds * 1000;
      }
      if (may_drain(p, room)) {
        entries.push_back({p.out, POLLIN, 0});
        entries.push_back({p.err, POLLIN, 0});
      }
    }
    poll(entries.data(), entries.size(), patience);
    epoll_event event{};
    if (epoll_wait(edges_, &event, 1, 0) == 1) {
      hung_up_ = (event.events & EPOLLHUP) != 0;
      if (hung_up_) {
        queue_.clear();
        reader_.forget();
        forget_streams();
      }
    }
  }

  void take_signals() {
    signalfd_siginfo info{};
    while (read(signals_, &info, sizeof info) == sizeof info) {
    }
    int status = 0;
    for (pid_t pid = 0; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
      for (Process& process : processes_) {
        if (process.pid == pid) {
          process.pid = 0;
          process.status = status;
        }
      }
    }
  }

  void receive() {
    char part[16U << 10];
    for (ssize_t got = 0; (got = read(port_, part, sizeof part)) > 0;) {
      reader_.feed({part, static_cast<std::size_t>(got)});
      Frame frame;
      while (reader_.next(frame)) {
        handle(frame);
      }
    }
  }

  void handle(const Frame& frame) {
    if (frame.type == FrameType::hello) {
      queue_.assign(1, '\0');  // ends what the other side may have half of
      forget_streams();
      vm::append_frame(queue_, FrameType::welcome, 0, frame.payload);
      return;
    }
    if (frame.type == FrameType::clock) {
      set_clock(frame.payload);
      return;
    }
    if (frame.type == FrameType::attach) {
      attach(frame.stream, frame.payload);
      return;
    }
    if (frame.type == FrameType::list) {
      list(frame.stream);
      return;
    }
    if (frame.type == FrameType::request || frame.type == FrameType::request_end) {
      if (request_stream_ != frame.stream) {
        request_.clear();
        request_stream_ = frame.stream;
      }
      if (request_.size() + frame.payload.size() > vm::kMaxRequest) {
        request_.clear();
        refuse(frame.stream, "the request is too long");
      }
      request_ += frame.payload;
      if (frame.type == FrameType::request_end) {
        start(frame.stream);
        request_.clear();
      }
      return;
    }
    for (Process& process : processes_) {
      if (process.stream != frame.stream || !process.heard) {
        continue;
      }
      if (frame.type == FrameType::output_ack && frame.payload.size() == 4) {
        process.unacknowledged -= std::min<std::size_t>(process.unacknowledged, vm::get_u32(frame.payload, 0));
      }
      if (process.ended) {
        continue;
      }
      if (frame.type == FrameType::input && process.input.size() + frame.payload.size() <= vm::kInputWindow) {
        process.input += frame.payload;
      } else if (frame.type == FrameType::input_end) {
        process.input_end = true;
      } else if (frame.type == FrameType::kill) {
        end_session(process.pid);
      } else if (frame.type == FrameType::signal && frame.payload.size() == 4 && process.pid > 0) {
        ::kill(-process.pid, static_cast<int>(vm::get_u32(frame.payload, 0)));
      }
    }
  }

  // A process that stays speaks on another stream from now. Newest first: a pid may have been used before.
  void attach(std::uint32_t stream, std::string_view payload) {
    const pid_t wanted = payload.size() == 4 ? static_cast<pid_t>(vm::get_u32(payload, 0)) : 0;
    for (auto p = processes_.rbegin(); p != processes_.rend(); ++p) {
      if (p->stays && p->number == wanted) {
        p->stream = stream;
        p->heard = true;
        p->unacknowledged = 0;
        tell_started(*p);
        p->recalled = p->ended;
        return;
      }
    }
    refuse(stream, "no such process");
  }

  void tell_started(const Process& process) {
    std::string body;
    vm::put_u32(body, static_cast<std::uint32_t>(process.number));
    const bool open = process.in >= 0 && !process.input_end;
    vm::put_u32(body, (open ? vm::kOpenInput : 0) | (process.ended ? vm::kHasEnded : 0));
    tell(process, FrameType::started, body);
  }

  void list(std::uint32_t stream) {
    std::string body;
    for (const Process& process : processes_) {
      if (process.stays && !process.ended) {
        vm::put_u32(body, static_cast<std::uint32_t>(process.number));
        vm::put_u32(body, static_cast<std::uint32_t>(process.listed.size()));
        body += process.listed;
      }
    }
    std::size_t at = 0;
    for (; body.size() - at > vm::kMaxPayload; at += vm::kMaxPayload) {
      vm::append_frame(queue_, FrameType::listing, stream, std::string_view(body).substr(at, vm::kMaxPayload));
    }
    vm::append_frame(queue_, FrameType::listing_end, stream, std::string_view(body).substr(at));
  }

  void refuse(std::uint32_t stream, const char* why) { vm::append_frame(queue_, FrameType::failed, stream, why); }

  void start(std::uint32_t stream) {
    vm::GuestRequest request;
    if (!vm::decode_request(request_, request)) {
      refuse(stream, "the request cannot be read");
      return;
    }
    struct stat folder {};
    if (request.kind == vm::GuestKind::process &&
        (stat(request.path.c_str(), &folder) != 0 || !S_ISDIR(folder.st_mode))) {
      refuse(stream, "its working directory does not exist");
      return;
    }
    int ends[3][2] = {{-1, -1}, {-1, -1}, {-1, -1}};
    bool ready = std::count_if(processes_.begin(), processes_.end(),
                               [](const Process& p) { return !p.ended || p.out >= 0 || p.err >= 0; }) < kMaxProcesses;
    for (auto& pair : ends) {
      ready = ready && pipe2(pair, O_CLOEXEC) == 0;
    }
    const pid_t child = ready ? fork() : -1;
    if (child == 0) {
      dup2(ends[0][0], 0), dup2(ends[1][1], 1), dup2(ends[2][1], 2);
      run_child(request);
    }
    close(ends[0][0]), close(ends[1][1]), close(ends[2][1]);
    if (child < 0) {
      close(ends[0][1]), close(ends[1][0]), close(ends[2][0]);
      refuse(stream, ready ? "no more processes can be started" : "too many processes are being served");
      return;
    }
    Process process;
    process.stream = stream;
    process.pid = child;
    process.in = ends[0][1], process.out = ends[1][0], process.err = ends[2][0];
    for (const int fd : {process.in, process.out, process.err}) {
      fcntl(fd, F_SETFL, O_NONBLOCK);
    }
    if (request.kind == vm::GuestKind::process) {
      keep(process, request);
    }
    processes_.push_back(std::move(process));
  }

  void keep(Process& process, vm::GuestRequest& request) {
    process.stays = true;
    process.number = process.pid;
    process.input_end = (request.flags & vm::kOpenInput) == 0;
    process.listed = request_;
    if (request_.size() > vm::kMaxListedRequest) {
      request.arguments.resize(std::min(request.arguments.find('\0') + 1, vm::kMaxListedRequest / 2));
      request.environment.clear();
      request.tag.resize(std::min<std::size_t>(request.tag.size(), 256));
      request.path.resize(std::min<std::size_t>(request.path.size(), 4096));
      process.listed = vm::encode_request(request);
    }
    // How the longest ended ones ended is forgotten first: it must not fill the memory of a guest that is kept busy.
    long ended = std::count_if(processes_.begin(), processes_.end(), [](const Process& p) { return forgettable(p); });
    processes_.remove_if([&ended](const Process& p) { return forgettable(p) && ended-- > kMaxEnded; });
    tell_started(process);
  }
  static bool forgettable(const Process& p) { return p.ended && !p.recalled && p.out < 0 && p.err < 0; }

  void feed(Process& process) {
    const ssize_t put = process.input.empty() ? 0 : write(process.in, process.input.data(), process.input.size());
    const bool broken = put < 0 && errno != EAGAIN && errno != EINTR;
    // A reader that went away takes everything: the program must not wait for it.
    const std::size_t taken = broken ? process.input.size() : static_cast<std::size_t>(std::max<ssize_t>(put, 0));
    if (taken > 0) {
      process.input.erase(0, taken);
      std::string count;
      vm::put_u32(count, static_cast<std::uint32_t>(taken));
      tell(process, FrameType::input_ack, count);
    }
    if (process.input.empty() && process.input_end && process.in >= 0) {
      close(process.in);
      process.in = -1;
    }
  }

  void tell(const Process& process, FrameType type, std::string_view payload) {
    if (process.heard) {
      vm::append_frame(queue_, type, process.stream, payload);
    }
  }

  static bool may_drain(const Process& p, bool room) {
    return !p.heard || p.ended || (room && p.unacknowledged < vm::kOutputWindow);
  }

  // Reads a pipe; without a listener, or after the end was reported, what comes is thrown away.
  void drain(Process& process, int& fd, FrameType type) {
    static char part[vm::kMaxPayload];
    const bool deaf = !process.heard || process.ended;
    for (int round = 0; fd >= 0 && round < 16 && may_drain(process, queue_.size() < kQueueBound); ++round) {
      const ssize_t got = read(fd, part, sizeof part);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
      }
      if (got <= 0) {
        close(fd);
        fd = -1;
      } else if (!deaf) {
        tell(process, type, {part, static_cast<std::size_t>(got)});
        process.unacknowledged += static_cast<std::size_t>(got);
      }
    }
  }

  static bool has_more(int fd) {
    pollfd entry{fd, POLLIN, 0};
    return fd >= 0 && poll(&entry, 1, 0) > 0 && (entry.revents & POLLIN) != 0;
  }

  // The end of a command is told after all that it wrote.
  void report(Process& process) {
    const bool again = process.ended && process.recalled;
    if (process.pid != 0 || (process.ended && !again) ||
        (process.heard && !again && (has_more(process.out) || has_more(process.err)))) {
      return;
    }
    const int signal = WIFSIGNALED(process.status) ? WTERMSIG(process.status) : 0;
    std::string body;
    vm::put_u32(body, static_cast<std::uint32_t>(signal != 0 ? 128 + signal : WEXITSTATUS(process.status)));
    vm::put_u32(body, static_cast<std::uint32_t>(signal));
    tell(process, FrameType::exited, body);
    process.recalled = false;
    if (process.ended) {
      return;
    }
    process.ended = true;
    process.ended_at = seconds_now();
    if (process.in >= 0) {
      close(process.in);
    }
    process.in = -1;
  }

  void forget_streams() {
    for (Process& process : processes_) {
      process.heard = false;
      process.input_end = process.input_end || !process.stays;
    }
    request_.clear();
  }

  void set_clock(std::string_view payload) {
    if (payload.size() < 8) {
      return;
    }
    const std::uint64_t now = vm::get_u64(payload, 0);
    const timespec time{static_cast<time_t>(now / 1'000'000'000), static_cast<long>(now % 1'000'000'000)};
    clock_settime(CLOCK_REALTIME, &time);
    // What RNDADDENTROPY takes: bits of entropy, bytes, the bytes.
    struct {
      int bits = 0, size = 0;
      char bytes[64]{};
    } entropy;
    const std::size_t size = std::min(payload.size() - 8, sizeof entropy.bytes);
    payload.copy(entropy.bytes, size, 8);
    entropy.bits = static_cast<int>(size * 8);
    entropy.size = static_cast<int>(size);
    const int random = open("/dev/urandom", O_RDWR | O_CLOEXEC);
    ioctl(random, RNDADDENTROPY, &entropy);
    ioctl(random, RNDRESEEDCRNG);
    close(random);
    vm::append_frame(queue_, FrameType::clock_set, 0);
  }

  // Ends the command and what still belongs to its session; daemons that made a session of their own stay.
  static void end_session(pid_t leader) {
    if (leader <= 0) {
      return;
    }
    bool found = true;
    for (int round = 0; round < kKillRounds && found; ++round) {
      found = false;
      DIR* proc = opendir("/proc");
      while (const dirent* entry = proc != nullptr ? readdir(proc) : nullptr) {
        const pid_t pid = atoi(entry->d_name);
        if (pid > 1 && pid != leader && getsid(pid) == leader) {
          found = kill(pid, SIGKILL) == 0 || found;
        }
      }
      closedir(proc);
    }
    kill(leader, SIGKILL);
  }

  void send() {
    while (!queue_.empty() && !hung_up_) {
      const ssize_t put = write(port_, queue_.data(), std::min<std::size_t>(queue_.size(), 32U << 10));
      if (put <= 0) {
        return;
      }
      queue_.erase(0, static_cast<std::size_t>(put));
    }
  }

  int port_, edges_, signals_;
  bool hung_up_ = false;
  vm::FrameReader reader_;
  std::string queue_, request_;
  std::uint32_t request_stream_ = 0;
  std::list<Process> processes_;
};

}  // namespace

void serve(int port) {
  sigset_t watched;
  sigemptyset(&watched);
  sigaddset(&watched, SIGCHLD);
  sigprocmask(SIG_BLOCK, &watched, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  const int signals = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
  // A port whose other end nobody holds is "ready" all the time, which a plain poll would spin on. Its changes are
  // what counts: someone came, went, sent, or made room.
  const int edges = epoll_create1(EPOLL_CLOEXEC);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLET;
  if (signals < 0 || edges < 0 || epoll_ctl(edges, EPOLL_CTL_ADD, port, &event) != 0) {
    die("watch", "the port to the program");
  }
  Agent(port, edges, signals).serve();
}

}  // namespace tidelock::sandbox::agent

int main() {
  tidelock::sandbox::agent::boot();
  tidelock::sandbox::agent::serve(tidelock::sandbox::agent::open_port());
}
