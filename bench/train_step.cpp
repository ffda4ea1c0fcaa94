// One full training step (forward, backward, AdamW, weights packed again) of a config.json on random tokens: tokens per
// second at the median step, as one JSON line. bench/compare_train_step.py runs it against bench/torch_train_step.py.
//   train_step --config models/nano/config.json --batch 8 --tokens 256 --threads 1
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/base.hpp"
#include "train/train.hpp"

namespace {

using namespace tidelock;

struct Options {
  std::string config = "models/nano/config.json";
  std::int64_t batch = 8, tokens = 256, threads = 1, steps = 7;
};

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i];
    if (key == "--config")
      o.config = argv[i + 1];
    else if (key == "--batch")
      o.batch = std::atoll(argv[i + 1]);
    else if (key == "--tokens")
      o.tokens = std::atoll(argv[i + 1]);
    else if (key == "--threads")
      o.threads = std::atoll(argv[i + 1]);
    else if (key == "--steps")
      o.steps = std::atoll(argv[i + 1]);
    else
      fail(ErrorCode::invalid_argument, "unknown option {}; known: --config --batch --tokens --threads --steps", key);
  }
  if (argc % 2 == 0 || o.batch < 1 || o.tokens < 2 || o.threads < 1 || o.steps < 1)
    fail(ErrorCode::invalid_argument, "every option takes a positive value");
  return o;
}

double run(const Options& o) {
  Team team(static_cast<int>(o.threads));
  model::Model model(model::parse_config(read_file(o.config), o.config), true);
  train::FullParameters parameters(model);
  parameters.initialize(model, 1);
  parameters.apply(model, team);
  train::AdamW optimizer(parameters.values().size());
  train::GradientWorker worker(model, team);
  std::vector<float> gradient(parameters.values().size());
  Random random(7);
  std::vector<std::vector<std::int32_t>> tokens(static_cast<std::size_t>(o.batch));
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(o.tokens), 1);
  mask[0] = 0;
  std::vector<train::TrainSequence> sequences;
  for (auto& t : tokens) {
    for (std::int64_t i = 0; i < o.tokens; ++i)
      t.push_back(static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(model.config().vocab))));
    sequences.push_back({t, mask, nullptr});
  }
  const float per_token = 1.0F / static_cast<float>(o.batch * (o.tokens - 1));
  train::GradientOptions options;
  options.micro_batch_tokens = std::max(o.tokens, o.batch * o.tokens / o.threads);
  std::vector<double> seconds;
  for (std::int64_t step = 0; step < o.steps + 2; ++step) {
    const auto start = std::chrono::steady_clock::now();
    std::fill(gradient.begin(), gradient.end(), 0.0F);
    worker.run(
        sequences,
        [&](std::size_t, std::span<const float>, std::span<float> d) {
          std::fill(d.begin(), d.end(), -per_token);
          return 0.0;
        },
        options, [&](std::span<float> flat) { return parameters.gradients(flat); }, gradient);
    optimizer.step(parameters.values(), gradient, 1.0F, {});
    parameters.apply(model, team);
    if (step >= 2) seconds.push_back(seconds_since(start));
  }
  std::nth_element(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2), seconds.end());
  return static_cast<double>(o.batch * o.tokens) / seconds[seconds.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options o = parse(argc, argv);
    std::printf("{\"name\":\"tidelock train step, %lld thread(s)\",\"value\":%.1f,\"unit\":\"tokens/s\"}\n",
                static_cast<long long>(o.threads), run(o));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_step: %s\n", error.what());
    return 2;
  }
}
