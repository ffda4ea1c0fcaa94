#include "rl/loss.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace tidelock::rl {
namespace {

void check_sizes(const LossOptions& options, const BatchSize& batch, const SequenceTerms& s,
                 std::span<float> gradient) {
  const std::size_t n = s.logprobs.size();
  if (s.old.size() != n || gradient.size() != n || (!s.mask.empty() && s.mask.size() != n))
    fail(ErrorCode::invalid_argument, "loss: {} log-probabilities, {} old ones, {} mask values, {} gradients", n,
         s.old.size(), s.mask.size(), gradient.size());
  if (options.kl_coefficient != 0 && s.reference.size() != n)
    fail(ErrorCode::invalid_argument, "loss: kl_coefficient is {} but {} of {} tokens have a reference",
         options.kl_coefficient, s.reference.size(), n);
  if (options.kind == LossKind::dr_grpo && options.max_tokens < 1)
    fail(ErrorCode::invalid_argument, "loss dr_grpo: max_tokens is {}, expected the most tokens of a trajectory",
         options.max_tokens);
  if (batch.sequences < 1) fail(ErrorCode::invalid_argument, "loss: a batch of {} sequences", batch.sequences);
}

// What the sum over a sequence's tokens is multiplied with.
double token_weight(const LossOptions& options, const BatchSize& batch, std::int64_t tokens) {
  switch (options.kind) {
    case LossKind::grpo:
      return 1.0 / (static_cast<double>(tokens) * static_cast<double>(batch.sequences));
    case LossKind::dr_grpo:
      return 1.0 / (static_cast<double>(options.max_tokens) * static_cast<double>(batch.sequences));
    case LossKind::dapo:
      return 1.0 / static_cast<double>(batch.tokens);
  }
  fail(ErrorCode::internal, "a loss kind without aggregation");
}

}  // namespace

LossKind parse_loss(std::string_view name) {
  for (const LossKind kind : {LossKind::grpo, LossKind::dr_grpo, LossKind::dapo})
    if (name == name_of(kind)) return kind;
  fail(ErrorCode::invalid_argument, "loss \"{}\" is not known; known are grpo, dr_grpo, dapo", name);
}

std::string_view name_of(LossKind kind) {
  switch (kind) {
    case LossKind::grpo:
      return "grpo";
    case LossKind::dr_grpo:
      return "dr_grpo";
    case LossKind::dapo:
      return "dapo";
  }
  fail(ErrorCode::internal, "a loss kind without name");
}

LossOptions LossOptions::defaults(LossKind kind, std::int64_t max_tokens) {
  LossOptions options;
  options.kind = kind;
  if (kind == LossKind::dapo) options.clip_high = 0.28;
  options.max_tokens = max_tokens;
  return options;
}

LossValue& LossValue::operator+=(const LossValue& other) {
  loss += other.loss;
  kl += other.kl;
  policy_kl += other.policy_kl;
  tokens += other.tokens;
  clipped += other.clipped;
  ratio_max = std::max(ratio_max, other.ratio_max);
  return *this;
}

LossValue sequence_loss(const LossOptions& options, const BatchSize& batch, const SequenceTerms& s,
                        std::span<float> gradient) {
  check_sizes(options, batch, s, gradient);
  const auto counts = [&](std::size_t t) { return s.mask.empty() || s.mask[t] != 0; };
  LossValue value;
  for (std::size_t t = 0; t < s.logprobs.size(); ++t) value.tokens += counts(t) ? 1 : 0;
  std::fill(gradient.begin(), gradient.end(), 0.0F);
  if (value.tokens == 0) return value;
  if (value.tokens > batch.tokens)
    fail(ErrorCode::invalid_argument, "loss: a sequence of {} tokens in a batch of {}", value.tokens, batch.tokens);

  const double weight = token_weight(options, batch, value.tokens), advantage = s.advantage;
  for (std::size_t t = 0; t < s.logprobs.size(); ++t) {
    if (!counts(t)) continue;
    const double ratio = std::exp(double{s.logprobs[t]} - double{s.old[t]});
    const double clipped = std::clamp(ratio, 1 - options.clip_low, 1 + options.clip_high);
    // The minimum is the clipped branch exactly where it is a constant, so the gradient is zero there.
    const bool is_clipped = clipped * advantage < ratio * advantage;
    double term = -std::min(ratio * advantage, clipped * advantage);
    double slope = is_clipped ? 0.0 : -ratio * advantage;
    if (options.kl_coefficient != 0) {
      const double gap = double{s.reference[t]} - double{s.logprobs[t]};
      const double k3 = std::expm1(gap) - gap;
      term += options.kl_coefficient * k3;
      slope += options.kl_coefficient * -std::expm1(gap);
      value.kl += k3;
    }
    value.loss += weight * term;
    gradient[t] = static_cast<float>(weight * slope);
    value.policy_kl += double{s.old[t]} - double{s.logprobs[t]};
    value.clipped += is_clipped ? 1 : 0;
    value.ratio_max = std::max(value.ratio_max, ratio);
  }
  return value;
}

}  // namespace tidelock::rl
