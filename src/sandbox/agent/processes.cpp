#include "sandbox/agent/processes.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>

namespace tidelock::sandbox::agent {
using vm::Frame;
using vm::FrameType;
namespace {

constexpr long kMaxProcesses = 256;  // streams at once, with those whose pipes are only kept empty
constexpr long kMaxEnded = 64;       // processes whose end is remembered
constexpr long kMaxWatches = 64;
constexpr int kKillRounds = 20;
constexpr long kKillPatience = 2000;  // ms until the end of a killed session is told whatever is left of it
constexpr int kKillLook = 10;         // ms between two looks

timespec monotonic_now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now;
}

time_t seconds_now() {
  return monotonic_now().tv_sec;
}

bool forgettable(const Process& p) {
  return p.ended && !p.recalled && p.out < 0 && p.err < 0;
}

bool has_more(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return fd >= 0 && poll(&entry, 1, 0) > 0 && (entry.revents & POLLIN) != 0;
}

void set_size(int terminal, std::uint32_t packed) {
  winsize size{};
  size.ws_row = static_cast<unsigned short>(packed >> 16);
  size.ws_col = static_cast<unsigned short>(packed);
  ioctl(terminal, TIOCSWINSZ, &size);
}

// Kills what belongs to the session of `leader` beside itself; whether there was anything.
bool kill_followers(pid_t leader) {
  bool found = false;
  DIR* proc = opendir("/proc");
  while (const dirent* entry = proc != nullptr ? readdir(proc) : nullptr) {
    const pid_t pid = atoi(entry->d_name);
    if (pid > 1 && pid != leader && getsid(pid) == leader) {
      found = kill(pid, SIGKILL) == 0 || found;
    }
  }
  closedir(proc);
  return found;
}

// Ends the command and what still belongs to its session; daemons that made a session of their own stay.
void end_session(pid_t leader) {
  for (int round = 0; round < kKillRounds && kill_followers(leader); ++round) {
  }
  kill(leader, SIGKILL);
}

// A killed process lives on until the processor comes to it. Its session's number is used for nothing else till then.
bool dies_still(const Process& p) {
  if (p.killed.tv_sec == 0) {
    return false;
  }
  const timespec now = monotonic_now();
  const long waited = (now.tv_sec - p.killed.tv_sec) * 1000 + (now.tv_nsec - p.killed.tv_nsec) / 1'000'000;
  return waited < kKillPatience && kill_followers(p.number);
}

}  // namespace

// What a new process speaks through: [0] the child's side, [1] ours, of input, output and error.
struct Processes::Ends {
  int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1};
  std::string terminal;  // its name for the child, which then has no ends
  void close_both(int side) {
    for (int* pair : {in, out, err}) {
      if (pair[side] >= 0) {
        close(pair[side]);
      }
    }
  }
};

bool Processes::open_ends(const vm::GuestRequest& request, Ends& ends) const {
  if (std::count_if(all_.begin(), all_.end(), [](const Process& p) { return !p.ended || p.out >= 0 || p.err >= 0; }) >=
      kMaxProcesses) {
    return false;
  }
  if ((request.flags & vm::kTerminal) == 0) {
    int pipes[3][2] = {{-1, -1}, {-1, -1}, {-1, -1}};
    const bool made =
        pipe2(pipes[0], O_CLOEXEC) == 0 && pipe2(pipes[1], O_CLOEXEC) == 0 && pipe2(pipes[2], O_CLOEXEC) == 0;
    ends.in[0] = pipes[0][0], ends.in[1] = pipes[0][1];
    ends.out[0] = pipes[1][1], ends.out[1] = pipes[1][0];
    ends.err[0] = pipes[2][1], ends.err[1] = pipes[2][0];
    return made;
  }
  ends.out[1] = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
  ends.in[1] = fcntl(ends.out[1], F_DUPFD_CLOEXEC, 3);
  int unlocked = 0;
  unsigned number = 0;
  if (ends.in[1] < 0 || ioctl(ends.out[1], TIOCSPTLCK, &unlocked) != 0 || ioctl(ends.out[1], TIOCGPTN, &number) != 0) {
    return false;
  }
  set_size(ends.out[1], request.mode);
  ends.terminal = "/dev/pts/" + std::to_string(number);
  return true;
}

