// engine/: requests become batches. Sequences with their own state, batched decode and chunked prefill over it,
// sampling.
//
// A sequence's tokens, and the log-probabilities reported for them, depend on its own tokens, adapter and seed alone -
// not on what else is in the batch, on chunk sizes or on threads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/team.hpp"
#include "engine/observer.hpp"
#include "engine/schedule.hpp"
#include "model/forward.hpp"
#include "state/kept_states.hpp"

namespace tidelock::engine {

// Which tokens a sequence may say. One sequence's own, called between its tokens, on the thread that steps the engine.
// Neither call may throw: a step is everybody's.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  // Bit i % 32 of word i / 32: whether token i may come next; at least one may. Empty: every token may. Valid until the
  // next call.
  virtual std::span<const std::uint32_t> allowed() = 0;
  // Told of every token that came.
  virtual void accept(std::int32_t token) = 0;
};

struct SamplingParams {
  float temperature = 1;  // 0: greedy (ties to the lower id)
  float top_p = 1;        // smallest set of most likely tokens with at least this probability
  int top_k = 0;          // 0: no limit
  std::uint64_t seed = 0;
  std::int64_t max_tokens = 256;  // sampled tokens in the sequence's whole life
  // Of them, those at the end of the prompt, or further up in it, that an earlier sequence sampled whose life this one
  // continues: draws are numbered on from there, so that with equal weights it says what the earlier one would have.
  std::int64_t sampled_before = 0;
  std::vector<std::int32_t> stop_tokens;  // ends a turn; the token itself is part of the sequence
  int top_logprobs = 0;                   // how many of the most likely tokens to report with each sampled one
  std::shared_ptr<TokenConstraint> constraint = nullptr;  // applied first; not shared by two sequences
};
// Throws Error{invalid_argument} naming the parameter.
void check(const SamplingParams& params);

// The next token. `counter` numbers the draws of one sequence: the same (logits, params, counter) gives the same token.
// The set is cut by `allowed` (see TokenConstraint), by top_k, then by top_p, on probabilities after temperature; ties
// by lower id.
std::int32_t sample(const float* logits, std::int64_t vocab, const SamplingParams& params, std::uint64_t counter,
                    std::span<const std::uint32_t> allowed = {});

enum class Status {
  prefill,
  decode,
  stopped,
  length
};  // stopped: at a stop token; length: max_tokens or context reached

struct TokenLogprob {
  std::int32_t token;
  float logprob;  // in the unmodified distribution
};
// The `count` most likely tokens, likeliest first; ties by lower id.
std::vector<TokenLogprob> top_logprobs(const float* logits, std::int64_t vocab, int count);

struct Event {  // one sampled token
  SequenceId sequence;
  std::int32_t token;
  float logprob;                  // in the unmodified distribution (temperature 1, nothing cut)
  Status status;                  // after this token
  std::vector<TokenLogprob> top;  // SamplingParams::top_logprobs of them
};

struct EngineOptions {
  std::int64_t step_tokens = 2048;  // most tokens of one step
  // What a step of prefill is to take at most; prompts that come wait for the step that runs. 0: no bound.
  double step_seconds = 0;
  // Models whose weights are at most this many bytes are run by sharding sequences over threads, each with its own
  // pass; larger ones run one pass whose products are split. Bits are the same.
  std::size_t shard_weights_limit = 64ULL << 20;
  // Bytes of state, live and kept, that the engine stays below. When sequences need more, kept states go, then the
  // sequence that came last is set back: it computes its tokens again when there is room.
  std::size_t state_limit = state::Pool::kNoLimit;
  bool reuse = false;  // keep states of what was computed, for sequences that start alike
  // A folder for kept states that memory has no room for (needs reuse), and the bytes that it may take.
  std::filesystem::path disk_folder = {};  // empty: none
  std::uint64_t disk_limit = 0;
  std::function<std::unique_ptr<state::DiskIo>()> disk_io = {};  // see state::DiskOptions
  Observer* observer = nullptr;                                  // told of decisions; must outlive the engine
};

class Engine {
 public:
  // Throws Error when options.disk_folder cannot be used (state/segment_store.hpp).
  Engine(const model::Model& model, Team& team, const EngineOptions& options = {});
  ~Engine();

