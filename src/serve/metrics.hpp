// What the server counts, as Prometheus reads it. Thread-safe. Private to serve/.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "serve/engine_loop.hpp"

namespace tidelock::serve {

class ServerMetrics {
 public:
  void count_response(const std::string& path, int status);
  void observe_first_token(double seconds) { observe(first_token_, seconds); }
  void observe_request(double seconds) { observe(request_, seconds); }
  void connections(int change);
  void count_refused_connection();
  int open_connections() const;

  // The text exposition format, version 0.0.4.
  std::string text(const EngineLoopCounters& engine) const;

 private:
  static constexpr std::array<double, 13> kBounds{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120};
  struct Histogram {
    std::array<std::int64_t, kBounds.size() + 1> counts{};  // the last: beyond all bounds
    double sum = 0;
  };
  void observe(Histogram& histogram, double seconds);
  static void write(std::string& out, const char* name, const char* help, const Histogram& histogram);

  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, std::int64_t> responses_;
  Histogram first_token_, request_;
  int connections_ = 0;
  std::int64_t refused_connections_ = 0;
};

}  // namespace tidelock::serve
