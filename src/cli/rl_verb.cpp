#include <chrono>
#include <cstdio>
#include <ctime>

#include "base/base.hpp"
#include "cli/cli.hpp"
#include "rl/run.hpp"
#include "rl/view.hpp"

namespace tidelock::cli {
namespace {

struct RlOptions {
  std::string recipe, out, resume;
  std::vector<std::string> set;
  int threads = 0;
  std::int64_t stop_after = 0;
  bool keys = false, markdown = false;
};

// runs/quickstart-20261129-154210
std::filesystem::path default_folder(const std::string& recipe) {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm local{};
  ::localtime_r(&now, &local);
  char stamp[32];
  std::strftime(stamp, sizeof(stamp), "%Y%m%d-%H%M%S", &local);
  return std::filesystem::path("runs") / (std::filesystem::path(recipe).stem().string() + "-" + stamp);
}

void print_summary(const rl::RunSummary& summary, const std::filesystem::path& folder) {
  for (const auto& e : summary.evaluations)
    fmt::print("step {:3d}: mean@{} {:.3f} [{:.3f}, {:.3f}]   pass@{} {:.3f} [{:.3f}, {:.3f}]   on {} held-out tasks\n",
               e.step, e.result.k, e.result.mean_at_k.value, e.result.mean_at_k.low, e.result.mean_at_k.high,
               e.result.k, e.result.pass_at_k.value, e.result.pass_at_k.low, e.result.pass_at_k.high, e.result.n);
  fmt::print("compared {} sampled tokens by bits: {} differ\n", summary.compared_tokens, summary.mismatch_tokens);
  fmt::print("{} steps in {:.0f} s; adapter {} in {}/adapter\n", summary.steps, summary.elapsed_s,
             summary.adapter_sha256.substr(0, 16), folder.string());
}

int run(const RlOptions& o) {
  const Schema schema = rl::rl_schema();
  if (o.keys) {
    std::fputs(schema.describe(o.markdown).c_str(), stdout);
    return 0;
  }
  if (o.recipe.empty() == o.resume.empty())
    throw Error(ErrorCode::invalid_argument, "give either a recipe or --resume DIR",
                "try: tidelock rl recipes/quickstart.toml");
  rl::RunOptions run;
  run.resume = !o.resume.empty();
  run.directory = run.resume      ? std::filesystem::path(o.resume)
                  : o.out.empty() ? default_folder(o.recipe)
                                  : std::filesystem::path(o.out);
  run.threads = resolve_threads(o.threads);
  run.stop_after = o.stop_after;
  if (run.resume && !o.set.empty())
    throw Error(ErrorCode::invalid_argument, "--set with --resume", "a resumed run keeps the recipe in its folder");
  const Settings settings =
      Settings::load(run.resume ? run.directory / "recipe.toml" : std::filesystem::path(o.recipe), schema, o.set);
  rl::RunSummary summary;
  {
    rl::Terminal terminal;
    const std::string name = run.resume ? run.directory.string() : o.recipe;
    run.watch = [&](const rl::ViewState& state) {
      rl::ViewState shown = state;
      shown.recipe = name;
      terminal.draw(shown);
    };
    summary = rl::run_rl(settings, run);
  }
  print_summary(summary, run.directory);
  return 0;
}

}  // namespace

Action add_rl(CLI::App& app) {
  auto o = std::make_shared<RlOptions>();
  app.add_option("recipe", o->recipe, "TOML recipe, such as recipes/quickstart.toml");
  app.add_option("--out", o->out, "folder of the run (default: runs/RECIPE-DATE)");
  app.add_option("--resume", o->resume, "go on with the run in this folder, from its newest checkpoint");
  app.add_option("--set", o->set, "override a key: a.b=VALUE")->take_all()->expected(1);
  app.add_option("--stop-after", o->stop_after, "end after this step; --resume goes on from there")
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--keys", o->keys, "print every key of a recipe and exit");
  app.add_flag("--markdown", o->markdown, "with --keys: as a Markdown table");
  add_threads(app, o->threads);
  return [o] { return run(*o); };
}

Action add_eval(CLI::App& app) {
  struct Options {
    std::string recipe, adapter;
    std::vector<std::string> set;
    int threads = 0;
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  app.add_option("recipe", o->recipe, "an rl recipe: its model, tasks, rollout and [eval] keys are used")->required();
  app.add_option("--adapter", o->adapter, "PEFT folder of an adapter");
  app.add_option("--set", o->set, "override a key: a.b=VALUE, such as eval.tasks=128")->take_all()->expected(1);
  app.add_flag("--json", o->json, "one JSON object per line");
  add_threads(app, o->threads);
  return [o] {
    const Settings settings = Settings::load(o->recipe, rl::rl_schema(), o->set);
    const auto result = rl::run_evaluation(settings, o->adapter, resolve_threads(o->threads));
    const auto line = [&](const std::string& name, const rl::Evaluation& e) {
      if (o->json)
        fmt::print(
            "{{\"family\":\"{}\",\"k\":{},\"n\":{},\"mean_at_k\":{},\"mean_at_k_low\":{},\"mean_at_k_high\":{},\"pass_"
            "at_k\":{},\"pass_at_k_low\":{},\"pass_at_k_high\":{}}}\n",
            name, e.k, e.n, e.mean_at_k.value, e.mean_at_k.low, e.mean_at_k.high, e.pass_at_k.value, e.pass_at_k.low,
            e.pass_at_k.high);
      else
        fmt::print("{:8} mean@{} {:.3f} [{:.3f}, {:.3f}]   pass@{} {:.3f} [{:.3f}, {:.3f}]   {} tasks\n", name, e.k,
                   e.mean_at_k.value, e.mean_at_k.low, e.mean_at_k.high, e.k, e.pass_at_k.value, e.pass_at_k.low,
                   e.pass_at_k.high, e.n);
    };
    line("all", result.evaluation);
    for (const auto& [family, e] : result.by_family) line(family, e);
    if (!o->json)
      fmt::print("{:.2f} tool calls a trajectory, {} failed gradings, {:.1f} s\n", result.tool_rate, result.failed,
                 result.seconds);
    return 0;
  };
}

}  // namespace tidelock::cli
