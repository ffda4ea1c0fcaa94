// The test program is its own sandbox helper, and it can show the terminal view with a made-up run.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string_view>

#include "base/log.hpp"
#include "rl/view_demo.hpp"
#include "sandbox/sandbox.hpp"

int main(int argc, char** argv) {
  const std::string_view verb = argc > 1 ? argv[1] : "";
  if (verb == "sandbox-helper") return tidelock::sandbox::helper_main(argc, argv);
  if (verb == "view-demo")
    return tidelock::rl::run_view_demo(argc > 2 ? std::atoi(argv[2]) : 60, argc > 3 ? std::atoi(argv[3]) : 200);
  tidelock::init_log();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
