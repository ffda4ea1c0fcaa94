#include "sandbox/vm/event_log.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "sandbox/wire.hpp"

namespace tidelock::sandbox {

const char* log_level_name(LogLevel level) {
  constexpr const char* kNames[] = {"debug", "info", "warn", "error"};
  return kNames[static_cast<int>(level)];
}

std::optional<LogLevel> parse_log_level(std::string_view name) {
  for (const LogLevel level : {LogLevel::debug, LogLevel::info, LogLevel::warning, LogLevel::error}) {
    if (name == log_level_name(level)) {
      return level;
    }
  }
  return std::nullopt;
}

}  // namespace tidelock::sandbox

namespace tidelock::sandbox::vm {
namespace fs = std::filesystem;
using Json = nlohmann::json;
namespace {

std::string shortened(std::string text) {
  if (text.size() > EventLog::kMostMessage) {
    text.resize(EventLog::kMostMessage);
    text += "...";
  }
  return text;
}

std::string line_of(const LogEntry& entry) {
  Json fields = Json::object();
  for (const auto& [name, text] : entry.fields) {
    fields[name] = shortened(text);
  }
  const Json out{{"time", entry.time},
                 {"level", log_level_name(entry.level)},
                 {"message", shortened(entry.message)},
                 {"fields", std::move(fields)}};
  return out.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";  // a cut may have left half a character
}

std::optional<LogEntry> parse_entry(const std::string& line) {
  try {
    const Json json = Json::parse(line);
    const std::optional<LogLevel> level = parse_log_level(json.at("level").get<std::string>());
    if (!level) {
      return std::nullopt;
    }
    return LogEntry{json.at("time").get<std::int64_t>(), *level, json.at("message").get<std::string>(),
                    json.at("fields").get<std::map<std::string, std::string>>()};
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

}  // namespace

EventLog::EventLog(fs::path folder) : folder_(std::move(folder)) {
  make_folder(folder_);
}

void EventLog::add(const std::string& id, const LogEntry& entry) {
  try {
    const std::string line = line_of(entry);
    const std::lock_guard lock(mutex_);
    append(id, line);
  } catch (const std::exception& error) {
    spdlog::warn("sandbox {}: '{}' is missing in its log: {}", id, entry.message.substr(0, 80), error.what());
  }
}

// A line is there whole or not at all, unless the host itself ends.
void EventLog::append(const std::string& id, const std::string& line) {
  const fs::path path = file_of(id);
  const FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  struct stat info {};
  if (!file || fstat(file.get(), &info) != 0) {
    fail_errno("open", path.string());
  }
  const ssize_t put = write(file.get(), line.data(), line.size());
  if (put != static_cast<ssize_t>(line.size())) {
    const int error = put < 0 ? errno : ENOSPC;
    if (put > 0 && ftruncate(file.get(), info.st_size) != 0) {
      spdlog::warn("{}: its last line is torn", path.string());
    }
    fail(ErrorCode::io, "cannot write {}: {}", path.string(), std::strerror(error));
  }
  if (static_cast<std::size_t>(info.st_size) + line.size() > kMostBytes) {
    const std::string all = read_file(path);
    const std::size_t start = all.find('\n', all.size() / 2);
    write_file_atomic(path, start == std::string::npos ? "" : std::string_view(all).substr(start + 1));
  }
}

std::vector<LogEntry> EventLog::read(const std::string& id) const {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    if (!fs::exists(file_of(id))) {
      return {};
    }
    text = read_file(file_of(id));
  }
  std::vector<LogEntry> out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    if (std::optional<LogEntry> entry = parse_entry(text.substr(at, end - at))) {
      out.push_back(std::move(*entry));
    }
    at = end + 1;
  }
  return out;
}

void EventLog::remove(const std::string& id) noexcept {
  std::error_code error;
  const std::lock_guard lock(mutex_);
  fs::remove(file_of(id), error);
  if (error) {
    spdlog::warn("cannot remove the log of sandbox {}: {}", id, error.message());
  }
}

void EventLog::keep_only(const std::set<std::string>& ids) {
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
    if (!ids.contains(entry.path().stem().string())) {
      std::error_code error;
      fs::remove(entry.path(), error);
    }
  }
}

}  // namespace tidelock::sandbox::vm
