// `tidelock bench model`: prefill and decode speed of a checkpoint, with the fields of llama-bench.
#include <chrono>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/base.hpp"
#include "cli/cli.hpp"
#include "cli/sizes.hpp"
#include "model/forward.hpp"
#include "model/plan.hpp"
#include "model/weight_source.hpp"
#include "state/state.hpp"

namespace tidelock::cli {
namespace {

constexpr std::int64_t kBatch = 512;  // prompt tokens of one pass, as llama.cpp's n_ubatch

struct Test {
  std::int64_t prompt = 0, generate = 0, depth = 0, sequences = 1;
};

struct BenchModelOptions {
  std::string model;
  WeightOptions weights;
  std::vector<std::int64_t> prompt{512}, generate{128}, depth{0};
  std::int64_t sequences = 1;
  int threads = 0, repetitions = 5;
  bool json = false, interactive = false;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Sequences of random tokens that grow together. Logits are computed where a sampler would want them.
class Runner {
 public:
  Runner(const model::Model& model, Team& team) : model_(model), team_(team), layout_(model.config()), pool_(layout_) {}

  // Seconds of one test: depth tokens are already there when the clock starts.
  double run(const Test& test) {
    sequences_.clear();
    for (std::int64_t s = 0; s < test.sequences; ++s) sequences_.emplace_back(pool_);
    for (auto& sequence : sequences_) prefill(sequence, test.depth);
    const double begin = now();
    for (auto& sequence : sequences_) prefill(sequence, test.prompt);
    for (std::int64_t i = 0; i < test.generate; ++i) decode();
    return now() - begin;
  }

 private:
  std::vector<std::int32_t> tokens(std::int64_t n) {
    std::vector<std::int32_t> out(static_cast<std::size_t>(n));
    for (auto& token : out)
      token = static_cast<std::int32_t>(random_.below(static_cast<std::uint32_t>(model_.config().vocab)));
    return out;
  }
  void prefill(state::SequenceState& sequence, std::int64_t n) {
    for (std::int64_t at = 0; at < n; at += kBatch) {
      const std::int64_t rows = std::min(kBatch, n - at);
      const auto input = tokens(rows);
      const model::Span span{sequence.extend(rows), sequence.position(), input, nullptr};
      const float* hidden = model::forward(model_, layout_, std::span(&span, 1), {}, workspace_, team_);
      sequence.advance(rows);
      if (at + rows == n) head(hidden + (rows - 1) * model_.config().hidden, 1);
    }
  }
  void decode() {
    const auto input = tokens(static_cast<std::int64_t>(sequences_.size()));
    std::vector<model::Span> spans;
    for (std::size_t s = 0; s < sequences_.size(); ++s)
      spans.push_back({sequences_[s].extend(1), sequences_[s].position(), std::span(input).subspan(s, 1), nullptr});
    const float* hidden = model::forward(model_, layout_, spans, {}, workspace_, team_);
    for (auto& sequence : sequences_) sequence.advance(1);
    head(hidden, static_cast<std::int64_t>(sequences_.size()));
  }
  void head(const float* hidden, std::int64_t rows) {
    logits_.resize(static_cast<std::size_t>(rows * model_.config().vocab));
    model::head_forward(model_, hidden, rows, logits_.data(), workspace_, team_);
  }

