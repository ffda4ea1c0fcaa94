// An empty qcow2 overlay, written here: starting another program for it would take longer than the whole checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>

namespace tidelock::sandbox::vm {

// Version 3, 64 KiB clusters, no backing file named: which layer lies below is given when it is opened, from the
// journal. Throws Error{exhausted} when the disk is full, Error{io}.
void create_overlay(const std::filesystem::path& path, std::uint64_t virtual_bytes);

}  // namespace tidelock::sandbox::vm
