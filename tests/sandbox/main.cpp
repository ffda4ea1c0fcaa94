// The test program is its own helper: the runtime starts it again with the hidden verb. It is also its own victim and
// its own ordinary user.
#include <gtest/gtest.h>

#include <string_view>

#include "base/log.hpp"
#include "sandbox/microvm_victim.hpp"
#include "sandbox/sandbox.hpp"
#include "sandbox/support.hpp"
#include "sandbox/unprivileged.hpp"

int main(int argc, char** argv) {
  const std::string_view verb = argc > 1 ? argv[1] : "";
  tidelock::init_log();
  if (verb == "sandbox-helper") {
    return tidelock::sandbox::helper_main(argc, argv);
  }
  if (verb == "victim") {
    return tidelock::sandbox::testing::victim_main(argc, argv);
  }
  if (verb == "microvm-victim") {
    return tidelock::sandbox::testing::microvm_victim_main(argc, argv);
  }
  if (verb == "unprivileged") {
    return tidelock::sandbox::testing::unprivileged_main(argc, argv);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
