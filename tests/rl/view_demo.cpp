#include "rl/view_demo.hpp"

#include <chrono>
#include <cmath>
#include <string>
#include <thread>

#include "base/random.hpp"

namespace tidelock::rl {

ViewState demo_state(int step, int steps) {
  ViewState s;
  s.run = "quickstart";
  s.model = "nano 2.5 M";
  s.seed = 1;
  s.steps = steps;
  s.step = step;
  s.phase = "rollout";
  s.phase_fraction = 0.4;
  s.elapsed_s = 3.7 * step;
  Random random(11);
  for (int i = 0; i < step; ++i)
    s.rewards.push_back(0.22 + 0.68 / (1 + std::exp(-(i - 18.0) / 6)) + 0.04 * random.normal());
  for (int at = 0; at <= step; at += 10) {
    const double mean = 0.21 + 0.68 / (1 + std::exp(-(at - 18.0) / 6));
    s.evaluations.push_back({at, {8, 96, {mean, mean - .04, mean + .04}, {0.7 + at * .004, 0.63, 0.93}}});
  }
  s.compared_tokens = 5'317L * step;
  s.rollout_tokens_per_s = 4'412;
  s.train_tokens_per_s = 2'871;
  s.rollout_s = 1.9 * step;
  s.sandbox_s = 0.4 * step;
  s.train_s = 1.2 * step;
  s.other_s = 0.2 * step;
  s.sandbox_wait_fraction = 0.83;
  s.sandbox_frozen_fraction = 0.79;
  s.tool_rate = 1.42;
  s.alive_fraction = 0.56;
  s.weight_version = static_cast<std::uint64_t>(step);
  s.sample = {"a+c?", "31", {{"cat /vault/a /vault/c", "12\n19"}, {"echo $((12+19))", "31"}}, 1};
  return s;
}

int run_view_demo(int steps, int milliseconds) {
  Terminal terminal;
  for (int step = 0; step <= steps; ++step) {
    for (int part = 0; part < 4; ++part) {
      ViewState s = demo_state(step, steps);
      s.phase = part < 2 ? "rollout" : "train";
      s.phase_fraction = part % 2 * 0.5 + 0.25;
      terminal.draw(s);
      std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds / 4));
    }
    if (step == steps / 2) terminal.note("a note that stays");
  }
  return 0;
}

}  // namespace tidelock::rl
