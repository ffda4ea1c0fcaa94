#include "sandbox/vm/entries.hpp"

#include <algorithm>
#include <cstdlib>

#include "sandbox/guest.hpp"
#include "sandbox/vm/frame.hpp"

namespace tidelock::sandbox::vm {

std::vector<std::string> split_texts(std::string_view texts) {
  std::vector<std::string> out;
  for (std::size_t at = 0; at < texts.size();) {
    const std::size_t end = std::min(texts.find('\0', at), texts.size());
    out.emplace_back(texts.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

FileEntry entry_of(const std::vector<std::string>& fields, std::size_t at) {
  FileEntry out;
  out.type = fields[at] == "f"   ? FileEntry::Type::file
             : fields[at] == "d" ? FileEntry::Type::folder
                                 : FileEntry::Type::other;
  out.path = fields[at + 1];
  out.size = std::strtoull(fields[at + 2].c_str(), nullptr, 10);
  out.mode = static_cast<std::uint32_t>(std::strtoul(fields[at + 3].c_str(), nullptr, 8));
  out.owner = fields[at + 4], out.group = fields[at + 5];
  out.seconds = std::strtoll(fields[at + 6].c_str(), nullptr, 10);
  out.nanoseconds = std::strtoll(fields[at + 7].c_str(), nullptr, 10);
  out.target = fields[at + 8];
  return out;
}

ErrorCode file_error(int exit_code) {
  switch (static_cast<FileExit>(exit_code)) {
    case FileExit::not_found:
      return ErrorCode::not_found;
    case FileExit::invalid:
      return ErrorCode::invalid_argument;
    case FileExit::exhausted:
      return ErrorCode::exhausted;
    case FileExit::exists:
      return ErrorCode::mismatch;
    default:
      return ErrorCode::io;
  }
}

bool take_change(std::string& bytes, FileChange& change) {
  const auto broken = [] { fail(ErrorCode::io, "what the guest's agent told of changed files cannot be read"); };
  std::size_t ends = 0, texts = 3;  // the first three, the last of which says how many more there are
  std::vector<std::string> fields;
  while (fields.size() < texts) {
    const std::size_t end = bytes.find('\0', ends);
    if (end == std::string::npos || end > kMaxChange) {
      if (bytes.size() > kMaxChange) {
        broken();
      }
      return false;
    }
    fields.push_back(bytes.substr(ends, end - ends));
    ends = end + 1;
    if (fields.size() == 3 && fields[2] == std::to_string(kFileFields)) {
      texts += kFileFields;
    } else if (fields.size() == 3 && fields[2] != "0") {
      broken();
    }
  }
  const std::size_t kind = fields[0].size() == 1 ? kChanges.find(fields[0][0]) : std::string_view::npos;
  if (kind == std::string_view::npos) {
    broken();
  }
  change = {.kind = static_cast<FileChange::Kind>(kind), .name = fields[1], .entry = std::nullopt};
  if (texts > 3) {
    change.entry = entry_of(fields, 3);
  }
  bytes.erase(0, ends);
  return true;
}

}  // namespace tidelock::sandbox::vm
