// What an engine is made of. Private to engine/.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "engine/schedule.hpp"

namespace tidelock::engine {

struct Sequence {
  SequenceId id;
  std::vector<std::int32_t> tokens;
  state::SequenceState state;
  std::shared_ptr<const model::Adapter> adapter;
  SamplingParams params;
  std::int64_t sampled = 0;
  Status status = Status::prefill;
  std::vector<SequenceId> clones = {};  // wait for this sequence's prompt; they fork from it
  state::Digest lineage = {};
  std::vector<KeepPoint> keep = {};  // still ahead, ascending
  std::int64_t cached = 0;
  bool waits = false;                                // for room to start, or to start again after it was set back
  std::shared_ptr<state::StateLoad> load = nullptr;  // its state is on its way from disk
  std::int64_t known = 0;                            // see state::KeptStates::Hit
  PromptClass prompt = PromptClass::brief;           // by what was to compute when it began
  int priority = 0;

  std::int64_t sampled_in_life() const { return params.sampled_before + sampled; }
  std::int64_t pending() const { return static_cast<std::int64_t>(tokens.size()) - state.position(); }
  // The tokens that its state stands for.
  std::span<const std::int32_t> done() const {
    return std::span(tokens).first(static_cast<std::size_t>(state.position()));
  }
  bool runs() const { return status == Status::prefill || status == Status::decode; }
  // Tokens of the next step, at most: it ends where a state is to be kept.
  std::int64_t next() const {
    return keep.empty() ? pending() : std::min(pending(), keep.front().position - state.position());
  }
};

// A state on its way from disk for a sequence to come.
struct Prefetch {
  state::Digest lineage;
  std::vector<std::int32_t> prompt;
  std::shared_ptr<state::StateLoad> load;
};

// One pass over some of the step's sequences, with its own working memory.
struct Shard {
  std::vector<Sequence*> sequences;
  std::vector<std::int64_t> counts;
  std::int64_t rows = 0;
  model::Workspace workspace;
  std::vector<float> hidden, logits;
  std::vector<std::size_t> finished;  // indices into sequences whose logits stand in `logits`, in order
};

struct Engine::Impl {
  const model::Model& model;
  Team& team;
  EngineOptions options;
  model::StateLayout layout;
  state::Pool pool;
  state::KeptStates cache;
  std::map<SequenceId, Sequence> sequences;
  std::vector<Prefetch> prefetches;
  SequenceId next_id = 1;
  std::vector<std::unique_ptr<Shard>> shards;
  Counters counters;
  StepPlanner planner;
  StepBudget budget;
  std::int64_t prefilled = 0;
  double prefill_seconds = 0;

  Impl(const model::Model& m, Team& t, const EngineOptions& o);
  std::optional<state::DiskOptions> disk_options() const;
  // What the bits of a state depend on beside its lineage: weights, contract, and how it lies in memory.
  state::Digest identity() const;
  Sequence& at(SequenceId id);
  std::vector<StepPlanItem> plan();
  static state::Digest lineage(const model::Adapter* adapter, const std::string& salt);
  // Starts a sequence's tokens from the deepest kept state, or begins to bring that up from disk.
  void start(Sequence& s);
  void begin_at(Sequence& s, state::SequenceState state, bool from_disk);
  // What is on its way for a prompt like the sequence's, if that is the deepest that there is.
  std::shared_ptr<state::StateLoad> take_prefetch(const Sequence& s);
  // Sequences whose state has come go on with it, and it is kept in memory, too; one that failed looks again.
  void finish_loads();
  void finish_prefetches();
  void abandon_prefetches();  // waits for them
  // Whether there was a load to wait for.
  bool wait_for_load();
  // Between kept states inside a prompt: as many tokens as weigh 0.6 of a recurrent part (state/ spec, 1.4).
  std::int64_t interior() const;
  void keep_state(Sequence& s);
  // Keeps a copy of its state, if there is room.
  void keep_copy(Sequence& s, state::Segment segment);
  // How fast prompts are computed: of steps that were mostly prefill.
  void count_time(std::span<const StepPlanItem> items, double seconds);
  double tokens_per_second() const;
  // What one sequence takes at most: its blocks, another one where it leaves a shared one, and its recurrent part.
  std::size_t bytes_of(std::int64_t tokens) const;
  // What another member of its group takes when its prompt is done.
  std::size_t fork_bytes() const { return layout.block_bytes() + layout.recurrent_bytes(); }
  std::size_t free_bytes() const;
  // Lets kept states go until `bytes` are free, as far as there are any.
  bool make_room(std::size_t bytes);
  // What the plan takes from the pool.
  std::size_t bytes_for(std::span<const StepPlanItem> items);
  // Starts what waits, in order, as far as there is room beside a block for each that runs: else it would be set back
  // again at once.
  void start_waiting();
  // Takes the state of the sequence that came last, if there is one behind `but`.
  bool set_back_youngest(SequenceId but);
  // The next step, for which there is room: kept states go first, then the youngest sequence is set back. The oldest
  // that runs never is, so the engine gets on.
  std::vector<StepPlanItem> plan_within_limit();
  // Largest first onto the emptiest shard.
  void assign(std::vector<StepPlanItem> items);
  std::vector<StepPlanItem> next_plan();
  void run_shards();
  void run(Shard& shard, Team& inner);
  Event sample_next(Sequence& s, const float* logits);
  void collect(const Shard& shard, std::vector<Event>& events);
};

}  // namespace tidelock::engine
