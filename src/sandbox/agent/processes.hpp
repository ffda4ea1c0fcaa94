// The processes of a guest that were asked for, and what goes in and out of them.
#pragma once

#include <poll.h>

#include <ctime>
#include <list>
#include <string>
#include <string_view>
#include <vector>

#include "sandbox/agent/agent.hpp"

namespace tidelock::sandbox::agent {

// Frames on their way to the program.
struct Outbox {
  std::string bytes;
  bool has_room() const { return bytes.size() < (256U << 10); }  // without it no output is read
  void add(vm::FrameType type, std::uint32_t stream, std::string_view payload = {}) {
    vm::append_frame(bytes, type, stream, payload);
  }
  void refuse(std::uint32_t stream, std::string_view why) { add(vm::FrameType::failed, stream, why); }
};

struct Process {
  std::uint32_t stream = 0;
  pid_t pid = 0;       // 0: reaped
  bool heard = true;   // the program that started it is still connected
  bool ended = false;  // its end was reported; the pipes are kept empty for what it left in the background
  int status = 0;
  timespec killed{};                // its session was ended, at this time of the monotonic clock
  int in = -1, out = -1, err = -1;  // with a terminal: in and out are its other side, err is none
  std::string input;
  bool input_end = false;
  std::size_t unacknowledged = 0;  // bytes of output on their way to the program
  bool stays = false;              // a GuestKind::process: goes on unheard, and its end is remembered
  bool terminal = false;
  bool watch = false;  // a GuestKind::watch
  // Not a process but a connection to a port, with a pid of 0; in and out are the same socket.
  bool socket = false;
  int connecting = 0;  // to this port, not yet decided
  bool last_try = false;
  bool recalled = false;  // an ended one was attached to: its end is to be told once more
  pid_t number = 0;       // its pid, also when it was reaped
  time_t ended_at = 0;
  std::string listed;  // its request, for lists
};

// Ends a connection; the server behind it is told at once that nobody is there any more.
void reset(Process& process);

class Processes {
 public:
  explicit Processes(Outbox& outbox) : outbox_(outbox) {}
  // `encoded` is what `request` was decoded from.
  void start(std::uint32_t stream, vm::GuestRequest& request, const std::string& encoded);
  void attach(std::uint32_t stream, std::string_view payload);
  void list(std::uint32_t stream);
  void connect(std::uint32_t stream, std::string_view payload);
  void take(const vm::Frame& frame);  // of a process's stream
  void forget_streams();
  // Around one poll: what to wait for, and for how long (milliseconds; -1 for ever); then everything that is ready.
  int add_polls(std::vector<pollfd>& entries) const;
  void reap();
  void work();

 private:
  struct Ends;
  bool open_ends(const vm::GuestRequest& request, Ends& ends) const;
  void keep(Process& process, vm::GuestRequest& request, const std::string& encoded);
  void tell(const Process& process, vm::FrameType type, std::string_view payload);
  void tell_started(const Process& process);
  void feed(Process& process);
  void drain(Process& process, int& fd, vm::FrameType type);
  void report(Process& process);
  void establish(Process& process);
  bool may_drain(const Process& process) const;
  Outbox& outbox_;
  std::list<Process> all_;
};

}  // namespace tidelock::sandbox::agent
