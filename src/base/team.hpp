// A team of threads for data-parallel loops.
//
// Work is split by output index, never inside a reduction (numerics.md), so the number of threads cannot change a bit.
// A worker that has nothing to do sleeps, and nobody spins for long. On a machine that others use, too, a loop does not
// wait for workers that did not come in time, and works alone for a while after one was taken off its core amid a piece
// (stall_guard.hpp): a busy core costs its share and little more.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace tidelock {

class Team {
 public:
  // `threads` >= 1 includes the caller. Every member thread has flush-to-zero and denormals-are-zero set.
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const;

  // Calls body(begin, end) on disjoint pieces that cover [0, count); pieces are multiples of `grain` (the last one may
  // be short). Pieces are handed out dynamically. Returns when all are done; the first exception is rethrown here. Not
  // reentrant: a body must not call parallel() on the same team.
  void parallel(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A team of one, for callers that parallelise outside. Safe to use from many threads at once.
Team& solo_team();

// Sets flush-to-zero and denormals-are-zero for the calling thread. Every thread that computes calls it once.
void set_flush_to_zero();

}  // namespace tidelock
