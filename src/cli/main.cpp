#include <sched.h>

#include <csignal>
#include <cstdio>
#include <cstring>

#include "base/base.hpp"
#include "cli/cli.hpp"
#include "sandbox/sandbox.hpp"

namespace tidelock::cli {

void add_threads(CLI::App& app, int& threads) {
  app.add_option("--threads", threads, "threads that compute; 0: all cores (results do not depend on it)")
      ->check(CLI::Range(0, 1024));
}

int resolve_threads(int threads) {
  if (threads > 0) return threads;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return CPU_COUNT(&set);
}

namespace {

void report(const Error& error) {
  std::fprintf(stderr, "tidelock: %s\n", error.what());
  if (!error.remedy().empty()) std::fprintf(stderr, "  %s\n", error.remedy().c_str());
}

int run(int argc, char** argv) {
  CLI::App app{
      "Tidelock: serves, sandboxes and trains hybrid linear-attention mixture-of-experts models; trainer and rollout "
      "agree by bits."};
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all", "help for all verbs");
  const std::pair<const char*, const char*> verbs[] = {
      {"rl", "reinforcement learning with tools in sandboxes"},
      {"train", "train a model from scratch on demonstrations"},
      {"eval", "mean@k and pass@k on held-out tasks"},
      {"generate", "text from a prompt or a chat"},
      {"logits", "logits of given tokens, as a .npy file"},
      {"sandbox", "virtual machines that pause, resume and fork with their memory"},
      {"bench", "measure against peers and limits"},
  };
  using Adder = Action (*)(CLI::App&);
  const Adder adders[] = {add_rl, add_train, add_eval, add_generate, add_logits, add_sandbox, add_bench};
  std::vector<std::pair<CLI::App*, Action>> actions;
  for (std::size_t i = 0; i < std::size(verbs); ++i) {
    CLI::App* sub = app.add_subcommand(verbs[i].first, verbs[i].second);
    actions.emplace_back(sub, adders[i](*sub));
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  for (const auto& [sub, action] : actions)
    if (sub->parsed()) return action();
  return 2;
}

}  // namespace
}  // namespace tidelock::cli

int main(int argc, char** argv) {
  if (argc >= 2 && std::strcmp(argv[1], "sandbox-helper") == 0) return tidelock::sandbox::helper_main(argc, argv);
  std::signal(SIGPIPE, SIG_IGN);
  tidelock::init_log();
  try {
    return tidelock::cli::run(argc, argv);
  } catch (const tidelock::Error& error) {
    tidelock::cli::report(error);
    return tidelock::exit_code(error.code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tidelock: %s\n", error.what());
    return 1;
  }
}
