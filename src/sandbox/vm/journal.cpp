#include "sandbox/vm/journal.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"

namespace tidelock::sandbox::vm {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kFirstLine = "tidelock-sandbox-journal 1\n";
constexpr std::uint64_t kCompactAt = 1U << 20;  // bytes; smaller files are read faster than rewritten

std::string make_line(const Journal::Json& transaction) {
  const std::string text = transaction.dump();
  return fmt::format("{:08x} {}\n", crc32c(text), text);
}

// Nothing for a line that is not what was written.
std::optional<Journal::Json> parse_line(std::string_view line) {
  std::uint32_t crc = 0;
  if (line.size() < 10 || line[8] != ' ' ||
      std::from_chars(line.data(), line.data() + 8, crc, 16).ptr != line.data() + 8 || crc != crc32c(line.substr(9))) {
    return std::nullopt;
  }
  Journal::Json value = Journal::Json::parse(line.substr(9), nullptr, false);
  if (!value.is_object() || !value.contains("put") || !value["put"].is_object() || !value.contains("drop") ||
      !value["drop"].is_array()) {
    return std::nullopt;
  }
  return value;
}

}  // namespace

Journal::Journal(fs::path path, fs::path quarantine) : path_(std::move(path)), quarantine_(std::move(quarantine)) {
  if (!fs::exists(path_)) {
    write_file_atomic(path_, kFirstLine);
  }
  load();
  file_.reset(open(path_.c_str(), O_WRONLY | O_CLOEXEC));
  if (!file_) {
    fail_errno("open", path_.string());
  }
  if (ftruncate(file_.get(), static_cast<off_t>(size_)) != 0) {  // a torn transaction
    fail_errno("shorten", path_.string());
  }
  if (damaged_ || size_ > kCompactAt) {
    compact();
  }
}

void Journal::set_aside(const std::string& content) {
  damaged_ = true;
  fs::create_directories(quarantine_);
  const fs::path copy = quarantine_ / fmt::format("journal-{}", sha256_hex(content).substr(0, 16));
  write_file_atomic(copy, content);
  spdlog::warn("{}: a damaged line; the whole file is kept as {}, the other lines are used", path_.string(),
               copy.string());
}

void Journal::load() {
  const std::string content = read_file(path_);
  if (content.compare(0, kFirstLine.size(), kFirstLine) != 0) {
    fail(ErrorCode::corrupt_data, "{}: its first line is '{}', expected '{}'", path_.string(),
         content.substr(0, std::min<std::size_t>(content.find('\n'), 60)), kFirstLine.substr(0, kFirstLine.size() - 1));
  }
  damaged_ = fs::exists(quarantine_) && !fs::is_empty(quarantine_);
  bool bad = false;
  std::size_t at = kFirstLine.size();
  size_ = at;
  while (at < content.size()) {
    const std::size_t end = content.find('\n', at);
    const std::optional<Json> value =
        end == std::string::npos ? std::nullopt : parse_line(std::string_view(content).substr(at, end - at));
    if (!value) {
      if (end == std::string::npos || end + 1 == content.size()) {
        break;  // the last line: torn while it was written, so it was never answered for
      }
      bad = true;
    } else {
      for (const auto& [key, record] : (*value)["put"].items()) {
        records_[key] = record;
      }
      for (const Json& key : (*value)["drop"]) {
        records_.erase(key.is_string() ? key.get<std::string>() : "");
      }
      number_ = std::max(number_, value->value("n", std::uint64_t{0}));
    }
    at = end + 1;
    size_ = at;
  }
  if (bad) {
    set_aside(content);
  }
}

const Journal::Json* Journal::find(const std::string& key) const {
  const auto found = records_.find(key);
  return found == records_.end() ? nullptr : &found->second;
}

void Journal::commit(const std::vector<Change>& changes) {
  Json transaction{{"n", number_ + 1}, {"put", Json::object()}, {"drop", Json::array()}};
  for (const Change& change : changes) {
    if (change.record) {
      transaction["put"][change.key] = *change.record;
    } else {
      transaction["drop"].push_back(change.key);
    }
  }
  const std::string line = make_line(transaction);
  const ssize_t put = pwrite(file_.get(), line.data(), line.size(), static_cast<off_t>(size_));
  if (put != static_cast<ssize_t>(line.size()) || fdatasync(file_.get()) != 0) {
    const int error = put >= 0 && put < static_cast<ssize_t>(line.size()) ? ENOSPC : errno;
    if (ftruncate(file_.get(), static_cast<off_t>(size_)) != 0) {
      spdlog::error("{}: cannot be shortened to {} bytes: {}", path_.string(), size_, std::strerror(errno));
    }
    fail(error == ENOSPC || error == EDQUOT ? ErrorCode::exhausted : ErrorCode::io, "cannot write {}: {}",
         path_.string(), std::strerror(error));
  }
  size_ += line.size();
  ++number_;
  for (const Change& change : changes) {
    if (change.record) {
      records_[change.key] = *change.record;
    } else {
      records_.erase(change.key);
    }
  }
  if (size_ > kCompactAt && size_ > 4 * live_) {
    try {
      compact();
    } catch (const Error& failure) {  // the long file goes on being right
      spdlog::warn("{}", failure.what());
      live_ = size_;
    }
  }
}

void Journal::compact() {
  Json transaction{{"n", number_}, {"put", Json(records_)}, {"drop", Json::array()}};
  if (records_.empty()) {
    transaction["put"] = Json::object();
  }
  const std::string content = std::string(kFirstLine) + make_line(transaction);
  write_file_atomic(path_, content);
  file_.reset(open(path_.c_str(), O_WRONLY | O_CLOEXEC));
  if (!file_) {
    fail_errno("open", path_.string());
  }
  size_ = live_ = content.size();
}

}  // namespace tidelock::sandbox::vm
