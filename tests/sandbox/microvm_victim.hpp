// Another program that uses microVM sandboxes, killed at a step of an operation: this test program with the verb
// `microvm-victim`.
#pragma once

#include <filesystem>
#include <string>

namespace tidelock::sandbox::testing {

// Runs `operation` on sandbox `id` in a program of its own, which ends itself with SIGKILL when it comes to `step`.
// Whether it did.
bool kill_microvm_program(const std::filesystem::path& directory, const std::string& operation, const std::string& step,
                          const std::string& id);
int microvm_victim_main(int argc, char** argv);

}  // namespace tidelock::sandbox::testing
