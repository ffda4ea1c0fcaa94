// What a run measured: `metrics.jsonl`, one JSON object a line, and the same numbers as TensorBoard events.
//
// Every row has `step`. Write all rows of a step before its checkpoint: a run that resumes after step N keeps the rows
// with step <= N and cuts off the rest, a half-written last line included, so nothing is counted twice.
#pragma once

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tidelock::rl {

using MetricValue = std::variant<bool, std::int64_t, double, std::string>;

// An ordered row of named values; `step` comes first.
class MetricsRow {
 public:
  explicit MetricsRow(std::int64_t step) : step_(step) {}
  void set(std::string_view name, MetricValue value);  // replaces a value of the same name
  void set(std::string_view name, const char* value) { set(name, MetricValue(std::string(value))); }
  void set(std::string_view name, bool value) { set(name, MetricValue(value)); }
  void set(std::string_view name, double value) { set(name, MetricValue(value)); }
  void set(std::string_view name, std::integral auto value) {
    set(name, MetricValue(static_cast<std::int64_t>(value)));
  }
  std::int64_t step() const { return step_; }
  const std::vector<std::pair<std::string, MetricValue>>& values() const { return values_; }
  // One JSON object without newline. Numbers that are not finite become null.
  std::string json() const;

 private:
  std::int64_t step_;
  std::vector<std::pair<std::string, MetricValue>> values_;
};

struct MetricsOptions {
  bool sync = false;               // fsync after every row
  bool tensorboard = true;         // numbers also go to RUN/tensorboard/events.out.tfevents.*
  std::int64_t resumed_step = -1;  // rows after this step are cut off; -1: a new run, both files start empty
};

// Appends to `directory`/metrics.jsonl. Throws Error{io}; Error{corrupt_data} when a whole line of an existing file is
// not a row.
class MetricsWriter {
 public:
  MetricsWriter(std::filesystem::path directory, const MetricsOptions& options);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;
  // `prefix` groups the tags in TensorBoard ("train", "eval"); it does not enter the JSON.
  void write(const MetricsRow& row, std::string_view prefix = "train");

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Cuts `path` (metrics.jsonl) back to rows of step <= `step`; a missing file is left missing.
void cut_back_metrics(const std::filesystem::path& path, std::int64_t step);

}  // namespace tidelock::rl
