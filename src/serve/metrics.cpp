#include "serve/metrics.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace tidelock::serve {

void ServerMetrics::count_response(const std::string& path, int status) {
  const std::lock_guard lock(mutex_);
  ++responses_[{path, status}];
}

void ServerMetrics::connections(int change) {
  const std::lock_guard lock(mutex_);
  connections_ += change;
}

void ServerMetrics::count_refused_connection() {
  const std::lock_guard lock(mutex_);
  ++refused_connections_;
}

int ServerMetrics::open_connections() const {
  const std::lock_guard lock(mutex_);
  return connections_;
}

void ServerMetrics::observe(Histogram& histogram, double seconds) {
  const auto bucket = std::lower_bound(kBounds.begin(), kBounds.end(), seconds) - kBounds.begin();
  const std::lock_guard lock(mutex_);
  ++histogram.counts[static_cast<std::size_t>(bucket)];
  histogram.sum += seconds;
}

void ServerMetrics::write(std::string& out, const char* name, const char* help, const Histogram& histogram) {
  out += fmt::format("# HELP {0} {1}\n# TYPE {0} histogram\n", name, help);
  std::int64_t total = 0;
  for (std::size_t i = 0; i < histogram.counts.size(); ++i) {
    total += histogram.counts[i];
    out += fmt::format("{}_bucket{{le=\"{}\"}} {}\n", name, i < kBounds.size() ? fmt::format("{}", kBounds[i]) : "+Inf",
                       total);
  }
  out += fmt::format("{0}_sum {1}\n{0}_count {2}\n", name, histogram.sum, total);
}

namespace {

template <typename One>
void write_disk(const One& one, const EngineLoopCounters& engine) {
  const state::DiskCounters& disk = engine.disk;
  one("tidelock_disk_states", "gauge", "States on disk.", disk.checkpoints);
  one("tidelock_disk_used_bytes", "gauge", "What they take there.", disk.used_bytes);
  one("tidelock_disk_found_states", "gauge", "Of them, states that were there at the start.", disk.found);
  one("tidelock_disk_cut_bytes_total", "counter", "Torn or unreadable bytes passed over at the start.", disk.cut_bytes);
  one("tidelock_disk_stored_total", "counter", "States written to disk.", disk.stored);
  one("tidelock_disk_stored_bytes_total", "counter", "Bytes written to disk.", disk.stored_bytes);
  one("tidelock_disk_store_failures_total", "counter", "States that could not be written.", disk.store_failures);
  one("tidelock_disk_loads_total", "counter", "States brought up from disk.", disk.loads);
  one("tidelock_disk_loaded_tokens_total", "counter", "Tokens that they stand for.", disk.loaded_tokens);
  one("tidelock_disk_loaded_bytes_total", "counter", "Bytes read from disk and verified.", disk.loaded_bytes);
  one("tidelock_disk_loads_missing_total", "counter", "Loads of a state that had gone.", disk.loads_missing);
  one("tidelock_disk_loads_corrupt_total", "counter", "Loads whose checksums failed.", disk.loads_corrupt);
  one("tidelock_disk_loads_failed_total", "counter", "Loads that the system could not read.", disk.loads_failed);
  one("tidelock_disk_evicted_total", "counter", "States that had to leave the disk.", disk.evicted);
  one("tidelock_prefetches_total", "counter", "States brought up before anybody asked for them.", engine.prefetches);
  one("tidelock_prefetched_tokens_total", "counter", "Tokens that those stand for that came.",
      engine.prefetched_tokens);
  one("tidelock_prefetches_late_total", "counter", "Of them, those that were asked for on their way.",
      engine.prefetches_late);
  one("tidelock_sequences_written_out_total", "counter", "Sequences set back whose state went to disk.",
      engine.written_out);
}

}  // namespace

