#include "rl/trajectory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.hpp"

namespace tidelock::rl {
namespace {

constexpr std::array<std::string_view, 3> kSources{"prompt", "sampled", "tool"};
constexpr std::array<std::string_view, 5> kStatuses{"completed", "truncated", "aborted", "failed", "malformed"};

template <std::size_t N>
std::size_t index_of(const std::array<std::string_view, N>& names, std::string_view name, const char* what) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end())
    fail(ErrorCode::corrupt_data, "{} \"{}\" is not one of {}", what, name, fmt::join(names, ", "));
  return static_cast<std::size_t>(found - names.begin());
}

}  // namespace

std::string_view name_of(Source source) {
  return kSources.at(static_cast<std::size_t>(source));
}
std::string_view name_of(Status status) {
  return kStatuses.at(static_cast<std::size_t>(status));
}
Source parse_source(std::string_view name) {
  return static_cast<Source>(index_of(kSources, name, "span source"));
}
Status parse_status(std::string_view name) {
  return static_cast<Status>(index_of(kStatuses, name, "trajectory status"));
}

void Trajectory::append(std::span<const std::int32_t> ids, Source source, std::span<const float> ids_logprobs,
                        std::uint64_t version) {
  if (source == Source::sampled && ids_logprobs.size() != ids.size())
    fail(ErrorCode::internal, "trajectory {}/{}: {} sampled tokens came with {} log-probabilities", task_id, member,
         ids.size(), ids_logprobs.size());
  if (ids.empty()) return;
  const auto begin = static_cast<std::int64_t>(tokens.size());
  const auto end = begin + static_cast<std::int64_t>(ids.size());
  tokens.insert(tokens.end(), ids.begin(), ids.end());
  mask.insert(mask.end(), ids.size(), source == Source::sampled ? 1 : 0);
  logprobs.insert(logprobs.end(), ids_logprobs.begin(), ids_logprobs.end());
  if (!spans.empty() && spans.back().source == source && spans.back().weight_version == version)
    spans.back().end = end;
  else
    spans.push_back({begin, end, source, version});
}

std::vector<std::int64_t> Trajectory::sampled_positions() const {
  std::vector<std::int64_t> positions;
  positions.reserve(logprobs.size());
  for (std::size_t i = 0; i < mask.size(); ++i)
    if (mask[i] != 0) positions.push_back(static_cast<std::int64_t>(i));
  return positions;
}

void Trajectory::check() const {
  const auto require = [&](bool holds, std::string_view rule) {
    if (!holds) fail(ErrorCode::internal, "trajectory {} (group {}, member {}): {}", task_id, group, member, rule);
  };
  require(mask.size() == tokens.size(), "the mask has another length than the tokens");
  std::int64_t position = 0, sampled = 0;
  for (const Span& span : spans) {
    require(span.begin == position && span.end > span.begin, "the spans leave a gap or overlap");
    require(span.end <= static_cast<std::int64_t>(tokens.size()), "a span ends after the last token");
    require(span.source == Source::sampled || span.weight_version == 0, "a token not sampled has a weight version");
    for (auto i = static_cast<std::size_t>(span.begin); i < static_cast<std::size_t>(span.end); ++i)
      require(mask[i] == (span.source == Source::sampled ? 1 : 0), "the mask disagrees with the spans");
    if (span.source == Source::sampled) sampled += span.end - span.begin;
    position = span.end;
  }
  require(position == static_cast<std::int64_t>(tokens.size()), "the spans do not cover all tokens");
  require(sampled == static_cast<std::int64_t>(logprobs.size()), "not one log-probability for each sampled token");
  for (const float logprob : logprobs)
    require(std::isfinite(logprob) && logprob <= 0.0F, "a log-probability is positive or not finite");
  require(std::isfinite(reward) && reward >= 0 && reward <= 1, "the reward is outside [0, 1]");
}

void check_gradings(std::span<const Trajectory> trajectories, const std::string& what) {
  std::size_t failed = 0;
  const Trajectory* first = nullptr;
  for (const Trajectory& t : trajectories) {
    if (t.status == Status::completed || t.status == Status::truncated) return;
    if (t.status != Status::failed) continue;
    if (failed++ == 0) first = &t;
  }
  if (first != nullptr)
    throw Error(
        ErrorCode::io,
        fmt::format("{}: all {} gradings failed; the first, {}: {}", what, failed, first->task_id, first->failure),
        "try the task's verifier by hand; no reward means nothing to learn from");
}

}  // namespace tidelock::rl
