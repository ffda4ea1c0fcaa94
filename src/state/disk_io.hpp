// Reads and writes of many pieces at once. io_uring where the kernel offers it, else one call after the other. One
// thread owns one. Private to state/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tidelock::state {

enum class IoOp : std::uint8_t { read, write };

struct IoRequest {
  IoOp op = IoOp::read;
  int fd = -1;
  std::uint64_t offset = 0;
  std::span<std::byte> bytes;  // page-aligned in address, offset and length where the file wants that (O_DIRECT)
  std::int64_t result = 0;     // bytes moved, fewer than asked for at a file's end; or -errno
  bool done = false;
};

class DiskIo {
 public:
  virtual ~DiskIo() = default;
  // Begins them. They, and their bytes, must stay where they are until wait() for them has returned.
  virtual void start(std::span<IoRequest> requests) = 0;
  // Returns when these are done. Never throws: what went wrong stands in each result.
  virtual void wait(std::span<IoRequest> requests) = 0;
};

enum class IoKind : std::uint8_t { best, plain };
std::unique_ptr<DiskIo> make_disk_io(IoKind kind = IoKind::best);

}  // namespace tidelock::state
