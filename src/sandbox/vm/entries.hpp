// What the agent tells of files, read. Pure. Private to sandbox/.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "sandbox/sandbox.hpp"

namespace tidelock::sandbox::vm {

// Texts that travel with a zero byte behind each.
std::vector<std::string> split_texts(std::string_view texts);

// Of kFileFields texts from `at` on.
FileEntry entry_of(const std::vector<std::string>& fields, std::size_t at);

// What a file operation or a watch ended with, but for 0.
ErrorCode file_error(int exit_code);

// Takes the first change from the front of `bytes`; false when it is not whole yet. Throws Error{io} for what no watch
// prints, which is also what is longer than kMaxChange.
bool take_change(std::string& bytes, FileChange& change);

}  // namespace tidelock::sandbox::vm
