#include "state/disk_io.hpp"

#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>

namespace tidelock::state {
namespace {

class PlainIo : public DiskIo {
 public:
  void start(std::span<IoRequest> requests) override {
    for (IoRequest& request : requests) run(request);
  }
  void wait(std::span<IoRequest> /*requests*/) override {}

 private:
  static void run(IoRequest& request) {
    request.result = 0;
    request.done = true;
    while (true) {
      const auto moved = static_cast<std::size_t>(request.result);
      if (moved == request.bytes.size()) return;
      std::byte* at = request.bytes.data() + moved;
      const std::size_t left = request.bytes.size() - moved;
      const auto offset = static_cast<off_t>(request.offset + moved);
      const ssize_t n =
          request.op == IoOp::read ? pread(request.fd, at, left, offset) : pwrite(request.fd, at, left, offset);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) request.result = -errno;
      if (n <= 0) return;
      request.result += n;
    }
  }
};

class RingIo : public DiskIo {
 public:
  static std::unique_ptr<DiskIo> make() {
    auto io = std::make_unique<RingIo>();
    return io->open_ ? std::move(io) : nullptr;
  }
  RingIo() : open_(io_uring_queue_init(kDepth, &ring_, 0) == 0) {}
  ~RingIo() override {
    if (!open_) return;
    while (in_flight_ > 0) reap();
    io_uring_queue_exit(&ring_);
  }
  RingIo(const RingIo&) = delete;
  RingIo& operator=(const RingIo&) = delete;

  void start(std::span<IoRequest> requests) override {
    for (IoRequest& request : requests) {
      request.result = 0;
      request.done = false;
      waiting_.push_back(&request);
    }
    submit();
  }

  void wait(std::span<IoRequest> requests) override {
    for (const IoRequest& request : requests)
      while (!request.done) reap();
  }

 private:
  static constexpr unsigned kDepth = 32;

  // What waits goes to the kernel, as far as there is room.
  void submit() {
    while (!waiting_.empty() && in_flight_ < kDepth) {
      IoRequest* request = waiting_.front();
      waiting_.pop_front();
      io_uring_sqe* entry = io_uring_get_sqe(&ring_);
      const auto moved = static_cast<std::size_t>(request->result);
      std::byte* at = request->bytes.data() + moved;
      const auto left = static_cast<unsigned>(std::min<std::size_t>(request->bytes.size() - moved, 1U << 30));
      if (request->op == IoOp::read) {
        io_uring_prep_read(entry, request->fd, at, left, request->offset + moved);
      } else {
        io_uring_prep_write(entry, request->fd, at, left, request->offset + moved);
      }
      io_uring_sqe_set_data(entry, request);
      ++in_flight_;
    }
    io_uring_submit(&ring_);
  }

  void reap() {
    io_uring_cqe* completion = nullptr;
    if (io_uring_wait_cqe(&ring_, &completion) != 0) return;  // interrupted: the caller asks again
    auto* request = static_cast<IoRequest*>(io_uring_cqe_get_data(completion));
    const std::int64_t n = completion->res;
    io_uring_cqe_seen(&ring_, completion);
    --in_flight_;
    if (n == -EINTR || n == -EAGAIN || (n > 0 && request->result + n < std::ssize(request->bytes))) {
      request->result += std::max<std::int64_t>(n, 0);
      waiting_.push_front(request);
    } else {
      request->result = n < 0 ? n : request->result + n;
      request->done = true;
    }
    submit();
  }

  io_uring ring_{};
  unsigned in_flight_ = 0;
  bool open_ = false;
  std::deque<IoRequest*> waiting_;
};

}  // namespace

std::unique_ptr<DiskIo> make_disk_io(IoKind kind) {
  if (kind == IoKind::best)
    if (auto ring = RingIo::make()) return ring;
  return std::make_unique<PlainIo>();
}

}  // namespace tidelock::state
