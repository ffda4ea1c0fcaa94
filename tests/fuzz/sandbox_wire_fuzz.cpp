// Arbitrary bytes as messages of a container's init: every decoder either refuses them or gives back what encodes to
// the same bytes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/error.hpp"
#include "sandbox/wire.hpp"

namespace {

template <typename Decode>
void expect_canonical(std::string_view body, Decode decode) {
  try {
    if (tidelock::sandbox::encode(decode(body)) != body) {
      std::abort();
    }
  } catch (const tidelock::Error& error) {
    if (error.code() != tidelock::ErrorCode::corrupt_data) {
      std::abort();
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tidelock::sandbox;
  if (size == 0) {
    return 0;
  }
  const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 6) {
    case 0:
      expect_canonical(body, decode_run);
      break;
    case 1:
      expect_canonical(body, decode_create);
      break;
    case 2:
      expect_canonical(body, decode_hello);
      break;
    case 3:
      expect_canonical(body, decode_welcome);
      break;
    case 4:
      expect_canonical(body, decode_exited);
      break;
    default:
      expect_canonical(body, decode_created);
      break;
  }
  return 0;
}
