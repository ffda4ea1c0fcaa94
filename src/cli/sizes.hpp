// Quantities with units on the command line. Private to cli/.
#pragma once

#include <cstdint>
#include <string>

namespace tidelock::cli {

// "64G", "512M", "1.4T", "1000000": bytes of memory, in powers of 1024. Throws Error{invalid_argument} naming `option`.
std::uint64_t parse_bytes(const std::string& text, const std::string& option);
// "7GB/s", "3500MB/s": bytes per second, in powers of 1000 as drives and memory are sold.
double parse_rate(const std::string& text, const std::string& option);
// "1M", "128K", "4096": tokens, in powers of 1024.
std::int64_t parse_tokens(const std::string& text, const std::string& option);

// Bytes per second that `threads` threads read from memory, measured for a fraction of a second.
double measure_bandwidth(int threads);

}  // namespace tidelock::cli
