// Any file either opens, and then every tensor can be read in full, or is refused with Error{corrupt_data}.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

#include "base/error.hpp"
#include "model/safetensors.hpp"

namespace {

using namespace tidelock;
using namespace tidelock::model;

// A file in memory, reused by all runs: the reader wants a path to map.
int memory_file() {
  static const int fd = ::memfd_create("fuzz", 0);
  if (fd < 0) std::abort();
  return fd;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const int fd = memory_file();
  if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, data, size, 0) != static_cast<ssize_t>(size)) std::abort();
  try {
    const SafetensorsFile file("/proc/self/fd/" + std::to_string(fd));
    std::size_t covered = 0;
    unsigned sum = 0;
    for (const auto& [name, tensor] : file.tensors()) {
      covered += tensor.bytes.size();
      for (const std::byte byte : tensor.bytes) sum += static_cast<unsigned>(byte);
      if (static_cast<std::size_t>(tensor.elements()) * dtype_size(tensor.dtype) != tensor.bytes.size()) std::abort();
      try {
        (void)read_f32(tensor, tensor.shape);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::corrupt_data) std::abort();
      }
    }
    if (covered > size || sum == ~0U) std::abort();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::corrupt_data) std::abort();
  }
  return 0;
}
