#include "base/team.hpp"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/stall_guard.hpp"

namespace tidelock {
namespace {

constexpr int kSpinsBeforeSleep = 2000;  // a few microseconds: covers back-to-back loops, not a busy core

}  // namespace

void set_flush_to_zero() {
  _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
  _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
}

struct Team::Impl {
  using Clock = std::chrono::steady_clock;

  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable wake, done;
  std::atomic<std::uint64_t> generation{0};  // of loops; changes under the mutex, like `open`
  bool open = false, stop = false;           // open: workers may still join the loop
  std::atomic<int> inside{0};                // workers that have joined and not left
  std::atomic<std::int64_t> next{0};
  std::int64_t count = 0, grain = 1;
  const std::function<void(std::int64_t, std::int64_t)>* body = nullptr;
  std::exception_ptr error;
  StallGuard guard;

  // Runs pieces until none is left; returns what the longest took.
  Clock::duration take_pieces() {
    Clock::duration longest{};
    for (auto begun = Clock::now();;) {
      const std::int64_t begin = next.fetch_add(grain);
      if (begin >= count) return longest;
      try {
        (*body)(begin, std::min(begin + grain, count));
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next.store(count);
      }
      const auto ended = Clock::now();
      longest = std::max(longest, ended - begun);
      begun = ended;
    }
  }

  // Waits for a loop that this worker has not seen; false at the end of the team.
  bool join(std::uint64_t& seen) {
    for (int spin = 0; spin < kSpinsBeforeSleep && generation.load(std::memory_order_acquire) == seen; ++spin)
      _mm_pause();
    std::unique_lock lock(mutex);
    wake.wait(lock, [&] { return stop || (open && generation.load() != seen); });
    if (stop) return false;
    seen = generation.load();
    inside.fetch_add(1);
    return true;
  }

  void worker() {
    set_flush_to_zero();
    for (std::uint64_t seen = 0; join(seen);) {
      take_pieces();
      const std::lock_guard lock(mutex);
      if (inside.fetch_sub(1) == 1) done.notify_one();
    }
  }

  void begin(std::int64_t of, std::int64_t step, const std::function<void(std::int64_t, std::int64_t)>& what) {
    {
      const std::lock_guard lock(mutex);
      count = of;
      grain = step;
      body = &what;
      error = nullptr;
      next.store(0);
      open = true;
      generation.fetch_add(1, std::memory_order_release);
    }
    wake.notify_all();
  }

  // No piece is left to take: whoever has not come by now is not waited for, only those with a piece in their hands.
  void finish() {
    {
      const std::lock_guard lock(mutex);
      open = false;
    }
    for (int spin = 0; spin < kSpinsBeforeSleep && inside.load() != 0; ++spin) _mm_pause();
    std::unique_lock lock(mutex);
    done.wait(lock, [&] { return inside.load() == 0; });
    if (error) std::rethrow_exception(error);
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
  const auto begun = Impl::Clock::now();
  if (impl_->workers.empty() || count <= grain || impl_->guard.alone(begun)) {
    for (std::int64_t begin = 0; begin < count; begin += grain) body(begin, std::min(begin + grain, count));
    return;
  }
  impl_->begin(count, grain, body);
  const auto longest = impl_->take_pieces();
  const auto waiting = Impl::Clock::now();
  impl_->finish();
  const auto now = Impl::Clock::now();
  impl_->guard.waited(now, now - waiting, longest);
}

Team& solo_team() {
  static Team team(1);
  return team;
}

}  // namespace tidelock
