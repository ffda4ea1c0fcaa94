// Another program that uses microVM sandboxes, killed at a step of an operation: this test program with the verb
// `microvm-victim`.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace tidelock::sandbox::vm {
class Store;
}

namespace tidelock::sandbox::testing {

// One operation by its name: start (does nothing), create, pause, resume, checkpoint, fork (2), snapshot ("new"),
// revert, remove, drop-snapshot, name-snapshot ("new"), set-defaults. What it is done to: a sandbox; for those of a
// snapshot that.
void perform(vm::Store& store, const std::string& operation, const std::string& subject);

// Performs it in a program of its own, which ends itself with SIGKILL at the operation's step number `number`, from 0.
// The name of that step; nothing when the operation came to its end before. The steps of "start" are those of bringing
// the directory in order.
// Throws Error{invalid_argument} when the operation failed.
std::optional<std::string> kill_microvm_program(const std::filesystem::path& directory, const std::string& operation,
                                                int number, const std::string& subject);
int microvm_victim_main(int argc, char** argv);

}  // namespace tidelock::sandbox::testing
