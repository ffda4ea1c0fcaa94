#include "base/base.hpp"
#include "cli/cli.hpp"
#include "model/forward.hpp"
#include "model/npy.hpp"
#include "state/state.hpp"

namespace tidelock::cli {
namespace {

constexpr std::int64_t kChunk = 512;  // rows of one pass

struct LogitsOptions {
  std::string model, tokens, out, adapter;
  WeightOptions weights;
  int threads = 0;
};

int run_logits(const LogitsOptions& o) {
  Team team(resolve_threads(o.threads));
  const auto model = load_weights(o.model, o.weights, team);
  std::unique_ptr<model::Adapter> adapter;
  if (!o.adapter.empty()) adapter = model::make_adapter(*model, model::load_adapter(*model, o.adapter));
  const std::vector<std::int32_t> tokens = model::read_tokens(o.tokens);
  if (tokens.empty()) fail(ErrorCode::invalid_argument, "{} holds no tokens", o.tokens);
  const model::StateLayout layout(model->config());
  state::Pool pool(layout);
  state::SequenceState sequence(pool);
  model::Workspace workspace;
  const std::int64_t n = static_cast<std::int64_t>(tokens.size()), vocab = model->config().vocab;
  std::vector<float> logits(static_cast<std::size_t>(n * vocab));
  for (std::int64_t at = 0; at < n; at += kChunk) {
    const std::int64_t rows = std::min(kChunk, n - at);
    const model::Span span{sequence.extend(rows), at,
                           std::span(tokens).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(rows)),
                           adapter.get()};
    const float* hidden = model::forward(*model, layout, std::span(&span, 1), {}, workspace, team);
    sequence.advance(rows);
    model::head_forward(*model, hidden, rows, logits.data() + at * vocab, workspace, team);
  }
  model::write_npy(o.out, logits, {n, vocab});
  return 0;
}

}  // namespace

Action add_logits(CLI::App& app) {
  auto o = std::make_shared<LogitsOptions>();
  app.add_option("model", o->model, "checkpoint folder (config.json, safetensors) or .gguf file")->required();
  app.add_option("--tokens", o->tokens, "token ids: .npy (int32, int64) or text separated by white space")->required();
  app.add_option("--out", o->out, ".npy to write: float32 [tokens, vocab]")->required();
  app.add_option("--adapter", o->adapter, "PEFT folder of an adapter");
  add_weights(app, o->weights);
  add_threads(app, o->threads);
  return [o] { return run_logits(*o); };
}

}  // namespace tidelock::cli
