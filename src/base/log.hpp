// The logger: the only global state. Lines go to standard error.
#pragma once

#include <spdlog/spdlog.h>

namespace tidelock {

// Sets the format and the level from TIDELOCK_LOG (trace, debug, info, warn, error; default warn).
void init_log();

}  // namespace tidelock
