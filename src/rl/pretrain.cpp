#include "rl/pretrain.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numbers>

#include "base/base.hpp"
#include "model/forward.hpp"
#include "rl/conversation.hpp"
#include "rl/recipe.hpp"
#include "train/train.hpp"

namespace tidelock::rl {
namespace {

Skill read_skill(const Settings& s) {
  Skill skill;
  skill.use_tool = s.number("skill.use_tool");
  skill.wrong_command = s.number("skill.wrong_command");
  skill.wrong_copy = s.number("skill.wrong_copy");
  skill.stop_early = s.number("skill.stop_early");
  skill.separate_calls = s.number("skill.separate_calls");
  skill.tool_sum = s.number("skill.tool_sum");
  return skill;
}

// The demonstrations of one step: as many whole conversations as fit into batch_tokens. A pure function of (seed,
// step).
std::vector<Conversation> draw_batch(const TaskMixture& mixture, const model::Tokenizer& tokenizer, const Skill& skill,
                                     std::uint64_t seed, std::int64_t step, std::int64_t batch_tokens) {
  std::vector<Conversation> batch;
  std::int64_t tokens = 0;
  for (std::uint64_t i = 0;; ++i) {
    const std::uint64_t episode_seed = mix_seed(mix_seed(seed, static_cast<std::uint64_t>(step)), i);
    const Episode episode = mixture.make(episode_seed, Split::train);
    Random random(episode_seed, 1);
    Conversation c =
        demonstration(tokenizer, episode, mixture.family_of(episode).demonstrate(episode, random, skill), false);
    tokens += static_cast<std::int64_t>(c.tokens.size());
    if (tokens > batch_tokens && !batch.empty()) return batch;
    batch.push_back(std::move(c));
  }
}

// Linear warm-up, then a cosine down to a tenth.
float learning_rate(const Settings& s, std::int64_t step, std::int64_t steps) {
  const double peak = s.number("train.learning_rate");
  const auto warmup = static_cast<double>(s.integer("train.warmup_steps"));
  const auto at = static_cast<double>(step);
  if (at < warmup) return static_cast<float>(peak * (at + 1) / warmup);
  const double part = (at - warmup) / std::max(1.0, static_cast<double>(steps) - warmup);
  return static_cast<float>(peak * (0.1 + 0.9 * 0.5 * (1 + std::cos(std::numbers::pi * part))));
}

// noaux_tc balance: the selection bias of an expert moves by a small step against its excess load (spec/model.md 4.7).
void balance_experts(const model::Model& model, const std::vector<std::int64_t>& load, float step,
                     train::FullParameters& parameters) {
  const auto count = static_cast<std::size_t>(model.config().experts.count);
  for (std::size_t layer = 0; layer < model.layers.size() && count != 0; ++layer) {
    const auto id = model.layers[layer].ffn.router_bias;
    if (id == model::kNone) continue;
    const std::int64_t* loads = load.data() + layer * count;
    double mean = 0;
    for (std::size_t e = 0; e < count; ++e) mean += static_cast<double>(loads[e]) / static_cast<double>(count);
    for (std::size_t e = 0; e < count; ++e) {
      const double excess = static_cast<double>(loads[e]) - mean;
      parameters.of(id)[e] -= excess > 0 ? step : excess < 0 ? -step : 0.0F;
    }
  }
}

std::vector<std::uint8_t> decay_marks(const model::Model& model, const train::FullParameters& parameters) {
  std::vector<std::uint8_t> marks;
  for (model::ParameterId id = 0; id < static_cast<model::ParameterId>(model.parameters().size()); ++id)
    marks.insert(marks.end(), parameters.of(id).size(), parameters.decays(model, id) ? 1 : 0);
  return marks;
}

void copy_tokenizer(const std::filesystem::path& from, const std::filesystem::path& to) {
  for (const char* name : {"tiktoken.model", "tokenizer_config.json"})
    if (std::filesystem::exists(from / name) && !std::filesystem::equivalent(from, to))
      write_file_atomic(to / name, read_file(from / name));
}

// Everything that lives through the run.
struct PretrainRun {
  const Settings& settings;
  Team team;
  model::Tokenizer tokenizer;
  model::Model model;
  TaskMixture mixture;
  Skill skill;
  train::FullParameters parameters;
  train::AdamW optimizer;
  train::GradientWorker worker;
  std::vector<std::uint8_t> decay;
  std::vector<float> gradient;
  std::uint64_t seed;

