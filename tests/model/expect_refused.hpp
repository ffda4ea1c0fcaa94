// What was thrown, for the tests of every room.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "base/error.hpp"

namespace tidelock::model::testing {

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
