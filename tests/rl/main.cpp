// The test program is its own helper: the runtime starts it again with the hidden verb.
#include <gtest/gtest.h>

#include <string_view>

#include "base/log.hpp"
#include "sandbox/sandbox.hpp"

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "sandbox-helper") {
    return tidelock::sandbox::helper_main(argc, argv);
  }
  tidelock::init_log();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
