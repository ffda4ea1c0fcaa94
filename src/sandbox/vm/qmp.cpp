#include "sandbox/vm/qmp.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/error.hpp"

namespace tidelock::sandbox::vm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kPatience{30};
constexpr std::size_t kMaxAnswer = 4U << 20;
constexpr std::size_t kMaxEvents = 64;  // kept for await_event; older ones go

// A socket's address holds 107 bytes; the way through an open directory is always shorter.
sockaddr_un short_address(const std::string& path, FileDescriptor& folder) {
  const std::filesystem::path whole(path);
  folder.reset(open(whole.parent_path().c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!folder) {
    fail_errno("open the folder of the socket", path);
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string text = fmt::format("/proc/self/fd/{}/{}", folder.get(), whole.filename().string());
  text.copy(address.sun_path, sizeof address.sun_path - 1);
  return address;
}

FileDescriptor make_socket() {
  FileDescriptor out(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!out) {
    fail(ErrorCode::exhausted, "sandbox: cannot make a socket: {}", std::strerror(errno));
  }
  return out;
}

}  // namespace

FileDescriptor connect_socket(const std::string& path) {
  FileDescriptor folder, out = make_socket();
  const sockaddr_un address = short_address(path, folder);
  if (connect(out.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    fail_errno("connect to", path);
  }
  return out;
}

FileDescriptor listen_socket(const std::string& path) {
  FileDescriptor folder, out = make_socket();
  const sockaddr_un address = short_address(path, folder);
  if (bind(out.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 || listen(out.get(), 4) != 0) {
    fail_errno("listen on", path);
  }
  return out;
}

Qmp::Qmp(const std::string& socket_path, std::chrono::milliseconds patience) : socket_(connect_socket(socket_path)) {
  const Json greeting = receive(Clock::now() + patience);
  if (!greeting.contains("QMP")) {
    fail(ErrorCode::io, "QEMU at {}: expected a greeting, found {}", socket_path, greeting.dump());
  }
  execute("qmp_capabilities");
}

Qmp::Json Qmp::receive(Clock::time_point deadline) {
  while (true) {
    const std::size_t end = buffer_.find('\n');
    if (end != std::string::npos) {
      const std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      Json value = Json::parse(line, nullptr, false);
      if (!value.is_object()) {
        fail(ErrorCode::corrupt_data, "QEMU: expected an object of JSON, found '{}'", line.substr(0, 200));
      }
      return value;
    }
    if (!wait_readable(socket_.get(), deadline)) {
      fail(ErrorCode::io, "QEMU does not answer");
    }
    char part[8192];
    const ssize_t got = read(socket_.get(), part, sizeof part);
    if (got <= 0 || buffer_.size() > kMaxAnswer) {
      fail(ErrorCode::io, "QEMU: the connection is closed");
    }
    buffer_.append(part, static_cast<std::size_t>(got));
  }
}

Qmp::Json Qmp::execute(const std::string& command, const Json& arguments, int descriptor) {
  if (!socket_) {
    fail(ErrorCode::internal, "QEMU: '{}' without a connection", command);
  }
  std::string line = Json{{"execute", command}, {"arguments", arguments}}.dump() + "\r\n";
  iovec part{line.data(), line.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  if (sendmsg(socket_.get(), &message, MSG_NOSIGNAL) != static_cast<ssize_t>(line.size())) {
    fail(ErrorCode::io, "QEMU: cannot send '{}': {}", command, std::strerror(errno));
  }
  const Clock::time_point deadline = Clock::now() + kPatience;
  while (true) {
    Json answer = receive(deadline);
    if (answer.contains("return")) {
      return std::move(answer["return"]);
    }
    if (answer.contains("error")) {
      fail(ErrorCode::io, "QEMU refuses '{}': {}", command, answer["error"].value("desc", answer["error"].dump()));
    }
    if (events_.size() >= kMaxEvents) {
      events_.erase(events_.begin());
    }
    events_.push_back(std::move(answer));
  }
}

bool Qmp::await_event(const std::string& name, std::chrono::milliseconds patience) {
  const Clock::time_point deadline = Clock::now() + patience;
  while (true) {
    for (auto event = events_.begin(); event != events_.end(); ++event) {
      if (event->value("event", "") == name) {
        events_.erase(event);
        return true;
      }
    }
    if (Clock::now() >= deadline ||
        (buffer_.find('\n') == std::string::npos && !wait_readable(socket_.get(), deadline))) {
      return false;
    }
    events_.push_back(receive(deadline));
  }
}

}  // namespace tidelock::sandbox::vm
