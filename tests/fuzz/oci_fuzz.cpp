// Arbitrary bytes as a layer: the tar reader either refuses them or gives entries whose paths stay inside, and never
// more content than there were bytes. The first byte says whether they are gzip.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/error.hpp"
#include "sandbox/oci/layout.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tidelock::sandbox::oci;
  if (size == 0) {
    return 0;
  }
  constexpr std::size_t kEnough = 4U << 20;  // bytes that gzip may make of them
  std::size_t at = 1, made = 0;
  Source source = [&](char* to, std::size_t room) {
    const std::size_t take = std::min(room, size - at);
    std::copy_n(reinterpret_cast<const char*>(data) + at, take, to);
    at += take;
    return take;
  };
  if (data[0] % 2 == 1) {
    source = gunzip(source, "input");
  }
  const Source counted = [&](char* to, std::size_t room) {
    const std::size_t got = made > kEnough ? 0 : source(to, room);
    made += got;
    return got;
  };
  try {
    TarReader reader(counted, "input");
    TarEntry entry;
    while (reader.next(entry)) {
      const std::string whole = "/" + entry.path + "/";
      if (whole.find("/../") != std::string::npos || entry.path.starts_with('/') ||
          entry.path.find('\0') != std::string::npos) {
        std::abort();
      }
      char part[1000];
      std::size_t content = 0;
      for (std::size_t got = 0; (got = reader.read(part, sizeof part)) > 0;) {
        content += got;
      }
      if (content != entry.size || content > made) {
        std::abort();
      }
    }
  } catch (const tidelock::Error& error) {
    if (error.code() != tidelock::ErrorCode::corrupt_data && error.code() != tidelock::ErrorCode::not_supported) {
      std::abort();
    }
  }
  return 0;
}
