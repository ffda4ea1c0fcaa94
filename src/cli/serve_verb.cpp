#include <cstdio>

#include "base/base.hpp"
#include "cli/cli.hpp"
#include "cli/sizes.hpp"
#include "model/gguf_vocabulary.hpp"
#include "serve/event_replay.hpp"
#include "serve/serve.hpp"

namespace tidelock::cli {
namespace {

struct ServeOptions {
  std::string model, adapter, keys, admin_keys, adapters, state_memory, state_folder, events, state_disk = "10G";
  WeightOptions weights;
  serve::ServeOptions serve;
  double patience = 30, idle = 75;
  int threads = 0;
};

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

int run(ServeOptions& o) {
  Team team(resolve_threads(o.threads));
  const auto model = load_weights(o.model, o.weights, team);
  const auto tokenizer = model::load_tokenizer(o.model);
  std::shared_ptr<const model::Adapter> adapter;
  if (!o.adapter.empty()) adapter = model::make_adapter(*model, model::load_adapter(*model, o.adapter));
  if (o.serve.model_id.empty()) o.serve.model_id = std::filesystem::weakly_canonical(o.model).filename().string();
  o.serve.keys = o.keys;
  o.serve.admin_keys = o.admin_keys;
  o.serve.adapters = o.adapters;
  // Half of what is free once the model is loaded: the other half is for working memory, clients and the page cache.
  o.serve.state_bytes = o.state_memory.empty() ? available_memory() / 2 : parse_bytes(o.state_memory, "--state-memory");
  o.serve.state_folder = o.state_folder;
  o.serve.event_log = o.events;
  o.serve.state_disk_bytes = parse_bytes(o.state_disk, "--state-disk");
  o.serve.patience = milliseconds(o.patience);
  o.serve.idle = milliseconds(o.idle);
  o.serve.listening = [&](std::uint16_t port) {
    fmt::print("{} at http://{}:{}/v1\n", o.serve.model_id, o.serve.host, port);
    std::fflush(stdout);
  };
  serve::serve(*model, tokenizer, adapter, team, o.serve);
  return 0;
}

}  // namespace

Action add_serve(CLI::App& app) {
  auto o = std::make_shared<ServeOptions>();
  app.add_option("model", o->model, "checkpoint folder with its tokenizer, or .gguf file with its vocabulary")
      ->required();
  app.add_option("--host", o->serve.host, "IP address to listen on")->capture_default_str();
  app.add_option("--port", o->serve.port, "0: any free one, which is printed")->capture_default_str();
  app.add_option("--model-id", o->serve.model_id, "what clients call the model (default: the folder's name)");
  app.add_option("--adapter", o->adapter, "PEFT folder of an adapter");
  app.add_option("--api-keys", o->keys, "file of keys: SHA256 NAME [LIMIT] a line; without it everybody is let in");
  app.add_option("--adapters", o->adapters, "folder below which administrators may load adapters");
  app.add_option("--admin-keys", o->admin_keys,
                 "file of administrators' keys, as --api-keys; without it nobody administers");
  app.add_option("--reasoning-effort", o->serve.reasoning_effort, "of chats that do not say one")
      ->check(CLI::IsMember({"none", "low", "high", "max"}))
      ->capture_default_str();
  app.add_option("--sequences", o->serve.sequences, "sequences that run at once")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option(
         "--step-time", o->serve.step_seconds,
         "seconds that a step with prompts in it takes, about; more is faster for long prompts, less for the others")
      ->check(CLI::Range(0.001, 60.0))
      ->capture_default_str();
  app.add_option("--first-token-limit", o->serve.first_token_seconds,
                 "seconds; requests whose first token is expected later get 429 with Retry-After (0: none)")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  app.add_option("--queue", o->serve.queue, "requests that may wait; more get 429")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  app.add_option("--state-memory", o->state_memory,
                 "of sequences' state, running and kept, e.g. 8G (default: half of the free memory)");
  auto* folder = app.add_option("--state-dir", o->state_folder,
                                "folder for kept states that memory has no room for, and over restarts");
  app.add_option("--state-disk", o->state_disk, "bytes that they may take there")->needs(folder)->capture_default_str();
  app.add_flag("!--no-prefix-reuse", o->serve.reuse, "compute every prompt from its first token")->excludes(folder);
  app.add_option("--event-log", o->events, "file of the scheduler's decisions, for `tidelock events`");
  app.add_option("--connections", o->serve.connections, "open at once; more get 503")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  app.add_option("--max-body", o->serve.body_bytes, "bytes of a request's body; more get 413")
      ->check(CLI::Range(1024, 1 << 30))
      ->capture_default_str();
  app.add_option("--patience", o->patience, "seconds for a header, a body, and each write to a client")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  app.add_option("--idle", o->idle, "seconds that a connection may rest between requests")
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str();
  app.add_option("--http-threads", o->serve.http_threads, "threads for connections, beside those that compute")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  add_weights(app, o->weights);
  add_threads(app, o->threads);
  return [o] { return run(*o); };
}

Action add_events(CLI::App& app) {
  auto file = std::make_shared<std::string>();
  app.add_option("file", *file, "what `tidelock serve --event-log` wrote")->required();
  return [file] {
    const serve::EventReplay replay = serve::replay_events(*file);
    for (const auto& [name, count] : replay.events) fmt::print("{:<12} {:>10}\n", name, count);
    fmt::print("{} decided again as they were, {} not\n", replay.decided, replay.differences);
    for (const std::string& line : replay.different) fmt::print("{}\n", line);
    return replay.differences == 0 ? 0 : 3;
  };
}

}  // namespace tidelock::cli
