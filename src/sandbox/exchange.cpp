#include "sandbox/exchange.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"

namespace tidelock::sandbox {
namespace {

constexpr std::size_t kPart = 64U << 10;
constexpr std::size_t kPipeMost = 1U << 20;  // /proc/sys/fs/pipe-max-size for users without privileges

}  // namespace

FileDescriptor make_input(std::string_view content) {
  if (content.empty()) {
    FileDescriptor null(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!null) {
      fail_errno("open", "/dev/null");
    }
    return null;
  }
  FileDescriptor file(memfd_create("input", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) {
    fail_errno("make", "a file in memory");
  }
  while (!content.empty()) {
    const ssize_t put = write(file.get(), content.data(), content.size());
    if (put <= 0) {
      if (put < 0 && errno == EINTR) {
        continue;
      }
      fail_errno("write", "a file in memory");
    }
    content.remove_prefix(static_cast<std::size_t>(put));
  }
  if (lseek(file.get(), 0, SEEK_SET) != 0 ||
      fcntl(file.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    fail_errno("seal", "a file in memory");
  }
  return file;
}

OutputPipe::OutputPipe(Stream stream, const ExecRequest& request) : stream_(stream), request_(request) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    fail(ErrorCode::exhausted, "sandbox: cannot make a pipe: {}", std::strerror(errno));
  }
  read_.reset(ends[0]);
  write_.reset(ends[1]);
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
}

bool OutputPipe::read_some() {
  static thread_local std::array<char, kPart> part;
  const ssize_t got = read(read_.get(), part.data(), part.size());
  if (got <= 0) {
    if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      read_.reset();
    }
    return false;
  }
  const std::uint64_t room = request_.output_limit - text_.size();
  const auto kept = static_cast<std::size_t>(std::min<std::uint64_t>(room, static_cast<std::uint64_t>(got)));
  truncated_ = truncated_ || kept < static_cast<std::size_t>(got);
  text_.append(part.data(), kept);
  if (kept > 0 && request_.on_output && !thrown_) {
    try {
      request_.on_output(stream_, {part.data(), kept});
    } catch (...) {
      thrown_ = std::current_exception();  // the command is ended first
    }
  }
  return true;
}

void OutputPipe::drain() {
  // A background process may write faster than we read: what the command itself wrote is among the first megabyte.
  for (std::size_t parts = 0; read_ && parts < kPipeMost / kPart * 4 && read_some(); ++parts) {
  }
}

}  // namespace tidelock::sandbox
