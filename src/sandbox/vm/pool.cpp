#include "sandbox/vm/pool.hpp"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

#include "base/error.hpp"
#include "base/log.hpp"

namespace tidelock::sandbox::vm {

int plan_pool(const PoolState& state) {
  if (state.idle > state.wanted) {
    return state.wanted - state.idle;
  }
  const std::uint64_t needed = state.reserve_bytes + state.copy_bytes;
  if (state.available_bytes < state.reserve_bytes) {
    return -state.idle;  // guests need what idle copies hold
  }
  return state.idle < state.wanted && state.available_bytes >= needed ? 1 : 0;
}

bool admits(std::uint64_t available_bytes, std::uint64_t guest_bytes, std::uint64_t reserve_bytes) {
  return available_bytes >= reserve_bytes && available_bytes - reserve_bytes >= guest_bytes;
}

std::uint64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (std::uint64_t kilobytes = 0; file >> name >> kilobytes; std::getline(file, unit)) {
    if (name == "MemAvailable:") {
      return kilobytes << 10;
    }
  }
  return std::numeric_limits<std::uint64_t>::max();
}

Pool::Pool(int wanted, Start start) : start_(std::move(start)), wanted_(wanted) {
  if (wanted_ > 0) {
    filler_ = std::thread([this] { fill(); });
  }
}

Pool::~Pool() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (filler_.joinable()) {
    filler_.join();
  }
  for (const std::unique_ptr<Machine>& machine : idle_) {
    machine->end();
  }
}

void Pool::fill() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    const int step =
        plan_pool({static_cast<int>(idle_.size()), wanted_, available_memory(), kCopyBytes, kReserveBytes});
    if (step < 0) {
      for (int i = 0; i > step && !idle_.empty(); --i) {
        idle_.front()->end();
        idle_.pop_front();
      }
    } else if (step > 0) {
      resting_ = false;
      lock.unlock();
      std::unique_ptr<Machine> machine;
      try {
        machine = start_();
      } catch (const std::exception& error) {
        spdlog::warn("sandbox pool: {}", error.what());
      }
      lock.lock();
      if (machine != nullptr) {
        idle_.push_back(std::move(machine));
        changed_.notify_all();
        continue;
      }
    }
    resting_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::seconds(1),
                      [this] { return ending_ || static_cast<int>(idle_.size()) < wanted_; });
  }
}

std::unique_ptr<Machine> Pool::take() {
  {
    const std::lock_guard lock(mutex_);
    while (!idle_.empty()) {
      std::unique_ptr<Machine> machine = std::move(idle_.front());
      idle_.pop_front();
      changed_.notify_all();
      if (machine->alive()) {
        return machine;
      }
    }
  }
  return start_();
}

void Pool::await_full() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] {
    return wanted_ == 0 || ending_ || (resting_ && !idle_.empty()) || static_cast<int>(idle_.size()) >= wanted_;
  });
}

}  // namespace tidelock::sandbox::vm
