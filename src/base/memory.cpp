#include "base/memory.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <fstream>
#include <limits>

namespace tidelock {

std::uint64_t available_memory() {
  std::uint64_t available = std::numeric_limits<std::uint64_t>::max();
  std::ifstream info("/proc/meminfo");
  for (std::string key, unit; info >> key;) {
    std::uint64_t kilobytes = 0;
    info >> kilobytes;
    std::getline(info, unit);
    if (key == "MemAvailable:") available = kilobytes * 1024;
  }
  std::ifstream limit("/sys/fs/cgroup/memory.max"), used("/sys/fs/cgroup/memory.current");
  std::uint64_t most = 0, now = 0;
  if (limit >> most && used >> now) available = std::min(available, most > now ? most - now : 0);
  return available;
}

std::string bytes_text(std::uint64_t bytes) {
  const char* units[] = {"B", "KB", "MB", "GB", "TB", "PB", "EB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < std::size(units)) {
    value /= 1000;
    ++unit;
  }
  const int digits = unit == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f} {}", value, digits, units[unit]);
}

}  // namespace tidelock
