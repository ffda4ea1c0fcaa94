// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
//
// A number is a pure function of (seed, stream, counter), so nothing depends on the order of calls, threads or batches.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace tidelock {

std::array<std::uint32_t, 4> philox(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter);

// Mixes two 64-bit values into one; for deriving seeds (step, group, member) from a run's seed.
std::uint64_t mix_seed(std::uint64_t a, std::uint64_t b);

// A sequence over one stream. Copyable: its whole state is (seed, stream, counter).
class Random {
 public:
  explicit Random(std::uint64_t seed, std::uint64_t stream = 0) : seed_(seed), stream_(stream) {}
  std::uint32_t next_u32();
  std::uint64_t next_u64();
  std::uint32_t below(std::uint32_t n);  // uniform in [0, n), n >= 1, without modulo bias
  int between(int low, int high);        // uniform in [low, high], both included
  float uniform();                       // [0, 1), 24 bits
  float normal();                        // mean 0, deviation 1; sum of 12 uniforms minus 6: identical on every machine

 private:
  std::uint64_t seed_, stream_, counter_ = 0;
  std::array<std::uint32_t, 4> block_{};
  int left_ = 0;
};

// Bytes that nobody can foresee, from the kernel: for tokens and nonces, never for what must come out the same again.
std::string random_bytes(std::size_t count);

}  // namespace tidelock
