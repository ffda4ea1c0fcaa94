// When a team should do without its workers: a pure decision.
//
// A worker that shares its core with another process may be taken off it in the middle of a piece, and everybody waits
// for milliseconds. After such a wait the caller works alone for a multiple of it, so that waiting costs at most a
// fixed share of the time however busy the cores are; a healthy machine is hardly ever alone.
#pragma once

#include <algorithm>
#include <chrono>

namespace tidelock {

class StallGuard {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;

  static constexpr Duration kShortest = std::chrono::microseconds(100);  // waits below are no stall
  static constexpr int kPieces = 4;  // nor are those below so many times the caller's longest piece of the loop
  static constexpr int kAlone = 20;  // so many times as long as a stall was, the caller works alone

  bool alone(Time now) const { return now < until_; }
  // The caller waited for its workers until `now`; its own longest piece of that loop took `longest`.
  void waited(Time now, Duration wait, Duration longest) {
    if (wait > kShortest + kPieces * longest) until_ = now + kAlone * wait;
  }

 private:
  Time until_{};
};

}  // namespace tidelock
