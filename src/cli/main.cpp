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
  struct Verb {
    const char *name, *description;
    Action (*add)(CLI::App&);
  };
  const Verb verbs[] = {
      {"rl", "reinforcement learning with tools in sandboxes", add_rl},
      {"train", "train a model from scratch on demonstrations", add_train},
      {"eval", "mean@k and pass@k on held-out tasks", add_eval},
      {"generate", "text from a prompt or a chat", add_generate},
      {"serve", "an HTTP server with the OpenAI API", add_serve},
      {"events", "decides again what a server's scheduler decided, from its event log", add_events},
      {"logits", "logits of given tokens, as a .npy file", add_logits},
      {"info", "what a checkpoint is, layer by layer, and whether it can be run", add_info},
      {"convert", "a checkpoint into another file format, or into coarser numbers", add_convert},
      {"plan", "what a model needs in memory, moves per step, and how fast it can decode", add_plan},
      {"sandbox", "virtual machines that pause, resume and fork with their memory", add_sandbox},
      {"bench", "measure against peers and limits", add_bench},
  };
  std::vector<std::pair<CLI::App*, Action>> actions;
  for (const Verb& verb : verbs) {
    CLI::App* sub = app.add_subcommand(verb.name, verb.description);
    actions.emplace_back(sub, verb.add(*sub));
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