  PretrainRun(const Settings& s, int threads)
      : settings(s),
        team(threads),
        tokenizer(model::Tokenizer::load(s.text("model.tokenizer"))),
        model(model::parse_config(read_file(s.text("model.config"), 16 << 20), s.text("model.config")), true),
        mixture(rl_tasks(s)),
        skill(read_skill(s)),
        parameters(model),
        optimizer(parameters.values().size()),
        worker(model, team),
        decay(decay_marks(model, parameters)),
        gradient(parameters.values().size()),
        seed(static_cast<std::uint64_t>(s.integer("train.seed"))) {
    if (tokenizer.vocab_size() > model.config().vocab)
      fail(ErrorCode::invalid_argument, "{} has {} tokens, the model's vocabulary is {}", s.text("model.tokenizer"),
           tokenizer.vocab_size(), model.config().vocab);
    parameters.initialize(model, seed);
    parameters.apply(model, team);
  }

  PretrainProgress step(std::int64_t at, std::int64_t steps) {
    const auto batch = draw_batch(mixture, tokenizer, skill, seed, at, settings.integer("train.batch_tokens"));
    std::vector<train::TrainSequence> sequences;
    std::int64_t targets = 0, rows = 0;
    for (const auto& c : batch) {
      sequences.push_back({c.tokens, c.mask, nullptr});
      targets += std::count(c.mask.begin(), c.mask.end(), std::uint8_t{1});
      rows += static_cast<std::int64_t>(c.tokens.size());
    }
    const float per_token = 1.0F / static_cast<float>(targets);
    const auto cross_entropy = [&](std::size_t, std::span<const float> logprobs, std::span<float> d) {
      double loss = 0;
      for (std::size_t i = 0; i < logprobs.size(); ++i) {
        loss -= static_cast<double>(logprobs[i]) * static_cast<double>(per_token);
        d[i] = -per_token;
      }
      return loss;
    };
    train::GradientOptions options;
    options.micro_batch_tokens = settings.integer("train.micro_batch_tokens");
    options.tape = settings.flag("train.recompute") ? model::TapeMode::recompute : model::TapeMode::full;
    options.dense_attention = at < settings.integer("train.index_warmup_steps");
    options.index_loss_weight =
        static_cast<float>(settings.number("train.index_loss_weight")) / static_cast<float>(rows);
    std::fill(gradient.begin(), gradient.end(), 0.0F);
    const auto result = worker.run(
        sequences, cross_entropy, options, [&](std::span<float> flat) { return parameters.gradients(flat); }, gradient);
    const double norm = train::gradient_norm(gradient);
    if (!std::isfinite(result.loss) || !std::isfinite(norm))
      fail(ErrorCode::internal, "step {}: the loss is {}, the gradient's norm {}", at + 1, result.loss, norm);
    train::AdamWOptions adam;
    adam.learning_rate = learning_rate(settings, at, steps);
    adam.weight_decay = static_cast<float>(settings.number("train.weight_decay"));
    optimizer.step(parameters.values(), gradient, train::clip_scale(norm, settings.number("train.clip_norm")), adam,
                   decay);
    balance_experts(model, result.expert_load, static_cast<float>(settings.number("train.balance_step")), parameters);
    parameters.apply(model, team);
    const auto mla = static_cast<double>(
        std::count(model.config().layers.begin(), model.config().layers.end(), model::LayerKind::mla));
    const double index_loss = mla > 0 ? result.index_loss / (static_cast<double>(rows) * mla) : 0;
    return {at + 1,
            steps,
            result.loss,
            index_loss,
            norm,
            static_cast<double>(adam.learning_rate),
            static_cast<double>(rows),
            0,
            {}};
  }
};

}  // namespace

Schema pretrain_schema() {
  Schema s;
  s.text("model.config", "config.json of the architecture to train");
  s.text("model.tokenizer", "folder with tiktoken.model and tokenizer_config.json");
  s.integer("train.steps", "optimizer steps").range(1, 1e7);
  s.integer("train.stop_after",
            "end after this many steps without saving (0: run all); the schedule stays that of train.steps")
      .range(0, 1e7)
      .fallback(0);
  s.integer("train.seed", "of weights and data").range(0, 9e15).fallback(1);
  s.integer("train.batch_tokens", "tokens of one step; whole conversations up to this many")
      .range(16, 1e8)
      .fallback(8192);
  s.integer("train.micro_batch_tokens", "tokens of one gradient; does change bits").range(16, 1e8).fallback(2048);
  s.number("train.learning_rate", "peak of the schedule").range(0, 1).fallback(1e-3);
  s.integer("train.warmup_steps", "linear warm-up, then cosine to a tenth").range(0, 1e7).fallback(50);
  s.number("train.weight_decay", "decoupled, on matrices").range(0, 1).fallback(0.01);
  s.number("train.clip_norm", "gradient norm limit; 0: none").range(0, 1e6).fallback(1.0);
  s.integer("train.index_warmup_steps", "steps with dense attention while the indexer learns")
      .range(0, 1e7)
      .fallback(100);
  s.number("train.index_loss_weight", "of the KL from attention to index scores").range(0, 1e3).fallback(1.0);
  s.number("train.balance_step", "of the router's selection bias against excess load").range(0, 1).fallback(1e-3);
  s.flag("train.recompute", "keep layer inputs only and run layers again in the backward pass").fallback(false);
  s.integer("train.log_every", "steps between progress lines").range(1, 1e6).fallback(20);
  const Skill d;
  const auto part = [&](const char* key, const char* doc, double value) {
    s.number(key, doc).range(0, 1).fallback(value);
  };
  part("skill.use_tool", "demonstrations that use the tool", d.use_tool);
  part("skill.wrong_command", "of these, with a wrong command", d.wrong_command);
  part("skill.wrong_copy", "answers with a wrong digit", d.wrong_copy);
  part("skill.stop_early", "guesses after the first of several calls", d.stop_early);
  part("skill.separate_calls", "vault: one call per file", d.separate_calls);
  part("skill.tool_sum", "vault: sums made by the tool", d.tool_sum);
  add_task_keys(s);
  return s;
}

void pretrain(const Settings& settings, const std::filesystem::path& out, int threads,
              const std::function<void(const PretrainProgress&)>& progress) {
  using Clock = std::chrono::steady_clock;
  PretrainRun run(settings, threads);
  const std::int64_t steps = settings.integer("train.steps"), stop_after = settings.integer("train.stop_after");
  const std::int64_t last = stop_after > 0 ? std::min(steps, stop_after) : steps;
  const std::int64_t every = settings.integer("train.log_every");
  const auto start = Clock::now();
  auto lap = start;
  double lap_tokens = 0;
  for (std::int64_t at = 0; at < last; ++at) {
    PretrainProgress p = run.step(at, steps);
    lap_tokens += p.tokens_per_s;
    if ((at + 1) % every != 0 && at + 1 != last) continue;
    const auto now = Clock::now();
    p.tokens_per_s = lap_tokens / std::chrono::duration<double>(now - lap).count();
    p.elapsed_s = std::chrono::duration<double>(now - start).count();
    p.weights_sha256 = sha256_hex(std::as_bytes(run.parameters.values()));
    progress(p);
    lap = now;
    lap_tokens = 0;
  }
  if (last < steps) return;
  model::save_model(
      run.model, [&](model::ParameterId id) { return std::span<const float>(run.parameters.of(id)); }, out);
  copy_tokenizer(settings.text("model.tokenizer"), out);
}

}  // namespace tidelock::rl
