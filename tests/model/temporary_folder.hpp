// A folder that goes when the test does.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <string>

#include "base/base.hpp"

namespace tidelock::model::testing {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tidelock-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) fail_errno("making a folder", pattern);
    path = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::filesystem::path path;
};

}  // namespace tidelock::model::testing
