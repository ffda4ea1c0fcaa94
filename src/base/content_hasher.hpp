// A fast hash of much content, for integrity and identity where nobody forges: XXH3, 128 bits.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace tidelock {

using ContentHash = std::array<std::byte, 16>;

// Of what is added, in order.
class ContentHasher {
 public:
  ContentHasher();
  ~ContentHasher();
  ContentHasher(const ContentHasher&) = delete;
  ContentHasher& operator=(const ContentHasher&) = delete;
  void reset();
  void add(std::span<const std::byte> bytes);
  ContentHash result() const;

 private:
  void* state_;
};

}  // namespace tidelock
