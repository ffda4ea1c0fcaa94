// How likely a kept state is to be wanted again.
#pragma once

#include <cstdint>

namespace tidelock::state {

// protected_use: the end of a request, a junction. probation: kept on the chance, inside a long prompt.
enum class Segment : std::uint8_t { protected_use, probation };

}  // namespace tidelock::state