void Processes::start(std::uint32_t stream, vm::GuestRequest& request, const std::string& encoded) {
  struct stat folder {};
  if (request.kind == vm::GuestKind::process &&
      (stat(request.path.c_str(), &folder) != 0 || !S_ISDIR(folder.st_mode))) {
    outbox_.refuse(stream, "its working directory does not exist");
    return;
  }
  const bool is_watch = request.kind == vm::GuestKind::watch;
  if (is_watch && std::count_if(all_.begin(), all_.end(), [](const Process& p) { return p.watch; }) >= kMaxWatches) {
    outbox_.refuse(stream, "more than " + std::to_string(kMaxWatches) + " folders are being watched");
    return;
  }
  Ends ends;
  const bool ready = open_ends(request, ends);
  const pid_t child = ready ? fork() : -1;
  if (child == 0) {
    if (ends.terminal.empty()) {
      dup2(ends.in[0], 0), dup2(ends.out[0], 1), dup2(ends.err[0], 2);
    }
    run_child(request, ends.terminal);
  }
  ends.close_both(0);
  if (child < 0) {
    ends.close_both(1);
    outbox_.refuse(stream, ready ? "no more processes can be started" : "too many processes are being served");
    return;
  }
  Process process;
  process.stream = stream;
  process.pid = child;
  process.in = ends.in[1], process.out = ends.out[1], process.err = ends.err[1];
  process.terminal = !ends.terminal.empty();
  for (const int fd : {process.in, process.out, process.err}) {
    if (fd >= 0) {
      fcntl(fd, F_SETFL, O_NONBLOCK);
    }
  }
  process.watch = is_watch;
  process.number = child;
  if (request.kind == vm::GuestKind::process) {
    keep(process, request, encoded);
  }
  if (process.stays || is_watch) {
    tell_started(process);
  }
  all_.push_back(std::move(process));
}

void Processes::keep(Process& process, vm::GuestRequest& request, const std::string& encoded) {
  process.stays = true;
  process.input_end = (request.flags & (vm::kOpenInput | vm::kTerminal)) == 0;
  process.listed = encoded;
  if (encoded.size() > vm::kMaxListedRequest) {
    request.arguments.resize(std::min(request.arguments.find('\0') + 1, vm::kMaxListedRequest / 2));
    request.environment.clear();
    request.tag.resize(std::min<std::size_t>(request.tag.size(), 256));
    request.path.resize(std::min<std::size_t>(request.path.size(), 4096));
    process.listed = vm::encode_request(request);
  }
  // How the longest ended ones ended is forgotten first: it must not fill the memory of a guest that is kept busy.
  long ended = std::count_if(all_.begin(), all_.end(), forgettable);
  all_.remove_if([&ended](const Process& p) { return forgettable(p) && ended-- > kMaxEnded; });
}

// A process that stays speaks on another stream from now. Newest first: a pid may have been used before.
void Processes::attach(std::uint32_t stream, std::string_view payload) {
  const pid_t wanted = payload.size() == 4 ? static_cast<pid_t>(vm::get_u32(payload, 0)) : 0;
  for (auto p = all_.rbegin(); p != all_.rend(); ++p) {
    if (p->stays && p->number == wanted) {
      p->stream = stream;
      p->heard = true;
      p->unacknowledged = 0;
      tell_started(*p);
      p->recalled = p->ended;
      return;
    }
  }
  outbox_.refuse(stream, "no such process");
}

void Processes::tell(const Process& process, FrameType type, std::string_view payload) {
  if (process.heard) {
    outbox_.add(type, process.stream, payload);
  }
}

void Processes::tell_started(const Process& process) {
  std::string body;
  vm::put_u32(body, static_cast<std::uint32_t>(process.number));
  const bool open = process.in >= 0 && !process.input_end;
  vm::put_u32(
      body, (open ? vm::kOpenInput : 0) | (process.ended ? vm::kHasEnded : 0) | (process.terminal ? vm::kTerminal : 0));
  tell(process, FrameType::started, body);
}

