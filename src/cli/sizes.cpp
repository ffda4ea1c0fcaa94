#include "cli/sizes.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
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
