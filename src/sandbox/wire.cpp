#include "sandbox/wire.hpp"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"

namespace tidelock::sandbox {
namespace {

class Writer {
 public:
  template <typename T>
  void number(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void text(std::string_view value) {
    number(static_cast<std::uint32_t>(value.size()));
    out_.append(value);
  }
  void list(const std::vector<std::string>& values) {
    number(static_cast<std::uint32_t>(values.size()));
    for (const std::string& value : values) {
      text(value);
    }
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

class Reader {
 public:
  Reader(std::string_view bytes, const char* what) : bytes_(bytes), what_(what) {}
  template <typename T>
  T number() {
    T value{};
    const std::string_view part = take(sizeof value);
    std::memcpy(&value, part.data(), sizeof value);
    return value;
  }
  std::string text() { return std::string(take(number<std::uint32_t>())); }
  bool flag() {
    const auto value = number<std::uint8_t>();
    if (value > 1) {
      fail(ErrorCode::corrupt_data, "sandbox message '{}': a flag is {}, expected 0 or 1", what_, value);
    }
    return value == 1;
  }
  std::vector<std::string> list() {
    const auto count = number<std::uint32_t>();
    // Each item takes at least its length field: a count that cannot fit is refused before anything is reserved for it.
    if (count > bytes_.size() / sizeof(std::uint32_t)) {
      fail(ErrorCode::corrupt_data, "sandbox message '{}': {} items announced in {} bytes", what_, count,
           bytes_.size());
    }
    std::vector<std::string> values;
    values.reserve(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      values.push_back(text());
    }
    return values;
  }
  void end() const {
    if (!bytes_.empty()) {
      fail(ErrorCode::corrupt_data, "sandbox message '{}': {} bytes after its end", what_, bytes_.size());
    }
  }

 private:
  std::string_view take(std::size_t count) {
    if (count > bytes_.size()) {
      fail(ErrorCode::corrupt_data, "sandbox message '{}': {} bytes needed, {} left", what_, count, bytes_.size());
    }
    const std::string_view part = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return part;
  }

  std::string_view bytes_;
  const char* what_;
};

std::size_t receive_some(int socket, char* into, std::size_t size, std::vector<FileDescriptor>& descriptors) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kMaxDescriptors)> control{};
  iovec part{into, size};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = 0;
  do {
    got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    if (errno == ECONNRESET) {
      return 0;
    }
    fail(ErrorCode::io, "sandbox socket: receive: {}", std::strerror(errno));
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
        descriptors.emplace_back(fd);
      }
    }
  }
  return static_cast<std::size_t>(got);
}

}  // namespace

void FileDescriptor::reset(int fd) {
  if (fd_ >= 0) {
    close(fd_);
  }
  fd_ = fd;
}

void raise_file_limit() noexcept {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
}

void send_message(int socket, MessageType type, std::string_view body, std::span<const int> descriptors) {
  if (body.size() > kMaxBody || descriptors.size() > kMaxDescriptors) {
    fail(ErrorCode::invalid_argument, "sandbox request of {} bytes: at most {} fit", body.size(), kMaxBody);
  }
  FrameHeader header{static_cast<std::uint32_t>(type), static_cast<std::uint32_t>(body.size())};
  std::array<iovec, 2> parts{iovec{&header, sizeof header}, iovec{const_cast<char*>(body.data()), body.size()}};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kMaxDescriptors)> control{};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
  }
  std::size_t left = sizeof header + body.size();
  while (left > 0) {
    const ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) {
        continue;
      }
      fail(ErrorCode::io, "sandbox socket: send: {}", std::strerror(errno));
    }
    left -= static_cast<std::size_t>(sent);
    message.msg_control = nullptr;  // descriptors travel with the first byte only
    message.msg_controllen = 0;
    std::size_t skip = static_cast<std::size_t>(sent);
    while (skip > 0 && message.msg_iovlen > 0) {
      iovec& part = *message.msg_iov;
      const std::size_t step = std::min(skip, part.iov_len);
      part.iov_base = static_cast<char*>(part.iov_base) + step;
      part.iov_len -= step;
      skip -= step;
      if (part.iov_len == 0) {
        ++message.msg_iov;
        --message.msg_iovlen;
      }
    }
  }
}

FrameHeader decode_header(std::string_view bytes) {
  Reader reader(bytes, "header");
  FrameHeader header;
  header.type = reader.number<std::uint32_t>();
  header.length = reader.number<std::uint32_t>();
  reader.end();
  if (header.type < static_cast<std::uint32_t>(MessageType::hello) ||
      header.type > static_cast<std::uint32_t>(MessageType::done) || header.length > kMaxBody) {
    fail(ErrorCode::corrupt_data, "sandbox message header: type {}, {} bytes; at most {} bytes are allowed",
         header.type, header.length, kMaxBody);
  }
  return header;
}

std::optional<Message> receive_message(int socket) {
  Message message;
  std::array<char, sizeof(FrameHeader)> bytes{};
  std::size_t have = 0;
  while (have < bytes.size()) {
    const std::size_t got = receive_some(socket, bytes.data() + have, bytes.size() - have, message.descriptors);
    if (got == 0) {
      if (have == 0) {
        return std::nullopt;
      }
      fail(ErrorCode::corrupt_data, "sandbox socket: closed inside a message header");
    }
    have += got;
  }
  const FrameHeader header = decode_header({bytes.data(), bytes.size()});
  message.type = static_cast<MessageType>(header.type);
  message.body.resize(header.length);
  for (have = 0; have < header.length;) {
    const std::size_t got = receive_some(socket, message.body.data() + have, header.length - have, message.descriptors);
    if (got == 0) {
      fail(ErrorCode::corrupt_data, "sandbox socket: closed after {} of {} bytes of a message", have, header.length);
    }
    have += got;
  }
  return message;
}