void Processes::list(std::uint32_t stream) {
  std::string body;
  for (const Process& process : all_) {
    if (process.stays && !process.ended) {
      vm::put_u32(body, static_cast<std::uint32_t>(process.number));
      vm::put_u32(body, static_cast<std::uint32_t>(process.listed.size()));
      body += process.listed;
    }
  }
  std::size_t at = 0;
  for (; body.size() - at > vm::kMaxPayload; at += vm::kMaxPayload) {
    outbox_.add(FrameType::listing, stream, std::string_view(body).substr(at, vm::kMaxPayload));
  }
  outbox_.add(FrameType::listing_end, stream, std::string_view(body).substr(at));
}

void Processes::take(const Frame& frame) {
  const std::uint32_t number = frame.payload.size() == 4 ? vm::get_u32(frame.payload, 0) : 0;
  for (Process& process : all_) {
    if (process.stream != frame.stream || !process.heard) {
      continue;
    }
    if (frame.type == FrameType::output_ack) {
      process.unacknowledged -= std::min<std::size_t>(process.unacknowledged, number);
    }
    if (process.ended) {
      continue;
    }
    if (frame.type == FrameType::input && process.input.size() + frame.payload.size() <= vm::kInputWindow) {
      process.input += frame.payload;
    } else if (frame.type == FrameType::input_end && !process.terminal) {
      process.input_end = true;
    } else if (frame.type == FrameType::kill && process.socket) {
      reset(process);
    } else if (frame.type == FrameType::kill && process.pid > 0) {
      end_session(process.pid);
      process.killed = monotonic_now();
    } else if (frame.type == FrameType::signal && number > 0 && process.pid > 0) {
      ::kill(-process.pid, static_cast<int>(number));
    } else if (frame.type == FrameType::resize && process.terminal && process.out >= 0) {
      set_size(process.out, number);
    }
  }
}

void Processes::forget_streams() {
  for (Process& process : all_) {
    process.heard = false;
    process.input_end = process.input_end || !process.stays;
    if (process.socket) {
      reset(process);
    }
  }
}

int Processes::add_polls(std::vector<pollfd>& entries) const {
  int patience = -1;
  for (const Process& p : all_) {
    if (p.in >= 0 && (!p.input.empty() || p.connecting != 0)) {
      entries.push_back({p.in, POLLOUT, 0});
    }
    if (p.ended && p.stays && patience < 0) {
      patience = vm::kEndedSeconds * 1000;
    }
    if (!p.ended && p.killed.tv_sec != 0) {
      patience = kKillLook;
    }
    if (may_drain(p)) {
      entries.push_back({p.out, POLLIN, 0});
      entries.push_back({p.err, POLLIN, 0});
    }
  }
  return patience;
}

void Processes::reap() {
  int status = 0;
  for (pid_t pid = 0; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
    for (Process& process : all_) {
      if (process.pid == pid) {
        process.pid = 0;
        process.status = status;
      }
    }
  }
}

void Processes::work() {
  for (Process& process : all_) {
    establish(process);
    feed(process);
    drain(process, process.out, FrameType::output);
    drain(process, process.err, FrameType::error);
    report(process);
  }
  const time_t now = seconds_now();
  all_.remove_if([now](const Process& p) {
    return p.ended && p.out < 0 && p.err < 0 && (!p.stays || now >= p.ended_at + vm::kEndedSeconds);
  });
}

void Processes::feed(Process& process) {
  if (process.connecting != 0) {
    return;
  }
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
    if (process.socket) {
      shutdown(process.in, SHUT_WR);
    }
    close(process.in);
    process.in = -1;
  }
}

bool Processes::may_drain(const Process& p) const {
  return p.connecting == 0 && (!p.heard || p.ended || (outbox_.has_room() && p.unacknowledged < vm::kOutputWindow));
}

// Reads a pipe; without a listener, or after the end was reported, what comes is thrown away.
void Processes::drain(Process& process, int& fd, FrameType type) {
  static char part[vm::kMaxPayload];
  const bool deaf = !process.heard || process.ended;
  for (int round = 0; fd >= 0 && round < 16 && may_drain(process); ++round) {
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

// The end of a command is told after all that it wrote; that of one which was killed, after its session's.
void Processes::report(Process& process) {
  const bool again = process.ended && process.recalled;
  if (process.pid != 0 || (process.socket && process.out >= 0) || (process.ended && !again) ||
      (process.heard && !again && (has_more(process.out) || has_more(process.err))) ||
      (!process.ended && dies_still(process))) {
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

}  // namespace tidelock::sandbox::agent
