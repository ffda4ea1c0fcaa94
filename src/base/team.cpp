#include "base/team.hpp"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.hpp"

namespace tidelock {
namespace {

constexpr int kSpinsBeforeSleep = 2000;  // a few microseconds: covers back-to-back loops, not a busy core

}  // namespace

void set_flush_to_zero() {
  _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
  _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
}

struct Team::Impl {
  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable wake, done;
  std::atomic<std::uint64_t> generation{0};
  std::atomic<int> active{0};
  std::atomic<std::int64_t> next{0};
  std::int64_t count = 0, grain = 1;
  const std::function<void(std::int64_t, std::int64_t)>* body = nullptr;
  std::exception_ptr error;
  bool stop = false;

  void take_pieces() {
    for (;;) {
      const std::int64_t begin = next.fetch_add(grain);
      if (begin >= count) return;
      try {
        (*body)(begin, std::min(begin + grain, count));
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next.store(count);
      }
    }
  }

  void worker() {
    set_flush_to_zero();
    std::uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpinsBeforeSleep && generation.load(std::memory_order_acquire) == seen; ++spin)
        _mm_pause();
      {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return stop || generation.load() != seen; });
        if (stop) return;
        seen = generation.load();
      }
      take_pieces();
      if (active.fetch_sub(1) == 1) {
        const std::lock_guard lock(mutex);
        done.notify_one();
      }
    }
  }
};

Team::Team(int threads) : impl_(std::make_unique<Impl>()) {
  if (threads < 1 || threads > 1024) fail(ErrorCode::invalid_argument, "threads must be 1 to 1024, not {}", threads);
  set_flush_to_zero();
  for (int i = 1; i < threads; ++i) impl_->workers.emplace_back([this] { impl_->worker(); });
}

Team::~Team() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
    impl_->generation.fetch_add(1);
  }
  impl_->wake.notify_all();
  for (auto& thread : impl_->workers) thread.join();
}

int Team::threads() const {
  return static_cast<int>(impl_->workers.size()) + 1;
}

void Team::parallel(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  if (impl_->workers.empty() || count <= grain) {
    for (std::int64_t begin = 0; begin < count; begin += grain) body(begin, std::min(begin + grain, count));
    return;
  }
  Impl& team = *impl_;
  {
    const std::lock_guard lock(team.mutex);
    team.count = count;
    team.grain = grain;
    team.body = &body;
    team.error = nullptr;
    team.next.store(0);
    team.active.store(static_cast<int>(team.workers.size()));
    team.generation.fetch_add(1, std::memory_order_release);
  }
  team.wake.notify_all();
  team.take_pieces();
  for (int spin = 0; spin < kSpinsBeforeSleep && team.active.load() != 0; ++spin) _mm_pause();
  std::unique_lock lock(team.mutex);
  team.done.wait(lock, [&] { return team.active.load() == 0; });
  if (team.error) std::rethrow_exception(team.error);
}

Team& solo_team() {
  static Team team(1);
  return team;
}

}  // namespace tidelock
