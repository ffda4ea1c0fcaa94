#include "cli/sizes.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <numeric>
#include <vector>

#include "base/base.hpp"

namespace tidelock::cli {
namespace {

// A number and one of the letters K, M, G, T, before what must follow it.
double parse(const std::string& text, const std::string& option, double step, const std::string& unit,
             const std::string& example) {
  std::size_t used = 0;
  double value = -1;
  try {
    value = std::stod(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  std::string rest = text.substr(used);
  const std::string letters = "KMGT";
  double scale = 1;
  if (!rest.empty() && letters.find(rest.front()) != std::string::npos) {
    scale = std::pow(step, 1.0 + static_cast<double>(letters.find(rest.front())));
    rest.erase(0, 1);
  }
  if (used == 0 || !(value > 0) || !(value * scale < 1e18) || rest != unit)
    throw Error(ErrorCode::invalid_argument, fmt::format("{} {}: expected a size such as {}", option, text, example));
  return value * scale;
}

}  // namespace

std::uint64_t parse_bytes(const std::string& text, const std::string& option) {
  return static_cast<std::uint64_t>(parse(text, option, 1024, "", "64G"));
}
double parse_rate(const std::string& text, const std::string& option) {
  return parse(text, option, 1000, "B/s", "7GB/s");
}
std::int64_t parse_tokens(const std::string& text, const std::string& option) {
  return static_cast<std::int64_t>(parse(text, option, 1024, "", "128K"));
}

std::string bytes_text(std::uint64_t bytes) {
  const char* units[] = {"B", "KB", "MB", "GB", "TB", "PB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < std::size(units)) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", value, unit == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2, units[unit]);
}

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

double measure_bandwidth(int threads) {
  constexpr std::size_t kWords = std::size_t{32} << 20;  // 256 MB: beyond any cache
  const std::vector<std::uint64_t> words(kWords, 1);
  Team team(threads);
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(threads) * 8);
  double best = 0;
  for (int round = 0; round < 4; ++round) {
    const auto start = std::chrono::steady_clock::now();
    team.parallel(threads, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const auto* from = words.data() + kWords / static_cast<std::size_t>(threads) * static_cast<std::size_t>(i);
        sums[static_cast<std::size_t>(i) * 8] =
            std::accumulate(from, from + kWords / static_cast<std::size_t>(threads), std::uint64_t{0});
      }
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(kWords * 8) / seconds.count());
  }
  if (std::accumulate(sums.begin(), sums.end(), std::uint64_t{0}) == 0) fail(ErrorCode::internal, "nothing was read");
  return best;
}

}  // namespace tidelock::cli
