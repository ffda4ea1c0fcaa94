// What happened to each sandbox, for people: made, paused, resumed, copied, lost. Not part of the truth (journal.hpp):
// an entry that cannot be written is a warning of the program's, never a failure of what it tells of.
//
// On disk: one file FOLDER/ID.jsonl for each sandbox, one JSON object a line, oldest first: {"time": milliseconds
// since 1970, "level", "message", "fields": {name: text}}. Past kMostBytes the newest half stays. A line that cannot be
// read is left out.
#pragma once

#include <filesystem>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "sandbox/sandbox.hpp"

namespace tidelock::sandbox::vm {

// Thread-safe.
class EventLog {
 public:
  static constexpr std::size_t kMostBytes = 256U << 10;  // of one sandbox's file
  static constexpr std::size_t kMostMessage = 2U << 10;  // bytes of a message or field; the rest is cut

  explicit EventLog(std::filesystem::path folder);         // made when it is not there; throws as make_folder
  void add(const std::string& id, const LogEntry& entry);  // never throws
  std::vector<LogEntry> read(
      const std::string& id) const;  // oldest first; none when nothing was told. Throws Error{io}
  void remove(const std::string& id) noexcept;
  void keep_only(const std::set<std::string>& ids);  // at a start: removes the files of sandboxes that are gone

 private:
  void append(const std::string& id, const std::string& line);
  std::filesystem::path file_of(const std::string& id) const { return folder_ / (id + ".jsonl"); }
  std::filesystem::path folder_;
  mutable std::mutex mutex_;  // the files
};

}  // namespace tidelock::sandbox::vm
