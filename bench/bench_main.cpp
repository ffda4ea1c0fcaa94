// bench_kernels [--json] [--threads N] [--filter SUBSTR]: the kernels against peers and against the machine.
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string_view>
#include <thread>

#include "base/team.hpp"
#include "bench_registry.hpp"
#include "numerics/isa.hpp"

namespace tidelock::bench {
namespace {

bool processor_time = false;

double now() {
  timespec time{};
  clock_gettime(processor_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

constexpr int kRounds = 9;
constexpr double kRoundSeconds = 0.03;  // per candidate: long enough that a tick of the scheduler is noise
// A peer's thread pool may spin after its last call; it must not take our core while we are measured.
constexpr auto kQuiet = std::chrono::milliseconds(10);

double seconds_of(const std::function<void()>& call, int times) {
  const double start = now();
  for (int i = 0; i < times; ++i) call();
  return (now() - start) / times;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

constexpr const char* kUsage =
    "usage: bench_kernels [--json] [--threads N] [--filter SUBSTR] [--processor-time]\n"
    "  --json          one object per line: name, value, unit, peer, ratio (ours / peer, above 1 is better)\n"
    "  --threads N     with N threads; without it with 1 and with 2\n"
    "  --filter S      only benchmarks whose name contains S\n"
    "  --processor-time  processor time instead of wall time: for one thread on a machine that others use too\n";

void print(const Measurement& m, bool json) {
  if (json) {
    const nlohmann::json line{
        {"name", m.name}, {"value", m.value}, {"unit", m.unit}, {"peer", m.peer}, {"ratio", m.ratio}};
    fmt::print("{}\n", line.dump());
  } else if (m.ratio > 0) {
    fmt::print("{:<52} {:>10.1f} {:<8} {:>6.2f} x {}\n", m.name, m.value, m.unit, m.ratio, m.peer);
  } else {
    fmt::print("{:<52} {:>10.1f} {}\n", m.name, m.value, m.unit);
  }
  std::fflush(stdout);
}

}  // namespace

std::vector<Bench>& registry() {
  static std::vector<Bench> all;
  return all;
}

Comparison compare(const std::vector<std::function<void()>>& candidates) {
  const std::size_t n = candidates.size();
  std::vector<int> times(n);
  for (std::size_t i = 0; i < n; ++i) {
    candidates[i]();  // warm-up: first touch, code generation of peers
    const double once = std::min(seconds_of(candidates[i], 1), seconds_of(candidates[i], 3));
    times[i] = std::clamp(static_cast<int>(std::ceil(kRoundSeconds / once)), 1, 1'000'000);
  }
  std::vector<std::vector<double>> seconds(n), ratios(n);
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < n; ++i) {
      std::this_thread::sleep_for(kQuiet);
      candidates[i]();
      seconds[i].push_back(seconds_of(candidates[i], times[i]));
      ratios[i].push_back(seconds[i].back() / seconds[0].back());
    }
  }
  Comparison result;
  for (std::size_t i = 0; i < n; ++i) {
    result.seconds.push_back(median(seconds[i]));
    result.ratio_to_first.push_back(median(ratios[i]));
  }
  return result;
}

}  // namespace tidelock::bench

int main(int argc, char** argv) {
  using namespace tidelock::bench;
  bool json = false;
  std::vector<int> threads{1, 2};
  std::string filter;
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    const auto value = [&]() -> std::string_view { return i + 1 < argc ? argv[++i] : ""; };
    if (option == "--json") {
      json = true;
    } else if (option == "--processor-time") {
      processor_time = true;
    } else if (option == "--filter") {
      filter = value();
    } else if (option == "--threads") {
      const std::string_view text = value();
      int n = 0;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
      if (error != std::errc() || end != text.data() + text.size() || n < 1 || n > 1024) {
        fmt::print(stderr, "bench_kernels: --threads {}: expected a number from 1 to 1024\n", text);
        return 2;
      }
      threads = {n};
    } else if (option == "--help" || option == "-h") {
      fmt::print("{}", kUsage);
      return 0;
    } else {
      fmt::print(stderr, "bench_kernels: unknown option {}\n{}", option, kUsage);
      return 2;
    }
  }
  tidelock::set_flush_to_zero();
  if (!json) fmt::print("instruction set {}\n", tidelock::numerics::isa_name(tidelock::numerics::isa()));
  bool any = false;
  for (const int n : threads) {
    for (const Bench& bench : registry()) {
      if (bench.name.find(filter) == std::string::npos) continue;
      any = true;
      for (const Measurement& m : bench.run(n)) print(m, json);
    }
  }
  if (!any) {
    fmt::print(stderr, "bench_kernels: no benchmark's name contains '{}'; there are:\n", filter);
    for (const Bench& bench : registry()) fmt::print(stderr, "  {}\n", bench.name);
    return 2;
  }
  return 0;
}
