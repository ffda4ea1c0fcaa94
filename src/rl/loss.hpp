// Policy-gradient losses as pure functions of log-probabilities.
//
// With ratio w_t = exp(logp_t - old_t) and advantage A of the trajectory, every kind takes, per sampled token,
//   l_t = -min(w_t A, clip(w_t, 1 - clip_low, 1 + clip_high) A) + kl_coefficient * k3_t
//   k3_t = exp(ref_t - logp_t) - (ref_t - logp_t) - 1                 (Schulman, "Approximating KL divergence")
// and they differ in clips and in how tokens are added up:
//   grpo     clip .2/.2   mean over the sequence's tokens, then mean over sequences   (Shao et al., 2402.03300)
//   dr_grpo  clip .2/.2   sum over tokens / (sequences * max_tokens)                  (Liu et al., 2503.20783)
//   dapo     clip .2/.28  sum over tokens / tokens of the whole batch                 (Yu et al., 2503.14476)
//
// A batch is handled one sequence at a time, so that the trainer can do the same: the losses of all sequences of a
// batch add up to the batch's loss, and the gradients are those of that sum.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace tidelock::rl {

enum class LossKind { grpo, dr_grpo, dapo };

// By name; Error{invalid_argument} lists the known names.
LossKind parse_loss(std::string_view name);
std::string_view name_of(LossKind kind);

struct LossOptions {
  LossKind kind = LossKind::dr_grpo;
  double clip_low = 0.2, clip_high = 0.2;
  double kl_coefficient = 0;    // > 0 needs reference log-probabilities
  std::int64_t max_tokens = 0;  // dr_grpo: the constant length that sums are divided by; >= 1

  static LossOptions defaults(LossKind kind, std::int64_t max_tokens = 0);
};

// Sizes of the whole batch that the loss is taken over, before it is split into pieces of any kind.
struct BatchSize {
  std::int64_t sequences = 0;  // kept trajectories
  std::int64_t tokens = 0;     // their sampled tokens that count (mask 1)
};

// One trajectory. All spans are [sampled tokens]; `mask` and `reference` may be empty (all ones; no KL).
struct SequenceTerms {
  std::span<const float> logprobs;   // under the weights being trained
  std::span<const float> old;        // under the weights that sampled
  std::span<const float> reference;  // under the reference policy
  std::span<const std::uint8_t> mask;
  float advantage = 0;
};

struct LossValue {
  double loss = 0;           // this sequence's share of the batch's loss
  double kl = 0;             // sum of k3 to the reference
  double policy_kl = 0;      // sum of old - logp: the k1 estimate of how far the policy has moved
  std::int64_t tokens = 0;   // that count
  std::int64_t clipped = 0;  // of these, tokens whose policy gradient the clip removed
  double ratio_max = 0;
  LossValue& operator+=(const LossValue& other);
};

// gradient: [sampled tokens], overwritten with dloss/dlogprob (0 where masked). Throws Error{invalid_argument} on sizes
// that disagree, a missing reference or a batch that cannot hold the sequence.
LossValue sequence_loss(const LossOptions& options, const BatchSize& batch, const SequenceTerms& sequence,
                        std::span<float> gradient);

}  // namespace tidelock::rl
