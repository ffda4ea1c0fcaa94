#include "rl/metrics.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <optional>

#include "base/error.hpp"
#include "base/files.hpp"
#include "model/json.hpp"
#include "rl/tensorboard.hpp"

namespace tidelock::rl {
namespace {

std::string json_value(const MetricValue& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* integer = std::get_if<std::int64_t>(&value)) return fmt::format("{}", *integer);
  if (const auto* number = std::get_if<double>(&value))
    return std::isfinite(*number) ? fmt::format("{}", *number) : "null";
  return model::json_quote(std::get<std::string>(value));
}

std::optional<double> as_number(const MetricValue& value) {
  if (const auto* integer = std::get_if<std::int64_t>(&value)) return static_cast<double>(*integer);
  if (const auto* number = std::get_if<double>(&value)) return *number;
  return std::nullopt;
}

std::int64_t step_of(std::string_view line, const std::filesystem::path& path, int number) {
  const auto row = model::parse_json(line, fmt::format("{}:{}", path.string(), number), {.bytes = 1 << 20, .depth = 8});
  const auto step = row.is_object() ? row.find("step") : row.end();
  if (!row.is_object() || step == row.end() || !step->is_number_integer())
    fail(ErrorCode::corrupt_data, "{}:{}: a row without a step", path.string(), number);
  return step->get<std::int64_t>();
}

}  // namespace

void MetricsRow::set(std::string_view name, MetricValue value) {
  if (name == "step") fail(ErrorCode::internal, "a metric may not be named step");
  for (auto& [known, old] : values_) {
    if (known != name) continue;
    old = std::move(value);
    return;
  }
  values_.emplace_back(std::string(name), std::move(value));
}

std::string MetricsRow::json() const {
  std::string text = fmt::format("{{\"step\":{}", step_);
  for (const auto& [name, value] : values_) {
    text += ',';
    text += model::json_quote(name);
    text += ':';
    text += json_value(value);
  }
  return text + '}';
}

void cut_back_metrics(const std::filesystem::path& path, std::int64_t step) {
  if (!std::filesystem::exists(path)) return;
  const std::string content = read_file(path);
  std::string kept;
  int number = 0;
  for (std::size_t at = 0; at < content.size();) {
    ++number;
    const std::size_t end = content.find('\n', at);
    if (end == std::string::npos) break;  // the line that was being written when the run died
    const std::string_view line = std::string_view(content).substr(at, end - at);
    if (step_of(line, path, number) <= step) {
      kept += line;
      kept += '\n';
    }
    at = end + 1;
  }
  if (kept != content) write_file_atomic(path, kept);
}

struct MetricsWriter::Impl {
  std::filesystem::path path;
  bool sync = false;
  int fd = -1;
  std::unique_ptr<TensorBoardWriter> tensorboard;

  void append(const std::string& line) const {
    const ssize_t written = ::write(fd, line.data(), line.size());
    if (written < 0) fail_errno("write", path.string());
    if (static_cast<std::size_t>(written) != line.size())
      fail(ErrorCode::io, "{}: {} of {} bytes written: the disk is full", path.string(), written, line.size());
    if (sync && ::fsync(fd) != 0) fail_errno("fsync", path.string());
  }
};

MetricsWriter::MetricsWriter(std::filesystem::path directory, const MetricsOptions& options)
    : impl_(std::make_unique<Impl>()) {
  std::filesystem::create_directories(directory);
  impl_->path = directory / "metrics.jsonl";
  impl_->sync = options.sync;
  if (options.resumed_step >= 0) cut_back_metrics(impl_->path, options.resumed_step);
  const int fresh = options.resumed_step < 0 ? O_TRUNC : 0;
  if (options.tensorboard)
    impl_->tensorboard = std::make_unique<TensorBoardWriter>(directory / "tensorboard", options.resumed_step);
  impl_->fd = ::open(impl_->path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | fresh, 0644);
  if (impl_->fd < 0) fail_errno("open", impl_->path.string());
}

MetricsWriter::~MetricsWriter() {
  if (impl_->fd >= 0) ::close(impl_->fd);
}

void MetricsWriter::write(const MetricsRow& row, std::string_view prefix) {
  impl_->append(row.json() + "\n");
  if (!impl_->tensorboard) return;
  TensorBoardEvent event;
  event.wall_time = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  event.step = row.step();
  for (const auto& [name, value] : row.values())
    if (const auto number = as_number(value)) event.values.emplace_back(fmt::format("{}/{}", prefix, name), *number);
  impl_->tensorboard->write(event);
}

}  // namespace tidelock::rl
