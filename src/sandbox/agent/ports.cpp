// Connections to ports of the guest's loopback, which stand among the processes as streams without one.

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "sandbox/agent/processes.hpp"

namespace tidelock::sandbox::agent {
namespace {

constexpr long kMaxConnections = 64;

// Begins to connect to the guest's own address, of IPv4 or IPv6; false when it cannot even begin.
bool begin_connect(Process& process, bool six) {
  for (int* fd : {&process.in, &process.out}) {
    if (*fd >= 0) {
      close(*fd);
    }
    *fd = -1;
  }
  sockaddr_in6 address6{};
  sockaddr_in address4{};
  const auto port = htons(static_cast<std::uint16_t>(process.connecting));
  address6.sin6_family = AF_INET6, address6.sin6_port = port, address6.sin6_addr = in6addr_loopback;
  address4.sin_family = AF_INET, address4.sin_port = port, address4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  process.in = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  process.out = fcntl(process.in, F_DUPFD_CLOEXEC, 3);
  process.last_try = six;
  const auto* address = six ? reinterpret_cast<sockaddr*>(&address6) : reinterpret_cast<sockaddr*>(&address4);
  return process.out >= 0 &&
         (::connect(process.in, address, six ? sizeof address6 : sizeof address4) == 0 || errno == EINPROGRESS);
}

}  // namespace

void reset(Process& process) {
  const linger now{1, 0};
  for (int* fd : {&process.in, &process.out}) {
    if (*fd >= 0) {
      setsockopt(*fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
      close(*fd);
    }
    *fd = -1;
  }
  process.input.clear();
  process.ended = true;
  process.connecting = 0;
}

void Processes::connect(std::uint32_t stream, std::string_view payload) {
  Process process;
  process.stream = stream;
  process.socket = true;
  process.connecting = payload.size() == 4 ? static_cast<int>(vm::get_u32(payload, 0)) : 0;
  const auto counts = [](const Process& p) { return p.socket && !p.ended; };
  if (std::count_if(all_.begin(), all_.end(), counts) >= kMaxConnections) {
    outbox_.refuse(stream, "more than " + std::to_string(kMaxConnections) + " connections to its ports are open");
  } else if (process.connecting < 1 || process.connecting > 65535) {
    outbox_.refuse(stream, "there is no such port");
  } else if (!begin_connect(process, false) && !begin_connect(process, true)) {
    reset(process);
    outbox_.refuse(stream, vm::kPortClosed);
  } else {
    all_.push_back(std::move(process));
  }
}

// Whether a connection has come about, when that is known.
void Processes::establish(Process& process) {
  pollfd entry{process.in, POLLOUT, 0};
  if (process.connecting == 0 || poll(&entry, 1, 0) <= 0) {
    return;
  }
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(process.in, SOL_SOCKET, SO_ERROR, &error, &size);
  if (error == 0) {
    process.connecting = 0;
    tell_started(process);
  } else if (process.last_try || !begin_connect(process, true)) {
    reset(process);
    tell(process, vm::FrameType::failed, vm::kPortClosed);
  }
}

}  // namespace tidelock::sandbox::agent
