#include "rl/learner.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <mutex>

#include "base/base.hpp"
#include "rl/recipe.hpp"

namespace tidelock::rl {

std::set<std::uint64_t> versions_of(const Trajectory& t) {
  std::set<std::uint64_t> versions;
  for (const Span& span : t.spans)
    if (span.source == Source::sampled) versions.insert(span.weight_version);
  return versions;
}

namespace {

// Of each sampled token, the version that sampled it.
std::vector<std::uint64_t> version_of_each(const Trajectory& t) {
  std::vector<std::uint64_t> versions;
  for (const Span& span : t.spans)
    if (span.source == Source::sampled)
      versions.insert(versions.end(), static_cast<std::size_t>(span.end - span.begin), span.weight_version);
  return versions;
}

}  // namespace

void compare_bits(const Trajectory& t, std::uint64_t version, std::span<const float> trainer, Comparison& c) {
  if (trainer.size() != t.logprobs.size())
    fail(ErrorCode::mismatch, "trajectory {}/{} of {}: {} sampled tokens, the trainer scored {}", t.group, t.member,
         t.task_id, t.logprobs.size(), trainer.size());
  const auto versions = version_of_each(t);
  for (std::size_t i = 0; i < trainer.size(); ++i) {
    if (versions[i] != version) continue;
    ++c.compared;
    if (std::bit_cast<std::uint32_t>(trainer[i]) == std::bit_cast<std::uint32_t>(t.logprobs[i])) continue;
    if (c.mismatched++ == 0)
      c.first = fmt::format("trajectory {}/{} of {}, sampled token {}: rollout {:.9g}, trainer {:.9g}", t.group,
                            t.member, t.task_id, i, t.logprobs[i], trainer[i]);
    c.max_abs = std::max(c.max_abs, std::fabs(static_cast<double>(trainer[i]) - static_cast<double>(t.logprobs[i])));
  }
}

std::string check_hand_over(const model::AdapterValues& sent, const model::Adapter& received, std::uint64_t version) {
  std::string trainer = sent.sha256(received.model());
  const std::string rollout = received.values().sha256(received.model());
  if (trainer != rollout)
    fail(ErrorCode::mismatch, "hand-over of weight version {}: the trainer's adapter is {}, the rollout received {}",
         version, trainer, rollout);
  return trainer;
}

void check_comparison(const Comparison& c, std::int64_t step, bool report_only) {
  if (c.compared == 0) fail(ErrorCode::mismatch, "step {}: no sampled token could be compared", step);
  if (c.mismatched == 0 || report_only) return;
  throw Error(
      ErrorCode::mismatch,
      fmt::format("step {}: {} of {} sampled tokens have other bits in the trainer (largest difference {}); first: {}",
                  step, c.mismatched, c.compared, c.max_abs, c.first),
      "this must not happen; --set rl.mismatch=\"report\" goes on and records it");
}

// The trajectories of a step by what they need: those that teach get a gradient, the others are scored for the
// comparison only.
struct Learner::Batch {
  std::vector<const Trajectory*> teaching, scored;
  std::vector<float> advantage;  // of teaching
  BatchSize size;
  std::vector<std::vector<float>> reference;  // of teaching, when the loss needs it
};

namespace {

train::TrainSequence sequence_of(const Trajectory& t, const model::Adapter* adapter) {
  return {t.tokens, t.mask, adapter};
}

std::vector<train::TrainSequence> sequences_of(std::span<const Trajectory* const> trajectories,
                                               const model::Adapter* adapter) {
  std::vector<train::TrainSequence> out;
  for (const Trajectory* t : trajectories) out.push_back(sequence_of(*t, adapter));
  return out;
}

}  // namespace

Learner::Learner(const model::Model& model, Team& team, const Settings& settings)
    : model_(model),
      s_(settings),
      parameters_(model, static_cast<int>(settings.integer("adapter.rank")),
                  static_cast<float>(settings.number("adapter.alpha")), settings.texts("adapter.targets")),
      optimizer_(parameters_.values().size()),
      worker_(model, team),
      gradient_(parameters_.values().size()) {
  options_.micro_batch_tokens = settings.integer("rl.micro_batch_tokens");
  options_.tape = settings.flag("rl.recompute") ? model::TapeMode::recompute : model::TapeMode::full;
}

Advantages Learner::advantages(std::span<const Trajectory> trajectories, std::uint64_t seed) const {
  std::vector<double> rewards;
  std::vector<std::int64_t> groups;
  std::vector<std::uint8_t> graded;
  for (const auto& t : trajectories) {
    rewards.push_back(t.reward);
    groups.push_back(t.group);
    graded.push_back(t.status == Status::failed || t.status == Status::aborted ? 0 : 1);
  }
  AdvantageOptions options = advantage_options(s_);
  options.seed = seed;
  return compute_advantages(rewards, groups, graded, options);
}

train::GradientResult Learner::gradient(const Batch& batch, const model::Adapter* adapter, LossValue& total) {
  const LossOptions loss = loss_options(s_);
  const auto sequences = sequences_of(batch.teaching, adapter);
  std::vector<LossValue> values(sequences.size());
  gradient_.assign(parameters_.values().size(), 0.0F);
  const auto policy = [&](std::size_t i, std::span<const float> logprobs, std::span<float> d) {
    const std::span<const float> reference = batch.reference.empty() ? std::span<const float>() : batch.reference[i];
    values[i] =
        sequence_loss(loss, batch.size, {logprobs, batch.teaching[i]->logprobs, reference, {}, batch.advantage[i]}, d);
    return values[i].loss;
  };
  auto result = worker_.run(
      sequences, policy, options_, [&](std::span<float> flat) { return parameters_.gradients(flat); }, gradient_);
  for (const LossValue& v : values) total += v;
  return result;
}

std::size_t Learner::put_away(const std::filesystem::path& folder) {
  const std::size_t gradient = gradient_.capacity() * sizeof(float);
  std::vector<float>().swap(gradient_);
  return gradient + optimizer_.put_away(folder);
}

// Tokens of trajectories that were set aside: their weights are not those that the gradient is taken at.
void Learner::compare_older(std::span<const Trajectory> trajectories, const Policies& policies, Update& out) {
  const std::uint64_t newest = policies.rbegin()->first;
  std::map<std::uint64_t, std::vector<const Trajectory*>> by_version;
  for (const Trajectory& t : trajectories)
    for (const std::uint64_t version : versions_of(t)) {
      if (!policies.contains(version))
        fail(ErrorCode::internal, "trajectory {}/{} of {}: the weights of version {} are gone", t.group, t.member,
             t.task_id, version);
      if (version != newest) by_version[version].push_back(&t);
    }
  for (const auto& [version, sampled] : by_version) {
    const std::int64_t before = out.compared.compared;
    const auto scored = worker_.score(sequences_of(sampled, policies.at(version).get()), options_);
    for (std::size_t i = 0; i < sampled.size(); ++i) {
      compare_bits(*sampled[i], version, scored[i], out.compared);
      out.tokens += std::ssize(sampled[i]->tokens);
    }
    out.older_tokens += out.compared.compared - before;
  }
}

Update Learner::update(std::span<const Trajectory> trajectories, const Advantages& advantages,
                       const Policies& policies) {
  const auto& [newest, held] = *policies.rbegin();
  const model::Adapter* adapter = held.get();
  Batch batch;
  Update out;
  double entropy = 0, sampled = 0;
  for (std::size_t i = 0; i < trajectories.size(); ++i) {
    const Trajectory& t = trajectories[i];
    if (t.logprobs.empty()) continue;
    for (const float logprob : t.logprobs) entropy -= static_cast<double>(logprob);
    sampled += static_cast<double>(t.logprobs.size());
    if (advantages.kept[i] != 0) {
      ++batch.size.sequences;
      batch.size.tokens += static_cast<std::int64_t>(t.logprobs.size());
    }
    const bool pulls = advantages.values[i] != 0 || s_.number("rl.kl_coefficient") > 0;
    if (advantages.kept[i] != 0 && pulls) {
      batch.teaching.push_back(&t);
      batch.advantage.push_back(advantages.values[i]);
    } else {
      batch.scored.push_back(&t);
    }
  }
  out.entropy_estimate = sampled > 0 ? entropy / sampled : 0;
  const auto scored = worker_.score(sequences_of(batch.scored, adapter), options_);
  for (std::size_t i = 0; i < batch.scored.size(); ++i) {
    compare_bits(*batch.scored[i], newest, scored[i], out.compared);
    out.tokens += static_cast<std::int64_t>(batch.scored[i]->tokens.size());
  }
  compare_older(trajectories, policies, out);
  if (batch.teaching.empty()) return out;
  if (s_.number("rl.kl_coefficient") > 0)
    batch.reference = worker_.score(sequences_of(batch.teaching, nullptr), options_);

  retrieve();
  std::unique_ptr<model::Adapter> current;
  LossValue total;
  for (std::int64_t epoch = 0; epoch < s_.integer("rl.epochs"); ++epoch) {
    if (epoch > 0) current = model::make_adapter(model_, parameters_.adapter_values());
    const auto result = gradient(batch, epoch == 0 ? adapter : current.get(), total);
    out.tokens += result.tokens;
    if (epoch == 0) {
      out.loss = result.loss;
      for (std::size_t i = 0; i < batch.teaching.size(); ++i)
        compare_bits(*batch.teaching[i], newest, result.logprobs[i], out.compared);
    }
    out.grad_norm = train::gradient_norm(gradient_);
    if (!std::isfinite(out.grad_norm)) fail(ErrorCode::internal, "the gradient's norm is {}", out.grad_norm);
    train::AdamWOptions adam;
    const auto warmup = static_cast<double>(s_.integer("rl.warmup_steps"));
    const double ramp = warmup > 0 ? std::min(1.0, static_cast<double>(optimizer_.steps() + 1) / warmup) : 1.0;
    adam.learning_rate = static_cast<float>(ramp * s_.number("rl.learning_rate"));
    adam.weight_decay = static_cast<float>(s_.number("rl.weight_decay"));
    optimizer_.step(parameters_.values(), gradient_, train::clip_scale(out.grad_norm, s_.number("rl.clip_norm")), adam);
  }
  if (total.tokens > 0) {
    out.kl = total.kl / static_cast<double>(total.tokens);
    out.clip_fraction = static_cast<double>(total.clipped) / static_cast<double>(total.tokens);
  }
  return out;
}

}  // namespace tidelock::rl
