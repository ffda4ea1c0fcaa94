// A made-up run for looking at the view: `test_rl view-demo [STEPS [MILLISECONDS A STEP]]`.
#pragma once

#include "rl/view.hpp"

namespace tidelock::rl {

ViewState demo_state(int step, int steps);
int run_view_demo(int steps, int milliseconds);

}  // namespace tidelock::rl
