// A trace of requests against the cache of kept states: which share of the prompts' tokens would not have been computed
// again, in a memory of given size. Sizes are those of a model (bytes a token, bytes a recurrent state) and a memory,
// scaled down together, so that as many states compete for as much room; no model runs.
//
//   trace_replay TRACE.jsonl [--bytes-per-token 16992] [--state-megabytes 232] [--gigabytes 1000] [--answers] [--json]
//
// TRACE: Mooncake's form, one {"input_length", "output_length", "hash_ids"} a line, each id a block of 512 tokens.
// The default sizes are Kimi K3's with 8-bit latents (spec of the state room, 1.1). What an answer said, and what a
// block that was not full at a prompt's end said, the trace does not tell: prompts count in whole blocks, and states at
// the ends of answers, which nothing could find here, are left out unless --answers asks for their weight.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/base.hpp"
#include "base/clock.hpp"
#include "engine/schedule.hpp"
#include "state/prefix_cache.hpp"

namespace {

using namespace tidelock;
using Tokens = std::vector<std::int32_t>;

constexpr std::size_t kTraceBlock = 512;

struct Request {
  std::size_t input = 0, output = 0;
  std::vector<std::uint64_t> ids;
};

std::vector<Request> read_trace(const std::string& path) {
  std::ifstream file(path);
  if (!file) fail_errno("cannot open", path);
  std::vector<Request> requests;
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line);
    requests.push_back({json.at("input_length"), json.at("output_length"), json.at("hash_ids")});
    if (requests.back().ids.size() * kTraceBlock < requests.back().input)
      fail(ErrorCode::corrupt_data, "{}: line {} has too few ids", path, requests.size());
  }
  return requests;
}

void add_block(Tokens& tokens, std::uint64_t id, std::size_t count) {
  Random random(id);
  for (std::size_t i = 0; i < count; ++i) tokens.push_back(static_cast<std::int32_t>(random.next_u32() >> 1));
}

// A layout whose recurrent state weighs as many tokens as the model's.
model::StateLayout layout_for(double state_tokens) {
  model::Config config;
  config.format = numerics::Format::bf16;
  config.mla = {.heads = 1, .q_lora = 0, .latent = 2, .nope = 2, .extra = 2, .value = 2};
  config.layers = {model::LayerKind::mla, model::LayerKind::kda};
  config.kda = {.heads = 1, .head_dim = 16};
  const auto token = static_cast<double>(model::StateLayout(config).block_bytes()) / 64;
  while (static_cast<double>(model::StateLayout(config).recurrent_bytes()) < state_tokens * token) ++config.kda.heads;
  return model::StateLayout(config);
}

class Replay {
 public:
  Replay(const model::StateLayout& layout, std::size_t limit) : layout_(layout), pool_(layout, limit), cache_(pool_) {
    interior_ = static_cast<std::int64_t>(0.6 * static_cast<double>(layout.recurrent_bytes()) /
                                          static_cast<double>(layout.block_bytes())) *
                64;
  }

  // As the engine does it. Returns the tokens of the prompt that were there.
  std::int64_t request(const Tokens& prompt, const Tokens& whole) {
    auto hit = cache_.lookup(state::Digest{}, prompt);
    const std::int64_t found = hit.state.position();
    state::SequenceState state = std::move(hit.state);
    for (const auto& point : engine::keep_points(found, hit.known, std::ssize(prompt), interior_)) {
      run_to(state, point.position);
      if (make_room(layout_.recurrent_bytes()))
        cache_.insert(state::Digest{}, std::span(whole).first(static_cast<std::size_t>(point.position)), state.fork(),
                      point.segment);
    }
    if (whole.size() <= prompt.size()) return found;
    run_to(state, std::ssize(whole) - 1);
    cache_.insert(state::Digest{}, std::span(whole).first(whole.size() - 1), std::move(state),
                  state::Segment::protected_use);
    return found;
  }
  state::PrefixCacheCounters counters() const { return cache_.counters(); }

 private:
  void run_to(state::SequenceState& state, std::int64_t position) {
    make_room(state.bytes_to_extend(position - state.position()));
    state.extend(position - state.position());
    state.advance(position - state.position());
  }
  bool make_room(std::size_t bytes) {
    while (pool_.used_bytes() + bytes > pool_.limit())
      if (!cache_.evict()) return false;
    return true;
  }

  const model::StateLayout layout_;
  state::Pool pool_;
  state::PrefixCache cache_;
  std::int64_t interior_;
};

int run(int argc, char** argv) {
  std::string trace;
  double bytes_per_token = 16992, state_megabytes = 232, gigabytes = 1000;
  bool json = false, answers_too = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view a = argv[i];
    const auto number = [&] { return std::stod(argv[++i]); };
    if (a == "--json") {
      json = true;
    } else if (a == "--answers") {
      answers_too = true;
    } else if (a == "--bytes-per-token" && i + 1 < argc) {
      bytes_per_token = number();
    } else if (a == "--state-megabytes" && i + 1 < argc) {
      state_megabytes = number();
    } else if (a == "--gigabytes" && i + 1 < argc) {
      gigabytes = number();
    } else if (!a.starts_with("-") && trace.empty()) {
      trace = a;
    } else {
      trace.clear();
      break;
    }
  }
  if (trace.empty() || !(bytes_per_token > 0) || !(state_megabytes > 0) || !(gigabytes > 0)) {
    fmt::print(stderr,
               "usage: trace_replay TRACE.jsonl [--bytes-per-token B] [--state-megabytes M] [--gigabytes G] "
               "[--answers] [--json]\n");
    return 2;
  }
  const std::vector<Request> requests = read_trace(trace);
  const model::StateLayout layout = layout_for(state_megabytes * 1e6 / bytes_per_token);
  const double token = static_cast<double>(layout.block_bytes()) / 64;
  Replay replay(layout, static_cast<std::size_t>(gigabytes * 1e9 / bytes_per_token * token));
  const auto start = std::chrono::steady_clock::now();
  std::int64_t asked = 0, found = 0;
  std::uint64_t answers = 1ULL << 40;  // ids that no prompt has
  for (const Request& request : requests) {
    Tokens prompt;
    asked += static_cast<std::int64_t>(request.input);
    for (std::size_t i = 0; i < request.input / kTraceBlock; ++i) add_block(prompt, request.ids[i], kTraceBlock);
    add_block(prompt, ++answers, 1);  // what comes behind, and is computed in any case
    Tokens whole = prompt;
    if (answers_too) add_block(whole, answers, request.output + request.input % kTraceBlock);
    found += replay.request(prompt, whole);
  }
  const double seconds = seconds_since(start), share = static_cast<double>(found) / static_cast<double>(asked);
  const auto counters = replay.counters();
  const std::string name = trace.substr(trace.find_last_of('/') + 1);
  if (json) {
    fmt::print("{{\"name\":\"{} at {} GB\",\"value\":{:.4f},\"unit\":\"of tokens\",\"peer\":\"\",\"ratio\":0}}\n", name,
               gigabytes, share);
  } else {
    fmt::print("{}: {:.4f} of {} prompt tokens found in {} GB; {} states kept, {} evicted, {:.1f} us a request\n", name,
               share, asked, gigabytes, counters.inserted, counters.evicted,
               1e6 * seconds / static_cast<double>(requests.size()));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "trace_replay: {}\n", error.what());
    return 1;
  }
}
