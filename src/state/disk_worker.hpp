// A thread with a lane to the disk, which does jobs in the order in which they come. Private to state/.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "state/segment_store.hpp"

namespace tidelock::state {

class DiskWorker {
 public:
  using Job = std::function<void(DiskLane&)>;  // does not throw

  explicit DiskWorker(std::unique_ptr<DiskIo> io) : lane_(std::move(io)), thread_([this] { run(); }) {}
  ~DiskWorker() {  // does what is left first
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  DiskWorker(const DiskWorker&) = delete;
  DiskWorker& operator=(const DiskWorker&) = delete;

  void post(Job job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_one();
  }

 private:
  void run() {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job(lane_);
    }
  }

  DiskLane lane_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool stop_ = false;
  std::thread thread_;  // last
};

}  // namespace tidelock::state
