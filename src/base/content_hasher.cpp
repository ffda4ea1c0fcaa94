#include "base/content_hasher.hpp"

#include <xxhash.h>

#include <bit>
#include <new>

namespace tidelock {

ContentHasher::ContentHasher() : state_(XXH3_createState()) {
  if (state_ == nullptr) throw std::bad_alloc();
  reset();
}
ContentHasher::~ContentHasher() {
  XXH3_freeState(static_cast<XXH3_state_t*>(state_));
}
void ContentHasher::reset() {
  XXH3_128bits_reset(static_cast<XXH3_state_t*>(state_));
}
void ContentHasher::add(std::span<const std::byte> bytes) {
  XXH3_128bits_update(static_cast<XXH3_state_t*>(state_), bytes.data(), bytes.size());
}
ContentHash ContentHasher::result() const {
  return std::bit_cast<ContentHash>(XXH3_128bits_digest(static_cast<const XXH3_state_t*>(state_)));
}

}  // namespace tidelock