  const model::Model& model_;
  Team& team_;
  const model::StateLayout layout_;
  state::Pool pool_;
  std::vector<state::SequenceState> sequences_;
  model::Workspace workspace_;
  std::vector<float> logits_;
  Random random_{1};
};

// What one decode step has to read and write, by the ledger of `tidelock plan`.
std::uint64_t bytes_per_step(const model::WeightSource& source, const model::Model& model, const Test& test) {
  model::PlanRequest request;
  request.context = test.depth + test.prompt;
  request.sequences = test.sequences;
  return model::make_plan(
             model, [&](model::ParameterId id, int piece) { return source.format(id, piece); }, request)
      .moved_bytes;
}

nlohmann::json report(const BenchModelOptions& o, const model::WeightSource& source, const model::Model& model,
                      int threads, const Test& test, const std::vector<double>& seconds) {
  const double tokens = static_cast<double>((test.prompt + test.generate) * test.sequences);
  std::vector<double> rates;
  std::vector<std::int64_t> nanoseconds;
  for (const double s : seconds) {
    rates.push_back(tokens / s);
    nanoseconds.push_back(std::llround(s * 1e9));
  }
  const auto mean = [](const auto& v) {
    double sum = 0;
    for (const auto x : v) sum += static_cast<double>(x);
    return sum / static_cast<double>(v.size());
  };
  const auto deviation = [&](const auto& v) {
    double sum = 0;
    for (const auto x : v) sum += std::pow(static_cast<double>(x) - mean(v), 2);
    return v.size() < 2 ? 0.0 : std::sqrt(sum / static_cast<double>(v.size() - 1));
  };
  return {{"model_filename", o.model},
          {"model_type", source.kind()},
          {"model_size", model.weight_bytes()},
          {"model_n_params", model.parameter_count()},
          {"n_threads", threads},
          {"n_ubatch", kBatch},
          {"n_prompt", test.prompt},
          {"n_gen", test.generate},
          {"n_depth", test.depth},
          {"n_seqs", test.sequences},
          {"bytes_per_step", bytes_per_step(source, model, test)},
          {"avg_ns", std::llround(mean(nanoseconds))},
          {"stddev_ns", std::llround(deviation(nanoseconds))},
          {"avg_ts", mean(rates)},
          {"stddev_ts", deviation(rates)},
          {"samples_ns", nanoseconds},
          {"samples_ts", rates}};
}

std::string title(const Test& t) {
  std::string name = t.prompt != 0 ? fmt::format("pp{}", t.prompt) : "";
  if (t.generate != 0) name += fmt::format("{}tg{}", name.empty() ? "" : "+", t.generate);
  if (t.depth != 0) name += fmt::format(" @ d{}", t.depth);
  return t.sequences == 1 ? name : name + fmt::format(" x {}", t.sequences);
}

// Lets another program interleave this one with a peer: a test for each line "PROMPT GENERATE DEPTH SEQUENCES" of
// standard input, answered by its seconds and the bytes of a decode step; "bandwidth" is answered by bytes per second.
int answer_lines(Runner& runner, const model::WeightSource& source, const model::Model& model, int threads) {
  std::string line;
  while (std::getline(std::cin, line)) {
    if (line == "bandwidth") {
      fmt::print("{:.0f}\n", measure_bandwidth(threads));
      std::fflush(stdout);
      continue;
    }
    Test t;
    std::istringstream in(line);
    if (!(in >> t.prompt >> t.generate >> t.depth >> t.sequences) || t.prompt < 0 || t.generate < 0 || t.depth < 0 ||
        t.prompt + t.generate < 1 || t.sequences < 1)
      fail(ErrorCode::invalid_argument, "\"{}\": expected PROMPT GENERATE DEPTH SEQUENCES", line);
    fmt::print("{:.9f} {}\n", runner.run(t), bytes_per_step(source, model, t));
    std::fflush(stdout);
  }
  return 0;
}

std::vector<Test> list_tests(const BenchModelOptions& o) {
  std::vector<Test> tests;
  for (const auto depth : o.depth) {
    for (const auto n : o.prompt)
      if (n != 0) tests.push_back({n, 0, depth, o.sequences});
    for (const auto n : o.generate)
      if (n != 0) tests.push_back({0, n, depth, o.sequences});
  }
  if (tests.empty()) fail(ErrorCode::invalid_argument, "nothing to measure: -p and -n are both 0");
  return tests;
}

int run(const BenchModelOptions& o) {
  const auto source = model::open_weights(o.model);
  const int threads = resolve_threads(o.threads);
  Team team(threads);
  const auto model = load_weights(*source, o.weights, team);
  Runner runner(*model, team);
  if (o.interactive) return answer_lines(runner, *source, *model, threads);
  nlohmann::json all = nlohmann::json::array();
  for (const Test& test : list_tests(o)) {
    runner.run(test);  // touches every page once
    std::vector<double> seconds(static_cast<std::size_t>(o.repetitions));
    for (double& s : seconds) s = runner.run(test);
    all.push_back(report(o, *source, *model, threads, test, seconds));
    if (!o.json)
      fmt::print("{:<24} {:>10.2f} tokens/s  +- {:.2f}\n", title(test), all.back()["avg_ts"].get<double>(),
                 all.back()["stddev_ts"].get<double>());
    std::fflush(stdout);
  }
  if (o.json) fmt::print("{}\n", all.dump(2));
  return 0;
}

}  // namespace

Action add_bench_model(CLI::App& app) {
  auto o = std::make_shared<BenchModelOptions>();
  const auto range = CLI::Range(std::int64_t{0}, std::int64_t{1} << 20);
  app.add_option("model", o->model, "checkpoint folder or .gguf file")->required();
  app.add_option("-p", o->prompt, "prompt lengths, comma-separated; 0: none")->delimiter(',')->check(range);
  app.add_option("-n", o->generate, "tokens to generate; 0: none")->delimiter(',')->check(range);
  app.add_option("-d", o->depth, "tokens in the context before the clock starts")->delimiter(',')->check(range);
  app.add_option("-s,--sequences", o->sequences, "sequences decoded at once")->check(CLI::Range(1, 4096));
  app.add_option("-r", o->repetitions, "repetitions, after one that is not counted")->check(CLI::Range(1, 1000));
  app.add_option("-t,--threads", o->threads, "threads; 0: all cores")->check(CLI::Range(0, 1024));
  add_weights(app, o->weights);
  app.add_flag("--json", o->json, "the fields of llama-bench");
  app.add_flag("--interactive", o->interactive,
               "a test for each line \"PROMPT GENERATE DEPTH SEQUENCES\" of standard input, answered by its seconds "
               "and a step's bytes; \"bandwidth\" by bytes a second");
  return [o] { return run(*o); };
}

}  // namespace tidelock::cli
