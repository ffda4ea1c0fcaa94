// The files of COPY steps, as tar archives.
#pragma once

#include <cstdint>
#include <string>

namespace tidelock::sandbox {

// The archive of what a COPY step names in a folder of this host, always the same bytes for the same files. Throws
// Error{not_found} when there is nothing, Error{exhausted} for more than `limit` bytes.
std::string archive_files(const std::string& folder, const std::string& source, std::uint64_t limit = 1ULL << 30);

// An archive that somebody sent, plain or gzip, as a plain one that is safe to unpack: only files, folders and links,
// whose paths do not lead out. Throws Error{invalid_argument, corrupt_data, not_supported}, Error{exhausted} for more
// than 1 GiB.
std::string checked_archive(const std::string& given);

}  // namespace tidelock::sandbox
