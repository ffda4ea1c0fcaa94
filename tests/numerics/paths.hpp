// Instruction-set paths in tests: those of this machine, and a guard that forces one and proves that it ran.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "numerics/matmul.hpp"

namespace tidelock::numerics::testing {

inline std::vector<Isa> available_isas() {
  std::vector<Isa> list;
  for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512bf16})
    if (isa_available(isa)) list.push_back(isa);
  return list;
}

// Forces a path, proves at the end that it ran, and restores the choice.
class ForcedIsa {
 public:
  explicit ForcedIsa(Isa path) : before_(isa()), path_(path), count_(matmul_path_count(path)) { force_isa(path); }
  ~ForcedIsa() {
    EXPECT_GT(matmul_path_count(path_), count_) << isa_name(path_) << " did not run";
    force_isa(before_);
  }
  ForcedIsa(const ForcedIsa&) = delete;
  ForcedIsa& operator=(const ForcedIsa&) = delete;

 private:
  Isa before_, path_;
  std::uint64_t count_;
};

}  // namespace tidelock::numerics::testing
