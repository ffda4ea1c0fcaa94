// Sequences whose contexts grow, in a memory that does not hold them all: what the engine's own admission does, against
// every fixed number of sequences that somebody could have set beforehand. Same prompts, seeds and answers in all runs.
//
//   admission MODEL [--sequences 48] [--tokens 900] [--share 0.25] [--threads 2] [--json]
//
// --share: of the memory that all sequences would need at their ends.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/base.hpp"
#include "base/clock.hpp"
#include "engine/engine.hpp"

namespace {

using namespace tidelock;

struct Options {
  std::string model;
  std::int64_t sequences = 48, tokens = 900;
  double share = 0.25;
  int threads = 2;
  bool json = false;
};

struct Outcome {
  double seconds = 0;
  std::int64_t set_back = 0;
  std::uint64_t answers = 0;  // of all tokens, in any order of sequences
};

std::size_t memory_for(const model::Model& model, const Options& o) {
  const model::StateLayout layout(model.config());
  const auto blocks = static_cast<std::size_t>(model::StateLayout::blocks_for(o.tokens)) + 1;
  const std::size_t one = blocks * layout.block_bytes() + layout.recurrent_bytes();
  return std::max(2 * one,
                  static_cast<std::size_t>(o.share * static_cast<double>(one) * static_cast<double>(o.sequences)));
}

Outcome run(const model::Model& model, Team& team, const Options& o, std::int64_t cap) {
  engine::Engine engine(model, team, {.state_limit = memory_for(model, o), .reuse = true});
  std::int64_t begun = 0, ended = 0, running = 0;
  std::map<engine::SequenceId, std::int64_t> seeds;
  Outcome out;
  const auto start = std::chrono::steady_clock::now();
  while (ended < o.sequences) {
    while (begun < o.sequences && running < cap &&
           (running == 0 || engine.room_for(100, 1, engine::PromptClass::brief) == engine::Engine::Room::enough)) {
      Random random(static_cast<std::uint64_t>(begun));
      std::vector<std::int32_t> prompt(100);
      for (auto& t : prompt) t = static_cast<std::int32_t>(7 + random.below(400));
      engine::SamplingParams params;
      params.seed = static_cast<std::uint64_t>(begun);
      params.max_tokens = o.tokens / 4 + begun * 37 % 101 * (o.tokens / 2) / 100;  // some end early
      seeds[engine.add(prompt, std::span(&params, 1)).front()] = begun++;
      ++running;
    }
    for (const engine::Event& event : engine.step()) {
      out.answers +=
          mix_seed(static_cast<std::uint64_t>(seeds[event.sequence]), static_cast<std::uint64_t>(event.token));
      if (event.status != engine::Status::length) continue;
      engine.remove(event.sequence);
      ++ended;
      --running;
    }
  }
  out.seconds = seconds_since(start);
  out.set_back = engine.counters().set_back;
  return out;
}

int measure(const Options& o) {
  const auto model = model::load_model(o.model, false);
  Team team(o.threads);
  std::vector<std::int64_t> caps;
  for (std::int64_t cap = 1; cap < o.sequences; cap = std::max(cap + 1, cap * 3 / 2)) caps.push_back(cap);
  Outcome best{1e300}, own = run(*model, team, o, o.sequences);
  std::int64_t best_cap = 0;
  for (const std::int64_t cap : caps) {
    const Outcome outcome = run(*model, team, o, cap);
    if (outcome.answers != own.answers) fail(ErrorCode::mismatch, "{} at once gave other answers", cap);
    if (!o.json) fmt::print("{:>4} at once: {:7.2f} s, {} set back\n", cap, outcome.seconds, outcome.set_back);
    std::fflush(stdout);
    if (outcome.seconds < best.seconds) {
      best = outcome;
      best_cap = cap;
    }
  }
  own.seconds = std::min(own.seconds, run(*model, team, o, o.sequences).seconds);
  if (o.json) {
    fmt::print(
        "{{\"name\":\"admission by memory\",\"value\":{:.2f},\"unit\":\"s\",\"peer\":\"best fixed number ({}: {:.2f} "
        "s)\",\"ratio\":{:.3f}}}\n",
        own.seconds, best_cap, best.seconds, best.seconds / own.seconds);
  } else {
    fmt::print("by memory:  {:7.2f} s, {} set back: {:.2f} of the speed of the best fixed number, {}\n", own.seconds,
               own.set_back, best.seconds / own.seconds, best_cap);
  }
  return 0;
}

int run(int argc, char** argv) {
  Options o;
  bool good = true;
  for (int i = 1; i < argc && good; ++i) {
    const std::string_view a = argv[i];
    if (a == "--json") {
      o.json = true;
    } else if (a.starts_with("--") && i + 1 < argc) {
      const double value = std::stod(argv[++i]);
      if (a == "--sequences")
        o.sequences = static_cast<std::int64_t>(value);
      else if (a == "--tokens")
        o.tokens = static_cast<std::int64_t>(value);
      else if (a == "--share")
        o.share = value;
      else if (a == "--threads")
        o.threads = static_cast<int>(value);
      else
        good = false;
    } else if (o.model.empty()) {
      o.model = a;
    } else {
      good = false;
    }
  }
  if (!good || o.model.empty() || o.sequences < 2 || o.tokens < 8 || o.threads < 1) {
    fmt::print(stderr, "usage: admission MODEL [--sequences N] [--tokens N] [--share S] [--threads N] [--json]\n");
    return 2;
  }
  return measure(o);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "admission: {}\n", error.what());
    return 1;
  }
}
