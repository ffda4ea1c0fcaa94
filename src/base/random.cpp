#include "base/random.hpp"

#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "base/error.hpp"

namespace tidelock {

std::array<std::uint32_t, 4> philox(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter) {
  std::uint32_t x0 = static_cast<std::uint32_t>(counter), x1 = static_cast<std::uint32_t>(counter >> 32);
  std::uint32_t x2 = static_cast<std::uint32_t>(stream), x3 = static_cast<std::uint32_t>(stream >> 32);
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53U} * x0;
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57U} * x2;
    const std::uint32_t y0 = static_cast<std::uint32_t>(p1 >> 32) ^ x1 ^ k0;
    const std::uint32_t y2 = static_cast<std::uint32_t>(p0 >> 32) ^ x3 ^ k1;
    x0 = y0;
    x1 = static_cast<std::uint32_t>(p1);
    x2 = y2;
    x3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return {x0, x1, x2, x3};
}

std::uint64_t mix_seed(std::uint64_t a, std::uint64_t b) {
  const auto r = philox(a, b, 0x7469646C6F636BULL);
  return (std::uint64_t{r[0]} << 32) | r[1];
}

std::uint32_t Random::next_u32() {
  if (left_ == 0) {
    block_ = philox(seed_, stream_, counter_++);
    left_ = 4;
  }
  return block_[static_cast<std::size_t>(4 - left_--)];
}

std::uint64_t Random::next_u64() {
  const std::uint64_t high = next_u32();
  return (high << 32) | next_u32();
}

std::uint32_t Random::below(std::uint32_t n) {
  const std::uint32_t reject_under = (0U - n) % n;  // Lemire's rejection: keeps every residue equally likely
  for (;;) {
    const std::uint64_t product = std::uint64_t{next_u32()} * n;
    if (static_cast<std::uint32_t>(product) >= reject_under) return static_cast<std::uint32_t>(product >> 32);
  }
}

int Random::between(int low, int high) {
  return low + static_cast<int>(below(static_cast<std::uint32_t>(high - low) + 1U));
}

float Random::uniform() {
  return static_cast<float>(next_u32() >> 8) * 0x1.0p-24F;
}

float Random::normal() {
  float sum = -6.0F;
  for (int i = 0; i < 12; ++i) sum += uniform();
  return sum;
}

std::string random_bytes(std::size_t count) {
  std::string out(count, '\0');
  if (::getrandom(out.data(), out.size(), 0) != static_cast<ssize_t>(count))
    fail(ErrorCode::io, "the system gives no random bytes: {}", std::strerror(errno));
  return out;
}

}  // namespace tidelock
