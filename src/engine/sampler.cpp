#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/base.hpp"
#include "engine/engine.hpp"

namespace tidelock::engine {
namespace {

std::int32_t argmax(const float* x, std::int64_t n) {
  return static_cast<std::int32_t>(std::max_element(x, x + n) - x);
}

struct Candidate {
  std::int32_t token;
  float weight;  // exp((logit - max) / temperature)
};

// Draws in proportion to the weights, with the cumulative sum in double in the given order.
std::int32_t draw(std::span<const Candidate> candidates, double total, float uniform) {
  const double target = static_cast<double>(uniform) * total;
  double sum = 0;
  for (const Candidate& c : candidates) {
    sum += c.weight;
    if (target < sum) return c.token;
  }
  for (auto it = candidates.rbegin(); it != candidates.rend(); ++it)
    if (it->weight > 0) return it->token;
  return candidates.front().token;
}

// The logits of the tokens that are allowed; no others can be drawn, as their weight is 0.
std::vector<float> only(const float* logits, std::int64_t vocab, std::span<const std::uint32_t> allowed) {
  std::vector<float> left(static_cast<std::size_t>(vocab), -std::numeric_limits<float>::infinity());
  for (std::size_t i = 0; i < left.size(); ++i)
    if ((allowed[i / 32] >> (i % 32) & 1U) != 0) left[i] = logits[i];
  return left;
}

double total_weight(std::span<const Candidate> candidates) {
  return std::accumulate(candidates.begin(), candidates.end(), 0.0,
                         [](double sum, const Candidate& c) { return sum + c.weight; });
}

}  // namespace

void check(const SamplingParams& p) {
  if (!(p.temperature >= 0 && p.temperature <= 100))
    fail(ErrorCode::invalid_argument, "temperature {}: expected 0 to 100", p.temperature);
  if (!(p.top_p > 0 && p.top_p <= 1))
    fail(ErrorCode::invalid_argument, "top_p {}: expected above 0, at most 1", p.top_p);
  if (p.top_k < 0) fail(ErrorCode::invalid_argument, "top_k {}: expected 0 (off) or more", p.top_k);
  if (p.top_logprobs < 0) fail(ErrorCode::invalid_argument, "top_logprobs {}: expected 0 or more", p.top_logprobs);
  if (p.max_tokens < 1) fail(ErrorCode::invalid_argument, "max_tokens {}: expected 1 or more", p.max_tokens);
  if (p.sampled_before < 0 || p.sampled_before >= p.max_tokens)
    fail(ErrorCode::invalid_argument, "sampled_before {}: expected 0 or more, below max_tokens {}", p.sampled_before,
         p.max_tokens);
}

std::int32_t sample(const float* logits, std::int64_t vocab, const SamplingParams& params, std::uint64_t counter,
                    std::span<const std::uint32_t> allowed) {
  std::vector<float> left;
  if (!allowed.empty()) {
    left = only(logits, vocab, allowed);
    logits = left.data();
  }
  if (params.temperature == 0) return argmax(logits, vocab);
  const float top = *std::max_element(logits, logits + vocab);
  const float inverse = 1.0F / params.temperature;
  std::vector<Candidate> candidates(static_cast<std::size_t>(vocab));
  for (std::int64_t i = 0; i < vocab; ++i)
    candidates[static_cast<std::size_t>(i)] = {static_cast<std::int32_t>(i),
                                               numerics::exp((logits[i] - top) * inverse)};
  if (params.top_k > 0 || params.top_p < 1) {
    std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
      return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
    });
    if (params.top_k > 0 && params.top_k < vocab) candidates.resize(static_cast<std::size_t>(params.top_k));
    if (params.top_p < 1) {
      const double limit = static_cast<double>(params.top_p) * total_weight(candidates);
      double sum = 0;
      std::size_t n = 0;
      while (n < candidates.size() && sum < limit) sum += candidates[n++].weight;
      candidates.resize(std::max<std::size_t>(n, 1));
    }
  }
  const float uniform = static_cast<float>(philox(params.seed, 0, counter)[0] >> 8) * 0x1.0p-24F;
  return draw(candidates, total_weight(candidates), uniform);
}

std::vector<TokenLogprob> top_logprobs(const float* logits, std::int64_t vocab, int count) {
  std::vector<TokenLogprob> top;
  if (count <= 0) return top;
  std::vector<std::int32_t> order(static_cast<std::size_t>(vocab));
  std::iota(order.begin(), order.end(), 0);
  const auto end = order.begin() + std::min<std::int64_t>(count, vocab);
  std::partial_sort(order.begin(), end, order.end(), [&](std::int32_t a, std::int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
  const float lse = numerics::log_sum_exp(logits, vocab);  // as model::token_logprob: equal bits
  for (auto it = order.begin(); it != end; ++it) top.push_back({*it, logits[*it] - lse});
  return top;
}

}  // namespace tidelock::engine
