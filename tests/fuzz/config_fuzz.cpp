// config.json: refused with a reason, or a Config that is written and read back as itself.
#include <cstdlib>

#include "base/error.hpp"
#include "model/config.hpp"

using namespace tidelock;
using namespace tidelock::model;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Config config;
  try {
    config = parse_config({reinterpret_cast<const char*>(data), size}, "fuzz");
  } catch (const Error& error) {
    if (error.code() != ErrorCode::invalid_argument && error.code() != ErrorCode::not_supported) std::abort();
    return 0;
  }
  // What was accepted once is accepted again (an escaping Error ends the run).
  const std::string written = config_to_json(config);
  if (config_to_json(parse_config(written, "written")) != written) std::abort();
  return 0;
}
