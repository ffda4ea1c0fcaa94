// How much memory this process may still take.
#pragma once

#include <cstdint>
#include <string>

namespace tidelock {

// MemAvailable, or less where the control group of this process allows less. UINT64_MAX when the system says neither.
std::uint64_t available_memory();

// "1.42 TB", "64.0 MB", "17 B": powers of 1000, three digits.
std::string bytes_text(std::uint64_t bytes);

}  // namespace tidelock
