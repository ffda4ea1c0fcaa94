// Tensors that are made while they are written. Private to model/.
#pragma once

#include <string>

#include "base/base.hpp"

namespace tidelock::model {

// Writes what `produce` hands to the sink it is given, which must come to `expected` bytes; more is never written.
template <typename Produce>
void write_produced(AtomicFile& file, const Produce& produce, std::uint64_t expected, const std::string& path,
                    const std::string& tensor) {
  std::uint64_t written = 0;
  produce([&](std::span<const std::byte> bytes) {
    written += bytes.size();
    if (written <= expected) file.write(bytes);
  });
  if (written != expected)
    fail(ErrorCode::internal, "{}: tensor {} came with {} bytes, expected {}", path, tensor, written, expected);
}

}  // namespace tidelock::model
