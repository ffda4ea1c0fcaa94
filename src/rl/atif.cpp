#include "rl/atif.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "base/error.hpp"
#include "base/files.hpp"
#include "model/json.hpp"

namespace tidelock::rl {
namespace {

// Keys in the order in which ATIF lists them, so that a person can read a line.
using Ordered = nlohmann::ordered_json;

constexpr const char* kSchema = "ATIF-v1.7";

std::vector<std::int32_t> slice(const std::vector<std::int32_t>& tokens, std::int64_t begin, std::int64_t end) {
  return {tokens.begin() + begin, tokens.begin() + end};
}

// A float as a double: JSON's decimal then reads back to the same bits.
std::vector<double> widened(const std::vector<float>& values, std::int64_t begin, std::int64_t end) {
  return {values.begin() + begin, values.begin() + end};
}

// One model turn in tokens: the sampled spans between two tool (or prompt) spans. Weights may change within it.
struct SampledRun {
  std::int64_t begin = 0, end = 0;
};

std::vector<SampledRun> sampled_runs(const Trajectory& t) {
  std::vector<SampledRun> runs;
  for (const Span& span : t.spans) {
    if (span.source != Source::sampled) continue;
    if (!runs.empty() && runs.back().end == span.begin)
      runs.back().end = span.end;
    else
      runs.push_back({span.begin, span.end});
  }
  return runs;
}

Ordered agent_step(const Trajectory& t, const SampledRun& run, std::int64_t first_logprob, const Turn* turn) {
  Ordered step;
  step["source"] = "agent";
  step["message"] = turn == nullptr ? "" : turn->text;
  if (turn != nullptr && !turn->calls.empty()) {
    Ordered calls = Ordered::array(), results = Ordered::array();
    for (const ToolUse& call : turn->calls) {
      const auto arguments = Ordered::parse(call.arguments, nullptr, false);
      // ATIF wants an object; what is none is kept as text under "raw".
      calls.push_back({{"tool_call_id", call.id},
                       {"function_name", call.name},
                       {"arguments", arguments.is_object() ? arguments : Ordered{{"raw", call.arguments}}}});
      results.push_back({{"source_call_id", call.id}, {"content", call.output}});
    }
    step["tool_calls"] = std::move(calls);
    step["observation"] = {{"results", std::move(results)}};
  }
  step["metrics"] = {{"prompt_tokens", run.begin},
                     {"completion_tokens", run.end - run.begin},
                     {"prompt_token_ids", slice(t.tokens, 0, run.begin)},
                     {"completion_token_ids", slice(t.tokens, run.begin, run.end)},
                     {"logprobs", widened(t.logprobs, first_logprob, first_logprob + run.end - run.begin)}};
  return step;
}

Ordered extra(const Trajectory& t) {
  Ordered spans = Ordered::array(), turns = Ordered::array();
  for (const Span& span : t.spans)
    spans.push_back({{"begin", span.begin},
                     {"end", span.end},
                     {"source", name_of(span.source)},
                     {"weight_version", span.weight_version}});
  // ATIF has one step for each run of sampled tokens; turns are kept apart since a turn cut short may have no text.
  for (const Turn& turn : t.turns) {
    Ordered calls = Ordered::array();
    for (const ToolUse& call : turn.calls)
      calls.push_back({{"id", call.id}, {"name", call.name}, {"arguments", call.arguments}, {"seconds", call.seconds}});
    turns.push_back({{"calls", std::move(calls)}});
  }
  const auto runs = sampled_runs(t);
  return {{"task_id", t.task_id},
          {"family", t.family},
          {"group", t.group},
          {"member", t.member},
          {"seed", t.seed},
          {"status", name_of(t.status)},
          {"failure", t.failure},
          {"reward", t.reward},
          {"reward_detail", t.reward_detail},
          {"answer", t.answer},
          {"tool_calls", t.tool_calls},
          {"sandbox", {{"alive_s", t.sandbox.alive}, {"busy_s", t.sandbox.busy}, {"frozen_s", t.sandbox.frozen}}},
          {"spans", std::move(spans)},
          {"turns", std::move(turns)},
          {"tail_token_ids",
           slice(t.tokens, runs.empty() ? 0 : runs.back().end, static_cast<std::int64_t>(t.tokens.size()))}};
}

void read_extra(const model::Json& e, Trajectory& t) {
  t.task_id = e.at("task_id").get<std::string>();
  t.family = e.at("family").get<std::string>();
  t.group = e.at("group").get<std::int64_t>();
  t.member = e.at("member").get<std::int64_t>();
  t.seed = e.at("seed").get<std::uint64_t>();
  t.status = parse_status(e.at("status").get<std::string>());
  t.failure = e.at("failure").get<std::string>();
  t.reward = e.at("reward").get<double>();
  t.reward_detail = e.at("reward_detail").get<std::map<std::string, double>>();
  t.answer = e.at("answer").get<std::string>();
  t.tool_calls = e.at("tool_calls").get<std::int64_t>();
  const auto& sandbox = e.at("sandbox");
  t.sandbox = {sandbox.at("alive_s").get<double>(), sandbox.at("busy_s").get<double>(),
               sandbox.at("frozen_s").get<double>()};
  for (const auto& span : e.at("spans"))
    t.spans.push_back({span.at("begin").get<std::int64_t>(), span.at("end").get<std::int64_t>(),
                       parse_source(span.at("source").get<std::string>()),
                       span.at("weight_version").get<std::uint64_t>()});
  for (const auto& turn : e.at("turns")) {
    Turn& read = t.turns.emplace_back();
    for (const auto& call : turn.at("calls"))
      read.calls.push_back({call.at("id").get<std::string>(), call.at("name").get<std::string>(),
                            call.at("arguments").get<std::string>(), "", call.at("seconds").get<double>()});
  }
}

// Tokens and log-probabilities from the agent steps, texts from messages and observations.
void read_steps(const model::Json& steps, Trajectory& t) {
  std::size_t turn = 0;
  for (const auto& step : steps) {
    if (step.at("source") != "agent") continue;
    const auto& metrics = step.at("metrics");
    const auto prompt = metrics.at("prompt_token_ids").get<std::vector<std::int32_t>>();
    const auto completion = metrics.at("completion_token_ids").get<std::vector<std::int32_t>>();
    const auto logprobs = metrics.at("logprobs").get<std::vector<double>>();
    const bool extends =
        prompt.size() >= t.tokens.size() && std::equal(t.tokens.begin(), t.tokens.end(), prompt.begin());
    if (!extends)
      fail(ErrorCode::corrupt_data, "prompt_token_ids of step {} do not start with the tokens before it",
           step.at("step_id").get<std::int64_t>());
    t.tokens = prompt;
    t.tokens.insert(t.tokens.end(), completion.begin(), completion.end());
    for (const double logprob : logprobs) t.logprobs.push_back(static_cast<float>(logprob));
    if (turn >= t.turns.size()) continue;
    Turn& read = t.turns[turn++];
    read.text = step.at("message").get<std::string>();
    for (std::size_t i = 0; i < read.calls.size(); ++i)
      read.calls[i].output = step.at("observation").at("results").at(i).at("content").get<std::string>();
  }
}

void read_document(std::string_view line, Trajectory& t) {
  const model::Json document = model::parse_json(line, "trajectory");
  if (document.at("schema_version") != kSchema)
    fail(ErrorCode::corrupt_data, "schema_version is {}, expected {}", document.at("schema_version").dump(), kSchema);
  const auto& e = document.at("extra").at("tidelock");
  read_extra(e, t);
  read_steps(document.at("steps"), t);
  const auto tail = e.at("tail_token_ids").get<std::vector<std::int32_t>>();
  t.tokens.insert(t.tokens.end(), tail.begin(), tail.end());
  t.mask.assign(t.tokens.size(), 0);
  for (const Span& span : t.spans)
    if (span.source == Source::sampled)
      for (std::int64_t i = std::max<std::int64_t>(span.begin, 0); i < span.end && i < std::ssize(t.mask); ++i)
        t.mask[static_cast<std::size_t>(i)] = 1;
}

}  // namespace

std::string atif_line(const AtifContext& context, const std::vector<model::Message>& messages,
                      const Trajectory& trajectory) {
  trajectory.check();
  const auto runs = sampled_runs(trajectory);
  if (trajectory.turns.size() > runs.size())
    fail(ErrorCode::internal, "trajectory {}: {} turns in {} runs of sampled tokens", trajectory.task_id,
         trajectory.turns.size(), runs.size());
  Ordered steps = Ordered::array();
  const auto add = [&](Ordered step) {
    Ordered numbered{{"step_id", steps.size() + 1}};
    numbered.update(step);
    steps.push_back(std::move(numbered));
  };
  for (const auto& message : messages)
    add({{"source", message.role == "system" ? "system" : "user"}, {"message", message.content}});
  std::int64_t logprob = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    add(agent_step(trajectory, runs[i], logprob, i < trajectory.turns.size() ? &trajectory.turns[i] : nullptr));
    logprob += runs[i].end - runs[i].begin;
  }
  const Ordered document{
      {"schema_version", kSchema},
      {"session_id", context.run},
      {"trajectory_id",
       fmt::format("{}/{}/{}/{}", context.run, trajectory.task_id, trajectory.group, trajectory.member)},
      {"agent", {{"name", "tidelock"}, {"version", context.version}, {"model_name", context.model}}},
      {"steps", std::move(steps)},
      {"final_metrics",
       {{"total_prompt_tokens", static_cast<std::int64_t>(trajectory.tokens.size() - trajectory.logprobs.size())},
        {"total_completion_tokens", trajectory.logprobs.size()},
        {"total_steps", messages.size() + runs.size()}}},
      {"extra", {{"tidelock", extra(trajectory)}}}};
  return document.dump(-1, ' ', false, Ordered::error_handler_t::replace);
}

Trajectory parse_atif(std::string_view line) {
  Trajectory t;
  try {
    read_document(line, t);
  } catch (const model::Json::exception& error) {
    fail(ErrorCode::corrupt_data, "not a trajectory: {}", error.what());
  }
  try {
    t.check();
  } catch (const Error& error) {
    fail(ErrorCode::corrupt_data, "{}", error.what());  // the file's fault, not ours
  }
  return t;
}

void write_atif(const std::filesystem::path& path, std::span<const std::string> lines) {
  std::filesystem::create_directories(path.parent_path());
  AtomicFile file(path);
  for (const std::string& line : lines) {
    file.write(std::string_view(line));
    file.write(std::string_view("\n"));
  }
  file.commit();
}

std::vector<Trajectory> read_atif(const std::filesystem::path& path) {
  std::istringstream lines(read_file(path));
  std::vector<Trajectory> result;
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    try {
      result.push_back(parse_atif(line));
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{}:{}: {}", path.string(), number, error.what()), error.remedy());
    }
  }
  return result;
}

}  // namespace tidelock::rl
