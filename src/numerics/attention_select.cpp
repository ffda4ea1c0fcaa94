// Top-k by a total order, in time linear in n whatever the scores are: a radix selection of the k-th best.
#include <bit>
#include <vector>

#include "numerics/attention.hpp"

namespace tidelock::numerics {
namespace {

// Larger for better scores; equal exactly for scores that count as equal.
std::uint32_t order_key(float score) {
  if (score != score) return 0x007FFFFFU;  // NaN: the key of -infinity
  std::uint32_t bits = std::bit_cast<std::uint32_t>(score);
  if ((bits & 0x7F800000U) == 0) bits = 0;  // both zeros, and denormals: zero to every computing thread
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

struct Threshold {
  std::uint32_t key;  // of the k-th best
  std::int64_t take;  // how many of the keys equal to it belong to the k best
};

// One byte per pass, the most significant first.
Threshold find_threshold(const std::uint32_t* keys, std::int64_t n, std::int64_t k) {
  std::uint32_t prefix = 0;
  std::int64_t wanted = k;
  for (int shift = 24; shift >= 0; shift -= 8) {
    std::int64_t histogram[256] = {};
    for (std::int64_t i = 0; i < n; ++i)
      if (shift == 24 || keys[i] >> (shift + 8) == prefix) ++histogram[(keys[i] >> shift) & 0xFFU];
    std::uint32_t digit = 255;
    while (histogram[digit] < wanted) wanted -= histogram[digit--];
    prefix = prefix << 8 | digit;
  }
  return {prefix, wanted};
}

}  // namespace

std::int32_t select_top_k(const float* scores, std::int64_t n, std::int64_t k, std::int32_t* positions) {
  if (k >= n) {
    for (std::int64_t i = 0; i < n; ++i) positions[i] = static_cast<std::int32_t>(i);
    return static_cast<std::int32_t>(n);
  }
  if (k <= 0) return 0;
  thread_local std::vector<std::uint32_t> keys;
  if (keys.size() < static_cast<std::size_t>(n)) keys.resize(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) keys[static_cast<std::size_t>(i)] = order_key(scores[i]);
  const Threshold threshold = find_threshold(keys.data(), n, k);
  std::int64_t ties = 0;
  for (std::int64_t i = 0; i < n; ++i) ties += keys[static_cast<std::size_t>(i)] == threshold.key ? 1 : 0;
  std::int64_t skip = ties - threshold.take;  // the oldest of them lose
  std::int32_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t key = keys[static_cast<std::size_t>(i)];
    if (key < threshold.key || (key == threshold.key && skip-- > 0)) continue;
    positions[count++] = static_cast<std::int32_t>(i);
  }
  return count;
}

}  // namespace tidelock::numerics
