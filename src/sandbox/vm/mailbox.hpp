// A stream of a link whose frames one caller waits for. Private to sandbox/.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

#include "sandbox/vm/channel.hpp"

namespace tidelock::sandbox::vm {

class Mailbox : public Sink {
 public:
  void take(const Frame& frame) override {
    const std::lock_guard lock(mutex_);
    frames_.push_back(frame);
    changed_.notify_one();
  }
  void lose() override {
    const std::lock_guard lock(mutex_);
    lost_ = true;
    changed_.notify_one();
  }
  // False: the deadline has passed. Throws Error{io} when the connection is gone.
  bool next(Frame& frame, std::chrono::steady_clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, deadline, [this] { return lost_ || !frames_.empty(); })) {
      return false;
    }
    if (frames_.empty()) {
      fail_gone();
    }
    frame = std::move(frames_.front());
    frames_.pop_front();
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Frame> frames_;
  bool lost_ = false;
};

// Open for as long as it lives.
struct Opened {
  Link& link;
  std::shared_ptr<Mailbox> mailbox = std::make_shared<Mailbox>();
  std::uint32_t stream = link.open(mailbox);
  ~Opened() { link.forget(stream); }
};

}  // namespace tidelock::sandbox::vm
