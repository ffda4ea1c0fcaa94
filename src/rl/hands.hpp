// Hands: threads that run slow jobs (sandboxes) and report through a queue that one thread reads. Private to rl/.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tidelock::rl {

class Hands {
 public:
  using Done = std::function<void()>;  // runs on the thread that collects
  using Job = std::function<Done()>;   // runs on a hand; must not throw

  explicit Hands(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Hands() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      jobs_.clear();
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  Hands(const Hands&) = delete;
  Hands& operator=(const Hands&) = delete;

  void post(Job job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
      ++outstanding_;
    }
    wake_.notify_one();
  }

  // Runs the reports that have arrived; with `wait`, waits for one when there is none (and work is under way). Returns
  // how many.
  std::size_t collect(bool wait) {
    std::deque<Done> reports;
    {
      std::unique_lock lock(mutex_);
      if (wait) arrived_.wait(lock, [&] { return !reports_.empty() || outstanding_ == 0; });
      reports.swap(reports_);
      outstanding_ -= reports.size();
    }
    for (const Done& report : reports) report();
    return reports.size();
  }

 private:
  void work() {
    for (;;) {
      Job job;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
        if (stop_) return;
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      Done done = job();
      const std::lock_guard lock(mutex_);
      reports_.push_back(std::move(done));
      arrived_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, arrived_;
  std::deque<Job> jobs_;
  std::deque<Done> reports_;
  std::size_t outstanding_ = 0;  // posted and not collected
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tidelock::rl
