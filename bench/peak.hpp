// What this machine can do at most, and the products as they would be without the contract: the yardsticks of
// bench_matmul.cpp. One implementation per instruction set, chosen at run time.
#pragma once

#include <array>
#include <cstdint>

#include "numerics/matmul_kernels.hpp"

namespace tidelock::bench {

struct Peak {
  // `steps` rounds of independent multiply-adds in registers; returns the floating-point operations done (2 per
  // multiply-add).
  double (*fma)(std::int64_t steps);
  double (*dot_bf16)(std::int64_t steps);
  // Reads the bytes once, as fast as loads go; returns something that depends on all of them.
  std::uint64_t (*read)(const std::byte* data, std::size_t bytes);
  // Products that split an output's sum over several chains, as a kernel free of the contract may: the same packed
  // weights, whole panels. Several tile shapes; the caller takes the fastest whose row count divides the rows. Null
  // behind the last.
  struct Split {
    std::int64_t rows;
    void (*run)(const numerics::MatmulJob& job, std::int64_t rows, std::int64_t panel0, std::int64_t panel1);
  };
  std::array<Split, 8> split_bf16;
};

// For isa(); null when the path has none (scalar).
const Peak* peak();

extern const Peak kPeakAvx2, kPeakAvx512, kPeakAvx512Bf16;

}  // namespace tidelock::bench
