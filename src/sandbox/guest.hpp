// What runs in a container's child processes: commands without privileges, file operations that cannot leave the root.
#pragma once

#include "sandbox/init.hpp"

namespace tidelock::sandbox {

// Exit codes of file operations; the text goes to standard error.
enum class FileExit : int { done = 0, not_found = 10, invalid = 11, exhausted = 12, io = 13, exists = 14 };

// In a child of init: gives up every privilege and becomes the command. Descriptors 0, 1, 2 are set up already.
// A command that cannot be started says so on standard error and exits with 127 (not found) or 126, as shells do.
[[noreturn]] void become_command(const InitPlan& plan, const RunRequest& request);

// In a child of init: writes standard input to request.path (parents are made; new files and folders belong to the
// user), or request.path to standard output. As the container's root, so that a task's files can be put and read
// anywhere; but only in the root overlay itself: a path or link that leads into /proc, /dev or another mount is
// refused.
[[noreturn]] void write_guest_file(const InitPlan& plan, const RunRequest& request);
[[noreturn]] void read_guest_file(const RunRequest& request);

// Drops the capabilities of the calling process but for those in `keep` (bits by number), from every set.
bool limit_capabilities(std::uint64_t keep) noexcept;

}  // namespace tidelock::sandbox
