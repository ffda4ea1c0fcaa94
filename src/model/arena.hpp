// A bump allocator for the forward and backward passes: no allocation in steady state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace tidelock::model {

// Memory handed out stays valid until release() to an earlier mark. Not thread-safe: one arena per thread of work.
class Arena {
 public:
  struct Mark {
    std::size_t chunk = 0, used = 0;
  };

  // Uninitialised, 64-byte aligned.
  template <typename T>
  T* take(std::int64_t count) {
    const std::size_t bytes =
        (static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(T) + 63) & ~std::size_t{63};
    while (current_ < chunks_.size() && used_ + bytes > chunks_[current_].size) {
      ++current_;
      used_ = 0;
    }
    if (current_ == chunks_.size()) {
      const std::size_t size = std::max(bytes, kChunkBytes);
      chunks_.push_back(
          {std::unique_ptr<std::byte[], Free>(static_cast<std::byte*>(::operator new (size, std::align_val_t{64}))),
           size});
      used_ = 0;
    }
    std::byte* p = chunks_[current_].data.get() + used_;
    used_ += bytes;
    return reinterpret_cast<T*>(p);
  }
  template <typename T>
  T* take_zeroed(std::int64_t count) {
    T* p = take<T>(count);
    std::memset(static_cast<void*>(p), 0, static_cast<std::size_t>(count) * sizeof(T));
    return p;
  }

  Mark mark() const { return {current_, used_}; }
  void release(Mark m) {
    current_ = m.chunk;
    used_ = m.used;
  }
  std::size_t reserved_bytes() const {
    std::size_t total = 0;
    for (const auto& chunk : chunks_) total += chunk.size;
    return total;
  }

 private:
  static constexpr std::size_t kChunkBytes = 4 << 20;
  struct Free {
    void operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{64}); }
  };
  struct Chunk {
    std::unique_ptr<std::byte[], Free> data;
    std::size_t size;
  };
  std::vector<Chunk> chunks_;
  std::size_t current_ = 0, used_ = 0;
};

// Releases on scope exit what was taken since its construction.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.release(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  Arena::Mark mark_;
};

}  // namespace tidelock::model
