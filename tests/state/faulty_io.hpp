// A disk that fails: wraps a true one, and spoils what comes back.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <functional>
#include <memory>
#include <utility>

#include "base/base.hpp"
#include "state/disk_io.hpp"

namespace tidelock::state::testing {

// Calls `spoil` with each request once it is done.
class SpoiledIo : public DiskIo {
 public:
  explicit SpoiledIo(std::function<void(IoRequest&)> spoil, IoKind kind = IoKind::best)
      : inner_(make_disk_io(kind)), spoil_(std::move(spoil)) {}
  void start(std::span<IoRequest> requests) override { inner_->start(requests); }
  void wait(std::span<IoRequest> requests) override {
    inner_->wait(requests);
    for (IoRequest& request : requests) spoil_(request);
  }

 private:
  const std::unique_ptr<DiskIo> inner_;
  const std::function<void(IoRequest&)> spoil_;
};

// One request in `of` fails: refused, full, short, or with a bit turned.
inline std::function<void(IoRequest&)> random_faults(std::uint64_t seed, std::uint64_t of) {
  return [random = Random(seed), of](IoRequest& request) mutable {
    if (random.below(of) != 0 || request.result <= 0) return;
    if (request.op == IoOp::write) {
      request.result = random.below(2) == 0 ? -ENOSPC : -EIO;
      return;
    }
    switch (random.below(3)) {
      case 0:
        request.result = -EIO;
        break;
      case 1:
        request.result = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(request.result)));
        break;
      default:
        request.bytes[random.below(request.bytes.size())] ^= std::byte{1} << random.below(8);
    }
  };
}

// A disk whose process is killed when it begins its n-th request: before it, or with half of it done.
class FatalIo : public DiskIo {
 public:
  explicit FatalIo(int* left) : left_(left) {}
  void start(std::span<IoRequest> requests) override {
    for (IoRequest& request : requests) {
      if (request.op == IoOp::write && --*left_ <= 0) {
        IoRequest half = request;
        half.bytes = half.bytes.first(half.bytes.size() / 2 / 4096 * 4096);
        if (!half.bytes.empty()) inner_->start(std::span(&half, 1));
        kill(getpid(), SIGKILL);
      }
      inner_->start(std::span(&request, 1));
    }
  }
  void wait(std::span<IoRequest> requests) override { inner_->wait(requests); }

 private:
  const std::unique_ptr<DiskIo> inner_ = make_disk_io(IoKind::plain);
  int* left_;
};

}  // namespace tidelock::state::testing