std::string ServerMetrics::text(const EngineLoopCounters& engine) const {
  const std::lock_guard lock(mutex_);
  std::string out;
  const auto one = [&](const char* name, const char* kind, const char* help, std::int64_t value) {
    out += fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n{0} {3}\n", name, help, kind, value);
  };
  one("tidelock_sequences_running", "gauge", "Sequences that the engine decodes or prefills now.", engine.running);
  one("tidelock_requests_waiting", "gauge", "Requests that wait for their turn.", engine.waiting);
  one("tidelock_state_bytes", "gauge", "Memory for state that the engine holds, used or not.", engine.state_bytes);
  one("tidelock_state_used_bytes", "gauge", "Of it, state of running sequences and kept state.",
      engine.state_bytes_used);
  one("tidelock_sequences_set_back_total", "counter", "Times that a sequence lost its state to the limit on memory.",
      engine.set_back);
  one("tidelock_prefix_lookups_total", "counter", "Prompts looked up among kept states.", engine.reuse.lookups);
  one("tidelock_prefix_hits_total", "counter", "Of them, those that went on from a kept state.", engine.reuse.hits);
  one("tidelock_prefix_asked_tokens_total", "counter", "Tokens of prompts looked up.", engine.reuse.asked_tokens);
  one("tidelock_prefix_hit_tokens_total", "counter", "Of them, tokens that were not computed again.",
      engine.reuse.hit_tokens);
  one("tidelock_prefix_lost_tokens_total", "counter", "Tokens known in blocks, but without a checkpoint to go on from.",
      engine.reuse.lost_no_checkpoint_tokens);
  one("tidelock_kept_states", "gauge", "States kept for prompts to come.", engine.reuse.checkpoints);
  one("tidelock_kept_blocks", "gauge", "Blocks of 64 tokens that lead to them.", engine.reuse.blocks);
  one("tidelock_states_kept_total", "counter", "States that were kept.", engine.reuse.inserted);
  one("tidelock_states_evicted_total", "counter", "Kept states that had to go.", engine.reuse.evicted);
  write_disk(one, engine);
  one("tidelock_connections", "gauge", "Open connections.", connections_);
  one("tidelock_prompt_tokens_total", "counter", "Prompt tokens of admitted requests.", engine.prompt_tokens);
  one("tidelock_generated_tokens_total", "counter", "Sampled tokens.", engine.sampled_tokens);
  one("tidelock_engine_steps_total", "counter", "Batches that the engine ran.", engine.steps);
  const auto seconds = [&](const char* name, const char* help, double value) {
    out += fmt::format("# HELP {0} {1}\n# TYPE {0} counter\n{0} {2:.6f}\n", name, help, value);
  };
  seconds("tidelock_step_seconds_total", "Time in steps.", engine.step_seconds);
  seconds("tidelock_schedule_seconds_total", "Of it, to decide what runs, and to take requests in and hand tokens out.",
          engine.schedule_seconds);
  seconds("tidelock_keep_seconds_total", "Of it, to copy states that are kept.", engine.keep_seconds);
  one("tidelock_engine_failed_steps_total", "counter", "Batches that failed.", engine.failed_steps);
  one("tidelock_requests_cancelled_total", "counter", "Requests whose client went away.", engine.cancelled);
  one("tidelock_requests_refused_total", "counter", "Requests whose first token would have come too late.",
      engine.refused);
  one("tidelock_connections_refused_total", "counter", "Connections beyond the limit.", refused_connections_);
  out += "# HELP tidelock_responses_total Responses by path and status.\n# TYPE tidelock_responses_total counter\n";
  for (const auto& [key, count] : responses_)
    out += fmt::format("tidelock_responses_total{{path=\"{}\",status=\"{}\"}} {}\n", key.first, key.second, count);
  write(out, "tidelock_time_to_first_token_seconds", "From a request's arrival to its first token.", first_token_);
  write(out, "tidelock_request_seconds", "From a request's arrival to the end of its answer.", request_);
  return out;
}

}  // namespace tidelock::serve
