// The benchmarks of `bench_kernels`: a file bench/bench_*.cpp registers its functions here, the program runs and prints
// them.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tidelock::bench {

// One figure. `ratio` is ours / peer, so that above 1 is better, whatever the unit; 0 when there is no peer.
struct Measurement {
  std::string name;
  double value = 0;
  std::string unit;
  std::string peer;  // what it was compared with
  double ratio = 0;
};

using BenchFunction = std::function<std::vector<Measurement>(int threads)>;

struct Bench {
  std::string name;  // what --filter looks at
  BenchFunction run;
};

std::vector<Bench>& registry();

// static const Register kMine("gemm bf16", run_gemm_bf16);
struct Register {
  Register(std::string name, BenchFunction run) { registry().push_back({std::move(name), std::move(run)}); }
};

// Median seconds of one call of each candidate, and the median over the rounds of each candidate's time divided by the
// first one's. The candidates take turns in every round, so that a slow moment of the machine meets all of them; ratios
// are formed within a round.
struct Comparison {
  std::vector<double> seconds;
  std::vector<double> ratio_to_first;  // time of candidate i / time of candidate 0
};
Comparison compare(const std::vector<std::function<void()>>& candidates);

}  // namespace tidelock::bench
