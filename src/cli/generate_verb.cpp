#include <unistd.h>

#include <cstdio>

#include "base/base.hpp"
#include "cli/cli.hpp"
#include "engine/engine.hpp"
#include "model/chat.hpp"
#include "model/gguf_vocabulary.hpp"
#include "model/toolcall.hpp"

namespace tidelock::cli {
namespace {

struct GenerateOptions {
  std::string model, prompt, chat, system, adapter, tools;
  WeightOptions weights;
  engine::SamplingParams sampling;
  std::int64_t seed = 0;
  int threads = 0;
  bool thinking = false, stats = false;
};

std::vector<std::int32_t> make_prompt(const GenerateOptions& o, const model::Tokenizer& tokenizer) {
  if (o.chat.empty()) return tokenizer.encode_text(o.prompt);
  std::vector<model::Message> messages;
  if (!o.system.empty()) messages.push_back({.role = "system", .content = o.system});
  messages.push_back({.role = "user", .content = o.chat});
  std::vector<model::ToolSpec> tools;
  if (!o.tools.empty()) tools.push_back({read_file(o.tools, 1 << 20)});
  model::ChatOptions chat;
  chat.thinking = o.thinking;
  return model::render_chat(tokenizer, messages, tools, chat, true);
}

// Prints what a chat answer says as it comes: text plain, tool calls in one line each.
class ChatPrinter {
 public:
  ChatPrinter(const model::Tokenizer& tokenizer, bool thinking) : parser_(tokenizer, thinking) {}
  void print(std::int32_t token) {
    const auto event = parser_.feed(token);
    if (!event) return;
    using Kind = model::TurnEvent::Kind;
    switch (event->kind) {
      case Kind::reasoning:
      case Kind::content:
      case Kind::argument_text:
        std::fwrite(event->text.data(), 1, event->text.size(), stdout);
        break;
      case Kind::call_begin:
        fmt::print("[{}{}", event->text, event->type == "raw" ? " " : "");
        break;
      case Kind::argument_begin:
        fmt::print(" {}=", event->text);
        break;
      case Kind::call_end:
        std::fputs("]\n", stdout);
        break;
      case Kind::malformed:
        fmt::print(stderr, "\ntidelock: the answer is malformed: {}\n", event->text);
        break;
      case Kind::argument_end:
      case Kind::end:
        break;
    }
  }

 private:
  model::AssistantParser parser_;
};

int run(GenerateOptions& o) {
  if (o.prompt.empty() == o.chat.empty())
    throw Error(ErrorCode::invalid_argument, "give either --prompt or --chat",
                "--prompt continues text, --chat asks as a user");
  if (o.chat.empty() && (!o.system.empty() || !o.tools.empty()))
    throw Error(ErrorCode::invalid_argument, "--system and --tools go with --chat");
  Team team(resolve_threads(o.threads));
  const auto model = load_weights(o.model, o.weights, team);
  const auto tokenizer = model::load_tokenizer(o.model);
  std::shared_ptr<const model::Adapter> adapter;
  if (!o.adapter.empty()) adapter = model::make_adapter(*model, model::load_adapter(*model, o.adapter));
  o.sampling.seed = static_cast<std::uint64_t>(o.seed);
  o.sampling.stop_tokens = model->config().end_tokens;
  if (!o.chat.empty()) o.sampling.stop_tokens.push_back(model::end_of_turn(tokenizer));
  engine::Engine engine(*model, team);
  const auto prompt = make_prompt(o, tokenizer);
  const auto id = engine.add(prompt, std::span(&o.sampling, 1), adapter).front();
  std::unique_ptr<ChatPrinter> chat = o.chat.empty() ? nullptr : std::make_unique<ChatPrinter>(tokenizer, o.thinking);
  std::int64_t sampled = 0;
  while (engine.has_work()) {
    for (const auto& event : engine.step()) {
      ++sampled;
      if (chat) {
        chat->print(event.token);
      } else if (event.status != engine::Status::stopped) {
        const std::string_view bytes = tokenizer.token_bytes(event.token);
        std::fwrite(bytes.data(), 1, bytes.size(), stdout);
      }
      std::fflush(stdout);
    }
  }
  std::fputc('\n', stdout);
  if (o.stats)
    fmt::print(stderr, "{} prompt tokens, {} sampled; {}\n", prompt.size(), sampled,
               engine.status(id) == engine::Status::stopped ? "ended by itself" : "cut at --max-tokens");
  return 0;
}

}  // namespace

Action add_generate(CLI::App& app) {
  auto o = std::make_shared<GenerateOptions>();
  app.add_option("model", o->model, "checkpoint folder with its tokenizer, or .gguf file with its vocabulary")
      ->required();
  app.add_option("--prompt", o->prompt, "text to continue");
  app.add_option("--chat", o->chat, "a user's message, in the chat protocol (K2 or K3) of the vocabulary");
  app.add_option("--system", o->system, "system message of the chat");
  app.add_option("--tools", o->tools, "file with one function in OpenAI form (JSON); calls are printed, not run");
  app.add_flag("--thinking", o->thinking, "open the thinking channel");
  app.add_option("--adapter", o->adapter, "PEFT folder of an adapter");
  app.add_option("--max-tokens", o->sampling.max_tokens, "sampled tokens at most");
  app.add_option("--temperature", o->sampling.temperature, "0: greedy");
  app.add_option("--top-p", o->sampling.top_p, "nucleus sampling");
  app.add_option("--top-k", o->sampling.top_k, "0: no limit");
  app.add_option("--seed", o->seed, "of the sampler: the same seed gives the same text")->check(CLI::NonNegativeNumber);
  app.add_flag("--stats", o->stats, "counts on standard error");
  add_weights(app, o->weights);
  add_threads(app, o->threads);
  return [o] { return run(*o); };
}

}  // namespace tidelock::cli
