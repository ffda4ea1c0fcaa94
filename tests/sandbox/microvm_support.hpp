// What the tests of microVMs share: one state directory with one template, booted by the first; a guest that counts.
#pragma once

#include <memory>
#include <string>

#include "sandbox/support.hpp"

namespace tidelock::sandbox::testing {

// A state directory that lives as long as the test program.
const fs::path& shared_directory();
MicrovmOptions options_for(const fs::path& directory);
std::unique_ptr<Runtime> open_runtime();  // of the shared directory
Spec small();
std::string output_of(Sandbox& box, const std::string& script);

// A process that counts in its memory and writes every number to the disk. A number lost, repeated or taken back, in
// memory or on disk, breaks the row.
void start_counter(Sandbox& box);
// Checks the row and that it grows; returns its length.
int expect_counting(Sandbox& box);

// QEMU processes of a state directory.
std::size_t machines_of(const fs::path& directory);
// "message; " of each entry in order.
std::string log_of(Runtime& runtime, const std::string& id);
bool soaking();  // TIDELOCK_SOAK is set: everything, however long it takes

}  // namespace tidelock::sandbox::testing