bool wait_readable(int descriptor, std::chrono::steady_clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    pollfd entry{descriptor, POLLIN, 0};
    const int ready = poll(&entry, 1, left > 0 ? static_cast<int>(std::min<long>(left, 1'000'000)) : 0);
    if (ready > 0) {
      return true;
    }
    if (ready == 0 && left <= 0) {
      return false;
    }
    if (ready < 0 && errno != EINTR) {
      fail(ErrorCode::io, "sandbox: poll: {}", std::strerror(errno));
    }
  }
}

std::string encode(const Hello& value) {
  Writer writer;
  writer.text(value.run_directory);
  writer.number<std::uint8_t>(value.features.cgroup_limits);
  writer.number<std::uint8_t>(value.features.cgroup_freezer);
  writer.number<std::uint8_t>(value.features.cgroup_version2);
  return writer.take();
}

Hello decode_hello(std::string_view body) {
  Reader reader(body, "hello");
  Hello value;
  value.run_directory = reader.text();
  value.features.cgroup_limits = reader.flag();
  value.features.cgroup_freezer = reader.flag();
  value.features.cgroup_version2 = reader.flag();
  reader.end();
  return value;
}

std::string encode(const Welcome& value) {
  Writer writer;
  writer.text(value.isolation);
  writer.number(static_cast<std::uint8_t>(value.freezer));
  return writer.take();
}

Welcome decode_welcome(std::string_view body) {
  Reader reader(body, "welcome");
  Welcome value;
  value.isolation = reader.text();
  const auto freezer = reader.number<std::uint8_t>();
  if (freezer > static_cast<std::uint8_t>(Freezer::version2)) {
    fail(ErrorCode::corrupt_data, "sandbox message 'welcome': freezer {} does not exist", freezer);
  }
  value.freezer = static_cast<Freezer>(freezer);
  reader.end();
  return value;
}

std::string encode(const CreateRequest& value) {
  Writer writer;
  writer.text(value.id);
  writer.text(value.image_root);
  writer.number(value.limits.memory_bytes);
  writer.number(value.limits.disk_bytes);
  writer.number<std::int32_t>(value.limits.processes);
  writer.number(std::bit_cast<std::uint64_t>(value.limits.cpus));
  writer.number(value.uid);
  return writer.take();
}

CreateRequest decode_create(std::string_view body) {
  Reader reader(body, "create");
  CreateRequest value;
  value.id = reader.text();
  value.image_root = reader.text();
  value.limits.memory_bytes = reader.number<std::uint64_t>();
  value.limits.disk_bytes = reader.number<std::uint64_t>();
  value.limits.processes = reader.number<std::int32_t>();
  value.limits.cpus = std::bit_cast<double>(reader.number<std::uint64_t>());
  value.uid = reader.number<std::uint32_t>();
  reader.end();
  // The id becomes the name of a cgroup: it must not be a path.
  if (value.id.empty() || value.id.find_first_of(std::string_view("/.\0", 3)) != std::string::npos) {
    fail(ErrorCode::corrupt_data, "sandbox message 'create': '{}' cannot be an id", value.id);
  }
  return value;
}

std::string encode(const Created& value) {
  Writer writer;
  writer.number(value.pid);
  writer.number(value.uid);
  return writer.take();
}

Created decode_created(std::string_view body) {
  Reader reader(body, "created");
  Created value;
  value.pid = reader.number<std::int32_t>();
  value.uid = reader.number<std::uint32_t>();
  reader.end();
  return value;
}

std::string encode(const RunRequest& value) {
  Writer writer;
  writer.number(static_cast<std::uint8_t>(value.kind));
  writer.list(value.argv);
  writer.list(value.environment);
  writer.text(value.path);
  writer.number(value.mode);
  writer.number(value.limit);
  return writer.take();
}

RunRequest decode_run(std::string_view body) {
  Reader reader(body, "run");
  RunRequest value;
  const auto kind = reader.number<std::uint8_t>();
  if (kind > static_cast<std::uint8_t>(RunKind::read_file)) {
    fail(ErrorCode::corrupt_data, "sandbox message 'run': kind {} does not exist", kind);
  }
  value.kind = static_cast<RunKind>(kind);
  value.argv = reader.list();
  value.environment = reader.list();
  value.path = reader.text();
  value.mode = reader.number<std::uint32_t>();
  value.limit = reader.number<std::uint64_t>();
  reader.end();
  if (value.kind == RunKind::command && value.argv.empty()) {
    fail(ErrorCode::corrupt_data, "sandbox message 'run': a command without a name");
  }
  return value;
}

std::string encode(const Exited& value) {
  Writer writer;
  writer.number(value.exit_code);
  writer.number(value.signal);
  return writer.take();
}

Exited decode_exited(std::string_view body) {
  Reader reader(body, "exited");
  Exited value;
  value.exit_code = reader.number<std::int32_t>();
  value.signal = reader.number<std::int32_t>();
  reader.end();
  return value;
}

}  // namespace tidelock::sandbox