  // Starts one sequence per element of `params`, all from the same prompt, which is computed once. The adapter is
  // shared. Prompts with lower `priority` are computed first, within their class (schedule.hpp). States are reused
  // among sequences of the same adapter and `salt` only. Throws Error{invalid_argument} for an empty prompt, bad
  // tokens, more tokens `sampled_before` than the prompt has, an adapter that was made for another model, and sequences
  // whose state could never fit below state_limit.
  std::vector<SequenceId> add(std::span<const std::int32_t> prompt, std::span<const SamplingParams> params,
                              std::shared_ptr<const model::Adapter> adapter = nullptr, const std::string& salt = {},
                              int priority = 0);
  // Tokens of this prompt that a sequence added now would have to compute.
  std::int64_t uncached_tokens(std::span<const std::int32_t> prompt,
                               const std::shared_ptr<const model::Adapter>& adapter, const std::string& salt);
  // Says that a sequence with this prompt will come: what is kept of it on disk is brought up to memory meanwhile, in
  // the place of what is worth less. Tokens of it that lie in memory now, and that will when this is done (fewer where
  // there is no room, or too much is on its way already). Does not wait; step() notices the end.
  struct Prefetched {
    std::int64_t ready = 0, coming = 0;
  };
  Prefetched prefetch(std::span<const std::int32_t> prompt, const std::shared_ptr<const model::Adapter>& adapter,
                      const std::string& salt);
  // Tokens of prompts that are still to be computed, by class, and how fast that goes (0: not known yet).
  std::array<std::int64_t, kPromptClasses> pending_tokens() const;
  double prefill_tokens_per_second() const;
  // The last of these, asked beforehand; from any thread, as longest_sequence(): how many tokens fit, at most the
  // model's context.
  std::int64_t longest_sequence() const;
  void check_fits(std::int64_t prompt_tokens, std::span<const SamplingParams> params) const;
  // Whether a group of `sequences` with this prompt, of this class, can start beside those that run without setting one
  // back; `capped`: there may be room, but not for its class (within_cap).
  enum class Room : std::uint8_t { enough, none, capped };
  Room room_for(std::int64_t prompt_tokens, std::int64_t sequences, PromptClass prompt) const;
  // Appends given tokens (a tool's observation) to a stopped sequence and lets it go on.
  void append(SequenceId id, std::span<const std::int32_t> tokens);
  // Ends a sequence. Its state is kept for others where the engine reuses states, unless it is `spoilt`: a step that
  // failed may have left half of its work in it.
  void remove(SequenceId id, bool spoilt = false);

  // Runs one batch. Empty when no sequence can go on.
  std::vector<Event> step();
  bool has_work() const;

  const std::vector<std::int32_t>& tokens(SequenceId id) const;
  Status status(SequenceId id) const;
  // Tokens of its prompt that were not computed for it.
  std::int64_t cached_tokens(SequenceId id) const;

  struct Counters {
    std::int64_t prefill_tokens = 0, decode_tokens = 0, steps = 0;
    std::int64_t set_back = 0;     // times that a sequence lost its state to state_limit
    std::int64_t written_out = 0;  // of these, states that were written to disk rather than dropped
    std::int64_t prefetches = 0, prefetched_tokens = 0;  // states brought up before they were asked for
    std::int64_t prefetches_late = 0;  // of them, those that somebody asked for while they were on their way
    double step_seconds = 0;           // in steps that ran something, without waiting for a disk,
    double schedule_seconds = 0;       // of that to decide what runs,
    double keep_seconds = 0;           // and to copy states that are kept; the rest is the model and sampling
  };
  Counters counters() const;
  state::PrefixCacheCounters reuse_counters() const;
  std::size_t state_bytes() const;       // allocated
  std::size_t state_bytes_used() const;  // live and kept
  state::DiskCounters disk_counters() const;
  void forget();  // every kept state
  // Gives the memory of kept states and of steps back to the system; kept states go to disk, where there is one. Waits.
  void rest();
  void write_back();  // kept states to disk, where there is one; waits. For an orderly end

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tidelock::engine
