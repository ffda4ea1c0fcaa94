// QEMU processes started ahead of time, each a copy of one template that waits for a state: starting one costs more
// than all else that a resume does.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "sandbox/vm/machine.hpp"

namespace tidelock::sandbox::vm {

// The decision alone. What the host can give is what limits it: idle copies are worth less than running guests.
struct PoolState {
  int idle = 0;
  int wanted = 0;                     // idle copies asked for
  std::uint64_t available_bytes = 0;  // of memory, as the host says
  std::uint64_t copy_bytes = 0;       // what one idle copy holds
  std::uint64_t reserve_bytes = 0;    // to be left for guests that grow
};
// How many copies to start (positive) or to end (negative), at most one start at a time.
int plan_pool(const PoolState& state);

// Whether a guest that may grow to `guest_bytes` fits now.
bool admits(std::uint64_t available_bytes, std::uint64_t guest_bytes, std::uint64_t reserve_bytes);

std::uint64_t available_memory();

constexpr std::uint64_t kCopyBytes = 48ULL << 20;  // an idle QEMU process, measured, rounded up
constexpr std::uint64_t kReserveBytes = 256ULL << 20;

// The pool of one template. Thread-safe.
class Pool {
 public:
  using Start = std::function<std::unique_ptr<Machine>()>;
  Pool(int wanted, Start start);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  // A waiting copy, or one that is started now.
  std::unique_ptr<Machine> take();
  // Waits until it is as full as it may be.
  void await_full();

 private:
  void fill();
  Start start_;
  const int wanted_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Machine>> idle_;
  bool ending_ = false, resting_ = false;
  std::thread filler_;
};

}  // namespace tidelock::sandbox::vm
