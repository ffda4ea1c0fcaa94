// A folder that goes when the test does, and what was thrown.
#pragma once

#include <gtest/gtest.h>
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

// `body` must throw Error{code} with `part` in its message.
template <typename F>
void expect_refused(ErrorCode code, const std::string& part, F&& body) {
  try {
    body();
    ADD_FAILURE() << "nothing was thrown; expected an error about " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
        << "\"" << error.what() << "\" says nothing about " << part;
  }
}

}  // namespace tidelock::model::testing
