// Any file either opens, and then every byte of every tensor can be read, or is refused as corrupt or not supported.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

#include "base/error.hpp"
#include "model/gguf.hpp"

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
    const GgufFile file("/proc/self/fd/" + std::to_string(fd));
    std::size_t covered = 0, values = 0;
    unsigned sum = 0;
    for (const GgufTensor& tensor : file.tensors()) {
      covered += tensor.bytes.size();
      for (const std::byte byte : tensor.bytes) sum += static_cast<unsigned>(byte);
      const auto blocks = static_cast<std::size_t>(tensor.elements() / tensor.type->block);
      if (tensor.bytes.empty() || blocks * tensor.type->bytes != tensor.bytes.size()) std::abort();
    }
    for (const auto& [key, value] : file.metadata()) values += value.size();
    if (covered > size || values > size || sum == ~0U) std::abort();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::corrupt_data && error.code() != ErrorCode::not_supported) std::abort();
  }
  return 0;
}
