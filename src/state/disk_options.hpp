// The tier below memory, as its callers see it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>

#include "state/digest.hpp"
#include "state/disk_io.hpp"

namespace tidelock::state {

struct DiskOptions {
  std::filesystem::path folder;                   // the tier's own
  std::uint64_t limit_bytes = 0;                  // of all records, heads and padding included
  Digest identity{};                              // of model, contract and layout: states of another are removed
  std::function<std::unique_ptr<DiskIo>()> io{};  // for each of its threads; none: io_uring where there is one
};

struct DiskCounters {
  std::int64_t checkpoints = 0, used_bytes = 0, queued_bytes = 0;  // now; queued: to be written, part of used
  std::int64_t found = 0, cut_bytes = 0;  // at the start: states taken over, bytes of torn records
  std::int64_t stored = 0, stored_bytes = 0, store_failures = 0;
  std::int64_t loads = 0, loaded_tokens = 0, loaded_bytes = 0;
  // Loads that came to nothing: the record was not there any more, was not what was written, or could not be read.
  std::int64_t loads_missing = 0, loads_corrupt = 0, loads_failed = 0;
  std::int64_t evicted = 0;
  double store_seconds = 0, load_seconds = 0;  // that its threads worked
};

}  // namespace tidelock::state
