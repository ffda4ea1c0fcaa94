#include "base/log.hpp"

#include <spdlog/sinks/stdout_color_sinks.h>

#include <cstdlib>

namespace tidelock {

void init_log() {
  auto logger = spdlog::stderr_color_mt("tidelock");
  logger->set_pattern("%H:%M:%S %^%l%$ %v");
  const char* level = std::getenv("TIDELOCK_LOG");
  logger->set_level(level == nullptr ? spdlog::level::warn : spdlog::level::from_str(level));
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace tidelock
