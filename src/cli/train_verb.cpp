#include <cstdio>

#include "base/base.hpp"
#include "cli/cli.hpp"
#include "rl/pretrain.hpp"

namespace tidelock::cli {

Action add_train(CLI::App& app) {
  struct Options {
    std::string recipe, out;
    std::vector<std::string> set;
    int threads = 0;
    bool keys = false, markdown = false;
  };
  auto o = std::make_shared<Options>();
  app.add_option("recipe", o->recipe, "TOML recipe, such as recipes/nano.toml");
  app.add_option("--out", o->out, "folder for the model (required unless train.stop_after is set)");
  app.add_option("--set", o->set, "override a key: a.b=VALUE")->take_all()->expected(1);
  app.add_flag("--keys", o->keys, "print every key of a recipe and exit");
  app.add_flag("--markdown", o->markdown, "with --keys: as a Markdown table");
  add_threads(app, o->threads);
  return [o] {
    const Schema schema = rl::pretrain_schema();
    if (o->keys) {
      std::fputs(schema.describe(o->markdown).c_str(), stdout);
      return 0;
    }
    if (o->recipe.empty())
      throw Error(ErrorCode::invalid_argument, "no recipe given",
                  "try: tidelock train recipes/nano.toml --out runs/nano");
    const Settings settings = Settings::load(o->recipe, schema, o->set);
    if (o->out.empty() && settings.integer("train.stop_after") == 0)
      throw Error(ErrorCode::invalid_argument, "no --out given", "name the folder that the model is written to");
    rl::pretrain(settings, o->out, resolve_threads(o->threads), [](const rl::PretrainProgress& p) {
      fmt::print(
          "step {:5d}/{}  loss {:.4f}  index KL {:.4f}  |g| {:.3f}  lr {:.2e}  {:.0f} tok/s  {:.0f} s  sha256 {}\n",
          p.step, p.steps, p.loss, p.index_loss, p.grad_norm, p.learning_rate, p.tokens_per_s, p.elapsed_s,
          p.weights_sha256.substr(0, 16));
      std::fflush(stdout);
    });
    return 0;
  };
}

}  // namespace tidelock::cli
