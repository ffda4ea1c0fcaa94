#include "train/put_away.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/base.hpp"

namespace tidelock::train {
namespace {

constexpr std::size_t kMostAtOnce = 64 << 20;

// A new file that has no name.
int open_nameless(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  const int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0) return fd;
  if (errno != EOPNOTSUPP && errno != EISDIR) fail_errno("open a file in", folder.string());
  std::string name = (folder / "optimizer-XXXXXX").string();  // a file system without such files
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named < 0) fail_errno("open a file in", folder.string());
  ::unlink(name.c_str());
  return named;
}

// Calls transfer(fd, data, bytes, offset), pread or pwrite, until all bytes went through.
template <typename Byte, typename Transfer>
void transfer_all(Transfer transfer, int fd, std::span<Byte> bytes, off_t offset, const char* what,
                  const std::filesystem::path& folder) {
  while (!bytes.empty()) {
    const ssize_t n = transfer(fd, bytes.data(), std::min(bytes.size(), kMostAtOnce), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = EIO;  // shorter than it was written
    if (n <= 0) fail_errno(what, folder.string());
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += n;
  }
}

}  // namespace

PutAway::PutAway(const std::filesystem::path& folder, std::span<const std::span<const float>> arrays)
    : folder_(folder), fd_(open_nameless(folder)) {
  try {
    ContentHasher hasher;
    off_t offset = 0;
    for (const auto& array : arrays) {
      const auto bytes = std::as_bytes(array);
      hasher.add(bytes);
      transfer_all(::pwrite, fd_, bytes, offset, "write the optimizer's state in", folder_);
      offset += static_cast<off_t>(bytes.size());
    }
    hash_ = hasher.result();
    if (::fdatasync(fd_) != 0) fail_errno("write the optimizer's state in", folder_.string());
    ::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

PutAway::~PutAway() {
  ::close(fd_);
}

void PutAway::read(std::span<const std::span<float>> arrays) const {
  ContentHasher hasher;
  off_t offset = 0;
  for (const auto& array : arrays) {
    const auto bytes = std::as_writable_bytes(array);
    transfer_all(::pread, fd_, bytes, offset, "read the optimizer's state in", folder_);
    hasher.add(bytes);
    offset += static_cast<off_t>(bytes.size());
  }
  if (hasher.result() != hash_)
    throw Error(ErrorCode::corrupt_data,
                fmt::format("the optimizer's state in {} is not what was written", folder_.string()),
                "go on from the last checkpoint with --resume");
}

}  // namespace tidelock::train
