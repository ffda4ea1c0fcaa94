#include "sandbox/build/archive.hpp"

#include <algorithm>
#include <cstdio>

#include "base/error.hpp"
#include "sandbox/build/recipe.hpp"
#include "sandbox/command.hpp"
#include "sandbox/oci/layout.hpp"

namespace tidelock::sandbox {
namespace {

constexpr std::uint64_t kMaxFiles = 1ULL << 30;  // bytes of a COPY's files, uncompressed

}  // namespace

// Uncompressed, and looked through: only files, folders and links, whose paths do not lead out.
std::string checked_archive(const std::string& given) {
  const bool zipped = given.starts_with("\x1f\x8b");
  std::string plain = zipped ? oci::gunzip_all(given, kMaxFiles, "the files of a COPY") : given;
  oci::TarReader reader(oci::source_of(plain), "the files of a COPY");
  oci::TarEntry entry;
  while (reader.next(entry)) {
    if (entry.kind == oci::TarEntry::Kind::device || entry.kind == oci::TarEntry::Kind::fifo) {
      fail(ErrorCode::invalid_argument, "the files of a COPY: '{}' is a device or a pipe", entry.path);
    }
  }
  return plain;
}

std::string archive_files(const std::string& folder, const std::string& source, std::uint64_t limit) {
  check_step({BuildStep::Kind::copy, {source, "/"}});
  // The pattern is left to the shell, everything else in it is not.
  std::string pattern;
  for (const char c : source) {
    pattern += c == '*' || c == '?' ? std::string(1, c) : shell_word(std::string(1, c));
  }
  const std::string command = fmt::format(
      "cd {} && tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --format=pax "
      "--pax-option=delete=atime,delete=ctime -cf - -- {} 2>&1",
      shell_word(folder), pattern);
  std::FILE* pipe = popen(command.c_str(), "re");
  if (pipe == nullptr) {
    fail_errno("run", "tar");
  }
  std::string out;
  char part[64U << 10];
  for (std::size_t got = 0; (got = std::fread(part, 1, sizeof part, pipe)) > 0 && out.size() <= limit;) {
    out.append(part, got);
  }
  const int status = pclose(pipe);
  if (out.size() > limit) {
    fail(ErrorCode::exhausted, "COPY {}: more than {} bytes", source, limit);
  }
  if (status != 0) {
    fail(ErrorCode::not_found, "COPY {}: cannot be read from {}: {}", source, folder, out.substr(0, 300));
  }
  return out;
}

}  // namespace tidelock::sandbox
