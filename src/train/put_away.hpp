// Arrays that lie on disk while nothing needs them. Private to train/.
#pragma once

#include <filesystem>
#include <span>
#include <vector>

#include "base/content_hasher.hpp"

namespace tidelock::train {

// Values in a file without a name, which the system removes with the process. Not kept in the page cache.
class PutAway {
 public:
  // Writes the arrays one behind the other. Throws Error{io} naming the folder; nothing is left then.
  PutAway(const std::filesystem::path& folder, std::span<const std::span<const float>> arrays);
  ~PutAway();
  PutAway(const PutAway&) = delete;
  PutAway& operator=(const PutAway&) = delete;

  // Fills the arrays, of the same sizes as those that were written. Throws Error{io, corrupt_data}.
  void read(std::span<const std::span<float>> arrays) const;

 private:
  std::filesystem::path folder_;
  int fd_ = -1;
  ContentHash hash_;
};

}  // namespace tidelock::train
